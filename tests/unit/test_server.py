"""The engine server between rank 0, an engine with canned answers, and real graders."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo_megatron.engine.server as module
from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.curve import admit_engines, end_watch
from dapo_megatron.engine.messages import GroupRequest, Hello, Order, OrderKind, Report
from dapo_megatron.engine.server import EngineServer, Left, Link
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import Completion, Finish, Grade, SyncError
from tests.helpers.rollouts import Key
from tests.helpers.servers import (
    PATIENCE_SECONDS,
    SECRET,
    VERSIONS,
    CannedEngine,
    opened_pool,
    prompt,
    sampling,
    wait_for,
)

TEXTS = ("7", "wrong", "raise", "7")
"""Text of each sample: two are right, and one has no grade."""
WHYS = {"7": "graded", "wrong": "graded", "raise": "error", "hang": "timeout"}
Item = Order | Callable[[], object]


class ScriptedLink:
    """Link that brings the orders of a script one after the other. A function in it is called
    until it is true before the next order is brought."""

    def __init__(self, script: Sequence[Item]) -> None:
        self.sent: list[Report] = []
        self.sent_at = 0.0
        self._script = list(script)
        self._end = time.monotonic() + PATIENCE_SECONDS

    def send(self, report: Report) -> None:
        self.sent_at = time.monotonic()
        self.sent.append(decode(encode(report), Report, "a server"))

    def orders(self, seconds: float) -> Iterator[Order]:
        assert time.monotonic() < self._end, self.sent
        if not self._script:
            raise Left("the script is over", 0)
        item = self._script[0]
        if isinstance(item, Order):
            yield self._script.pop(0)  # type: ignore[misc]
        elif item():
            self._script.pop(0)
        else:
            time.sleep(min(seconds, 0.005))

    @property
    def returned(self) -> list[tuple[int, Completion, str]]:
        return [item for report in self.sent for item in report.returned]


@pytest.fixture(scope="module")
def grading() -> Iterator[GradingPool]:
    graders = {"sums": "tests.helpers.graders:moody"}
    with GradingPool(graders, workers=2, timeout_seconds=60.0) as pool:
        yield pool


def sample_order(ticket: int, *samples: Any, num_steps: int = 0, is_seeded: bool = True) -> Order:
    """Return an order for new samples, given by index, or others, given by completion."""
    pairs = tuple(
        (each, None) if isinstance(each, int) else (each.sample, each) for each in samples
    )
    request = GroupRequest(ticket, prompt(ticket), pairs)
    return Order(
        OrderKind.SAMPLE,
        sampling=sampling(is_seeded=is_seeded),
        requests=[request],
        num_steps=num_steps,
    )


def serve(
    engine: CannedEngine,
    grading: GradingPool,
    script: Sequence[Item],
    link: Any = None,
    report_seconds: float = 0.0,
) -> ScriptedLink:
    link = link or ScriptedLink(script)
    with pytest.raises(Left):
        EngineServer(engine, grading, None, link, report_seconds).serve()  # type: ignore[arg-type]
    return link  # type: ignore[no-any-return]


def test_real_graders_grade_a_free_phase(grading: GradingPool) -> None:
    script: list[Item] = [sample_order(3, 0, 1), sample_order(4, 2, 3)]
    script.append(lambda: len(link.returned) == 4)
    script.append(Order(OrderKind.INTERRUPT))
    link = ScriptedLink(script)
    serve(CannedEngine(TEXTS), grading, [], link)
    assert link.sent[-1].is_interrupted and not link.sent[-1].returned
    assert not any(report.is_interrupted for report in link.sent[:-1])
    keys = Counter((ticket, each.sample) for ticket, each, _ in link.returned)
    assert keys == Counter([(3, 0), (3, 1), (4, 2), (4, 3)])
    for _, completion, why in link.returned:
        text = TEXTS[completion.sample]
        assert completion.text == text and why == WHYS[text]
        if why == "graded":
            assert completion.grade is not None and completion.grade.correct == (text == "7")
        else:
            assert completion.grade is None
    assert link.sent[-1].errors == {"sums": "ValueError: raise"}
    numbers = [report.num_sampled for report in link.sent if report.is_news]
    assert numbers == sorted(numbers) and numbers[-1] == 4


class LateGrading:
    """Grading pool in this process, whose results come late and in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.last_errors: dict[str, str] = {}
        self._rng = rng
        self._pending: list[tuple[int, Grade | None, str]] = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    def submit(self, number: int, source: str, text: str, truth: str, extra: Any) -> None:
        is_graded = WHYS[text] == "graded"
        grade = Grade(1.0, text == truth, text) if is_graded else None
        self._pending.append((number, grade, WHYS[text]))

    def collect(self, wait: bool) -> list[tuple[int, Grade | None, str]]:
        arrived = [item for item in self._pending if self._rng.random() < 0.3]
        self._pending = [item for item in self._pending if item not in arrived]
        self._rng.shuffle(arrived)
        return arrived

    def drop_queued(self) -> None:
        """Drop nothing: all results still come."""


class Rank0:
    """Link to a rank 0 that asks for samples in several phases, and interrupts each after a number
    of polls, or when all is answered. It checks that each request is answered once: graded, or with
    what the next phase continues from."""

    def __init__(self, engine: CannedEngine, rng: random.Random, limits: Sequence[int]) -> None:
        self.sent_at = math.inf
        self.num_graded = 0
        self._engine, self._rng, self._limits = engine, rng, list(limits)
        self._asked: dict[Key, Completion | None] = {}
        self._open: dict[Key, Completion | None] = {}
        self._num_polls = self._num_sampled = 0

    def orders(self, seconds: float) -> Iterator[Order]:
        self._num_polls += 1
        if self._num_polls == 1:
            self._engine._texts = self._rng.choices(list(WHYS), k=4)
            keys = [(ticket, sample) for ticket in range(3) for sample in range(4)]
            self._open |= {key: None for key in keys if self._rng.random() < 0.5} | self._open
            self._asked, self._open = self._open, {}
            for key, so_far in self._asked.copy().items():
                yield sample_order(key[0], key[1] if so_far is None else so_far)
        elif self._num_polls > self._limits[0] or not self._asked:
            del self._limits[0]
            self._num_polls = 0
            yield Order(OrderKind.INTERRUPT)
            if not self._limits:
                raise Left("all phases are over", 0)

    def send(self, report: Report) -> None:
        for ticket, completion, why in report.returned:
            key = ticket, completion.sample
            so_far = self._asked.pop(key)
            is_new = so_far is None or so_far.finish is Finish.UNFINISHED
            assert completion.num_tokens == (so_far.num_tokens if so_far else 0) + is_new
            if why:
                assert why == WHYS[completion.text]
                is_right = completion.grade and completion.grade.correct
                assert is_right == (completion.text == "7" if why == "graded" else None)
                self.num_graded += 1
            else:
                assert report.is_interrupted and completion.grade is None
                self._open[key] = completion
            self._num_sampled += is_new and completion.finish is not Finish.UNFINISHED
        if report.is_interrupted:
            assert self._asked == {} and report.num_sampled == self._num_sampled
            self._num_sampled = 0


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    limits=st.lists(st.integers(1, 12), max_size=4),
    report_seconds=st.sampled_from([0.0, 1e9]),
)
def test_each_request_is_answered_once_with_its_grade_in_interrupted_phases(
    seed: int, limits: list[int], report_seconds: float
) -> None:
    rng = random.Random(seed)
    engine = CannedEngine(TEXTS, holds=lambda request: rng.random() < 0.5)
    link = Rank0(engine, rng, [*limits, 10_000])
    serve(engine, LateGrading(rng), [], link, report_seconds)  # type: ignore[arg-type]
    assert not link._open and not engine.requests


def test_a_deterministic_order_runs_its_steps_and_waits_for_all_grades() -> None:
    def run(seed: int) -> list[Report]:
        engine = CannedEngine(TEXTS)
        orders = [sample_order(3, 0, 1, 2, num_steps=1), sample_order(4, 0, 3, num_steps=3)]
        empty = Order(OrderKind.SAMPLE, sampling=sampling(), num_steps=3)
        graders: Any = LateGrading(random.Random(seed))
        link = serve(engine, graders, [*orders, empty, Order(OrderKind.INTERRUPT)])
        assert engine.num_steps == 3
        assert any(report.grade_seconds for report in link.sent if report.is_news)
        return [replace(report, grade_seconds=0.0) for report in link.sent if report.is_news]

    reports = run(0)
    assert [[(t, c.sample) for t, c, _ in report.returned] for report in reports] == [
        [(3, 2), (3, 1)],  # the newest first
        [(4, 3), (4, 0), (3, 0)],
        [],
        [],
    ]
    assert [report.num_sampled for report in reports] == [2, 5, 5, 5]
    assert all(why for report in reports for _, _, why in report.returned)
    assert [report.is_interrupted for report in reports] == [False] * 3 + [True]
    assert run(1) == reports


def test_calls_return_results_and_errors_of_the_engine(grading: GradingPool) -> None:
    class Engine(CannedEngine):
        def score(self, sequences: list[list[int]]) -> list[list[float]]:
            return [[-float(token) for token in tokens[1:]] for tokens in sequences]

        def wake(self, part: str) -> None:
            raise SyncError(f"no memory for {part}")

    calls = [
        Order(OrderKind.CALL, text="score", arguments=encode(([[1, 2, 3]],))),
        Order(OrderKind.CALL, text="wake", arguments=encode(("kv_cache",))),
    ]
    link = serve(Engine(TEXTS), grading, calls)
    scored, failed = link.sent
    assert scored.answer == encode([[-2.0, -3.0]]) and scored.error is None
    assert failed.answer is None and failed.error is not None
    assert (failed.error.kind, failed.error.text) == ("SyncError", "no memory for kv_cache")


def test_a_server_with_work_shows_that_it_is_alive(
    grading: GradingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.02)
    engine = CannedEngine(TEXTS, holds=lambda request: True)
    link = ScriptedLink([sample_order(3, 0), lambda: len(link.sent) > 5])
    serve(engine, grading, [], link)
    assert all(not report.is_news and not report.returned for report in link.sent)


def orders_until_left(link: Link, pool: Pool | None = None) -> tuple[list[Order], Left]:
    """Return the orders that arrive until the link ends, and how it ends."""
    orders: list[Order] = []
    end = time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < end:
            orders += link.orders(0.02)
            if pool is not None:
                pool.wait(0.01)
    except Left as left:
        return orders, left
    raise AssertionError("it never ended")


@contextmanager
def linked(address: str, facts: Mapping[str, str] = VERSIONS) -> Iterator[Link]:
    link = Link(address, SECRET)
    link.send(Report(hello=Hello(0, "process", dict(facts))))
    yield link
    end_watch(link._socket, link._monitor)
    link._socket.close(0)


def test_a_server_ends_with_the_run_with_code_0_and_otherwise_with_1() -> None:
    with opened_pool(1) as pool, linked(pool.address, {}) as refused:
        orders, left = orders_until_left(refused, pool)
        assert (orders, left.code) == ([], 1) and "version of vllm" in str(left)
        with linked(pool.address) as link:
            welcome: list[Order] = []
            wait_for(pool, lambda: welcome.extend(link.orders(0.0)) or welcome)
            assert [order.kind for order in welcome] == [OrderKind.WELCOME]
            pool._send(pool._engines[0].identity, Order(OrderKind.PING))
            pool.close()
            assert orders_until_left(link)[1].code == 0


def test_a_server_ends_if_rank_0_is_gone() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    authenticator = admit_engines(context, router, SECRET)
    router.bind("tcp://127.0.0.1:0")
    with linked(router.getsockopt_string(zmq.LAST_ENDPOINT)) as link:
        router.recv_multipart()
        assert list(link.orders(0.5)) == []
        router.close(0)
        left = orders_until_left(link)[1]
        assert left.code == 1 and "the connection to rank 0 has ended" in str(left)
    authenticator.stop()
    context.term()
