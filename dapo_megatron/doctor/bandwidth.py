"""Measure the bandwidth between neighboring nodes, and of all ranks together.

Results are bus bandwidths per rank in GB/s (1e9 bytes), as defined by nccl-tests
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). With S bytes of tensor per rank, t seconds and n
ranks, the bus bandwidth is S / t for a pair (per direction, with both directions busy),
S / t * 2 (n - 1) / n for all-reduce, and S / t * (n - 1) / n for all-to-all. It can be compared
with the rate of the link for any n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.config import PreflightConfig
from dapo_megatron.doctor.check_result import Check, Status
from dapo_megatron.protocols import Exchange

MIB = 2**20
WARM_UPS = 2
"""Warm-up runs. The first one establishes the connections."""
MAX_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of the warm-up, largest number of bytes, and approximate seconds per measurement."""

    first_bytes: int
    most_bytes: int
    seconds: float


BUDGETS = {"nccl": Budget(8 * MIB, 512 * MIB, 3.0), "gloo": Budget(MIB // 4, 8 * MIB, 0.25)}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes, and the bandwidth of the slowest of their ranks."""

    nodes: tuple[str, str]
    gbps: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Measured bandwidths; None with one rank."""

    all_reduce_gbps: float | None = None
    all_to_all_gbps: float | None = None
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class Wire:
    """The ranks, and the process group whose bandwidth they measure. `note` is called with the name
    of each phase."""

    exchange: Exchange
    group: Any
    device: torch.device
    budget: Budget
    note: Callable[[str], None]


def measure(wire: Wire, ranks_of: Mapping[str, Sequence[int]]) -> Bandwidth:
    """Measure pairs of nodes, then all ranks. `ranks_of` lists the ranks of each node. Collective.

    Pairs come first, because a pair that hangs can be named. Takes at most about 5 budgets.
    """
    num_ranks = wire.exchange.world_size
    if num_ranks == 1:
        return Bandwidth()
    pairs: list[Pair] = []
    for paired in rounds(list(ranks_of)):
        pairs += _measure_pairs(wire, ranks_of, paired)
    wire.note("all-reduce")
    reduce = _rate(wire, lambda tensor: all_reduce(tensor, wire.group), range(num_ranks))
    wire.note("all-to-all")
    share = _rate(wire, lambda tensor: all_to_all(tensor, wire.group), range(num_ranks))
    return Bandwidth(
        all_reduce_gbps=reduce * 2 * (num_ranks - 1) / num_ranks,
        all_to_all_gbps=share * (num_ranks - 1) / num_ranks,
        pairs=tuple(pairs),
    )


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pair each node with its neighbors on a ring, so that no node occurs twice in a round. There
    are two rounds; three for an odd number of nodes, one for two nodes."""
    if len(nodes) < 2:
        return []
    edges = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    if len(nodes) == 2:
        return [edges[:1]]
    odd = [edges.pop()] if len(nodes) % 2 else []
    return [pairs for pairs in (edges[::2], edges[1::2], odd) if pairs]


def slow_nodes(pairs: Iterable[Pair], floor_gbps: float) -> tuple[list[str], list[Pair]]:
    """Return the slow nodes, and the slow pairs without a slow node.

    A node is slow if it has at least two pairs and all of them are below the floor. A good node
    between two slow ones therefore counts as slow, too.
    """
    of_node: dict[str, list[Pair]] = {}
    for pair in pairs:
        for node in pair.nodes:
            of_node.setdefault(node, []).append(pair)
    slow = [
        node
        for node, node_pairs in of_node.items()
        if len(node_pairs) > 1 and all(pair.gbps < floor_gbps for pair in node_pairs)
    ]
    unexplained = {
        pair.nodes: pair
        for node_pairs in of_node.values()
        for pair in node_pairs
        if pair.gbps < floor_gbps and not set(pair.nodes) & set(slow)
    }
    return slow, list(unexplained.values())


def judge(
    bandwidth: Bandwidth, settings: PreflightConfig, checks: dict[str, list[Check]]
) -> list[Check]:
    """Add a failed check for each slow node to `checks`. Return the failed checks that no single
    node explains."""
    overall = []
    floor = settings.min_gbps_pair
    if floor is not None:
        slow, unexplained = slow_nodes(bandwidth.pairs, floor)
        remedy = "exclude the node; check its network adapters"
        for node in slow:
            rates = [f"{pair.gbps:.2f}" for pair in bandwidth.pairs if node in pair.nodes]
            text = f"{', '.join(rates)} GB/s per GPU with its neighbors; {floor:g} are required"
            checks[node].append(Check("bandwidth", Status.FAIL, text, remedy))
        for pair in unexplained:
            text = f"{' and '.join(pair.nodes)} exchange {pair.gbps:.2f} GB/s per GPU; "
            text += f"{floor:g} are required"
            remedy = "check both nodes and the link; to find the slow one, test with a third node"
            overall.append(Check("bandwidth of a pair", Status.FAIL, text, remedy))
    for key, name in (("all_reduce", "all-reduce"), ("all_to_all", "all-to-all")):
        floor, gbps = getattr(settings, f"min_gbps_{key}"), getattr(bandwidth, f"{key}_gbps")
        if floor is not None and gbps is not None and gbps < floor:
            text = f"{gbps:.2f} GB/s per GPU over all nodes; {floor:g} are required"
            remedy = f"check the slowest pairs, or lower preflight.min_gbps_{key}"
            overall.append(Check(name, Status.FAIL, text, remedy))
    return overall


# ------------------------------------------------------------------------------- exchanges


def swap(tensor: Tensor, peer: int, group: Any) -> None:
    """Send a tensor to another rank, and receive one of the same size from it."""
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, peer, group),
        dist.P2POp(dist.irecv, received, peer, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def all_reduce(tensor: Tensor, group: Any) -> None:
    """Sum a tensor over all ranks."""
    dist.all_reduce(tensor, group=group)


def all_to_all(tensor: Tensor, group: Any) -> None:
    """Exchange equal parts of a tensor between all ranks."""
    dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)


# ------------------------------------------------------------------------------- measuring


def _measure_pairs(
    wire: Wire, ranks_of: Mapping[str, Sequence[int]], paired: Sequence[tuple[str, str]]
) -> list[Pair]:
    """Measure all pairs of a round at the same time. Rank k of one node swaps with rank k of the
    other."""
    me = wire.exchange.rank
    run: Callable[[Tensor], None] = _nothing
    members: dict[tuple[str, str], list[int]] = {}
    own_members: Sequence[int] = ()
    for first, second in paired:
        couples = list(zip(ranks_of[first], ranks_of[second], strict=False))
        members[first, second] = [rank for couple in couples for rank in couple]
        for couple in couples:
            if me in couple:
                peer = couple[couple[0] == me]
                name = f"pair {first} {second}"
                run, own_members = _swap_with(peer, wire, name), members[first, second]
    rates = wire.exchange.all_gather(_rate(wire, run, own_members), float)
    return [Pair(nodes, min(rates[rank] for rank in ranks)) for nodes, ranks in members.items()]


def _swap_with(peer: int, wire: Wire, name: str) -> Callable[[Tensor], None]:
    def run(tensor: Tensor) -> None:
        wire.note(name)
        swap(tensor, peer, wire.group)
        _finish(wire.device)
        wire.note(f"waiting after {name}")

    return run


def _nothing(_: Tensor) -> None:
    """Do nothing, for a node without a partner in this round."""


def _rate(wire: Wire, run: Callable[[Tensor], None], members: Sequence[int]) -> float:
    """Return GB of tensor per second of the slowest of `members`. Collective over all ranks,
    including those that are in no pair."""
    size = wire.budget.first_bytes
    seconds = [_seconds(wire, run, size, 1) for _ in range(WARM_UPS)][-1]
    first = _slowest(wire, seconds, members)
    affordable = int(size * wire.budget.seconds / 4 / first) if members else size
    # A multiple of the warm-up's size, within the time budget.
    size = max(size, min(wire.budget.most_bytes, affordable) // size * size)
    expected = first * size / wire.budget.first_bytes
    repeats = max(1, min(MAX_REPEATS, int(wire.budget.seconds / 2 / expected)))
    return size / _slowest(wire, _seconds(wire, run, size, repeats), members) / 1e9


def _seconds(wire: Wire, run: Callable[[Tensor], None], size: int, repeats: int) -> float:
    """Return the mean seconds of a run on this rank. All ranks start together."""
    count = size // 4 // wire.exchange.world_size * wire.exchange.world_size
    tensor = torch.zeros(max(count, wire.exchange.world_size), device=wire.device)
    _finish(wire.device)
    wire.exchange.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run(tensor)
    _finish(wire.device)
    return (time.perf_counter() - start) / repeats


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(wire: Wire, seconds: float, members: Sequence[int]) -> float:
    """Return the largest seconds of `members`, or `seconds` itself without members. Collective."""
    all_seconds = wire.exchange.all_gather(seconds, float)
    return max([all_seconds[rank] for rank in members] or [seconds]) or 1e-9
