"""Phases, memory and timelines of a report, from generated series and files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.report import charts, phases, timeline
from dapo_megatron.report.curves import PALETTE
from dapo_megatron.report.run_data import Metrics, RunData, RunState, StateWord, frame_of


def run_of(
    path: Path = Path("runs/made"),
    columns: dict[str, list[float | None]] | None = None,
    steps: list[int] | None = None,
    **changes: Any,
) -> RunData:
    columns = columns or {}
    length = len(next(iter(columns.values()), []))
    standing: dict[str, Any] = {
        "name": "made",
        "config": {},
        "config_text": "",
        "evaluations": [],
        "state": RunState(StateWord.FINISHED, ""),
        "summary": None,
        "attempts": [],
        "plan": None,
        "provenance": None,
        "warnings": [],
    }
    metrics = Metrics(frame_of(steps or range(1, length + 1), columns))
    return RunData(path=path, metrics=metrics, **standing | changes)


def derived(run: RunData) -> dict[str, list[float | None]]:
    """Return all columns of the charts, with None for what is not known."""
    metrics = Metrics(charts.columns_of(run))
    return {name: metrics.column(name) for name in metrics.frame}


# ---------------------------------------------------------------------------- phases


def test_phases_of_a_step_add_up_to_its_duration() -> None:
    columns: dict[str, list[float | None]] = {
        "time/step": [20.0, 9.0],
        "time/generate": [10.0, 4.0],
        "time/grade": [1.0, None],
        "time/logprobs": [2.0, 1.0],
        "time/update": [3.0, 2.0],
        "time/sync": [2.0, 1.0],
        "time/sync_verify": [0.5, 0.25],
        "time/sync_turns": [0.25, None],
        "time/evaluate": [1.5, None],
    }
    run = run_of(columns=columns)
    chart_columns = derived(run)
    [chart] = [chart for chart in charts.CHARTS if chart.id == "time_phases"]
    for at in range(2):
        parts = (chart_columns.get(metric, [0.0, 0.0])[at] for metric in chart.series)
        assert sum(value or 0.0 for value in parts) == columns["time/step"][at]
    assert chart_columns[phases.REST] == [1.5, 1.0]
    assert chart_columns[phases.MOVED] == [1.25, 0.75]


def test_the_idle_fraction_of_engines_is_relative_to_generation() -> None:
    columns: dict[str, list[float | None]] = {
        "time/generate": [10.0, 0.0, None, 4.0],
        "time/engine_idle": [2.5, 0.0, 1.0, 5.0],
    }
    assert derived(run_of(columns=columns))[phases.IDLE] == [0.25, None, None, 1.0]


def test_values_too_large_to_add_are_missing() -> None:
    columns: dict[str, list[float | None]] = {"time/step": [-1e308], "time/update": [1e308]}
    columns |= {"time/sync": [1e308], "time/generate": [1e308], "time/grade": [-1e308]}
    chart_columns = derived(run_of(columns=columns))
    assert chart_columns[phases.REST] == [None]
    assert chart_columns[phases.GENERATE] == [None]


def test_a_run_without_times_has_no_derived_columns() -> None:
    chart_columns = derived(run_of(columns={"accuracy/raw": [0.5]}))
    assert [name for name, column in chart_columns.items() if column != [None]] == ["accuracy/raw"]


# ---------------------------------------------------------------------------- memory


def test_planned_memory_is_drawn_with_the_measured_memory() -> None:
    columns: dict[str, list[float | None]] = {
        "memory/update_gib": [60.0, 61.0],
        "memory/sync_gib": [50.0, None],
    }
    plan = {"device": "gpu", "phases": {"update": 62, "sync": 40.0, "generate": 0}, "note": "Why."}
    run = run_of(columns=columns, plan=plan)
    assert derived(run)["derived/plan_update_gib"] == [62.0, 62.0]
    assert derived(run)["derived/plan_sync_gib"] == [40.0, None]
    assert phases.note(run) == "Memory plan: Why."
    [chart] = [chart for chart in charts.CHARTS if chart.id == "memory"]
    assert "derived/plan_update_gib" in chart.series
    assert chart.colors["derived/plan_update_gib"] == chart.colors["memory/update_gib"]


def test_without_a_plan_no_planned_memory_is_drawn() -> None:
    run = run_of(columns={"memory/update_gib": [60.0]})
    assert phases.memory_plan(run) == {}
    assert not [name for name in derived(run) if "plan" in name]
    assert phases.note(run) is None


@pytest.mark.parametrize("plan", [{}, {"phases": []}, {"phases": {"update": "much"}}])
def test_a_malformed_plan_is_ignored(plan: dict[str, Any]) -> None:
    assert phases.memory_plan(run_of(plan=plan)) == {}


# ---------------------------------------------------------------------------- timelines


def write(folder: Path, step: int, **changes: Any) -> None:
    body = {
        "step": step,
        "begin": 1.0,
        "ranks": [
            {"rank": 0, "host": "n1", "spans": [["generate", 0, 10], ["update", 10, 14]]},
            {"rank": 1, "host": "n2", "spans": [["generate", 0, 10], ["update", 10, 19]]},
        ],
        "replicas": [
            {"replica": 0, "running": [[0, 8], [2, 4], [4, 0], [10, 0]]},
            {"replica": 1, "running": [[0, 8], [8, 1], [10, 0]]},
        ],
    }
    (folder / "timeline").mkdir(exist_ok=True)
    text = json.dumps(body | changes)
    (folder / "timeline" / f"step_{step:06d}.json").write_text(text, encoding="utf-8")


def test_a_timeline_is_drawn_with_spans_and_running_sequences(tmp_path: Path) -> None:
    write(tmp_path, 3)
    [drawn] = timeline.timelines(run_of(tmp_path))
    assert (drawn.step, drawn.seconds) == (3, 19)
    assert [phase["label"] for phase in drawn.phases] == ["generate", "update"]
    update = {"label": "update", "color": PALETTE[phases.COLORS["update"]]}
    assert drawn.phases[1] == {**update, "mean": 6.5, "least": 4, "most": 9, "slowest": 1}
    generate, update, replicas = drawn.figure["data"]
    ranks = ["rank 0", "rank 1"]
    assert (generate["base"], generate["x"], generate["y"]) == ([0, 0], [10, 10], ranks)
    assert (update["base"], update["x"], update["y"]) == ([10, 10], [4, 9], ranks)
    assert update["hovertext"][1] == "rank 1 on n2: update, 9 s (10 to 19)"
    assert replicas["y"] == ["replica 0", "replica 1"]
    assert [len(row) for row in replicas["z"]] == [timeline.CELLS] * 2
    assert replicas["x0"] == pytest.approx(5 / timeline.CELLS, abs=1e-4)
    assert replicas["z"][0][0] == 8 and replicas["z"][0][-1] == 0
    assert timeline.note(run_of(tmp_path)) is None


def test_ranks_wait_while_engines_on_other_gpus_generate(tmp_path: Path) -> None:
    write(tmp_path, 1, replicas=[{"replica": 0, "running": [[0, 8], [12, 8], [19, 0]]}])
    apart = {"engine": {"colocated": False}}
    [drawn] = timeline.timelines(run_of(tmp_path, config=apart))
    waiting, update, replicas = drawn.figure["data"]
    assert (waiting["name"], update["name"]) == (timeline.WAITING, "update")
    assert (waiting["base"], waiting["x"]) == ([0, 0], [10, 10])
    assert replicas["y"] == ["replica 0"] and replicas["z"][0][-2] == 8
    assert [phase["label"] for phase in drawn.phases] == [timeline.WAITING, "update"]


def test_shares_in_which_policy_and_engines_wait() -> None:
    columns: dict[str, list[float | None]] = {
        "time/step": [20.0, 20.0, 20.0],
        "time/generate": [8.0, 2.0, 8.0],
        "time/engine_idle": [1.0, 0.0, 1.0],
        "time/logprobs": [2.0, 4.0, 2.0],
        "time/update": [8.0, 12.0, 8.0],
        "throughput/overlap": [0.5, 0.0, None],
    }
    run = run_of(columns=columns)
    assert derived(run)[phases.POLICY_WAITS] == [0.4, 0.1, None]
    assert derived(run)[phases.ENGINES_WAIT] == [0.3, 0.8, None]


POINTS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), min_size=1, max_size=30).map(
    lambda points: sorted({at: (at, count) for at, count in points}.values())
)


@given(POINTS)
def test_cells_of_the_heat_map_preserve_the_integral(points: list[tuple[float, float]]) -> None:
    cells = timeline.cells(points, 0, 100, count=50)
    integral = sum(count * (until - at) for (at, count), (until, _) in pairwise(points))
    assert sum(cells) * 2 == pytest.approx(integral, abs=0.1 * 50 * 2)
    assert max(cells) <= max(count for _, count in points)


def test_a_report_without_timelines_explains_why(tmp_path: Path) -> None:
    assert timeline.timelines(run_of(tmp_path)) == []
    assert "recorded none (tracking.timeline_every" in (timeline.note(run_of(tmp_path)) or "")


def test_damaged_timelines_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, ranks=[{"rank": 0, "spans": [["update", 3, 1], ["sync", 0, 1], 5]}, 7])
    (tmp_path / "timeline" / "step_000003.json").write_text('{"step": 3, "ra', encoding="utf-8")
    (tmp_path / "timeline" / "step_000004.json").write_text("[1]", encoding="utf-8")
    drawn = timeline.timelines(run_of(tmp_path))
    assert [item.step for item in drawn] == [1, 2]
    assert drawn[1].figure["data"][0]["hovertext"] == ["rank 0 on : sync, 1 s (0 to 1)"]
    assert "step_000003.json, step_000004.json" in (timeline.note(run_of(tmp_path)) or "")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rank", "host", "spans", "replica", "running", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_any_json_in_a_timeline_file_is_tolerated(
    tmp_path_factory: pytest.TempPathFactory, ranks: Any, replicas: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, 1, ranks=ranks, replicas=replicas)
    timeline.timelines(run_of(folder))


def test_of_many_timelines_the_first_last_and_slowest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    seconds: list[float | None] = [10.0] * 100
    seconds[42] = 900.0
    run = run_of(tmp_path, {"time/step": seconds})
    steps = [item.step for item in timeline.timelines(run)]
    assert {1, 43, 100} <= set(steps)
    assert len(steps) == timeline.MAX_TIMELINES
    assert steps == sorted(steps)
    assert f"{len(steps)} of 100" in (timeline.note(run) or "")
