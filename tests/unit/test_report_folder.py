"""The report reads run folders that are complete, half-written, damaged or with repeated steps."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster import heartbeat
from dapo_megatron.cluster.attempt import end_attempt, start_attempt
from dapo_megatron.cluster.heartbeat import Heartbeat, RankState
from dapo_megatron.report import curves
from dapo_megatron.report.curves import evaluation_curves, stride_of, thin
from dapo_megatron.report.run_data import Metrics, StateWord, frame_of, read_metrics, read_run
from dapo_megatron.types import ConfigError

A_HEARTBEAT = Heartbeat(
    rank=0,
    world_size=1,
    attempt="7.0",
    host="n1",
    pid=1,
    state=RankState.RUNNING,
    time=0.0,
    phase="generate",
    step=3,
    limit_seconds=60.0,
    silent_seconds=1.0,
    sign="token 5",
)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, steps: int = 40) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(
        f"run: {{name: mine}}\ntrain: {{rollout_steps: {steps}}}\ndata: {{train: [{{name: a}}]}}\n"
    )
    lines = [{"step": 1, "accuracy/raw": 0.5}] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read(tmp_path: Path) -> None:
    evaluated = {"eval/a/b/avg@4": 0.4, "eval/a/b/avg@4_low": 0.3, "eval/a/b/avg@4_high": 0.5}
    folder = write_run(
        tmp_path / "r",
        [{"step": 0, **evaluated}, {"step": 1, "x": 1}, {"step": 2, "x": math.nan, "y": 2.5}],
    )
    run = read_run(folder)
    assert run.name == "mine"
    assert run.metrics.steps == [1, 2]
    assert run.metrics.column("x") == [1.0, None]
    assert run.metrics.column("y") == [None, 2.5]
    assert run.metrics.column("never") == [None, None]
    assert run.metrics.last("x") == 1.0
    (evaluation,) = run.evaluations
    assert (evaluation.set, evaluation.metric, evaluation.step) == ("a/b", "avg@4", 0)
    assert (evaluation.value, evaluation.low, evaluation.high) == (0.4, 0.3, 0.5)
    assert run.setting("train.rollout_steps") == 40
    assert run.setting("train.x.y") is run.setting("train.rollout_steps.y") is None


def test_a_half_written_last_line_is_not_reported_as_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    (folder / "attempts.jsonl").write_text("")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "accuracy')
    run = read_run(folder)
    assert run.metrics.steps == [1]
    assert run.warnings == []


def test_damaged_files_and_lines_are_left_out_and_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    lines = b'\xff\xfe\n[1]\n{"step": "two"}\n{"step": 3, "accuracy/raw": "high"}\n{"step": 4}\n'
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(lines)
    (folder / "config.yaml").write_text("a: [")
    (folder / "summary.json").write_text("[]")
    (folder / "plan.json").write_text("[" * 100_000)
    (folder / "provenance.json").mkdir()
    run = read_run(folder)
    assert run.metrics.steps == [1, 3, 4]
    assert run.metrics.column("accuracy/raw") == [0.5, None, None]
    assert (run.config, run.summary, run.plan, run.provenance) == ({}, None, None, None)
    assert run.name == "r"
    warnings = " ".join(run.warnings)
    for name in ("config.yaml", "metrics.jsonl: 2", "line 2, 3", "summary", "plan", "provenance"):
        assert name in warnings


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["step", "x", "eval/a/avg@2", "eval/a/avg@2_low", "eval/"]),
            st.one_of(
                st.none(),
                st.booleans(),
                st.integers(-2, 9),
                st.just(10**400),
                st.floats(),
                st.text(),
            ),
        )
    )
)
def test_any_lines_give_finite_columns_and_sorted_steps(lines: list[dict[str, Any]]) -> None:
    metrics, evaluations = read_metrics(lines)
    assert metrics.steps == sorted(set(metrics.steps))
    assert all(step >= 1 for step in metrics.steps)
    for name in metrics.frame:
        assert all(value is None or math.isfinite(value) for value in metrics.column(name))
    assert all(math.isfinite(point.value) and point.step >= 0 for point in evaluations)


def test_a_repeated_step_replaces_all_later_ones() -> None:
    lines = [{"step": step, "x": float(step)} for step in (0, 1, 2, 3, 4)]
    metrics, _ = read_metrics([*lines, {"step": 2, "x": 20.0}, {"step": 3, "x": 30.0}])
    assert metrics.steps == [1, 2, 3]
    assert metrics.column("x") == [1.0, 20.0, 30.0]


@pytest.mark.parametrize("wrong", ["none", "empty", "runs", "file"])
def test_a_wrong_folder_is_refused_with_a_suggestion(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "runs").mkdir()
    good = write_run(tmp_path / "runs" / "good")
    (tmp_path / "empty").mkdir()
    path = {
        "none": tmp_path / "none",
        "empty": tmp_path / "empty",
        "runs": tmp_path / "runs",
        "file": good / "config.yaml",
    }[wrong]
    with pytest.raises(ConfigError, match="RUN_FOLDER") as raised:
        read_run(path)
    assert str(path) in str(raised.value)
    if wrong in ("runs", "file"):
        assert f"such as {good}" in str(raised.value)


# ------------------------------------------------------------------ state of the run


def state(folder: Path) -> StateWord:
    return read_run(folder).state.word


def test_without_heartbeats_or_attempts_the_state_is_unknown(tmp_path: Path) -> None:
    assert state(write_run(tmp_path / "r")) is StateWord.UNKNOWN


def test_the_state_of_a_run_from_its_start_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    folder = write_run(tmp_path / "r")
    attempts = folder / "attempts.jsonl"
    start_attempt(attempts, 0, SLURM)
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=now))
    running = read_run(folder).state
    assert running.word is StateWord.RUNNING
    assert not running.has_ended
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=now - 100))
    cut = read_run(folder).state
    assert cut.word is StateWord.CRASHED
    assert "100 s ago" in cut.text or "2 min ago" in cut.text
    for end in ("stopped", "crashed", "hung"):
        end_attempt(attempts, end, SLURM)
        assert state(folder) == end
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, world_size=2, state=RankState.HUNG))
    assert "rank 1: missing: it never wrote" in read_run(folder).state.text
    (folder / "summary.json").write_text(json.dumps({"steps": 40}))
    assert state(folder) is StateWord.FINISHED


@pytest.mark.parametrize("end", ["stopped", "crashed"])
def test_a_run_that_recorded_its_end_has_ended_although_its_ranks_still_run(
    tmp_path: Path, end: str
) -> None:
    """A run records its end, then writes its report, and only then exits."""
    folder = write_run(tmp_path / "r")
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time()))
    start_attempt(folder / "attempts.jsonl", 0, SLURM)
    end_attempt(folder / "attempts.jsonl", end, SLURM)
    assert state(folder) == end
    start_attempt(folder / "attempts.jsonl", 1, {**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert state(folder) is StateWord.RUNNING
    (folder / "summary.json").write_text(json.dumps({"steps": 40}))
    assert state(folder) is StateWord.FINISHED


def test_a_summary_of_fewer_steps_is_not_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", steps=80)
    (folder / "summary.json").write_text(json.dumps({"steps": 40}))
    assert state(folder) is StateWord.UNKNOWN
    heartbeat.write_heartbeat(folder, replace(A_HEARTBEAT, time=time.time()))
    assert state(folder) is StateWord.RUNNING


def test_heartbeats_of_another_version_are_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    heartbeat.write_heartbeat(folder, A_HEARTBEAT)
    heartbeat.heartbeat_file(folder, 1).write_text('{"rank": 1}')
    heartbeat.heartbeat_file(folder, 0).write_text('{"state": "running"}')
    assert state(folder) is StateWord.UNKNOWN


def test_a_folder_can_be_read_while_the_run_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        for step in range(2, 60):
            line = json.dumps({"step": step, "accuracy/raw": step / 100, "pad": "x" * 99}) + "\n"
            for part in (line[:40], line[40:]):
                os.write(file.fileno(), part.encode())
                steps = read_run(folder).metrics.steps
                assert steps == list(range(1, len(steps) + 1))
    assert steps[-1] == 59


# ------------------------------------------------------------------ curves


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=50), st.integers(7, 50))
def test_thinned_curves_keep_the_last_step_and_extremes(
    column: list[float | None], most: int
) -> None:
    frame = frame_of(range(1, len(column) + 1), {"a/mean": column, "a/gap_max": column})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "MAX_POINTS", most)
        thinned = Metrics(thin(frame))
        assert len(thinned.steps) == -(-len(column) // stride_of(len(column)))
    assert thinned.steps[-1:] == ([len(column)] if column else [])
    known = [value for value in column if value is not None]
    means, largest = (thinned.column(name) for name in ("a/mean", "a/gap_max"))
    assert max(thinned.values("a/gap_max"), default=None) == max(known, default=None)
    for mean, top in zip(means, largest, strict=True):
        assert (mean is None) == (top is None)
        assert mean is None or top is None or mean <= top + 1e-5 * abs(top) + 1e-5 * abs(mean)


def test_short_runs_are_not_thinned() -> None:
    assert [stride_of(n) for n in (0, 1, 2000, 2001, 5000)] == [1, 1, 1, 2, 3]


def test_of_several_pass_metrics_the_one_with_most_samples_is_drawn() -> None:
    line = {"step": 0, "eval/a/pass@1": 0.1, "eval/a/pass@4": 0.4, "eval/a/ungraded": 2.0}
    _, evaluations = read_metrics([line, {**line, "step": 5, "eval/a/pass@4_low": 0.3}])
    [(key, points)] = evaluation_curves(evaluations).items()
    assert key == ("a", "pass@4")
    assert points["value"].to_dict() == {0: 0.4, 5: 0.4}
    assert points["low"].dropna().to_dict() == {5: 0.3}
