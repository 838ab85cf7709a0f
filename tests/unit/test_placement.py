"""Ranks of engines: chosen so that ranks have much of what they need, within nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.model import (
    ChunkPlace,
    Groups,
    engine_groups,
    engine_slices,
    layout_of,
    place_engines,
)
from dapo_megatron.types import TensorSlice
from tests.helpers.configs import tiny_config
from tests.unit.test_plan_islands import MOE, slices_of_cluster

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def place(
    num_ranks: int, engine_tp: int, policy_tp: int, ep: int = 1, whole: bool = False, node: int = 8
) -> list[list[int]]:
    groups = place_engines(
        MOE,
        num_ranks,
        engine_tp,
        policy_tp=policy_tp,
        policy_ep=ep,
        whole_experts=whole,
        ranks_per_node=node,
    )
    return list(map(list, groups))


def consecutive(num_ranks: int, engine_tp: int) -> list[list[int]]:
    return [list(range(first, first + engine_tp)) for first in range(0, num_ranks, engine_tp)]


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        (place(8, 4, 8), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (place(8, 2, 4), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (place(8, 2, 8), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (place(8, 4, 4), consecutive(8, 4)),
        (place(8, 4, 2), consecutive(8, 4)),
        (place(8, 1, 4), consecutive(8, 1)),
        (place(24, 4, 6), consecutive(24, 4)),
        # The policy's 16 ranks are on two nodes, and engines of 8 stay on one.
        (place(16, 8, 16), consecutive(16, 8)),
        # Experts decide: each rank has the half of them that it needs already.
        (place(8, 2, 4, ep=2, whole=True), consecutive(8, 2)),
        (place(8, 2, 4, ep=2, whole=False), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (place(8, 4, 2, ep=8, whole=True), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (place(8, 4, 2, ep=8, whole=False), consecutive(8, 4)),
    ],
)
def test_ranks_of_an_engine(placed: Groups, expected: Groups) -> None:
    assert placed == expected


def test_groups_follow_the_config() -> None:
    config = tiny_config(
        policy__tensor_parallel=4, engine__tensor_parallel=2, engine__expert_parallel=True,
        engine__replicas="null",
    )  # fmt: skip
    assert list(map(list, engine_groups(config, MOE, 8, 8))) == place(8, 2, 4, whole=True)
    assert list(map(list, engine_groups(config, MOE, 8, 2))) == consecutive(8, 2)
    assert list(map(list, engine_groups(tiny_config(), MOE, 2, 2))) == [[0]]  # the quickstart


def test_ranks_beyond_the_last_engine_are_in_none() -> None:
    config = tiny_config(policy__tensor_parallel=1, engine__tensor_parallel=2, engine__replicas=2)
    for num_ranks in (5, 8):
        groups = engine_groups(config, MOE, num_ranks, 8)
        assert list(map(list, groups)) == consecutive(4, 2)


@given(engine_tp=SIZES, policy_tp=SIZES, ep=SIZES, node=SIZES, whole=st.booleans())
def test_every_rank_is_in_one_engine_that_extends_over_no_more_nodes(
    engine_tp: int, policy_tp: int, ep: int, node: int, whole: bool
) -> None:
    groups = place(48, engine_tp, policy_tp, ep, whole, node)
    assert sorted(chain(*groups)) == list(range(48))
    assert all(group == sorted(group) and len(group) == engine_tp for group in groups)

    def num_nodes(of: Groups) -> int:
        return sum(len({rank // node for rank in group}) for group in of)

    assert num_nodes(groups) <= num_nodes(consecutive(48, engine_tp))


LAYOUTS = [*product((1, 2, 4, 8), (1,), (1, 2, 8), (2, 4), (False, True)), (2, 2, 4, 2, True)]


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "engine_tp", "whole"),
    [
        (tp, pp, ep, engine_tp, whole)
        for tp, pp, ep, engine_tp, whole in LAYOUTS
        if place(8, engine_tp, tp, ep, whole) != consecutive(8, engine_tp)
    ],
)
def test_placed_engines_receive_less(
    tp: int, pp: int, ep: int, engine_tp: int, whole: bool
) -> None:
    """Count the bytes with the planner, in every layout with engines of ranks that are not
    consecutive."""
    held, _ = slices_of_cluster(8, tp, pp, ep, engine_tp)
    needed = [
        engine_slices(MOE, number, engine_tp, torch.bfloat16, expert_parallel=whole)
        for number in range(engine_tp)
    ]

    def received(groups: Groups) -> list[int]:
        number_of = {rank: number for group in groups for number, rank in enumerate(group)}
        wanted = [needed[number_of[rank]] for rank in range(8)]
        return sorted(make_plan(held, wanted).missing)

    before = received(consecutive(8, engine_tp))
    after = received(place(8, engine_tp, tp, ep, whole))
    assert sum(after) < sum(before)
    assert max(after) <= max(before)


def test_engines_of_half_the_ranks_receive_half() -> None:
    arch = replace(MOE, num_kv_heads=8, vocab_size=1024, num_experts=0)
    held = [
        [
            TensorSlice(part.name, part.global_shape, torch.bfloat16, part.region)
            for parameter in layout_of(arch, ChunkPlace(rank, 8, 0, 4, True, True)).values()
            for part in parameter.parts
        ]
        for rank in range(8)
    ]
    needed = [engine_slices(arch, number, 4, torch.bfloat16) for number in range(4)]
    before = make_plan(held, [needed[rank % 4] for rank in range(8)]).missing
    after = make_plan(held, [needed[rank // 2] for rank in range(8)]).missing
    assert place(8, 4, 8) == [[rank for rank in range(8) if rank % 2 == n] for n in range(2)]
    assert max(after) == min(after) == max(before) / 2
