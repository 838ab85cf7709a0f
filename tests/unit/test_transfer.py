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
        self.calls = 0
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
        self.calls += self.rank == 0
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


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Threads:
    threads = Threads(NUM_RANKS)
    monkeypatch.setattr("dapo_megatron.bridge.transfer.group_or_world", lambda _: threads)
    return threads


def test_random_layouts_are_transferred_bit_for_bit_at_every_sync(ranks: Threads) -> None:
    layout = random_layout()
    plan = make_plan(layout.held, layout.wanted, bucket_bytes=BUCKET_BYTES, ranks_per_node=2)

    def carry() -> int:
        shards = make_shards(layout.held[ranks.rank])
        transfer = Transfer(plan, shards, layout.wanted[ranks.rank], ranks.rank, CPU)
        for version in (1, 2):
            fill(shards, version)
            arrived = [
                (name, region, value) for name, regions in transfer for region, value in regions
            ]
            assert sorted((name, region.start, region.shape) for name, region, _ in arrived) == (
                sorted((p.name, p.region.start, p.region.shape) for p in layout.wanted[ranks.rank])
            )
            tensor_slices = {
                tensor_slice.name: tensor_slice for tensor_slice in layout.wanted[ranks.rank]
            }
            for name, region, value in arrived:
                expected = contents(tensor_slices[name], version)[region.slices]
                assert same_bits(value, expected), f"{name}{region}, version {version}"
        return transfer.nbytes_received

    received = ranks.run(carry)
    moves = [
        sum(
            source != box.target == rank
            for tensors in plan.rounds
            for tensor in tensors
            for box, source in tensor.routes.with_sources()
        )
        for rank in range(NUM_RANKS)
    ]
    assert received[0] == plan.missing[0] == 0
    for planned, nbytes, num_boxes in zip(plan.missing[1:], received[1:], moves[1:]):
        assert 0 < planned <= nbytes <= planned + (ALIGNMENT_BYTES - 1) * num_boxes


def test_boxes_are_aligned_and_an_empty_round_has_no_exchange(ranks: Threads) -> None:
    """Boxes of six bytes each: the second one starts at the next multiple of 16."""

    def tensor_slice(name: str) -> TensorSlice:
        return TensorSlice(name, (3,), torch.bfloat16, whole((3,)))

    held = [[tensor_slice("a"), tensor_slice("b"), tensor_slice("c")], [tensor_slice("c")], [], []]
    wanted = [[], [tensor_slice("a"), tensor_slice("b")], [tensor_slice("a")], []]
    plan = make_plan(held, wanted)
    local = make_plan(held, [[tensor_slice("c")], [tensor_slice("c")], [], []])

    def carry() -> tuple[int, int]:
        shards = make_shards(held[ranks.rank])
        transfer = Transfer(plan, shards, wanted[ranks.rank], ranks.rank, CPU)
        assert [name for name, _ in transfer] == [p.name for p in wanted[ranks.rank]]
        calls = ranks.calls
        kept = [tensor_slice("c")] if ranks.rank < 2 else []
        stays = Transfer(local, shards, kept, ranks.rank, CPU)
        assert [name for name, _ in stays] == [p.name for p in kept]
        assert stays.nbytes_received == 0
        return transfer.nbytes_received, ranks.calls - calls

    assert ranks.run(carry) == [(0, 0), (32, 0), (16, 0), (0, 0)]
    assert ranks.calls == 1


def test_a_shard_wanted_by_several_ranks_is_read_once(
    ranks: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_slice = TensorSlice("a", (4,), torch.float32, whole((4,)))
    held = [[tensor_slice], [], [], []]
    wanted = [[], [tensor_slice], [tensor_slice], [tensor_slice]]
    plan = make_plan(held, wanted)
    shards = [make_shards(tensor_slices) for tensor_slices in held]
    fill(shards[0], 1)
    reads = []
    read = type(shards[0][0]).read
    monkeypatch.setattr(
        type(shards[0][0]), "read", lambda shard: reads.append(shard) or read(shard)
    )
    ranks.run(lambda: list(
        Transfer(plan, shards[ranks.rank], wanted[ranks.rank], ranks.rank, CPU)
    ))  # fmt: skip
    assert len(reads) == 1


def test_tensors_missing_in_the_plan_are_refused_by_name() -> None:
    tensor_slice = TensorSlice("a", (4,), torch.float32, whole((4,)))
    other = TensorSlice("b", (4,), torch.float32, whole((4,)))
    plan = make_plan([[tensor_slice], []], [[tensor_slice], [tensor_slice]])
    with pytest.raises(SyncError, match=r"^the plan does not bring b, wanted on rank 1$"):
        Transfer(plan, [], [tensor_slice, other], 1, CPU)
    half = TensorSlice("a", (4,), torch.float32, Region((0,), (2,)))
    with pytest.raises(SyncError, match=r"^a\[0:4\]: this rank does not hold it, although"):
        Transfer(plan, make_shards([half]), [tensor_slice], 0, CPU)


def test_whole_tensors_are_gathered_on_all_ranks(ranks: Threads) -> None:
    layout = random_layout(seed=1)
    tensor_slices = {part.name: part for parts in layout.held for part in parts}

    def gather() -> list[str]:
        shards = make_shards(layout.held[ranks.rank])
        fill(shards, 1)
        names = []
        for name, tensor in gather_whole(shards, ranks, CPU):  # type: ignore[arg-type]
            assert same_bits(tensor, contents(tensor_slices[name], 1))
            names.append(name)
        return sorted(names)

    assert ranks.run(gather) == [sorted(tensor_slices)] * NUM_RANKS
