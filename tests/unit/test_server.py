"""The engine server between rank 0, an engine with canned answers, and real graders."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import zmq

import dapo_megatron.engine.server as module
from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.curve import admit_engines, end_watch
from dapo_megatron.engine.messages import GroupRequest, Hello, Order, OrderKind, Report
from dapo_megatron.engine.server import EngineServer, Left, Link
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import Completion, Finish, SampleRequest, Segment, SyncError
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
        EngineServer(engine, grading, link, report_seconds).serve()  # type: ignore[arg-type]
    return link  # type: ignore[no-any-return]


def finished(sample: int, text: str) -> Completion:
    return Completion(
        sample, array("i", [5, 5]), array("f", [-1, -1]), text, Finish.STOP, (Segment(0, 2),)
    )


def test_a_free_phase_returns_each_completion_once_with_its_grade(grading: GradingPool) -> None:
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


def test_an_interrupt_returns_everything_once_and_the_next_phase_starts_anew(
    grading: GradingPool,
) -> None:
    """Two completions are graded, two are still graded, and one is unfinished."""
    texts = ("7", "wrong", "hang", "hang", "7")
    engine = CannedEngine(texts, holds=lambda request: request.sample == 4)
    first = [
        sample_order(3, 0, 1, 2, 3, 4),
        lambda: {item[1].sample for item in link.returned} == {0, 1},
        Order(OrderKind.INTERRUPT),
    ]
    link = ScriptedLink(first)
    hanging = GradingPool({"sums": "tests.helpers.graders:moody"}, 4, timeout_seconds=60.0)
    with hanging:
        serve(engine, hanging, [], link)
    last = link.sent[-1]
    assert last.is_interrupted and last.num_sampled == 4
    rest = {each.sample: (each, why) for _, each, why in last.returned}
    assert sorted(rest) == [2, 3, 4] and len(last.returned) == 3
    assert {why for _, why in rest.values()} == {""}
    assert all(each.grade is None for each, _ in rest.values())
    assert rest[4][0].finish is Finish.UNFINISHED and rest[4][0].num_tokens == 1
    assert rest[2][0].finish is rest[3][0].finish is Finish.STOP
    assert engine.requests == []

    # The unfinished one goes on, and a finished one is only graded.
    other = CannedEngine(TEXTS)
    submitted: list[SampleRequest] = []
    submit = other.submit
    other.submit = lambda requests: (submitted.extend(requests), submit(requests))[1]  # type: ignore[method-assign]
    so_far = replace(rest[4][0], sample=3)
    graded_only = replace(rest[2][0], text="7")
    link = ScriptedLink([sample_order(3, so_far, graded_only), lambda: len(link.returned) == 2])
    serve(other, grading, [], link)
    assert [request.so_far for request in submitted] == [so_far]
    assert submitted[0].seed == sampling().request(3, prompt(3), 3, so_far).seed is not None
    results = {each.sample: each for _, each, _ in link.returned}
    assert results[3].num_tokens == 2
    assert replace(results[2], grade=None) == graded_only
    assert results[2].grade is not None and results[2].grade.correct
    assert link.sent[-1].num_sampled == 1  # since the interrupt, and only what was sampled


def test_an_interrupt_returns_grades_that_were_not_due_to_be_reported(
    grading: GradingPool,
) -> None:
    engine = CannedEngine(TEXTS, holds=lambda request: request.sample == 3)
    script: list[Item] = [
        sample_order(3, 0, 1, 2, 3),
        lambda: engine.num_steps >= 2 and not grading.pending,
        Order(OrderKind.INTERRUPT),
    ]
    link = ScriptedLink(script)
    serve(engine, grading, [], link, report_seconds=1e9)
    [last] = [report for report in link.sent if report.is_news]
    assert last.is_interrupted and last.num_sampled == 3
    assert sorted(each.sample for _, each, _ in link.returned) == [0, 1, 2, 3]
    whys = {each.sample: why for _, each, why in link.returned}
    assert whys == {0: "graded", 1: "graded", 2: "error", 3: ""}


def test_a_deterministic_order_runs_its_steps_and_waits_for_all_grades(
    grading: GradingPool,
) -> None:
    def run(slow: bool) -> list[Report]:
        engine = CannedEngine(TEXTS)
        graders = grading
        if slow:
            graders = SlowGrading(grading)  # type: ignore[assignment]
        orders = [sample_order(3, 0, 1, 2, num_steps=1), sample_order(4, 0, 3, num_steps=3)]
        empty = Order(OrderKind.SAMPLE, sampling=sampling(), num_steps=3)
        link = serve(engine, graders, [*orders, empty, Order(OrderKind.INTERRUPT)])
        assert engine.num_steps == 3
        news = [report for report in link.sent if report.is_news]
        assert any(report.grade_seconds for report in news)
        return [replace(report, grade_seconds=0.0) for report in news]

    reports = run(slow=False)
    assert [[(t, c.sample) for t, c, _ in report.returned] for report in reports] == [
        [(3, 2), (3, 1)],  # the newest first
        [(4, 3), (4, 0), (3, 0)],
        [],
        [],
    ]
    assert [report.num_sampled for report in reports] == [2, 5, 5, 5]
    assert all(why for report in reports for _, _, why in report.returned)
    assert [report.is_interrupted for report in reports] == [False] * 3 + [True]
    assert run(slow=True) == reports


class SlowGrading:
    """Grading pool whose results come late, and in another order."""

    def __init__(self, pool: GradingPool) -> None:
        self._pool = pool
        self._results: list[Any] = []
        self._waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def collect(self, wait: bool) -> list[Any]:
        self._results += self._pool.collect(wait)
        self._waits = self._waits + 1 if self._results and not self._pool.pending else 0
        if self._waits < 10:
            return []
        results, self._results, self._waits = self._results[::-1], [], 0
        return results


def test_grades_of_an_interrupted_phase_do_not_reach_the_next(grading: GradingPool) -> None:
    """The same ticket and sample is asked for again, with another text."""
    slow = SlowGrading(grading)
    engine = CannedEngine(["wrong"])
    answers = iter(["wrong", "7"])

    def step() -> list[tuple[SampleRequest, Completion]]:
        engine._texts = [next(answers)]
        return CannedEngine.step(engine)

    engine.step = step  # type: ignore[method-assign]
    link = ScriptedLink(
        [
            sample_order(3, 0),
            lambda: slow._results,
            Order(OrderKind.INTERRUPT),
            sample_order(3, 0),
            lambda: len(link.returned) == 2,
            Order(OrderKind.INTERRUPT),
        ]
    )
    serve(engine, slow, [], link)  # type: ignore[arg-type]
    (_, first, first_why), (_, second, second_why) = link.returned
    assert (first.text, first_why, first.grade) == ("wrong", "", None)
    assert (second.text, second_why) == ("7", "graded")
    assert second.grade is not None and second.grade.correct
    last = link.sent[-1]
    assert last.is_interrupted and (last.returned, last.num_sampled) == ([], 1)


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
