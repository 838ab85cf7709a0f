"""`doctor sync`, for real, on a converted model in a third layout; and a checkpoint of one layout
evaluated in another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.configs import REPOSITORY, TINY


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model cut in four."""
    target = tmp_path_factory.mktemp("converted") / "megatron"
    source = REPOSITORY / "model_configs" / "tiny_qwen3"
    cut = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    run("tools/convert_checkpoint.py", "hf-to-megatron", str(source), str(target), *cut)
    return target


def test_a_sync_of_a_converted_model_is_proved(converted: Path, tmp_path: Path) -> None:
    figures = tmp_path / "sync.json"
    layout = ("policy.tensor_parallel=1", "policy.pipeline_parallel=2", "engine.tensor_parallel=2")
    said = run(
        "-m", "dapo_megatron", "doctor", "sync", str(TINY), f"model.path={converted}", *layout,
        "--json", str(figures),
    )  # fmt: skip
    assert "engines hold and compute with what the policy holds" in said
    proof: dict[str, Any] = json.loads(figures.read_text())
    assert proof["num_tensors"] == 46
    assert len(proof["syncs"]) == 3
    for sync in proof["syncs"]:
        assert sync["fingerprinted"]
        assert sync["canary_gap"] < 1e-4
        assert 0 < sync["num_bytes"] <= 1.05 * proof["lower_bound_bytes"]
    assert proof["lower_bound_bytes"] < 0.5 * proof["num_bytes"]


def test_the_converted_model_evaluates_as_the_first(converted: Path, tmp_path: Path) -> None:
    figures = []
    for number, checkpoint in enumerate(((), (f"checkpoint={converted}",))):
        file = tmp_path / f"{number}.json"
        small = ("evaluation.sets.0.size=40", "evaluation.samples=2")
        run("-m", "dapo_megatron", "evaluate", str(TINY), *small, *checkpoint, "--json", str(file))
        figures.append(json.loads(file.read_text()))
    assert figures[0] == figures[1]
    assert 0.1 < next(iter(figures[0].values())) < 0.9
