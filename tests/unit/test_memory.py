"""The memory estimate against published parameter counts and figures worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dapo_megatron.config import Config
from dapo_megatron.memory import GIB, Estimate, Row, estimate
from dapo_megatron.policy import vocab_parallel
from tests.helpers.configs import tiny_config

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_8B = QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
}
QWEN3_30B_A3B = QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
QWEN3_8B_PARAMETERS = 8_190_735_360
QWEN3_30B_PARAMETERS = 30_532_122_624
"""Of the published checkpoints: bytes of their safetensors files over 2."""


def config_of(folder: Path, hf: dict[str, Any], **overrides: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    settings = {
        "model__path": folder,
        "policy__precision": "bfloat16",
        "policy__tensor_parallel": 1,
        "rollout__max_prompt_tokens": 2048,
        "rollout__max_response_tokens": 20480,
        "train__max_tokens_per_microbatch": 32768,
    }
    return tiny_config(**settings | overrides)


def row(of: Estimate, part: str) -> Row:
    [found] = [row for row in of.rows if row.part == part]
    return found


def test_one_gpu_holds_every_parameter(tmp_path: Path) -> None:
    for hf, count in ((QWEN3_8B, QWEN3_8B_PARAMETERS), (QWEN3_30B_A3B, QWEN3_30B_PARAMETERS)):
        found = estimate(config_of(tmp_path, hf), 1)
        assert row(found, "policy weights").size_bytes == 2 * count
        assert row(found, "engine weights").size_bytes == 2 * count
        assert row(found, "gradients").size_bytes == 4 * count
        assert row(found, "optimizer").size_bytes == 12 * count  # main weight and two moments
        assert row(found, "checkpoint").size_bytes == 14 * count


def test_data_parallel_ranks_share_the_optimizer_alone(tmp_path: Path) -> None:
    found = estimate(config_of(tmp_path, QWEN3_8B, policy__context_parallel=2), 8)
    assert row(found, "policy weights").size_bytes == 2 * QWEN3_8B_PARAMETERS
    assert row(found, "optimizer").size_bytes == 12 * QWEN3_8B_PARAMETERS // 8
    assert row(found, "checkpoint").size_bytes == (8 * 2 + 12) * QWEN3_8B_PARAMETERS


def test_experts_are_shared_out_over_their_own_ranks(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        QWEN3_30B_A3B,
        policy__tensor_parallel=4,
        policy__sequence_parallel=True,
        policy__expert_parallel=8,
    )
    found = estimate(config, 16)
    experts = 48 * 128 * 3 * 2048 * 768
    # Norms and routers are whole on every rank; what the ranks cut is at least a quarter.
    dense = row(found, "policy weights").size_bytes // 2 - experts // 8
    assert (QWEN3_30B_PARAMETERS - experts) / 4 < dense < (QWEN3_30B_PARAMETERS - experts) / 3.9
    # 4 copies of the rest, 2 of each expert.
    assert row(found, "optimizer").size_bytes == 12 * dense // 4 + 12 * experts // 8 // 2


def test_pipeline_shows_the_fullest_stage(tmp_path: Path) -> None:
    parts = {"policy__pipeline_parallel": 2, "engine__tensor_parallel": 1}
    found = estimate(config_of(tmp_path, QWEN3_8B, **parts), 2)
    # Both have 18 layers and 151936 rows; the first holds two micro-batches, which is more than
    # what the last one's head takes.
    layers = row(found, "activations").how
    assert "36 layers" in layers
    assert row(found, "policy weights").size_bytes < 2 * (QWEN3_8B_PARAMETERS / 2 + 1)
    assert row(found, "checkpoint").size_bytes == 14 * QWEN3_8B_PARAMETERS


def test_cache_holds_what_the_weights_leave(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN3_8B, engine__tensor_parallel=2, engine__memory_fraction=0.5)
    found = estimate(config, 2, gpu_memory_gib=80.0)
    per_token = 36 * 2 * 4 * 128 * 2
    cache = row(found, "KV cache").size_bytes
    assert cache == 40 * GIB - row(found, "engine weights").size_bytes
    assert found.sequences == cache // (per_token * 22528)


def test_recomputing_leaves_the_inputs(tmp_path: Path) -> None:
    whole, inputs = (
        row(estimate(config_of(tmp_path, QWEN3_8B, policy__recompute=kind), 1), "activations")
        for kind in ("none", "full")
    )
    # Korthikanti et al., section 5: 2sbh per layer; and one layer's own.
    assert inputs.size_bytes == 36 * 2 * 32768 * 4096 + whole.size_bytes // 36


def test_sequence_parallelism_cuts_everything(tmp_path: Path) -> None:
    sizes = [
        row(estimate(config_of(tmp_path, QWEN3_8B, **keys), 4), "activations").size_bytes
        for keys in (
            {},
            {"policy__tensor_parallel": 4},
            {"policy__tensor_parallel": 4, "policy__sequence_parallel": True},
        )
    ]
    assert sizes[2] == sizes[0] // 4
    assert sizes[0] / 4 < sizes[1] < sizes[0]


def test_what_does_not_fit_is_said_with_its_key(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    found = estimate(config_of(tmp_path, QWEN3_8B), 1)
    found.render(console)
    assert {"training takes", "generating takes"} <= {
        " ".join(problem.split()[:2]) for problem in found.problems()
    }
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "engine.memory_fraction" in text and "policy.recompute=full" in text
    fits = estimate(
        config_of(
            tmp_path,
            QWEN3_8B,
            policy__tensor_parallel=8,
            policy__sequence_parallel=True,
            policy__recompute="full",
        ),
        16,
    )
    assert not list(fits.problems())


def test_tiny_cpu_is_tiny() -> None:
    assert estimate(tiny_config(), 2).training_gib < 1.5


@pytest.mark.parametrize("name", ["TILE_BYTES", "MIN_TILE_ENTRIES"])
def test_tiles_are_those_of_the_policy(name: str) -> None:
    from dapo_megatron import memory

    assert getattr(memory, name) == getattr(vocab_parallel, name)
