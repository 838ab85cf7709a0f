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
    assert "Known, closest first: Qwen3.5-9B, Qwen3-8B, " in result.stderr
    assert "Mistral-7B-Instruct-v0.3" in result.stderr


def test_training_without_the_model_folder_shows_the_download_command() -> None:
    result = run("train", CONFIG, "model.path=nowhere/qwen3-8b")
    assert result.returncode == 2
    assert "`hf download Qwen/Qwen3-8B --local-dir nowhere/qwen3-8b`" in result.stderr


def test_a_plan_that_does_not_fit_names_phases_parts_and_layouts(model: str) -> None:
    keys = "policy.offload=[]", "train.max_tokens_per_microbatch=40960"
    result = plan(CONFIG, model, *keys, "--host-memory-gib", "100")
    assert result.returncode == 2
    assert "update: every rank takes" in result.stderr and "(activations " in result.stderr
    assert "host: a node's ranks take" in result.stderr
    assert "layouts that fit 8 GPUs of 80 GiB with memory to spare:" in result.stderr
    assert "none; use more nodes" in result.stderr  # no layout needs less host memory
    result = plan(CONFIG, model, "train.max_tokens_per_microbatch=65536")
    assert " s a step: policy." in result.stderr and "policy.recompute=full" in result.stderr


@pytest.mark.parametrize("side", ["tables of a pipeline", "engines on other GPUs"])
def test_there_is_a_table_for_each_kind_of_rank_that_takes_most(model: str, side: str) -> None:
    if side == "engines on other GPUs":
        keys = ["engine.colocated=false", "engine.replicas=4", "policy.offload=[]"]
        expected = ["memory of every policy rank", "memory of every engine rank"]
    else:
        keys = ["policy.pipeline_parallel=4", "policy.recompute=full"]
        expected = ["memory of pipeline stage 1 of 4", "memory of pipeline stage 4 of 4"]
    output = plan(CONFIG, model, *keys).stdout
    assert all(title in output for title in expected)
    assert ("the policy waits for" in output) == (side == "engines on other GPUs")


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


def test_a_plan_with_little_memory_left_warns(model: str) -> None:
    result = plan(CONFIG, model, "--gpu-memory-gib", "64")
    assert result.returncode == 0, result.stderr
    assert "warning: " in result.stdout and "less than 5%" in result.stdout


def test_the_teacher_of_a_distillation_is_planned_and_checked() -> None:
    config, nodes = "model_configs/qwen3_4b_distill.yaml", ("--nodes", "1")
    result = plan(config, *nodes)
    assert result.returncode == 0, result.stderr
    assert "the teacher's likely tokens" in result.stdout
    assert (
        "the teacher's likely tokens" not in plan(config, *nodes, "loss.distill.top_k=null").stdout
    )
    for change in ("policy.sequence_parallel=false", "loss.distill.teacher=Qwen/Qwen3-32B"):
        result = plan(config, *nodes, change)
        assert result.returncode == 2, result.stdout
        assert "loss.distill.teacher: " in result.stderr
