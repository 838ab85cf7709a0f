"""Timelines: thinning, how busy engines are, and ranks whose clocks differ."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster import instruments
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
from dapo_megatron.tracking.recorder import RunRecorder
from dapo_megatron.types import EnginesLost
from tests.helpers.console import Console
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


@given(points(), st.integers(2, 250))
def test_thinning_keeps_both_ends_and_the_order(made: list[Point], limit: int) -> None:
    kept = thinned(made, limit)
    assert len(kept) <= limit
    assert (kept[0], kept[-1]) == (made[0], made[-1])
    rest = iter(made)
    assert all(point in rest for point in kept), "the order is kept"


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


def files(kept: dict[int, Any]) -> Any:
    return SimpleNamespace(timeline=kept.__setitem__)


class Clock:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(instruments.time, "perf_counter", lambda: self.now)


def test_requests_are_counted_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an evaluation do not count, those during training are overlap. Requests that go on
    count from the start of an interval. Two replicas are averaged."""
    clock, kept = Clock(monkeypatch), dict[int, Any]()
    timeline = TimelineRecorder(Ranks(0, 1, 0), 2, files(kept))
    timeline.follow(num_replicas=2, max_sequences=8)
    timeline.begin(1)
    clock.now += 1.0
    with timeline.phase("generate"):
        clock.now += 0.5
        timeline.change(0, 4)
        clock.now += 2.0
        timeline.change(0, 0)
        clock.now += 1.5
    with timeline.phase("update"), timeline.serving():
        clock.now += 1.0
        timeline.change(0, 4)
        clock.now += 6.0
        timeline.change(0, 0)
        timeline.change(1, 3)
        clock.now += 1.0
        assert timeline.requests == 3
    with timeline.phase("evaluate"):
        timeline.change(0, 8)
        clock.now += 50.0
        timeline.change(0, 0)
    assert timeline.metrics() == {
        "time/engine_idle": pytest.approx((2.0 + 4.0) / 2),
        "throughput/running_mean": pytest.approx(4 * 2.0 / 4.0 / 2 / 8),
        "throughput/overlap": pytest.approx((6.0 + 1.0) / 8.0 / 2),
    }
    first, second = (replica["running"] for replica in kept[1]["replicas"])
    assert first[:4] == [[1.0, 0], [1.5, 4], [3.5, 0], [5.0, 0]]
    assert first[4:] == [[5.0, 0], [6.0, 4], [12.0, 0], [13.0, 0]]
    assert second[-1] == [13.0, 3]
    assert kept[1]["ranks"][0]["spans"] == [
        ["generate", 1.0, 5.0], ["update", 5.0, 13.0], ["evaluate", 13.0, 63.0],
    ]  # fmt: skip
    timeline.begin(2)
    with timeline.phase("generate"):
        clock.now += 3.0
        timeline.change(1, 0)
        clock.now += 1.0
    metrics = timeline.metrics()
    assert metrics["time/engine_idle"] == pytest.approx((4.0 + 1.0) / 2)
    assert metrics["throughput/running_mean"] == pytest.approx(3 * 3.0 / 4.0 / 2 / 8)


@pytest.mark.parametrize(
    ("every", "expected"), [(0, []), (1, [5, 6, 7, 8, 9]), (2, [5, 6, 8]), (10, [5])]
)
def test_timelines_are_kept_for_the_first_step_and_every_nth(
    every: int, expected: list[int]
) -> None:
    kept: dict[int, Any] = {}
    timeline = TimelineRecorder(Ranks(0, 1, 0), every, files(kept))
    for step in range(5, 10):
        timeline.begin(step)
        assert timeline.metrics() == {}, "no metrics without an engine"
    assert list(kept) == expected
    assert all(record["step"] == step for step, record in kept.items())


def watch(rank: int) -> Any:
    """Two ranks, the first of which follows two replicas; the clock of rank 1 is an hour ahead."""
    true, now = time.perf_counter, 100.0
    instruments.time.perf_counter = lambda: now + 3600.0 * rank  # type: ignore[assignment]
    kept: dict[int, Any] = {}
    exchange = Ranks(rank, 2, rank)
    timeline = TimelineRecorder(exchange, 1, files(kept))
    if rank == 0:
        timeline.follow(num_replicas=2, max_sequences=4)
    exchange.barrier()
    timeline.begin(1)
    with timeline.phase("generate"):
        for replica in range(2 * (rank == 0)):
            timeline.change(replica, 2)
            now += 0.1
            for count in range(2 * MAX_POINTS):
                now += 1e-6
                timeline.change(replica, count)
            timeline.change(replica, 0)
        exchange.barrier()
        now = 100.31  # both ranks waited
    metrics = timeline.metrics()
    instruments.time.perf_counter = true
    return metrics, kept


def test_clocks_of_ranks_are_aligned() -> None:
    (metrics, kept), (other, nothing) = run_ranks(watch, 2)
    assert not other and not nothing
    # Each of two replicas is busy for 0.1 s of 0.31 s, one after the other.
    assert metrics["time/engine_idle"] == pytest.approx(0.21, abs=0.01)
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

    console, folder = Console(), tmp_path / "timeline"
    recorder = RunRecorder(trackers=[], console=console, num_devices=1, timeline_folder=folder)
    with monkeypatch.context() as patch:
        patch.setattr("dapo_megatron.tracking.recorder.write_json", full)
        recorder.timeline(1, {"step": 1})
    recorder.timeline(2, {"step": 2})
    [written] = folder.iterdir()
    assert written.name == "step_000002.json"
    assert json.loads(written.read_text()) == {"step": 2}
    assert console.warnings[0].startswith("the timeline of step 1 was not written: ")


def test_a_phase_that_fails_counts_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After EnginesLost, the step goes on with another phase of this name."""
    clock, timeline = Clock(monkeypatch), TimelineRecorder(ALONE, every=0)
    timeline.follow(num_replicas=1, max_sequences=8)
    instruments = StepInstruments(MagicMock(), MemoryMeter(ALONE), timeline)
    instruments.begin(5)
    with suppress(EnginesLost), instruments.phase("generate"):
        timeline.change(0, 2)
        clock.now += 3.0
        raise EnginesLost("no engine is left")
    timeline.change(0, 0)
    with instruments.phase("generate"):
        clock.now += 4.0
    metrics = instruments.metrics(100)
    assert (metrics["time/generate"], metrics["time/engine_idle"]) == (7.0, 4.0)
    assert metrics["time/step"] >= 7.0
    instruments.begin(6)
    clock.now += 1.0
    assert "time/generate" not in instruments.metrics(100)
