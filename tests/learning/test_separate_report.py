"""Test the report and the plan of a run whose engines sample while the policy trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_megatron.plan.estimate import NodeSpec, estimate_memory
from dapo_megatron.plan.speed import estimate_speed
from dapo_megatron.report import derived, timeline
from dapo_megatron.report.reading import read_run
from tests.helpers.commands import run
from tests.helpers.configs import TINY, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    done = run(
        "train", str(TINY), f"run.directory={directory}", "run.name=roles", "run.processes=1",
        "policy.tensor_parallel=1", "engine.colocated=false", "train.rollout_steps=3",
        "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "rollout.on_policy=false",
        "rollout.deterministic=false", "rollout.lookahead=8", "evaluation.every=0",
        "evaluation.samples=1", "checkpoint.every=0", "tracking.mlflow=false",
        "tracking.timeline_every=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "roles"


def test_the_timeline_shows_that_the_engine_samples_in_training(folder: Path) -> None:
    run_data = read_run(folder)
    (drawn, *_), _ = timeline.timelines(run_data)  # later it has sampled enough
    bars = {
        (trace["name"], begin, begin + length)
        for trace in drawn.figure["data"][:-1]
        for begin, length in zip(trace["base"], trace["x"], strict=True)
    }
    names = {name for name, *_ in bars}
    assert names >= {timeline.WAITING, "update", "sync"}
    assert "generate" not in names
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("throughput/overlap", 0.0) for row in rows) > 0


def test_the_report_shows_how_long_each_role_waits(folder: Path) -> None:
    run_data = read_run(folder)
    waits = [run_data.values(name) for name in (derived.POLICY_WAITS, derived.ENGINES_WAIT)]
    assert all(len(series) == 3 and 0 < max(series) < 1 for series in waits)
    done = run("report", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Waiting of each side" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_plan_counts_the_bytes_of_a_sync(folder: Path) -> None:
    config = tiny_config(
        policy__tensor_parallel=1, run__processes=1, engine__colocated=False, engine__replicas=1
    )
    planned = estimate_speed(estimate_memory(config, 1, NodeSpec())).sync_bytes
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["sync/bytes"] == pytest.approx(planned, rel=0.01)
