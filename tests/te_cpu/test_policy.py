"""Transformer Engine's layers compute what Megatron's own do, in every layout and family:
log-probs, gradients, their norm, and an update.

Transformer Engine's Python is the published one. Its compiled kernels are replaced by torch
(extension.py), so this shows that layers are put together, sharded and accumulated as they must be.
It shows nothing of the kernels themselves, of streams, and of speed.
"""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.model import FAMILIES as RULES
from tests.helpers.models import FAMILIES, make_random_model
from tests.helpers.ranks import run_ranks
from tests.te_cpu.ranks import compute
from tests.te_cpu.stand_in import FOLDER

pytestmark = pytest.mark.skipif(
    not (FOLDER / ".ready").exists(), reason="needs Transformer Engine's wheel: make test-te-cpu"
)
TP = {"policy__tensor_parallel": 2, "policy__sequence_parallel": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    **{name: (1, name, {}) for name in sorted(FAMILIES) if not RULES[name].has_latent},
    "padded rows": (1, "qwen3", {"train__packing": False}),
    "TP": (2, "qwen3", TP),
    "TP, bias": (2, "qwen2", TP),
    "CP": (2, "qwen3", {"policy__context_parallel": 2}),
    "PP, recompute": (
        2,
        "qwen3",
        {"policy__pipeline_parallel": 2, "policy__recompute": "selective"},
    ),
    "EP": (2, "qwen3_moe", {"policy__expert_parallel": 2}),
    "TP, EP": (2, "qwen3_moe", {**TP, "policy__expert_parallel": 2}),
    "TP, EP, shared experts": (2, "glm4_moe", {**TP, "policy__expert_parallel": 2}),
}
"""Case -> (number of ranks, family, overrides)."""
BOUND = 5e-6
AFTER_AN_UPDATE = 2e-4
"""AdamW's first step divides gradients by their size, also those that are rounding errors."""


def results(folder: Path, num_ranks: int, names: list[str]) -> dict[str, Any]:
    """Return the results of rank 0 for these cases, by kernels and case."""
    cases = {}
    for name in names:
        _, family, overrides = CASES[name]
        if not (folder / family).exists():
            make_random_model(family, folder / family)
        cases[name] = (folder / family, overrides)
    return {
        "local": run_ranks(compute, num_ranks, num_ranks, "local", cases)[0],
        "transformer_engine": run_ranks(
            compute, num_ranks, num_ranks, "transformer_engine", cases, context=get_context("spawn")
        )[0],
    }


def check(by_kernels: dict[str, Any], names: list[str]) -> None:
    for name in names:
        local, fused = by_kernels["local"][name], by_kernels["transformer_engine"][name]
        assert fused["calls"]["fused_attn_bwd"] and fused["calls"]["rmsnorm_bwd"], name
        for field in ("before", "entropy", "after"):
            difference = float((local[field] - fused[field]).abs().max())
            bound = AFTER_AN_UPDATE if field == "after" else BOUND
            assert difference < bound, (name, field, difference)
        assert abs(local["grad_norm"] / fused["grad_norm"] - 1) < BOUND, (
            name,
            local["grad_norm"],
            fused["grad_norm"],
        )
        assert local["gradients"].keys() == fused["gradients"].keys()
        for key, gradient in local["gradients"].items():
            difference = float((gradient - fused["gradients"][key]).norm())
            assert difference <= BOUND * float(gradient.norm()), (name, key, difference)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transformer_engine_computes_what_megatron_computes(num_ranks: int, tmp_path: Path) -> None:
    names = [name for name, (number, _, _) in CASES.items() if number == num_ranks]
    check(results(tmp_path, num_ranks, names), names)
