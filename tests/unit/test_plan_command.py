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


def test_a_plan_that_fits(model: str, tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    ran = plan(CONFIG, model, "--json", str(figures), "--mfu", "0.2")
    assert ran.returncode == 0, ran.stderr
    for word in ("KV cache", "free", "host memory of a node", "checkpoint", "mfu 0.2", "seconds"):
        assert word in ran.stdout, word
    told = json.loads(figures.read_text(encoding="utf-8"))
    assert told["fits"] and told["processes"] == 8
    assert told["seconds"]["step"] > told["seconds"]["update"] > 0


def test_tables_in_a_file_are_not_squeezed(model: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    in_a_file = run("plan", CONFIG, model, environment={**environment, "NO_COLOR": "1"})
    widest = max(map(len, in_a_file.stdout.splitlines()))
    assert 80 < widest <= 160
    assert "..." not in in_a_file.stdout and "…" not in in_a_file.stdout


def test_without_a_folder_published_dimensions_give_the_same_plan(
    model: str, tmp_path: Path
) -> None:
    figures = [tmp_path / "folder.json", tmp_path / "published.json"]
    paths = [model, "model.path=Qwen/Qwen3-8B-Base"]
    outputs = [
        plan(CONFIG, path, "--json", str(file)).stdout
        for path, file in zip(paths, figures, strict=True)
    ]
    note = "published dimensions of Qwen/Qwen3-8B-Base, because there is no folder"
    assert note in outputs[1] and "published" not in outputs[0]
    with_folder, without = (json.loads(file.read_text(encoding="utf-8")) for file in figures)
    assert with_folder.pop("model_notes") == []
    assert note in without.pop("model_notes")[0]
    assert without == with_folder


def test_a_model_that_is_not_known_is_refused_with_the_closest_names() -> None:
    ran = plan(CONFIG, "model.path=nowhere/Qwen3-9B")
    assert ran.returncode == 2
    assert "Known, closest first: Qwen3-8B, Qwen3-4B, " in ran.stderr
    assert "Mistral-7B-Instruct-v0.3" in ran.stderr


def test_training_needs_the_folder_and_says_how_to_get_it() -> None:
    ran = run("train", CONFIG, "model.path=nowhere/qwen3-8b")
    assert ran.returncode == 2
    assert "`hf download Qwen/Qwen3-8B --local-dir nowhere/qwen3-8b`" in ran.stderr


def test_what_does_not_fit_is_refused_by_phase_and_setting(model: str) -> None:
    ran = plan(CONFIG, model, "policy.offload=[]", "train.max_tokens_per_microbatch=40960")
    assert ran.returncode == 2
    assert "update: every rank takes" in ran.stderr and "GiB, " in ran.stderr
    assert "policy.recompute=full" in ran.stderr
    assert "generate, sync: every rank takes" in ran.stderr
    assert "policy.offload=[weights,gradients,optimizer]" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model.path=/nowhere",), "hf download OWNER/NAME config.json --local-dir /nowhere"),
        (("policy.tensor_parallel=3",), "policy.tensor_parallel"),
        (("--gpu", "T4"), "--gpu: T4 is not known; use H100"),
    ],
)
def test_refusals(model: str, arguments: tuple[str, ...], said: str) -> None:
    ran = plan(CONFIG, model, *arguments)
    assert ran.returncode == 2, ran.stdout
    assert said in ran.stderr


def on(folder: Path, name: str) -> str:
    """A folder with what a plan needs of a published model."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name][1]), encoding="utf-8")
    return f"model.path={folder}"


def test_too_few_nodes_are_refused_in_words(tmp_path: Path) -> None:
    """The layout does not suit 8 GPUs; those that do are too big for them."""
    paper = "model_configs/qwen2.5_32b_dapo.yaml", on(tmp_path, "Qwen2.5-32B")
    ran = plan(*paper, "--nodes", "1")
    assert ran.returncode == 2, ran.stdout
    assert "does not divide the 8 processes" in ran.stderr
    assert "the run does not fit 8 GPUs of 80 GiB" in ran.stderr
    assert "2 nodes of 8 GPUs would suffice, as it is configured" in ran.stderr
    assert plan(*paper, "--nodes", "2").returncode == 0
    # A layout that suits them, in which memory is short.
    ran = plan(*paper, "--nodes", "2", "--gpu-memory-gib", "40")
    assert ran.returncode == 2
    assert "more than there is" in ran.stderr and "nodes of 8 GPUs would suffice" in ran.stderr


def test_a_small_host_is_refused_by_setting(model: str) -> None:
    ran = plan(CONFIG, model, "--host-memory-gib", "200")
    assert ran.returncode == 2
    assert "host: the ranks of a node take" in ran.stderr
    assert "policy.offload=[weights,gradients]" in ran.stderr


def test_little_room_is_warned_of(model: str) -> None:
    ran = plan(CONFIG, model, "--gpu-memory-gib", "64")
    assert ran.returncode == 0, ran.stderr
    assert "warning: " in ran.stdout and "less than 5%" in ran.stdout
