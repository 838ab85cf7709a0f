"""Delivery of tokens: each rank gets exactly the sequences of its data-parallel index."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.batch import describe
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.rollout import delivery
from dapo_megatron.rollout.delivery import Delivery, RouteSize
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, DapoError, Finish, Grade, Group, Prompt
from tests.helpers.batches import ONE_INDEX
from tests.helpers.configs import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.rollouts import completion_of, with_random_tokens

OVERLONG = tiny_config().overlong
LAYOUTS = [(0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 2, 3), (1, 1, 0, 0)]
"""Data-parallel index of each rank. Megatron does not number them like this in all cases."""
LAYERS = 3


def groups_of(seed: int) -> list[Group]:
    rng = random.Random(seed)
    return [
        Group(
            ticket,
            Prompt("sums", ticket, tuple(rng.choices(range(2**31), k=rng.randint(1, 5))), "", ""),
            tuple(completion(rng, sample) for sample in range(3)),
        )
        for ticket in rng.sample(range(100), 6)
    ]


def completion(rng: random.Random, sample: int) -> Completion:
    grade = Grade(1.0 if sample else -1.0, bool(sample), "")
    made = completion_of(sample, (Segment(0, rng.randint(1, 9)),), Finish.STOP, grade)
    return with_random_tokens(made, rng)


def routed(group: Group, dtype: str) -> Group:
    """Return the group with routes of all tokens but the last of each sequence."""

    def routes(each: Completion) -> array[int]:
        number = LAYERS * (len(group.prompt.tokens) + each.num_tokens - 1)
        values = np.arange(number).astype(dtype)
        return array("B" if dtype == "uint8" else "h", values.tobytes())

    return replace(
        group, completions=tuple(replace(c, routes=routes(c)) for c in group.completions)
    )


def plain(tokens: Any) -> Any:
    return {
        index: [
            None if values is None else (values.dtype.str, values.tolist())
            for values in (each.prompt, each.response, each.logprobs, each.routes)
        ]
        for index, each in tokens.items()
    }


def deliver(rank: int) -> list[Any]:
    """Deliver in every layout. Return what this rank got, as plain values."""
    delivery.MAX_BROADCAST = 100  # several broadcasts
    ranks, got = Ranks(rank, 4, rank), []
    for layout in LAYOUTS:
        for dtype in ("", "uint8", "int16"):
            groups = groups_of(len(got))
            size = RouteSize()
            if dtype:
                groups = [routed(group, dtype) for group in groups]
                size = RouteSize(LAYERS * np.dtype(dtype).itemsize, dtype)
            plan = partial(plan_microbatches, max_tokens=64)
            parallel = DataParallelRanks.join(ranks, layout[rank], plan, num_updates=2)
            peers = ranks.subgroup([r for r, index in enumerate(layout) if index == layout[rank]])
            sequences = describe(groups, overlong=OVERLONG, eps=1e-6)
            tokens = Delivery(parallel, peers, size)(sequences, groups if rank == 0 else [])
            owned = [
                i for i, owner in enumerate(parallel.owners(sequences)) if owner == layout[rank]
            ]
            assert list(tokens) == owned
            expected = Delivery(ONE_INDEX, ONE_INDEX.exchange, size)(sequences, groups)
            assert plain(tokens) == {index: plain(expected)[index] for index in owned}
            got.append(len(owned))
    return got


def test_every_layout_gets_its_sequences_bit_for_bit() -> None:
    counts = np.array(run_ranks(deliver, 4))
    for case, layout in enumerate(layout for layout in LAYOUTS for _ in range(3)):
        firsts = [layout.index(index) for index in sorted(set(layout))]
        assert sum(counts[first][case] for first in firsts) == 18  # each sequence once
        assert all(
            counts[rank][case] == counts[layout.index(layout[rank])][case] for rank in range(4)
        )


@dataclass
class Pair:
    """An exchange of two ranks that run one after the other: rank 1 reads what rank 0 sent."""

    rank: int
    sent: deque[Any]
    world_size = 2

    def all_gather(self, value: Any, of: type) -> list[Any]:
        assert isinstance(value, of)
        return [value, value]

    def broadcast(self, value: Any, of: Any) -> Any:
        if self.rank:
            return self.sent.popleft()
        assert of is not bytes or 0 < len(value) <= delivery.MAX_BROADCAST
        self.sent.append(value)
        return value

    def scatter(self, parts: Any, size: int) -> memoryview:
        part = self.sent.popleft() if self.rank else parts[0]
        self.sent += () if self.rank else parts[1:]
        assert len(part) == size
        return memoryview(part)


def test_the_first_rank_of_an_index_broadcasts_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_BROADCAST", 100)
    groups = [routed(group, "int16") for group in groups_of(3)]
    sequences = describe(groups, overlong=OVERLONG, eps=1e-6)
    plan = partial(plan_microbatches, max_tokens=64)
    sent: deque[Any] = deque()
    got = []
    for rank in (0, 1):
        pair: Any = Pair(rank, sent)
        parallel = DataParallelRanks.join(pair, 0, plan, 2)
        got.append(Delivery(parallel, pair, RouteSize(2 * LAYERS, "int16"))(sequences, groups))
        assert len(sent) > 3 or rank
    assert plain(got[0]) == plain(got[1]) and not sent
    for index, routes in enumerate(c.routes for group in groups for c in group.completions):
        assert got[1][index].routes.tolist() == list(routes)  # type: ignore[union-attr, arg-type]


def test_one_rank_gets_views_of_what_it_has() -> None:
    groups = groups_of(1)
    sequences = describe(groups, overlong=OVERLONG, eps=1e-6)
    tokens = Delivery(ONE_INDEX, ONE_INDEX.exchange)(sequences, groups)
    by_key = {(g.ticket, c.sample): (g, c) for g in groups for c in g.completions}
    for index, sequence in enumerate(sequences):
        group, each = by_key[sequence.ticket, sequence.sample]
        assert tuple(tokens[index].prompt.tolist()) == group.prompt.tokens
        assert tokens[index].response.tobytes() == each.tokens.tobytes()
        assert tokens[index].logprobs.tobytes() == each.logprobs.tobytes()


def test_a_completion_without_its_routes_is_named() -> None:
    groups = [routed(group, "uint8") for group in groups_of(2)]
    sequences = describe(groups, overlong=OVERLONG, eps=1e-6)
    first, *rest = groups[0].completions
    wrong = replace(first, routes=array("B", bytes(5)))
    groups[0] = replace(groups[0], completions=(wrong, *rest))
    with pytest.raises(DapoError, match=r"ticket \d+, sample 0: 5 bytes of routes, but policy"):
        Delivery(ONE_INDEX, ONE_INDEX.exchange, RouteSize(LAYERS))(sequences, groups)
