"""Transfer plans: each wanted element is sent exactly once, in rounds of bounded size, and errors
name the tensor and the rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.bridge.plan import (
    SENT_BUCKETS,
    BoxTransfer,
    TensorTransfer,
    TransferPlan,
    make_plan,
)
from dapo_megatron.types import Region, SyncError, TensorSlice, whole

Slices = list[list[TensorSlice]]


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A box of the tensor, perhaps empty."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def slabs(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Disjoint slices of the tensor along one dimension."""
    if not shape:
        return [whole(shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.lists(st.integers(0, shape[dim]), max_size=3))
    tensor_slices = []
    for first, last in pairwise([0, *sorted(inner), shape[dim]]):
        start = [0] * len(shape)
        start[dim] = first
        tensor_slices.append(Region(tuple(start), (*shape[:dim], last - first, *shape[dim + 1 :])))
    return tensor_slices


@st.composite
def situations(draw: st.DrawFn) -> tuple[Slices, Slices]:
    """Pieces of a few tensors that up to six ranks hold (boxes that may overlap, and slabs that
    cover the tensor) and want (disjoint slabs)."""
    num_ranks = draw(st.integers(1, 6))
    held: Slices = [[] for _ in range(num_ranks)]
    wanted: Slices = [[] for _ in range(num_ranks)]
    ranks = st.integers(0, num_ranks - 1)
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        name = f"model.layers.{number // 2}.part_{number}"
        for region in draw(slabs(shape)):
            held[draw(ranks)].append(TensorSlice(name, shape, dtype, region))
        for rank in draw(st.lists(ranks, max_size=6)):
            held[rank].append(TensorSlice(name, shape, dtype, draw(regions(shape))))
        for rank in draw(st.sets(ranks)):
            cuts = draw(slabs(shape))
            for region in draw(st.lists(st.sampled_from(cuts), unique=True)):
                wanted[rank].append(TensorSlice(name, shape, dtype, region))
    return held, wanted


def boxes_of(tensors: Sequence[TensorTransfer]) -> Iterator[tuple[BoxTransfer, int]]:
    """All boxes of a round, with their sources."""
    for tensor in tensors:
        yield from tensor.routes.with_sources()


def mask(shape: Sequence[int], boxes: Sequence[Region]) -> numpy.ndarray:
    """Number of boxes that contain each element."""
    count = numpy.zeros(shape, dtype=int)
    for region in boxes:
        count[region.slices] += 1
    return count


@given(situations())
def test_every_wanted_element_arrives_once_from_a_rank_that_holds_it(
    situation: tuple[Slices, Slices],
) -> None:
    held, wanted = situation
    plan = make_plan(held, wanted, bucket_bytes=64, ranks_per_node=2)
    arriving: dict[tuple[int, str, Region], list[Region]] = defaultdict(list)
    for tensor in (tensor for tensors in plan.rounds for tensor in tensors):
        for move, source in tensor.routes.with_sources():
            arriving[move.target, tensor.name, move.region].append(move.box)
            assert any(
                tensor_slice.name == tensor.name
                and tensor_slice.region.intersect(move.box) == move.box
                for tensor_slice in held[source]
            )
    for rank, tensor_slices in enumerate(wanted):
        for tensor_slice in tensor_slices:
            boxes = arriving.pop((rank, tensor_slice.name, tensor_slice.region), [])
            assert (
                mask(tensor_slice.global_shape, boxes)
                == mask(tensor_slice.global_shape, [tensor_slice.region])
            ).all()
    assert not arriving


@given(situations())
def test_only_missing_elements_are_sent(situation: tuple[Slices, Slices]) -> None:
    held, wanted = situation
    plan = make_plan(held, wanted, bucket_bytes=64, ranks_per_node=2)
    received, sent = Counter[int](), Counter[int]()
    for tensors in plan.rounds:
        for move, source in boxes_of(tensors):
            if source != move.target:
                received[move.target] += move.nbytes
                sent[source] += move.nbytes
    for rank, tensor_slices in enumerate(wanted):
        missing = 0
        for tensor_slice in tensor_slices:
            own = [
                held_piece.region
                for held_piece in held[rank]
                if held_piece.name == tensor_slice.name
            ]
            wants = mask(tensor_slice.global_shape, [tensor_slice.region]) > 0
            missing += int((wants & (mask(tensor_slice.global_shape, own) == 0)).sum()) * (
                tensor_slice.dtype.itemsize
            )
        assert plan.missing[rank] == received[rank] == missing
        assert plan.sent[rank] == sent[rank]


@given(situations(), st.integers(1, 200))
def test_the_bytes_of_a_round_are_bounded(
    situation: tuple[Slices, Slices], bucket_bytes: int
) -> None:
    held, wanted = situation
    plan = make_plan(held, wanted, bucket_bytes=bucket_bytes)
    for tensors in plan.rounds:
        for by_source, limit in ((False, bucket_bytes), (True, SENT_BUCKETS * bucket_bytes)):
            nbytes: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
            for tensor in tensors:
                for move, source in tensor.routes.with_sources():
                    if source != move.target:
                        rank = source if by_source else move.target
                        nbytes[rank][tensor.name, move.target] += move.nbytes
            for wishes in nbytes.values():
                assert wishes.total() <= limit or len(wishes) == 1
    wishes_by_round = [
        {
            (tensor.name, move.target)
            for tensor in tensors
            for move, _ in tensor.routes.with_sources()
        }
        for tensors in plan.rounds
    ]
    # What one rank wants of a tensor is sent in one round.
    assert sum(map(len, wishes_by_round)) == len(set().union(*wishes_by_round))
    wanted_names = {tensor_slice.name for tensor_slices in wanted for tensor_slice in tensor_slices}
    assert {tensor.name for tensors in plan.rounds for tensor in tensors} == set(wanted_names)


def test_a_tensor_wanted_by_many_ranks_is_sent_bucket_by_bucket() -> None:
    plan = make_plan([[tensor_slice("t")], *[[]] * 9], [[tensor_slice("t")]] * 10, bucket_bytes=128)
    sent = [
        Counter(source for move, source in boxes_of(tensors) if move.target)
        for tensors in plan.rounds
    ]
    assert sent == [{0: 2}, {0: 2}, {0: 2}, {0: 2}, {0: 1}]
    assert {tensor.name for tensors in plan.rounds for tensor in tensors} == {"t"}


def tensor_slice(name: str, first: int = 0, num: int = 8, **other: object) -> TensorSlice:
    """Rows of a tensor of shape [8, 4]."""
    values: dict = {"global_shape": (8, 4), "dtype": torch.float32, **other}
    return TensorSlice(name, region=Region((first, 0), (num, 4)), **values)


def sources(plan: TransferPlan) -> list[list[int]]:
    """The sources of each tensor's boxes, in the order of the plan."""
    return [list(tensor.routes.sources) for tensors in plan.rounds for tensor in tensors]


def test_sources_on_the_same_node_are_preferred_and_equal_ones_alternate() -> None:
    names = [f"t{number}" for number in range(4)]
    all_slices = [tensor_slice(name) for name in names]
    plan = make_plan(
        [all_slices, all_slices, [], all_slices], [[], [], all_slices, []], ranks_per_node=2
    )
    assert sources(plan) == [[3], [3], [3], [3]]  # rank 3 is on the same node as rank 2
    plan = make_plan(
        [all_slices, all_slices, [], all_slices], [[], [], all_slices, []], ranks_per_node=1
    )
    assert sources(plan) == [[0], [1], [3], [0]]
    plan = make_plan([all_slices, all_slices, []], [all_slices, [], []], ranks_per_node=1)
    assert sources(plan) == [[0]] * 4
    assert plan.sent[0] == plan.missing[0] == 0


def stage(layers: range, experts: int = 0) -> list[TensorSlice]:
    """The tensors of `layers`, each with `experts` experts."""
    parts = ["a", "b", *(f"experts.{number}" for number in range(experts))]
    return [tensor_slice(f"model.layers.{layer}.{part}") for layer in layers for part in parts]


def test_pipeline_stages_send_in_the_same_rounds_and_layers_stay_together() -> None:
    first = [tensor_slice("model.embed_tokens.weight"), *stage(range(3))]
    second = [*stage(range(3, 6)), tensor_slice("lm_head.weight")]
    held = [first, second]
    all_slices = [*first, *second]
    plan = make_plan(held, [all_slices, all_slices], bucket_bytes=4 * 128)
    for tensors in plan.rounds:
        senders = Counter(source for move, source in boxes_of(tensors) if source != move.target)
        assert senders == {0: 4, 1: 4} or tensors is plan.rounds[-1]
        layers = [tensor.name.split(".")[2] for tensor in tensors if "layers" in tensor.name]
        runs = [layers[0], *(layer for previous, layer in pairwise(layers) if previous != layer)]
        assert len(runs) == len(set(runs))
    order = [
        int(tensor.name.split(".")[2])
        for tensors in plan.rounds
        for tensor in tensors
        if "layers" in tensor.name
    ]
    assert [layer for layer in order if layer < 3] == sorted([0, 1, 2] * 2)
    assert [layer for layer in order if layer >= 3] == sorted([3, 4, 5] * 2)


@given(st.integers(1, 8), st.integers(1, 8))
def test_stages_of_any_size_have_sent_about_the_same_share_after_each_round(
    num_first: int, num_second: int
) -> None:
    held = [stage(range(num_first)), stage(range(num_first, num_first + num_second))]
    plan = make_plan(held, [[*held[0], *held[1]]] * 2, bucket_bytes=2 * 128)
    sent = Counter[int]()
    for tensors in plan.rounds:
        sent.update(source for move, source in boxes_of(tensors) if source != move.target)
        # One tensor more, at most, than the share of the other stage.
        first, second = map(len, held)
        assert abs(sent[0] * second - sent[1] * first) <= max(first, second)


def test_expert_ranks_send_in_the_same_rounds() -> None:
    experts = stage(range(1), experts=8)[2:]
    plan = make_plan([experts[:4], experts[4:], []], [[], [], experts], bucket_bytes=4 * 128)
    for tensors in plan.rounds:
        assert Counter(source for _, source in boxes_of(tensors)) == {0: 2, 1: 2}


def test_tensors_of_the_same_layout_share_their_boxes() -> None:
    tensor_slices = stage(range(50))
    plan = make_plan([tensor_slices, []], [[], tensor_slices])
    assert len({id(tensor.routes.boxes) for tensors in plan.rounds for tensor in tensors}) == 1


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        (
            [[tensor_slice("t")], []],
            [[], [tensor_slice("t"), tensor_slice("u")]],
            "rank 1 wants u, which no rank holds",
        ),
        (
            [[tensor_slice("t", 0, 3)], [tensor_slice("t", 4, 4)]],
            [[], [tensor_slice("t", 2, 4)]],
            r"rank 1 wants \[3:4, 0:4\] of t, which no rank holds",
        ),
        (
            [[tensor_slice("t")], [tensor_slice("t", global_shape=(9, 4))]],
            [[], [tensor_slice("t")]],
            r"t is \[8, 4\] torch.float32 on rank 0, but \[9, 4\] torch.float32 on rank 1",
        ),
        (
            [[tensor_slice("t")], []],
            [[], [tensor_slice("t", dtype=torch.bfloat16)]],
            r"t is \[8, 4\] torch.float32 on rank 0, but \[8, 4\] torch.bfloat16 on rank 1",
        ),
        (
            [[tensor_slice("t")], []],
            [[], [tensor_slice("t", 0, 5), tensor_slice("t", 4, 4)]],
            r"rank 1 wants \[4:5, 0:4\] of t twice",
        ),
    ],
)
def test_errors_name_the_tensor_and_the_rank(held: Slices, wanted: Slices, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        make_plan(held, wanted)
