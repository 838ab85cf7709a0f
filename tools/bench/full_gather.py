"""Weight sync as most systems do it, for comparison (weight_sync.py).

Every rank gathers every whole HF tensor, in buckets of bounded size. All weights have one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Shard, TensorSlice


class FullGather:
    """Iterator over (name, whole tensor). Collective: all ranks create it and iterate together.

    `replicas` are groups of ranks that together hold a whole model. Within a group, the first rank
    that holds a slice broadcasts it. `bucket` is in bytes.
    """

    def __init__(
        self, shards: Sequence[Shard], ranks: Ranks, replicas: Sequence[Sequence[int]], bucket: int
    ) -> None:
        self._rank = ranks.rank
        self._shards = {
            (shard.tensor_slice.name, shard.tensor_slice.region): shard for shard in shards
        }
        held = ranks.all_gather([shard.tensor_slice for shard in shards], list[TensorSlice])
        for members in replicas:
            group = dist.new_group(list(members))
            if ranks.rank in members:
                self._group, self._members = group, members
        owners: dict[str, dict[TensorSlice, list[int]]] = {}
        for rank in self._members:
            for tensor_slice in held[rank]:
                owners.setdefault(tensor_slice.name, {}).setdefault(tensor_slice, []).append(rank)
        self._buckets: list[list[dict[TensorSlice, list[int]]]] = [[]]
        filled = 0
        for tensor_slices in owners.values():
            nbytes = sum(tensor_slice.nbytes for tensor_slice in tensor_slices)
            if self._buckets[-1] and filled + nbytes > bucket:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(tensor_slices)
            filled += nbytes
        self.nbytes_received = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.nbytes_received = 0
        for bucket in self._buckets:
            yield from self._fetch(bucket).items()

    def _fetch(self, bucket: list[dict[TensorSlice, list[int]]]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        by_sender: dict[int, list[TensorSlice]] = {}
        for tensor_slices in bucket:
            for tensor_slice, holders in tensor_slices.items():
                if tensor_slice.name not in whole:
                    whole[tensor_slice.name] = torch.empty(
                        tensor_slice.global_shape, dtype=tensor_slice.dtype
                    )
                if len(holders) < len(self._members):
                    by_sender.setdefault(holders[0], []).append(tensor_slice)
                else:
                    shard = self._shards[tensor_slice.name, tensor_slice.region]
                    whole[tensor_slice.name][tensor_slice.region.slices] = shard.read()
        for sender, sent in by_sender.items():
            self._broadcast(sender, sent, whole)
        return whole

    def _broadcast(self, sender: int, sent: list[TensorSlice], whole: dict[str, Tensor]) -> None:
        if sender == self._rank:
            values = [
                self._shards[tensor_slice.name, tensor_slice.region].read() for tensor_slice in sent
            ]
            flat = torch.cat([value.reshape(-1) for value in values])
        else:
            flat = torch.empty(
                sum(tensor_slice.region.numel for tensor_slice in sent), dtype=sent[0].dtype
            )
            self.nbytes_received += flat.nbytes
        dist.broadcast(flat, src=sender, group=self._group)
        for tensor_slice, part in zip(
            sent, flat.split([tensor_slice.region.numel for tensor_slice in sent])
        ):
            whole[tensor_slice.name][tensor_slice.region.slices] = part.view(
                tensor_slice.region.shape
            )
