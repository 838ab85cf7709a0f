"""Weight sync as most systems do it, for comparison (weight_sync.py).

Every rank gathers every whole HF tensor, in buckets of bounded size. All weights have one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Piece, Shard


class FullGather:
    """Iterator over (name, whole tensor). Collective: all ranks create it and iterate together.

    `replicas` are groups of ranks that together hold a whole model. Within a group, the first rank
    that holds a slice broadcasts it. `bucket` is in bytes.
    """

    def __init__(
        self, shards: Sequence[Shard], ranks: Ranks, replicas: Sequence[Sequence[int]], bucket: int
    ) -> None:
        self._rank = ranks.rank
        self._shards = {(shard.piece.name, shard.piece.region): shard for shard in shards}
        held = ranks.all_gather([shard.piece for shard in shards], list[Piece])
        for members in replicas:
            group = dist.new_group(list(members))
            if ranks.rank in members:
                self._group, self._members = group, members
        owners: dict[str, dict[Piece, list[int]]] = {}
        for rank in self._members:
            for piece in held[rank]:
                owners.setdefault(piece.name, {}).setdefault(piece, []).append(rank)
        self._buckets: list[list[dict[Piece, list[int]]]] = [[]]
        filled = 0
        for pieces in owners.values():
            nbytes = sum(piece.nbytes for piece in pieces)
            if self._buckets[-1] and filled + nbytes > bucket:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(pieces)
            filled += nbytes
        self.nbytes_received = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.nbytes_received = 0
        for bucket in self._buckets:
            yield from self._fetch(bucket).items()

    def _fetch(self, bucket: list[dict[Piece, list[int]]]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        by_sender: dict[int, list[Piece]] = {}
        for pieces in bucket:
            for piece, holders in pieces.items():
                if piece.name not in whole:
                    whole[piece.name] = torch.empty(piece.global_shape, dtype=piece.dtype)
                if len(holders) < len(self._members):
                    by_sender.setdefault(holders[0], []).append(piece)
                else:
                    shard = self._shards[piece.name, piece.region]
                    whole[piece.name][piece.region.slices] = shard.read()
        for sender, sent in by_sender.items():
            self._broadcast(sender, sent, whole)
        return whole

    def _broadcast(self, sender: int, sent: list[Piece], whole: dict[str, Tensor]) -> None:
        if sender == self._rank:
            values = [self._shards[piece.name, piece.region].read() for piece in sent]
            flat = torch.cat([value.reshape(-1) for value in values])
        else:
            flat = torch.empty(sum(piece.region.numel for piece in sent), dtype=sent[0].dtype)
            self.nbytes_received += flat.nbytes
        dist.broadcast(flat, src=sender, group=self._group)
        for piece, part in zip(sent, flat.split([piece.region.numel for piece in sent])):
            whole[piece.name][piece.region.slices] = part.view(piece.region.shape)
