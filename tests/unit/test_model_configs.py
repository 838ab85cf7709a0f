"""Every config in model_configs: valid, fits its machines, and uses the numbers of the paper."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config import Config, FileSource
from dapo_megatron.config.file import load_config
from dapo_megatron.model import read_architecture
from dapo_megatron.plan import GIB
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.estimate import PHASES, NodeSpec, estimate_memory
from dapo_megatron.plan.layout import check_layout
from dapo_megatron.plan.speed import Assumptions, estimate_speed
from tests.helpers.configs import REPOSITORY
from tests.helpers.published import PUBLISHED

CONFIGS = REPOSITORY / "model_configs"
# name: (model, [(nodes, GPUs per node)]) from the header of each file.
MACHINES: dict[str, tuple[str, list[tuple[int, int]]]] = {
    "qwen2.5_32b_dapo": ("Qwen2.5-32B", [(16, 8)]),
    "qwen2.5_math_7b": ("Qwen2.5-Math-7B", [(1, 8), (2, 8), (4, 8)]),
    "qwen3_4b_retool": ("Qwen3-4B-Instruct-2507", [(1, 8)]),
    "qwen3_4b_distill": ("Qwen3-4B", [(1, 8)]),
    "qwen3_8b": ("Qwen3-8B-Base", [(1, 8)]),
    "qwen3_8b_fp8": ("Qwen3-8B-Base", [(1, 8)]),
    "qwen3_30b_a3b": ("Qwen3-30B-A3B-Base", [(2, 8), (4, 8)]),
    "qwen3.5_4b": ("Qwen3.5-4B", [(1, 8)]),
    "qwen3.5_35b_a3b": ("Qwen3.5-35B-A3B", [(4, 8)]),
    "qwen3_0.6b_one_gpu": ("Qwen3-0.6B-Base", [(1, 1)]),
}
TINY = {path.stem for path in CONFIGS.glob("tiny_*.yaml")}


def load(name: str, folder: Path, *overrides: str) -> Config:
    hf_config: dict[str, Any] = dict(PUBLISHED[MACHINES[name][0]][1])
    if name == "qwen2.5_math_7b":
        hf_config["max_position_embeddings"] = 32768  # as the file says
    (folder / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
    return load_config(CONFIGS / f"{name}.yaml", [f"model.path={folder}", *overrides])


def test_every_config_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(MACHINES) | TINY


@pytest.mark.parametrize("name", MACHINES)
def test_a_config_fits_the_machines_in_its_header(name: str, tmp_path: Path) -> None:
    config = load(name, tmp_path)
    assert config.run.name == name
    arch = read_architecture(config)
    check_compatibility(config, arch)
    for nodes, gpus in MACHINES[name][1]:
        check_layout(config, arch, nodes * gpus)
        plan = estimate_memory(config, nodes * gpus, NodeSpec(gpus_per_node=gpus))
        assert not list(plan.problems())
        assert 80.0 - max(map(plan.num_bytes, PHASES)) / GIB > 5.0  # docs/plan.md
        checkpoint_gib = plan.disk[-1].num_bytes / GIB
        kept_and_written = (config.checkpoint.keep + 1) * checkpoint_gib
        assert 1.0 < config.preflight.min_free_disk_gib / kept_and_written < 1.3
    largest = MACHINES[name][1][-1] if name != "qwen3_30b_a3b" else (2, 8)
    assert config.run.processes == largest[0] * largest[1]


@pytest.mark.parametrize("name", MACHINES)
def test_a_config_uses_the_prepared_data_and_a_local_model(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.model.path == f"models/{MACHINES[name][0]}"
    paths = [
        source.path
        for source in (*config.data.train, *config.evaluation.sets)
        if isinstance(source, FileSource)
    ]
    assert paths == ["data/dapo_math.parquet", "data/aime_2024.parquet"]
    assert config.overlong.max_tokens == config.rollout.max_response_tokens


def test_the_small_model_fits_the_gpus_in_its_header(tmp_path: Path) -> None:
    """The header of the file states which GPUs are large enough."""
    config = load("qwen3_0.6b_one_gpu", tmp_path)
    assert estimate_memory(config, 1, NodeSpec(gpus_per_node=1, gpu_memory_gib=39.5)).fits()
    assert not estimate_memory(config, 1, NodeSpec(gpus_per_node=1, gpu_memory_gib=20.0)).fits()
    keys = ("engine.memory_fraction=0.4", "train.max_tokens_per_microbatch=4096")
    config = load("qwen3_0.6b_one_gpu", tmp_path, *keys)
    assert estimate_memory(config, 1, NodeSpec(gpus_per_node=1, gpu_memory_gib=23.5)).fits()


def test_qwen2_5_math_7b_needs_an_edited_config_json(tmp_path: Path) -> None:
    from dapo_megatron.types import ConfigError

    config = load("qwen2.5_math_7b", tmp_path)
    hf_config = PUBLISHED["Qwen2.5-Math-7B"][1]
    (tmp_path / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        check_layout(config, read_architecture(config), 32)


PAPER: dict[str, Any] = {
    # arXiv 2503.14476, section 4.1. Values that it does not state are from the authors' scripts.
    "rollout.prompts_per_step": 512,
    "rollout.samples_per_prompt": 16,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.max_prompt_tokens": 2048,
    "rollout.max_response_tokens": 20480,
    "rollout.dynamic_sampling": True,
    "rollout.on_policy": True,
    "rollout.max_prompts_per_step": 10 * 1536,
    "overlong.max_tokens": 20480,
    "overlong.buffer_tokens": 4096,
    "overlong.penalty": True,
    "overlong.filter": False,
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.dual_clip": 10.0,
    "loss.aggregation": "token",
    "loss.tis_cap": None,
    "loss.advantage_eps": 1e-6,
    "optimizer.lr": 1e-6,
    "optimizer.warmup_rollout_steps": 20,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.clip_grad": 1.0,
    "train.updates_per_step": 16,
    "train.rollout_steps": 5280 // 16,
    "evaluation.every": 5,
    "evaluation.samples": 32,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 0.7,
    "checkpoint.every": 5,
    "engine.tensor_parallel": 4,
    "engine.memory_fraction": 0.8,
    "engine.max_sequences": 1024,
    "engine.max_batched_tokens": 22528,
}


def test_the_32b_config_has_the_numbers_of_the_paper() -> None:
    config = load_config(CONFIGS / "qwen2.5_32b_dapo.yaml")
    assert {key: attrgetter(key)(config) for key in PAPER} == PAPER
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    assert sequences / config.train.updates_per_step == 512  # sequences of a mini-batch


def test_the_estimated_step_time_is_near_that_of_the_papers_run(tmp_path: Path) -> None:
    """230 rollout steps in 5 days on 128 A800 (verl issue 795): 31 minutes each, evaluations
    included. Responses of its first 230 steps have 2,400 tokens on the mean (figure 7a). It sampled
    without CUDA graphs."""
    keys = ("policy.recompute=full", "engine.enforce_eager=true")
    config = load("qwen2.5_32b_dapo", tmp_path, *keys)
    speed = estimate_speed(
        estimate_memory(config, 128), Assumptions(gpu="A800", response_tokens=2400.0)
    )
    assert 0.5 < speed.step_seconds / (5 * 86400 / 230) < 1.5
