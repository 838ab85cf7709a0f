"""Weight transfer between ranks that are threads of this process: bit for bit, without extra bytes.

tests/parity/test_transfer.py does the same over gloo. Here the threads exchange through a shared
list, which is fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import ALIGNMENT_BYTES, Transfer, gather_whole
from dapo_megatron.types import Region, SyncError, TensorSlice, whole
from tests.parity.test_transfer import (
    BUCKET_BYTES,
    CPU,
    NUM_RANKS,
    contents,
    fill,
    make_shards,
    random_layout,
    same_bits,
)


class Threads:
    """Ranks as threads: `protocols.Exchange` and the all-to-all of a process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._here = threading.local()
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._values: list[Any] = [None] * world_size

    @property
    def rank(self) -> int:
        return self._here.rank

    def all_gather(self, value: Any, of: object) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast(self, value: Any, of: object, source: int = 0) -> Any:
        return self.all_gather(value, of)[source]

    def alltoall_base(
        self, received: Tensor, sent: Tensor, splits_in: list[int], splits_out: list[int]
    ) -> Threads:
        assert received.numel() == sum(splits_in) and sent.numel() == sum(splits_out)
        parts = self.all_gather(sent.split(splits_out), of=None)
        received_parts = [part[self.rank] for part in parts]
        assert [len(part) for part in received_parts] == splits_in
        received.copy_(torch.cat(received_parts))
        self.all_gather(None, of=None)  # until here, receivers read the sender's buffer
        return self

    def wait(self) -> None:
        """Return at once: the all-to-all has ended."""

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """Return the result of `work` on each rank. A rank that fails breaks the barrier."""

        def on(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            futures = [pool.submit(on, rank) for rank in range(self.world_size)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_any_layout_is_transferred_and_gathered_bit_for_bit(seed: int) -> None:
    ranks = Threads(NUM_RANKS)
    layout = random_layout(20, seed)
    plan = make_plan(layout.held, layout.wanted, bucket_bytes=BUCKET_BYTES, ranks_per_node=2)
    whole_slices = {part.name: part for parts in layout.held for part in parts}

    def carry() -> int:
        shards = make_shards(layout.held[ranks.rank])
        wanted = layout.wanted[ranks.rank]
        transfer = Transfer(plan, shards, wanted, ranks.rank, CPU)
        for version in (1, 2):
            fill(shards, version)
            arrived = {(n, region): v for n, regions in transfer for region, v in regions}
            assert arrived.keys() == {(part.name, part.region) for part in wanted}
            for part in wanted:
                expected = contents(part, version)[part.region.slices]
                assert same_bits(arrived[part.name, part.region], expected)
        gathered = dict(gather_whole(shards, ranks, CPU))  # type: ignore[arg-type]
        assert gathered.keys() == whole_slices.keys()
        assert all(same_bits(v, contents(whole_slices[n], 2)) for n, v in gathered.items())
        return transfer.nbytes_received

    moves = [0] * NUM_RANKS
    for tensor in (tensor for tensors in plan.rounds for tensor in tensors):
        for box, source in tensor.routes.with_sources():
            moves[box.target] += source != box.target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_megatron.bridge.transfer.group_or_world", lambda _: ranks)
        received_bytes = ranks.run(carry)
    for planned, received, num_boxes in zip(plan.missing, received_bytes, moves, strict=True):
        assert planned <= received <= planned + (ALIGNMENT_BYTES - 1) * num_boxes


def test_tensors_missing_in_the_plan_are_refused_by_name() -> None:
    tensor_slice = TensorSlice("a", (4,), torch.float32, whole((4,)))
    other = TensorSlice("b", (4,), torch.float32, whole((4,)))
    plan = make_plan([[tensor_slice], []], [[tensor_slice], [tensor_slice]])
    with pytest.raises(SyncError, match=r"^the plan does not bring b, wanted on rank 1$"):
        Transfer(plan, [], [tensor_slice, other], 1, CPU)
    half = TensorSlice("a", (4,), torch.float32, Region((0,), (2,)))
    with pytest.raises(SyncError, match=r"^a\[0:4\]: this rank does not hold it, although"):
        Transfer(plan, make_shards([half]), [tensor_slice], 0, CPU)
