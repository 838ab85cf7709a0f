"""`python -m dapo_megatron plan`: what it prints, refuses and writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.published import PUBLISHED

CONFIG = "model_configs/qwen3_8b.yaml"


@pytest.fixture
def model(tmp_path: Path) -> str:
    hf = PUBLISHED["Qwen3-8B-Base"][1]
    (tmp_path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return f"model.path={tmp_path}"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    plain_and_wide = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    return run("plan", *arguments, environment={**os.environ, **plain_and_wide})


def test_a_plan_that_fits_is_printed_and_written_as_json(model: str, tmp_path: Path) -> None:
    json_file = tmp_path / "plan.json"
    result = plan(CONFIG, model, "--json", str(json_file), "--mfu", "0.2")
    assert result.returncode == 0, result.stderr
    for word in ("KV cache", "free", "host memory of a node", "checkpoint", "mfu 0.2", "seconds"):
        assert word in result.stdout, word
    report = json.loads(json_file.read_text(encoding="utf-8"))
    assert report["fits"] and report["processes"] == 8
    assert report["seconds"]["step"] > report["seconds"]["update"] > 0


def test_tables_in_a_file_are_not_truncated(model: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    in_a_file = run("plan", CONFIG, model, environment={**environment, "NO_COLOR": "1"})
    widest = max(map(len, in_a_file.stdout.splitlines()))
    assert 80 < widest <= 160
    assert "..." not in in_a_file.stdout and "…" not in in_a_file.stdout


def test_without_a_folder_published_dimensions_give_the_same_plan(
    model: str, tmp_path: Path
) -> None:
    json_files = [tmp_path / "folder.json", tmp_path / "published.json"]
    paths = [model, "model.path=Qwen/Qwen3-8B-Base"]
    outputs = [
        plan(CONFIG, path, "--json", str(file)).stdout
        for path, file in zip(paths, json_files, strict=True)
    ]
    note = "published dimensions of Qwen/Qwen3-8B-Base, because there is no folder"
    assert note in outputs[1] and "published" not in outputs[0]
    with_folder, without = (json.loads(file.read_text(encoding="utf-8")) for file in json_files)
    assert with_folder.pop("model_notes") == []
    assert note in without.pop("model_notes")[0]
    assert without == with_folder


def test_an_unknown_model_is_refused_with_the_closest_names() -> None:
    result = plan(CONFIG, "model.path=nowhere/Qwen3-9B")
    assert result.returncode == 2
    assert "Known, closest first: Qwen3-8B, Qwen3-4B, " in result.stderr
    assert "Mistral-7B-Instruct-v0.3" in result.stderr


def test_training_without_the_model_folder_shows_the_download_command() -> None:
    result = run("train", CONFIG, "model.path=nowhere/qwen3-8b")
    assert result.returncode == 2
    assert "`hf download Qwen/Qwen3-8B --local-dir nowhere/qwen3-8b`" in result.stderr


def test_a_plan_that_does_not_fit_names_phases_and_settings(model: str) -> None:
    result = plan(CONFIG, model, "policy.offload=[]", "train.max_tokens_per_microbatch=40960")
    assert result.returncode == 2
    assert "update: every rank takes" in result.stderr and "GiB, " in result.stderr
    assert "policy.recompute=full" in result.stderr
    assert "generate, sync: every rank takes" in result.stderr
    assert "policy.offload=[weights,gradients,optimizer]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.path=/nowhere",), "hf download OWNER/NAME config.json --local-dir /nowhere"),
        (("policy.tensor_parallel=3",), "policy.tensor_parallel"),
        (("--gpu", "T4"), "--gpu: T4 is not known; use H100"),
    ],
)
def test_bad_arguments_are_refused(model: str, arguments: tuple[str, ...], message: str) -> None:
    result = plan(CONFIG, model, *arguments)
    assert result.returncode == 2, result.stdout
    assert message in result.stderr


def with_published_model(folder: Path, name: str) -> str:
    """Write the config.json of a published model; return the override of model.path."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name][1]), encoding="utf-8")
    return f"model.path={folder}"


def test_too_few_nodes_are_refused_with_the_number_that_suffices(tmp_path: Path) -> None:
    """The layout needs more than 8 GPUs, and no layout for 8 GPUs fits into their memory."""
    dapo_32b = "model_configs/qwen2.5_32b_dapo.yaml", with_published_model(tmp_path, "Qwen2.5-32B")
    result = plan(*dapo_32b, "--nodes", "1")
    assert result.returncode == 2, result.stdout
    assert "does not divide the 8 processes" in result.stderr
    assert "the run does not fit 8 GPUs of 80 GiB" in result.stderr
    assert "2 nodes of 8 GPUs would suffice, as it is configured" in result.stderr
    assert plan(*dapo_32b, "--nodes", "2").returncode == 0
    # The layout suits 2 nodes, but their memory is too small.
    result = plan(*dapo_32b, "--nodes", "2", "--gpu-memory-gib", "40")
    assert result.returncode == 2
    assert (
        "more than there is" in result.stderr and "nodes of 8 GPUs would suffice" in result.stderr
    )


def test_too_little_host_memory_is_refused_with_the_setting_to_change(model: str) -> None:
    result = plan(CONFIG, model, "--host-memory-gib", "200")
    assert result.returncode == 2
    assert "host: the ranks of a node take" in result.stderr
    assert "policy.offload=[weights,gradients]" in result.stderr


def test_a_plan_with_little_memory_left_warns(model: str) -> None:
    result = plan(CONFIG, model, "--gpu-memory-gib", "64")
    assert result.returncode == 0, result.stderr
    assert "warning: " in result.stdout and "less than 5%" in result.stdout
