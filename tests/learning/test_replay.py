"""Record and replay, for real: what a run recorded gives the same updates again, bit by bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.commands import run
from tests.helpers.configs import TINY

STEPS = 3
OVERRIDES = (
    *("run.processes=1", "policy.tensor_parallel=1"),
    f"train.rollout_steps={STEPS}",
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"),
    "rollout.on_policy=false",  # so that groups are trained on by later weights than sampled them
    "loss.tis_cap=2.0",  # so that the engine's log-probs matter
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
    """A replay that is asked for a step more than was recorded: its folder, and what it said."""
    more = (f"train.rollout_steps={STEPS + 1}", "--replay", str(recorded))
    done = train(recorded.parent, "replayed", *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (recorded.parent / "replayed" / "tokenizer.json").exists()  # it needs none
    return recorded.parent / "replayed", done.stdout


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_update_is_the_recorded_one(recorded: Path, replayed: tuple[Path, str]) -> None:
    ours, theirs = rows(replayed[0]), rows(recorded)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    assert any(row["groups/age_mean"] > 0 for row in theirs), "nothing was carried"
    for one, other in zip(ours, theirs, strict=True):
        names = {name for name in other if name.startswith("policy/")}
        assert {"policy/loss", "policy/grad_norm", "policy/entropy", "policy/tis_weight"} <= names
        assert {name: one[name] for name in names} == {name: other[name] for name in names}


def test_the_weights_and_the_optimizer_end_equal(
    recorded: Path, replayed: tuple[Path, str]
) -> None:
    ours, theirs = (
        load_file(folder / "checkpoints" / f"step_{STEPS:06d}" / "rank_00000.safetensors")
        for folder in (replayed[0], recorded)
    )
    assert ours.keys() == theirs.keys()
    # The random state of the process alone differs, of which the engine took its part.
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert [name for name in different if not name.startswith("rng/")] == []


def test_a_step_that_was_not_recorded_ends_the_replay(
    recorded: Path, replayed: tuple[Path, str]
) -> None:
    missing = recorded / "samples" / f"step_{STEPS + 1:06d}.jsonl"
    assert f"error: {missing}: not recorded" in replayed[1]


def test_a_replay_starts_no_engine(replayed: tuple[Path, str]) -> None:
    said = (replayed[0] / "logs" / "rank_0.log").read_text()
    assert "vllm" not in said.lower()
