"""Timelines: thinning, how busy engines are, and ranks whose clocks differ."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster import instruments
from dapo_megatron.cluster.collectives import EnginesChanged
from dapo_megatron.cluster.instruments import (
    MAX_POINTS,
    MemoryMeter,
    Point,
    Running,
    StepInstruments,
    TimelineRecorder,
    thinned,
)
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.recorder import RunRecorder
from dapo_megatron.tracking.trackers import CompositeTracker
from tests.helpers.ranks import run_ranks
from tests.helpers.saving import ALONE


@st.composite
def points(draw: st.DrawFn) -> list[Point]:
    gaps = draw(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=600))
    start, seconds = draw(st.floats(-1e6, 1e6)), 0.0
    made = []
    for gap in gaps:
        seconds += gap
        made.append((start + seconds, draw(st.integers(0, 512))))
    return made


def at(where: list[Point], seconds: float) -> int:
    """Return the count at a time."""
    return [count for when, count in where if when <= seconds][-1]


@given(points(), st.integers(4, 250))
def test_thinning_keeps_both_ends_the_maximum_and_the_order(made: list[Point], limit: int) -> None:
    kept = thinned(made, limit)
    assert len(kept) <= limit
    assert (kept[0], kept[-1]) == (made[0], made[-1])
    assert max(count for _, count in kept) == max(count for _, count in made)
    rest = iter(made)
    assert all(point in rest for point in kept), "the order is kept"


def test_thinning_is_exact_at_the_end_of_every_part() -> None:
    made = [(index / 10, index * 7 % 31) for index in range(1001)]
    kept = thinned(made, 103)
    for part in range(99):  # the last part ends with the last point
        just_before = part + 1 - 1e-9
        assert at(kept, just_before) == at(made, just_before)


def test_a_sparse_tail_is_kept_point_by_point() -> None:
    """Hundreds of sequences finish together, and a few last ones far apart."""
    crowd = [(index / 1000, 900 - index) for index in range(895)]
    tail = [(10.0 * index, 6 - index) for index in range(1, 7)]
    assert thinned([*crowd, *tail])[-6:] == tail


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5)), max_size=50))
def test_idle_seconds_and_the_mean_are_exact(changes: list[tuple[int, int]]) -> None:
    """Whole seconds, compared with counting second by second."""
    watched, now, counts = Running(), 0, {0: 0}
    watched.begin(0.0)
    for gap, count in changes:
        now += gap
        watched.change(float(now), count)
        counts[now] = count
    end = now + 3
    watched.end(float(end))
    by_second, current = [], 0
    for second in range(end):
        current = counts.get(second, current)
        by_second.append(current)
    assert watched.seconds == end
    assert watched.idle_seconds == by_second.count(0)
    assert watched.request_seconds == sum(by_second)
    assert [at(watched.points, second) for second in range(end)] == by_second


class Clock:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(instruments.time, "perf_counter", lambda: self.now)


def test_sequences_of_evaluation_do_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept = Clock(monkeypatch), {}
    timeline = TimelineRecorder(Ranks(0, 1, 0), 2, kept.__setitem__)
    report_running = timeline.follow(replica=0, max_sequences=8)
    report_running(7)
    timeline.begin(1)
    clock.now += 1.0
    with timeline.phase("generate"):
        clock.now += 0.5
        report_running(4)
        clock.now += 2.0
        report_running(0)
        clock.now += 1.5
    with timeline.phase("evaluate"):
        report_running(8)
        clock.now += 50.0
        report_running(0)
    metrics = timeline.metrics()
    assert metrics == {
        "time/engine_idle": pytest.approx(2.0),
        "throughput/running_mean": pytest.approx(4 * 2.0 / 4.0 / 8),
    }
    assert kept[1]["replicas"] == [
        {"replica": 0, "running": [[1.0, 0], [1.5, 4], [3.5, 0], [5.0, 0]]}
    ]
    assert kept[1]["ranks"][0]["spans"] == [["generate", 1.0, 5.0], ["evaluate", 5.0, 55.0]]


def test_requests_during_training_on_other_ranks_count_as_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, kept = Clock(monkeypatch), {}
    timeline = TimelineRecorder(Ranks(0, 1, 0), 2, kept.__setitem__)
    report_running = timeline.follow(replica=0, max_sequences=8)
    timeline.begin(1)
    with timeline.phase("generate"):
        clock.now += 2.0
    with timeline.serving():
        clock.now += 1.0
        report_running(4)
        clock.now += 6.0
        report_running(0)
        clock.now += 1.0
    metrics = timeline.metrics()
    assert metrics["throughput/overlap"] == pytest.approx(0.75)
    assert metrics["time/engine_idle"] == pytest.approx(2.0)  # of the phase generate only
    assert kept[1]["replicas"][0]["running"] == [
        [0.0, 0], [2.0, 0], [2.0, 0], [3.0, 4], [9.0, 0], [10.0, 0],
    ]  # fmt: skip
    assert kept[1]["ranks"][0]["spans"] == [["generate", 0.0, 2.0], ["generate", 2.0, 10.0]]


@pytest.mark.parametrize(
    ("every", "expected"), [(0, []), (1, [5, 6, 7, 8, 9]), (2, [5, 6, 8]), (10, [5])]
)
def test_timelines_are_kept_for_the_first_step_and_every_nth(
    every: int, expected: list[int]
) -> None:
    kept: dict[int, Any] = {}
    timeline = TimelineRecorder(Ranks(0, 1, 0), every, kept.__setitem__)
    for step in range(5, 10):
        timeline.begin(step)
        assert timeline.metrics() == {}, "no metrics without an engine"
    assert list(kept) == expected
    assert all(record["step"] == step for step, record in kept.items())


def watch(rank: int) -> Any:
    """Two ranks, one replica each; the clock of rank 1 is an hour ahead."""
    true, now = time.perf_counter, 100.0
    instruments.time.perf_counter = lambda: now + 3600.0 * rank  # type: ignore[assignment]
    kept: dict[int, Any] = {}
    exchange = Ranks(rank, 2, rank)
    timeline = TimelineRecorder(exchange, 1, kept.__setitem__)
    report_running = timeline.follow(replica=rank, max_sequences=4)
    exchange.barrier()
    timeline.begin(1)
    with timeline.phase("generate"):
        report_running(2)
        now += 0.1 + 0.2 * rank
        for count in range(2 * MAX_POINTS):
            now += 1e-6
            report_running(count)
        report_running(0)
        exchange.barrier()
        now = 100.31  # rank 0 waited for rank 1
    metrics = timeline.metrics()
    instruments.time.perf_counter = true
    return metrics, kept


def test_clocks_of_ranks_are_aligned() -> None:
    (metrics, kept), (other, nothing) = run_ranks(watch, 2)
    assert metrics == other
    assert not nothing
    # One of two replicas is idle for 0.2 s: 0.1 s on average.
    assert metrics["time/engine_idle"] == pytest.approx(0.1, abs=0.05)
    record = kept[1]
    assert abs(record["begin"] - time.time()) < 60
    (first,), (second,) = (rank["spans"] for rank in record["ranks"])
    assert first[1:] == pytest.approx(second[1:], abs=0.05)
    assert first[2] == pytest.approx(0.3, abs=0.1)
    for replica in record["replicas"]:
        times = [seconds for seconds, _ in replica["running"]]
        assert len(times) <= MAX_POINTS
        assert all(before <= after for before, after in pairwise(times))
        assert replica["running"][-1][1] == 0
    assert [replica["replica"] for replica in record["replicas"]] == [0, 1]


def test_a_timeline_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = io.StringIO()
    console = RunConsole(num_steps=3, file=out)
    recorder = RunRecorder(
        tracker=CompositeTracker(),
        console=console,
        num_devices=1,
        timeline_folder=tmp_path / "timeline",
    )
    with monkeypatch.context() as patch:
        patch.setattr("dapo_megatron.tracking.recorder.write_json", full)
        recorder.timeline(1, {"step": 1})
    recorder.timeline(2, {"step": 2})
    [written] = (tmp_path / "timeline").iterdir()
    assert written.name == "step_000002.json"
    assert json.loads(written.read_text()) == {"step": 2}
    assert "WARNING: the timeline of step 1 was not written: " in out.getvalue()


def test_a_step_that_goes_on_in_another_generation_keeps_its_times() -> None:
    """Otherwise the update would have taken no time, and the speed would be out of all measure."""

    class Watched:
        @contextmanager
        def phase(self, name: str, step: int) -> Iterator[None]:
            yield

    def make() -> StepInstruments:
        timeline = TimelineRecorder(ALONE, every=0)
        return StepInstruments(cast(Any, Watched()), MemoryMeter(ALONE), timeline)

    first, second, third = make(), make(), make()
    first.begin(5)
    with suppress(EnginesChanged), first.phase("update"):
        time.sleep(0.05)
        raise EnginesChanged("an engine was lost")
    second.continue_from(first)
    second.begin(4)
    assert "time/update" not in second.metrics(100)
    second.begin(5)
    lost_at_once = make()
    lost_at_once.continue_from(second)
    lost_at_once.begin(4)
    third.continue_from(lost_at_once)
    third.begin(5)
    metrics = third.metrics(100)
    assert 0.05 <= metrics["time/update"] <= metrics["time/step"]
    assert metrics["throughput/tokens_per_second"] == 100 / metrics["time/step"] < 2000
    third.begin(6)
    assert "time/update" not in third.metrics(100)
