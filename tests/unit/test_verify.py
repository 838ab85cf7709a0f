"""Fingerprints of shards add up for any sharding and change with every fault; disagreements name
the tensor and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, product, zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.bridge.islands import RankSlices, Wanted
from dapo_megatron.bridge.verify import (
    Fingerprints,
    Mismatch,
    _coefficients,
    check_fingerprints,
    describe_mismatches,
)
from dapo_megatron.bridge.verify import fingerprints as contributions
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Region, Shard, SyncError, TensorSlice, whole

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fingerprint(value: Tensor, region: Region) -> int:
    [contribution] = contributions([(value, region)])
    return contribution


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A grid of boxes that covers a tensor."""
    axes = []
    for size in shape:
        ends = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size})
        axes.append([(start, end - start) for start, end in pairwise(ends)])
    grid = product(*axes)
    return [
        Region(tuple(start for start, _ in box), tuple(size for _, size in box)) for box in grid
    ]


@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_fingerprints_of_parts_add_up_to_that_of_the_tensor(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = random_tensor(shape, dtype)
    boxes = data.draw(cuts(shape).flatmap(st.permutations))
    parts = [fingerprint(tensor[box.slices], box) for box in boxes]
    assert sum(parts) % 2**64 == fingerprint(tensor, whole(shape))


@given(st.data(), shapes.filter(lambda shape: len(shape) > 0))
def test_any_flipped_bit_changes_the_fingerprint(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(shape, torch.float32)
    flipped = tensor.clone()
    bits = flipped.view(torch.int32).view(-1)
    where = data.draw(st.integers(0, tensor.numel() - 1))
    bits[where] ^= data.draw(st.sampled_from([1 << bit for bit in range(31)] + [-(2**31)]))
    changed = not torch.equal(normal(tensor), normal(flipped))
    same = fingerprint(tensor, whole(shape)) == fingerprint(flipped, whole(shape))
    assert same != changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_negated_and_missing_values_change_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = random_tensor((8, 6), dtype)
    right = fingerprint(tensor, whole((8, 6)))
    swapped = tensor[[1, 0, 2, 3, 4, 5, 6, 7]]
    nan = torch.full_like(tensor, torch.nan)
    for wrong in (swapped, tensor.roll(1, 1), tensor.flip(0), -tensor, nan, tensor * 0):
        assert fingerprint(wrong, whole((8, 6))) != right
    places = [Region((first, 0), (4, 6)) for first in (0, 4)]
    assert fingerprint(tensor[:4], places[0]) != fingerprint(tensor[:4], places[1])
    assert fingerprint(nan, whole((8, 6))) != fingerprint(tensor * 0, whole((8, 6)))
    # Zeros of both signs and subnormal values are the same: an engine may flush them.
    for zeros in (-0.0, 1e-39):
        same = torch.full_like(tensor, zeros)
        assert fingerprint(same, whole((8, 6))) == fingerprint(same * 0, whole((8, 6)))


def normal(tensor: Tensor) -> Tensor:
    """Replace zeros of both signs and subnormal values by 0."""
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0.0, tensor)


def test_large_tensors_are_summed_in_chunks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = random_tensor((100, 7), torch.float32)
    right = fingerprint(tensor, whole((100, 7)))
    monkeypatch.setattr("dapo_megatron.bridge.verify._CHUNK", 50)
    assert fingerprint(tensor, whole((100, 7))) == right


# ------------------------------------------------------------------ both sides

SHAPE = (12, 8)
NAME = "model.layers.3.mlp.down_proj.weight"


def box(rows: tuple[int, int] = (0, 12), columns: tuple[int, int] = (0, 8)) -> Region:
    return Region((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))


HALVES = [box((0, 6)), box((6, 12))]
QUARTERS = [box((first, first + 3)) for first in range(0, 12, 3)]
COLUMNS = [box(columns=(0, 4)), box(columns=(4, 8))]


def fingerprints(
    regions: list[Region], tensors: list[Tensor], name: str = NAME
) -> list[list[tuple[TensorSlice, int]]]:
    """Return the fingerprints by rank: rank r has region r of tensor r."""
    return [
        [
            (
                TensorSlice(name, SHAPE, torch.float32, region),
                fingerprint(tensor[region.slices], region),
            )
        ]
        for region, tensor in zip(regions, tensors, strict=True)
    ]


def mismatches(
    policy: Fingerprints, engines: Fingerprints, replicas: Sequence[int]
) -> list[Mismatch]:
    """Describe mismatches of a policy and engines on the first ranks, both from rank 0."""
    sides = zip_longest(policy, engines, replicas)
    held, wanted, numbers = zip(*((p or [], e or [], r or 0) for p, e, r in sides), strict=True)
    return describe_mismatches(held, wanted, numbers)


LAYOUTS = {  # regions of policy ranks, of engine ranks, and the replica of each engine rank
    "equal": (HALVES * 2, HALVES * 2, [0, 0, 1, 1]),
    "policy finer": (QUARTERS, HALVES * 2, [0, 0, 1, 1]),
    "engine finer": (HALVES * 2, QUARTERS, [0] * 4),
    "across": (HALVES * 2, COLUMNS * 2, [0, 0, 1, 1]),
    "whole to halves": ([box()] * 4, HALVES * 2, [0, 0, 1, 1]),
    "every second rank": (QUARTERS, [HALVES[0]] * 2 + [HALVES[1]] * 2, [0, 1, 0, 1]),
    "one holder": ([box()], [box()] * 4, [0, 1, 2, 3]),
}


@pytest.mark.parametrize(
    "layout,stale,named",
    [
        ("equal", 3, "weight: engine ranks 2, 3 hold"),
        ("policy finer", 1, "weight: engine ranks 0, 1 hold"),
        ("engine finer", 2, "weight: engine ranks 0, 1, 2, 3 hold"),
        ("across", 2, "weight: engine ranks 2, 3 hold"),
        ("whole to halves", 0, "weight: engine ranks 0, 1 hold"),
        ("every second rank", 2, "weight: engine ranks 0, 2 hold"),
        ("one holder", 2, "engine ranks 2 hold"),
    ],
)
def test_only_the_ranks_of_a_stale_engine_are_named(layout: str, stale: int, named: str) -> None:
    held, wanted, replicas = LAYOUTS[layout]
    new, old = random_tensor(SHAPE, torch.float32, 1), random_tensor(SHAPE, torch.float32, 2)
    sampled = [old if rank == stale else new for rank in range(len(wanted))]
    policy = fingerprints(held, [new] * len(held))
    assert mismatches(policy, fingerprints(wanted, [new] * len(wanted)), replicas) == []
    [(line, at_fault)] = mismatches(policy, fingerprints(wanted, sampled), replicas)
    assert line.startswith(NAME) and named in line
    assert at_fault == [replicas[stale]]


def test_workers_on_other_gpus_are_numbered_after_the_trainers() -> None:
    new, old = random_tensor(SHAPE, torch.float32, 1), random_tensor(SHAPE, torch.float32, 2)
    policy = [*fingerprints([box()], [new]), [], []]
    engines = [[], *fingerprints([box()] * 2, [new, old])]
    [(line, at_fault)] = describe_mismatches(policy, engines, [-1, 0, 3])
    assert "engine ranks 2 hold" in line and at_fault == [3]


def test_a_policy_rank_that_drifted_is_named_even_if_its_engine_follows_it() -> None:
    new, old = random_tensor(SHAPE, torch.float32, 1), random_tensor(SHAPE, torch.float32, 2)
    state = [new, new, old, new]
    [(line, at_fault)] = mismatches(
        fingerprints([box()] * 4, state), fingerprints([box()] * 4, state), range(4)
    )
    assert line == f"{NAME}[0:12, 0:8]: policy ranks 2 hold other values than ranks 0, 1, 3"
    assert at_fault == []


def test_copies_inside_one_engine_are_compared_with_each_other() -> None:
    """Tensor-parallel ranks hold copies if there are fewer key-value heads than ranks."""
    new, old = random_tensor(SHAPE, torch.float32, 1), random_tensor(SHAPE, torch.float32, 2)
    wanted = [HALVES[0], HALVES[0], HALVES[1], HALVES[1]]
    [(line, at_fault)] = mismatches(
        fingerprints([box()], [new]), fingerprints(wanted, [new, old, new, new]), [0] * 4
    )
    assert "engine ranks" in line and "1" in line
    assert at_fault == [0]


def test_mismatches_of_all_tensors_are_returned() -> None:
    new, old = random_tensor(SHAPE, torch.float32, 1), random_tensor(SHAPE, torch.float32, 2)

    def side(**tensors: list[Tensor]) -> Fingerprints:
        by_tensor = [fingerprints([box()] * 2, copies, name) for name, copies in tensors.items()]
        return [list(chain(*of_rank)) for of_rank in zip(*by_tensor, strict=True)]

    policy = side(a=[new, old], b=[old, new], c=[new, new], not_of_engines=[new, new])
    engines = side(a=[new, old], b=[new, new], c=[new, old])
    returned = mismatches(policy, engines, [0, 3])
    assert [(text[0], at_fault) for text, at_fault in returned] == [
        ("a", []),
        ("b", []),
        ("c", [3]),
    ]


@settings(max_examples=50)
@given(st.data())
def test_any_two_shardings_agree_and_any_fault_is_reported(data: st.DataObject) -> None:
    tensor = random_tensor(SHAPE, torch.float32)
    held, wanted = data.draw(cuts(SHAPE)), data.draw(cuts(SHAPE))
    policy, replicas = fingerprints(held, [tensor] * len(held)), [0] * len(wanted)
    assert mismatches(policy, fingerprints(wanted, [tensor] * len(wanted)), replicas) == []
    wrong = tensor.clone()
    wrong[data.draw(st.integers(0, 11)), data.draw(st.integers(0, 7))] += 1.0
    assert mismatches(policy, fingerprints(wanted, [wrong] * len(wanted)), replicas)


def check(wanted: Sequence[TensorSlice], by_replica: dict[int, list[tuple[int, int]]]) -> int:
    """Compare a policy on one rank with engines of one worker. `by_replica` has the (index into
    `wanted`, fingerprint) that each can read, where 0 is the right one."""
    names = sorted({part.name for part in wanted})
    tensor = random_tensor(SHAPE, torch.float32)
    right = [fingerprint(tensor[part.region.slices], part.region) for part in wanted]
    prints = {
        replica: [[(index, right[index] + number) for index, number in prints]]
        for replica, prints in by_replica.items()
    }
    engines: Any = SimpleNamespace(call=lambda method, of: prints)
    held = [TensorSlice(name, SHAPE, torch.float32, box()) for name in names]
    return check_fingerprints(
        3,
        [Shard(part, tensor) for part in held],
        RankSlices.of([held]),
        Wanted(RankSlices.of([wanted] * len(prints)), list(prints)),
        engines,
        Ranks(0, 1, 0),
    )


@pytest.mark.parametrize("num_wrong", [1, 5, 7])
def test_an_error_names_some_of_the_wrong_tensors_and_the_engine(num_wrong: int) -> None:
    wanted = [TensorSlice(f"{n}.bias", SHAPE, torch.float32, box()) for n in range(8)]
    right = [(index, 0) for index in range(8)]
    wrong = [(index, int(index < num_wrong)) for index in range(8)]
    with pytest.raises(SyncError) as raised:
        check(wanted, {2: right, 4: wrong})
    lines = [
        f"{n}.bias: engine ranks 1 hold other values than the policy" for n in range(num_wrong)
    ]
    more = [f"... and {num_wrong - 5} more"] if num_wrong > 5 else []
    first = "weights 3: fingerprints differ after the sync"
    assert str(raised.value).split("\n") == [first, *lines[:5], *more]
    assert raised.value.engines == {4}


def test_tensors_that_the_first_engine_cannot_read_are_counted() -> None:
    wanted = [TensorSlice(name, SHAPE, torch.float32, half) for name in "abc" for half in HALVES]
    everything = [(index, 0) for index in range(6)]
    assert check(wanted, {0: everything[:3], 1: everything}) == 2  # a whole, half of b, no c
    assert check(wanted, {1: everything, 3: everything[:3]}) == 0


def test_fingerprint_weights_are_odd() -> None:
    # An even weight would hide a flipped top bit: 2^63 times an even number is 0 modulo 2^64.
    for dim in range(3):
        assert (_coefficients(dim, 5, 1000, torch.device("cpu")) % 2 == 1).all()
