"""The bandwidth probe between real gloo ranks: results, duration, and reporting of a slow node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor import bandwidth
from dapo_megatron.doctor.bandwidth import BUDGETS, Bandwidth, Pair, Wire, measure, rounds
from tests.helpers.ranks import run_ranks

GBPS = 0.1
SLOW_GBPS = 0.004


@given(st.integers(0, 40))
def test_every_node_is_paired_with_its_neighbors_and_once_per_round(num_nodes: int) -> None:
    nodes = [f"n{number}" for number in range(num_nodes)]
    plan = rounds(nodes)
    assert len(plan) <= 3
    for paired in plan:
        busy_nodes = [node for pair in paired for node in pair]
        assert len(busy_nodes) == len(set(busy_nodes))
    meetings = [node for paired in plan for pair in paired for node in pair]
    expected_meetings = 0 if num_nodes < 2 else 1 if num_nodes == 2 else 2
    assert all(meetings.count(node) == expected_meetings for node in nodes)


@given(st.integers(3, 20), st.data())
def test_only_the_slow_node_is_reported(num_nodes: int, data: st.DataObject) -> None:
    nodes = [f"n{number}" for number in range(num_nodes)]
    slow = data.draw(st.sampled_from(nodes))
    pairs = [
        Pair(pair, 1.0 if slow in pair else 50.0) for paired in rounds(nodes) for pair in paired
    ]
    assert bandwidth.slow_nodes(pairs, 40.0) == ([slow], [])
    assert bandwidth.slow_nodes(pairs, 0.5) == ([], [])


def test_with_two_nodes_the_slow_pair_is_reported() -> None:
    pair = Pair(("a", "b"), 1.0)
    assert bandwidth.slow_nodes([pair], 40.0) == ([], [pair])


def test_a_slow_link_between_good_nodes_is_reported_as_a_pair() -> None:
    pairs = [Pair(("a", "b"), 1.0), Pair(("b", "c"), 50.0), Pair(("c", "a"), 50.0)]
    assert bandwidth.slow_nodes(pairs, 40.0) == ([], [pairs[0]])


class Clock:
    """Replaces `time` in the probe: seconds pass only during exchanges."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def timed(self, exchange: Callable[..., None], gbps: float) -> Callable[..., None]:
        """Return `exchange` as a function that takes the time of its bytes at this rate."""

        def exchange_and_wait(tensor: torch.Tensor, *arguments: Any) -> None:
            self.seconds += tensor.nbytes / gbps / 1e9
            exchange(tensor, *arguments)

        return exchange_and_wait


def probe(rank: int, world_size: int, slow: int | None, per_node: int) -> tuple[Bandwidth, float]:
    """Measure with real exchanges, whose duration on a fake clock depends only on their bytes."""
    clock = Clock()
    bandwidth.time = clock
    gbps = SLOW_GBPS if rank == slow else GBPS
    for name in ("swap", "all_reduce", "all_to_all"):
        setattr(bandwidth, name, clock.timed(getattr(bandwidth, name), gbps))
    phases: list[str] = []
    wire = Wire(
        Ranks(rank, world_size, rank), None, torch.device("cpu"), BUDGETS["gloo"], phases.append
    )
    ranks_of: dict[str, list[int]] = {}
    for member in range(world_size):
        ranks_of.setdefault(f"n{member // per_node}", []).append(member)
    measured = measure(wire, ranks_of)
    assert phases[-1] == "all-to-all"
    return measured, clock.seconds


def test_ranks_agree_and_stay_within_the_time_budget() -> None:
    results = run_ranks(probe, 4, 4, None, 2)
    bandwidths = [measured for measured, _ in results]
    assert all(measured == bandwidths[0] for measured in bandwidths)
    assert bandwidths[0].all_reduce_gbps and bandwidths[0].all_to_all_gbps
    assert [pair.nodes for pair in bandwidths[0].pairs] == [("n0", "n1")]
    assert max(seconds for _, seconds in results) < 5 * BUDGETS["gloo"].seconds


def test_a_node_that_sends_slowly_is_reported(tmp_path: Path) -> None:
    measured, _ = run_ranks(probe, 4, 4, 2, 1)[0]
    slow = [pair for pair in measured.pairs if "n2" in pair.nodes]
    assert len(slow) == 2
    assert all(0.2 * SLOW_GBPS < pair.gbps < 1.1 * SLOW_GBPS for pair in slow)
    assert bandwidth.slow_nodes(measured.pairs, 2 * SLOW_GBPS) == (["n2"], [])


def test_bus_bandwidths_follow_the_definition_of_nccl_tests(monkeypatch: Any) -> None:
    # 8 ranks, 1 GB in 1 s: a link carries 2 * 7 / 8 GB for all-reduce, 7 / 8 GB for all-to-all.
    monkeypatch.setattr(bandwidth, "_rate", lambda *_: 1.0)
    wire = Wire(Ranks(0, 8, 0), None, torch.device("cpu"), BUDGETS["gloo"], lambda _: None)
    measured = measure(wire, {"one": range(8)})
    assert measured == Bandwidth(all_reduce_gbps=1.75, all_to_all_gbps=0.875)
