"""Test that replaying the rollouts of a run gives bitwise the same updates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import run
from tests.helpers.configs import TINY
from tests.helpers.training_state import stored_tensors

STEPS = 3
OVERRIDES = (
    *("run.processes=1", "policy.tensor_parallel=1"),
    f"train.rollout_steps={STEPS}",
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"),
    "rollout.on_policy=false",  # so that some groups are sampled by older weights than are trained
    # So that the engine's log-probs matter.
    *("loss.tis_cap=2.0", "loss.correction.sequence_mean=[0.9, 1.1]"),
    *("train.updates_per_step=2", "optimizer.warmup_rollout_steps=0"),
    *("evaluation.sets=[]", "tracking.mlflow=false", f"checkpoint.every={STEPS}"),
)


def train(directory: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    where = (f"run.directory={directory}", f"run.name={name}")
    return run("train", TINY, *OVERRIDES, *where, *more)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    done = train(directory, "recorded")
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "recorded"


@pytest.fixture(scope="module")
def replayed(recorded: Path) -> tuple[Path, str]:
    """Folder and output of a replay with one step more than was recorded."""
    more = (f"train.rollout_steps={STEPS + 1}", "--replay", str(recorded))
    done = train(recorded.parent, "replayed", *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (
        recorded.parent / "replayed" / "tokenizer.json"
    ).exists()  # a replay needs no tokenizer
    return recorded.parent / "replayed", done.stdout


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_update_equals_the_recorded_one(recorded: Path, replayed: tuple[Path, str]) -> None:
    replayed_rows, recorded_rows = rows(replayed[0]), rows(recorded)
    assert [row["step"] for row in replayed_rows] == list(range(1, STEPS + 1))
    assert any(row["groups/age_mean"] > 0 for row in recorded_rows), (
        "no group was carried to a later step"
    )
    for replayed_row, recorded_row in zip(replayed_rows, recorded_rows, strict=True):
        names = {name for name in recorded_row if name.startswith("policy/")}
        assert {"policy/loss", "policy/grad_norm", "policy/entropy", "policy/tis_weight"} <= names
        assert {name: replayed_row[name] for name in names} == {
            name: recorded_row[name] for name in names
        }


def test_final_weights_and_optimizer_state_are_equal(
    recorded: Path, replayed: tuple[Path, str]
) -> None:
    replayed_tensors, recorded_tensors = (
        stored_tensors(folder / "checkpoints" / f"step_{STEPS:06d}")
        for folder in (replayed[0], recorded)
    )
    assert replayed_tensors.keys() == recorded_tensors.keys()
    # Only the random state of the process differs, because the engine drew from it in one run.
    different = [
        name
        for name in recorded_tensors
        if not torch.equal(replayed_tensors[name], recorded_tensors[name])
    ]
    assert [name for name in different if not name.startswith("rng.")] == []


def test_a_step_that_was_not_recorded_ends_the_replay(
    recorded: Path, replayed: tuple[Path, str]
) -> None:
    missing = recorded / "samples" / f"step_{STEPS + 1:06d}"
    assert f"error: {missing}: not recorded" in replayed[1]


def test_a_replay_starts_no_engine(replayed: tuple[Path, str]) -> None:
    log = (replayed[0] / "logs" / "rank_0.log").read_text()
    assert "vllm" not in log.lower()
