"""Run `doctor sync` on a converted model in another layout, and evaluate weights of one layout in
another."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY, TINY

BASE = REPOSITORY / "model_configs" / "tiny_qwen3"


def convert(source: Path, target: Path) -> Path:
    """Convert an HF model to a checkpoint of Megatron."""
    done = run("tools/convert_checkpoint.py", "hf-to-megatron", source, target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def evaluate(checkpoint: Path, metrics: Path) -> subprocess.CompletedProcess[str]:
    small = ("evaluation.sets.0.size=40", "evaluation.samples=2", f"checkpoint={checkpoint}")
    return run("evaluate", TINY, *small, "--json", metrics)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model with a final norm of zeros, which never answers correctly."""
    folder = tmp_path_factory.mktemp("silent") / "hf"
    shutil.copytree(BASE, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.long
def test_a_sync_of_a_converted_model_passes_every_check(tmp_path: Path) -> None:
    converted, metrics = convert(BASE, tmp_path / "megatron"), tmp_path / "sync.json"
    layout = ("policy.tensor_parallel=1", "policy.pipeline_parallel=2", "engine.tensor_parallel=2")
    done = run(
        *("doctor", "sync", TINY, f"model.path={converted}", *layout, "--json", metrics),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engines compute with the policy's weights\n" in done.stdout
    report: dict[str, Any] = json.loads(metrics.read_text())
    assert report["num_tensors"] == 46
    assert len(report["syncs"]) == 3
    for sync in report["syncs"]:
        assert sync["fingerprinted"]
        assert sync["gap"] < 1e-4
        assert 0 < sync["num_bytes"] <= 1.05 * report["lower_bound_bytes"]
    assert report["lower_bound_bytes"] < 0.5 * report["num_bytes"]


def test_evaluate_uses_the_weights_of_the_checkpoint(silent: Path, tmp_path: Path) -> None:
    done = evaluate(convert(silent, tmp_path / "megatron"), tmp_path / "metrics.json")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["eval/chain_sum_held_out/avg@2"] < 0.05  # the base model has 0.37


def test_weights_of_another_model_are_refused(silent: Path, tmp_path: Path) -> None:
    config = json.loads((silent / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    other = tmp_path / "other"
    shutil.copytree(silent, other)
    (other / "config.json").write_text(json.dumps(config))
    done = evaluate(other, tmp_path / "metrics.json")
    assert done.returncode == 2
    assert "is of another model than model.path: norm_eps 0.5, not 1e-06" in done.stdout
