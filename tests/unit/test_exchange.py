"""The exchange of tokens over real processes, and the completions that leaders hold."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.completion_rows import CompletionRow, summarize
from dapo_megatron.rollout.exchange import BYTES, RouteSize, TokenExchange
from dapo_megatron.rollout.messages import Move
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.rollout.store import CompletionStore
from dapo_megatron.types import (
    Completion,
    CompletionSummary,
    DapoError,
    Finish,
    Grade,
    Prompt,
    Segment,
    TrainingSequence,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.rollouts import ScriptedDriver, make_coordinator

WORLD_SIZE = 4
LAYOUTS = [
    # data-parallel index of each rank; rank of each replica's leader
    ((0, 0, 0, 0), (0,)),
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 0, 1, 1), (0, 2)),
    ((0, 1, 0, 1), (0, 2)),
    ((0, 0, 1, 1), (3, 1)),
    ((1, 0, 1, 0), (0, 1, 2, 3)),
]


@dataclass(frozen=True)
class Indices:
    """Data-parallel indices of all ranks, as seen by one."""

    indices: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.indices[self.rank]

    @property
    def size(self) -> int:
        return max(self.indices) + 1


@dataclass
class Counting:
    """Exchange that counts the bytes that arrive."""

    ranks: Ranks
    received: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    def all_gather(self, value: Any, of: object) -> list[Any]:
        return self.ranks.all_gather(value, of)

    def all_to_all(self, parts: Any, sizes: Any) -> list[memoryview]:
        messages = self.ranks.all_to_all(parts, sizes)
        self.received.append(sum(message.nbytes for message in messages))
        return messages


@dataclass
class Step:
    """A step with random sequences. Every rank makes the same one from its seed."""

    routes: RouteSize
    rows: list[tuple[int, CompletionRow]] = field(default_factory=list)
    """(replica, completion) of every completion."""
    sequences: list[TrainingSequence] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


ROUTES = (RouteSize(), RouteSize(6, "uint8"), RouteSize(6, "int16"))


def random_routes(rng: random.Random, size: RouteSize, num_tokens: int) -> array[int] | None:
    """Return the routes of a completion whose prompt and response have `num_tokens` tokens."""
    if not size.bytes_per_token:
        return None
    return array(np.dtype(size.dtype).char, rng.randbytes(size.bytes_per_token * (num_tokens - 1)))


def random_step(seed: int, num_indices: int, num_replicas: int) -> Step:
    rng, step = random.Random(seed), Step(ROUTES[seed % len(ROUTES)])
    for ticket in range(rng.randint(0, 6)):
        prompt = Prompt("sums", ticket, _tokens(rng, rng.randint(1, 5)), f"{ticket}", "7")
        is_trained = rng.random() < 0.6
        for sample in range(rng.randint(1, 4)):
            replica, num_tokens = rng.randrange(num_replicas), rng.choice([0, 1, 2, 7, 300])
            num_tokens = max(num_tokens, not is_trained)  # unfinished ones have at least one
            completion = Completion(
                sample,
                array("i", _tokens(rng, num_tokens)),
                array("f", [-rng.random() for _ in range(num_tokens)]),
                "",
                Finish.STOP if is_trained else Finish.UNFINISHED,
                (Segment(3, num_tokens),),
                routes=random_routes(rng, step.routes, len(prompt.tokens) + num_tokens),
            )
            step.rows.append((replica, CompletionRow(ticket, prompt, completion)))
            if is_trained:
                step.sequences.append(
                    TrainingSequence(
                        ticket=ticket,
                        sample=sample,
                        replica=replica,
                        prompt_tokens=len(prompt.tokens),
                        response_tokens=num_tokens,
                        segments=completion.segments,
                        advantage=0.5,
                        in_loss=True,
                        reward=1.0,
                    )
                )
                step.owners.append(rng.randrange(num_indices))
            elif num_replicas > 1 and rng.random() < 0.5:
                target = rng.choice([r for r in range(num_replicas) if r != replica])
                step.moves.append(Move(ticket, prompt, summarize(completion, replica), target))
    return step


def _tokens(rng: random.Random, number: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2**31) for _ in range(number))


def exchange_random_steps(rank: int) -> list[tuple[int, int]]:
    """Check random steps in all layouts. Return (received bytes, own bytes) of each."""
    ranks, sizes = Ranks(rank, WORLD_SIZE, rank), []
    for number, (indices, leaders) in enumerate(LAYOUTS):
        for seed in range(8):
            step = random_step(100 * number + seed, max(indices) + 1, len(leaders))
            sizes.append(check_step(ranks, step, indices, leaders))
    return sizes


def check_step(
    ranks: Ranks, step: Step, indices: tuple[int, ...], leaders: tuple[int, ...]
) -> tuple[int, int]:
    own_replica = leaders.index(ranks.rank) if ranks.rank in leaders else None
    store, counting = CompletionStore(), Counting(ranks)
    store.fill(row for replica, row in step.rows if replica == own_replica)
    index, routes = indices[ranks.rank], step.routes
    exchange = TokenExchange(counting, Indices(indices, ranks.rank), leaders, store, routes)  # type: ignore[arg-type]
    tokens = exchange(step.sequences, step.owners, step.moves)

    by_key = {(row.ticket, row.completion.sample): row for _, row in step.rows}
    own = [place for place, owner in enumerate(step.owners) if owner == index]
    assert list(tokens) == own
    num_bytes = 0
    for place in own:
        sequence = step.sequences[place]
        row = by_key[sequence.ticket, sequence.sample]
        assert tokens[place].prompt.tolist() == list(row.prompt.tokens)
        assert tokens[place].response.tobytes() == row.completion.tokens.tobytes()
        assert tokens[place].logprobs.tobytes() == row.completion.logprobs.tobytes()
        assert tokens[place].response.dtype == tokens[place].prompt.dtype == np.int32
        assert tokens[place].logprobs.dtype == np.float32
        num_bytes += BYTES * (sequence.prompt_tokens + 2 * sequence.response_tokens)
        if routes.bytes_per_token:
            values = tokens[place].routes
            assert values is not None and row.completion.routes is not None
            assert values.tobytes() == row.completion.routes.tobytes()
            assert values.dtype.name == routes.dtype
            num_bytes += values.nbytes
        else:
            assert tokens[place].routes is None

    moves = {(move.ticket, move.summary.sample): move for move in step.moves}
    held = {
        key
        for (replica, row), key in zip(step.rows, by_key, strict=True)
        if own_replica is not None
        and (moves[key].target if key in moves else replica) == own_replica
    }
    assert {(row.ticket, row.completion.sample) for row in store.rows()} == held
    for row in store.rows():
        original = by_key[row.ticket, row.completion.sample]
        assert row.prompt == original.prompt
        assert row.completion == original.completion
    for move in step.moves:
        if move.target == own_replica:
            num_bytes += 2 * BYTES * move.summary.num_tokens
            num_tokens = len(move.prompt.tokens) + move.summary.num_tokens
            num_bytes += routes.bytes_per_token * (num_tokens - 1)
    return counting.received[0], num_bytes


def exchange_another_length(rank: int) -> str:
    """Announce one token more of a sequence, and then of a move, than its replica holds."""
    ranks, errors = Ranks(rank, WORLD_SIZE, rank), []
    indices, leaders = (0, 0, 1, 1), (0, 2)
    completion = Completion(5, (1, 2), (-0.5, -1.0), "", Finish.UNFINISHED, (Segment(3, 2),))  # type: ignore[arg-type]
    prompt = Prompt("sums", 0, (1, 2, 3), "4", "7")
    summary = replace(summarize(completion, 1), num_tokens=3)
    sequence = TrainingSequence(4, 5, 1, 3, 2, (Segment(3, 2),), 0.5, True, 1.0)
    for sequences, moves, is_without_routes in (
        ([replace(sequence, response_tokens=3)], [], False),
        ([replace(sequence, prompt_tokens=2)], [], False),
        ([replace(sequence, sample=6)], [], False),
        ([], [Move(4, prompt, summary, 0)], False),
        ([sequence], [], True),
    ):
        store = CompletionStore()
        if rank == leaders[1]:
            store.put(4, prompt, completion)
        exchange = TokenExchange(
            ranks,
            Indices(indices, rank),  # type: ignore[arg-type]
            leaders,
            store,
            RouteSize(6) if is_without_routes else RouteSize(),
        )
        with pytest.raises(DapoError) as raised:
            exchange(sequences, [1] * len(sequences), moves)
        errors.append(str(raised.value))
    return "\n".join(errors)


def both(rank: int) -> tuple[list[tuple[int, int]], str]:
    return exchange_random_steps(rank), exchange_another_length(rank)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(both, WORLD_SIZE)


def test_every_rank_receives_exactly_its_own_sequences_and_moves(ranks: list[Any]) -> None:
    """The ranks compare the values themselves."""
    for sizes, _ in ranks:
        assert [received for received, _ in sizes] == [own for _, own in sizes]
        assert len({received for received, _ in sizes}) > len(sizes) // 2


def test_another_length_than_announced_is_an_error_with_ticket_and_sample(ranks: list[Any]) -> None:
    assert len({errors for _, errors in ranks}) == 1, "all ranks raise the same error"
    response, prompt, missing, move, routes = ranks[0][1].splitlines()
    assert routes == (
        "rank 2: ticket 4, sample 5: 0 bytes of routes here, but policy.router_replay engine needs "
        "24 for its 4 tokens"
    )
    known = "2 tokens and 2 log-probs here, but the coordinator knows of 3 tokens"
    sequence = "rank 2: ticket 4, sample 5"
    assert response == move == f"{sequence}: {known}"
    assert prompt == f"{sequence}: 3 prompt tokens here, but the coordinator knows of 2"
    assert missing == "rank 2: ticket 4, sample 6: this replica does not hold it"


# ------------------------------------------------------------------ which completions move


@settings(max_examples=200, deadline=None)
@given(
    held=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    max_sequences=st.integers(1, 8),
    num_finished=st.integers(0, 10),
)
def test_completions_move_only_from_replicas_that_hold_too_many(
    held: list[int], max_sequences: int, num_finished: int
) -> None:
    driver = ScriptedDriver(lambda *_: True, num_replicas=len(held), max_sequences=max_sequences)
    coordinator = make_coordinator(driver, lookahead=4.0)
    finishes = [Finish.UNFINISHED] * sum(held) + [Finish.STOP] * num_finished
    replicas = [replica for replica, number in enumerate(held) for _ in range(number)]
    replicas += [0] * num_finished
    random.Random(sum(held)).shuffle(replicas)
    before: dict[tuple[int, int], CompletionSummary] = {}
    for number, (replica, finish) in enumerate(zip(sorted(replicas), finishes, strict=True)):
        ticket, sample = divmod(number, 3)
        group = coordinator.groups.setdefault(
            ticket, OpenGroup(ticket, Prompt("sums", ticket, (1,), "", "7"), 3)
        )
        summary = CompletionSummary(sample, 2, finish, (Segment(0, 2),), replica)
        group.completions[sample] = before[ticket, sample] = summary
    moves = coordinator.rebalance()

    after = {(t, s): c for t, g in coordinator.groups.items() for s, c in g.completions.items()}
    keys = [(move.ticket, move.summary.sample) for move in moves]
    assert len(set(keys)) == len(keys)
    for move, key in zip(moves, keys, strict=True):
        assert move.summary == before[key]
        assert move.summary.finish is Finish.UNFINISHED
        assert move.prompt == coordinator.groups[move.ticket].prompt
        assert move.target != move.summary.replica
        assert after[key] == replace(before[key], replica=move.target)
    assert {key: after[key] for key in after if key not in keys} == {
        key: before[key] for key in before if key not in keys
    }
    num_before, num_after = (
        [
            sum(c.replica == r and c.finish is Finish.UNFINISHED for c in summaries.values())
            for r in range(len(held))
        ]
        for summaries in (before, after)
    )
    for number, now in zip(num_before, num_after, strict=True):
        if number > max_sequences:  # gives away until it fits, or until others hold as many
            assert now <= max(max_sequences, min(num_after) + 1)
        else:
            assert now >= number
    if max(num_before, default=0) <= max_sequences:
        assert moves == []
    assert coordinator.rebalance() == [] or max(num_after) > max_sequences


# ------------------------------------------------------------------ what a leader holds

PROMPT = Prompt("sums", 0, (1, 2), "3+4", "7")


def held(sample: int, num_tokens: int = 1, finish: Finish = Finish.STOP) -> Completion:
    values = [0.0] * num_tokens
    return Completion(sample, [5] * num_tokens, values, "", finish, (Segment(0, num_tokens),))  # type: ignore[arg-type]


def filled() -> CompletionStore:
    store = CompletionStore()
    for ticket in (3, 1):
        for sample in (1, 0):
            store.put(ticket, replace(PROMPT, index=ticket), held(sample))
    return store


def keys(store: CompletionStore) -> list[tuple[int, int]]:
    return [(row.ticket, row.completion.sample) for row in store.rows()]


def test_a_store_returns_what_was_put_in_order() -> None:
    store = filled()
    assert keys(store) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert {row.ticket: row.prompt.index for row in store.rows()} == {1: 1, 3: 3}
    store.put(1, PROMPT, held(0, 4))
    assert (store.num_tokens(1, 0), store.num_tokens(1, 2), store.num_tokens(7, 0)) == (4, 0, 0)
    assert store.get(1, 0) == held(0, 4)
    for ticket, sample in ((1, 2), (7, 0)):
        with pytest.raises(DapoError, match=rf"ticket {ticket}, sample {sample}: this replica"):
            store.get(ticket, sample)
        with pytest.raises(DapoError, match=rf"ticket {ticket}, sample {sample}: this replica"):
            store.take(ticket, sample)


def test_a_closed_ticket_and_a_taken_completion_leave_the_store() -> None:
    store = filled()
    assert [row.completion.sample for row in store.close(3)] == [0, 1]
    assert store.close(3) == [] == store.close(9)
    assert keys(store) == [(1, 0), (1, 1)]
    assert store.take(1, 0) == held(0)
    assert keys(store) == [(1, 1)]
    store.take(1, 1)
    assert keys(store) == []
    with pytest.raises(KeyError):
        store.prompt(1)
    store.set_grade(1, 1, Grade(1.0, True, "7"))  # late: the ticket is closed
    assert keys(store) == []


def test_a_store_returns_to_its_save_point_as_often_as_needed() -> None:
    store = filled()
    store.save_point()
    saved = store.rows()
    for _ in range(2):
        store.set_grade(1, 0, Grade(1.0, True, "7"))
        store.put(1, PROMPT, held(1, 7))
        store.put(8, PROMPT, held(0))
        store.close(3)
        assert store.rows() != saved
        store.roll_back()
        assert store.rows() == saved
    store.fill([])
    assert keys(store) == []
    store.roll_back()
    assert store.rows() == saved
