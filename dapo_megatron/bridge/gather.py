"""Whole HF tensors on every rank, from the shards of all ranks.

The first form of the bridge: every rank receives everything, in buckets of bounded size, each
slice sent once by its owner. The list of who sends what is made once and reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.bridge.shards import Region, Shard, check_coverage
from dapo_megatron.protocols import Exchange

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    global_shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    rank: int


class Gather:
    """Collective: every rank constructs it with its own shards and iterates at the same time."""

    def __init__(self, shards: Sequence[Shard], exchange: Exchange) -> None:
        self._rank = exchange.rank
        self._owned = {shard.name: shard for shard in shards if shard.is_owner}
        mine = [
            _Piece(s.name, s.global_shape, s.region, s.view.dtype, exchange.rank)
            for s in self._owned.values()
        ]
        pieces = [piece for one in exchange.all_gather(mine) for piece in one]
        check_coverage((piece.name, piece.global_shape, piece.region) for piece in pieces)
        by_name: dict[str, list[_Piece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        self._buckets = _buckets(by_name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that iterating yields."""
        return {name: pieces[0].global_shape for bucket in self._buckets for name, pieces in bucket}

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            yield from self._fetch(bucket).items()

    def _fetch(self, bucket: _Bucket) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for name, pieces in bucket:
            whole[name] = torch.empty(
                pieces[0].global_shape, dtype=pieces[0].dtype, device=self._device()
            )
        senders = sorted({piece.rank for _, pieces in bucket for piece in pieces})
        for sender in senders:
            sent = [piece for _, pieces in bucket for piece in pieces if piece.rank == sender]
            for dtype in dict.fromkeys(piece.dtype for piece in sent):
                self._broadcast(sender, [p for p in sent if p.dtype == dtype], whole)
        return whole

    def _broadcast(self, sender: int, sent: list[_Piece], whole: dict[str, Tensor]) -> None:
        if sender == self._rank:
            flat = torch.cat([self._owned[piece.name].read().reshape(-1) for piece in sent])
        else:
            total = sum(piece.region.numel for piece in sent)
            flat = torch.empty(total, dtype=sent[0].dtype, device=self._device())
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(flat, src=sender)
        for piece, part in zip(sent, flat.split([p.region.numel for p in sent]), strict=True):
            whole[piece.name][piece.region.slices] = part.view(piece.region.shape)

    def _device(self) -> torch.device:
        return next(iter(self._owned.values())).view.device if self._owned else torch.device("cpu")


_Bucket = list[tuple[str, list[_Piece]]]


def _buckets(by_name: dict[str, list[_Piece]]) -> list[_Bucket]:
    """Tensors in a fixed order, cut into lists of at most BUCKET_BYTES (or one tensor)."""
    buckets: list[_Bucket] = [[]]
    filled = 0
    for name, pieces in by_name.items():
        size = sum(piece.region.numel for piece in pieces) * pieces[0].dtype.itemsize
        if buckets[-1] and filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, pieces))
        filled += size
    return buckets
