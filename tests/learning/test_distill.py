"""Runs with a teacher, with all processes: the student gets as good as the teacher, in fewer steps
than with rewards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.runs import metrics_of

OVERLAY = REPOSITORY / "model_configs" / "distillation" / "tiny.yaml"


def test_a_student_approaches_its_teacher(tmp_path: Path) -> None:
    """The student is the teacher with noise in its weights."""
    teacher = REPOSITORY / "model_configs" / "tiny_qwen3"
    student = tmp_path / "student"
    shutil.copytree(teacher, student)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(student / "model.safetensors")
    for weight in weights.values():
        weight *= 1 + 0.3 * torch.randn(weight.shape, generator=generator)
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    taught = train(
        *(tmp_path, "taught", "--overlay", OVERLAY, f"model.path={student}"),
        *(f"loss.distill.teacher={teacher}", "train.rollout_steps=5", "evaluation.sets=[]"),
        *("optimizer.warmup_rollout_steps=2", "rollout.prompts_per_step=64"),
    )
    rows = metrics_of(taught)
    divergences = [row["policy/distill_penalty"] for row in rows]
    assert divergences[-1] < divergences[0] / 2, divergences
    assert all(divergence > 0 for divergence in divergences)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart")
    train(directory, "tiny_cpu", "evaluation.every=5")
    return directory / "tiny_cpu"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_the_quickstart_teaches_in_fewer_steps_than_it_learned(
    quickstart: Path, seed: int, tmp_path: Path
) -> None:
    teacher = quickstart / "checkpoints" / "step_000040"
    overrides = (f"loss.distill.teacher={teacher}", f"seed={seed}", "--overlay", OVERLAY)
    taught = train(tmp_path, "taught", *overrides)
    assert steps_to(0.85, taught) < steps_to(0.85, quickstart) / 2


def train(directory: Path, name: str, *arguments: object) -> Path:
    """Train the tiny model to the end. Return the run's folder."""
    done = run(
        *("train", TINY, *arguments, f"run.directory={directory}", f"run.name={name}"),
        *("tracking.mlflow=false", "tracking.report=false", "tracking.samples=false"),
        timeout=2000.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / name


def steps_to(accuracy: float, folder: Path) -> int:
    """Return the first step after which an evaluation reached this accuracy."""
    name = "eval/chain_sum_held_out/avg@4"
    return next(int(row["step"]) for row in metrics_of(folder) if row.get(name, 0.0) >= accuracy)
