"""`doctor sync`, for real, on a converted model in a third layout; and weights of one layout
evaluated in another, if they are of the same model."""

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
    """Cut in four."""
    cut = ("--tensor-parallel", "2", "--pipeline-parallel", "2")
    done = run("tools/convert_checkpoint.py", "hf-to-megatron", source, target, *cut)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def evaluate(checkpoint: Path, figures: Path) -> subprocess.CompletedProcess[str]:
    small = ("evaluation.sets.0.size=40", "evaluation.samples=2", f"checkpoint={checkpoint}")
    return run("evaluate", TINY, *small, "--json", figures)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a final norm of zeros: it never finds an answer."""
    folder = tmp_path_factory.mktemp("silent") / "hf"
    shutil.copytree(BASE, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.long
def test_a_sync_of_a_converted_model_is_proved(tmp_path: Path) -> None:
    converted, figures = convert(BASE, tmp_path / "megatron"), tmp_path / "sync.json"
    layout = ("policy.tensor_parallel=1", "policy.pipeline_parallel=2", "engine.tensor_parallel=2")
    done = run(
        *("doctor", "sync", TINY, f"model.path={converted}", *layout, "--json", figures),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engines compute with the policy's weights\n" in done.stdout
    proof: dict[str, Any] = json.loads(figures.read_text())
    assert proof["num_tensors"] == 46
    assert len(proof["syncs"]) == 3
    for sync in proof["syncs"]:
        assert sync["fingerprinted"]
        assert sync["canary_gap"] < 1e-4
        assert 0 < sync["num_bytes"] <= 1.05 * proof["lower_bound_bytes"]
    assert proof["lower_bound_bytes"] < 0.5 * proof["num_bytes"]


def test_what_is_evaluated_are_the_weights_of_the_checkpoint(silent: Path, tmp_path: Path) -> None:
    done = evaluate(convert(silent, tmp_path / "megatron"), tmp_path / "figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["eval/chain_sum_held_out/avg@2"] < 0.05  # the base model's is 0.37


def test_weights_of_another_model_are_refused(silent: Path, tmp_path: Path) -> None:
    config = json.loads((silent / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    other = tmp_path / "other"
    shutil.copytree(silent, other)
    (other / "config.json").write_text(json.dumps(config))
    done = evaluate(other, tmp_path / "figures.json")
    assert done.returncode == 2
    assert "is of another model than model.path: norm_eps 0.5, not 1e-06" in done.stdout
