"""Ranks of engines: chosen so that ranks have much of what they need, within nodes."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.model import (
    Groups,
    engine_groups,
    engine_slices,
    place_engines,
)
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


def test_groups_follow_the_config() -> None:
    config = tiny_config(
        policy__tensor_parallel=4, engine__tensor_parallel=2, engine__expert_parallel=True,
        engine__replicas="null",
    )  # fmt: skip
    assert list(map(list, engine_groups(config, MOE, 8, 8))) == place(8, 2, 4, whole=True)
    assert list(map(list, engine_groups(config, MOE, 8, 2))) == consecutive(8, 2)
    assert list(map(list, engine_groups(tiny_config(), MOE, 2, 2))) == [[0]]  # the quickstart


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
