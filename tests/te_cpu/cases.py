"""Models, layouts and settings in which Transformer Engine's layers are compared."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.te_cpu.ranks import compute
from tests.te_cpu.stand_in import FOLDER

needs_wheel = pytest.mark.skipif(
    not (FOLDER / ".ready").exists(), reason="needs Transformer Engine's wheel: make test-te-cpu"
)
TP = {"policy__tensor_parallel": 2, "policy__sequence_parallel": True}
EP = {"policy__expert_parallel": 2}

Case = tuple[Path, dict[str, Any]]
"""Folder of a model, and overrides of the config."""


def make_model(folder: Path, family: str, *, for_fp8: bool = False) -> Path:
    """Write a random model, once. Sizes for FP8 have several blocks of 128, and the embedding is
    multiplied by 128: the layers then add little to a large residual stream, so that the rounding
    of one layer hardly changes the inputs of the next."""
    path = folder / f"{family}{'_fp8' if for_fp8 else ''}"
    if path.exists():
        return path
    sizes = {"hidden_size": 256, "intermediate_size": 512} if for_fp8 else {}
    experts = {"moe_intermediate_size": 128} if for_fp8 and family.endswith("moe") else {}
    make_random_model(family, path, **sizes, **experts)
    if for_fp8:
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= 128
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def run_local(num_ranks: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Return the results of rank 0 with Megatron's own layers."""
    first: dict[str, Any] = run_ranks(compute, num_ranks, num_ranks, "local", cases)[0]
    return first


def run_fused(num_ranks: int, cases: dict[str, Case]) -> list[dict[str, Any]]:
    """Return the results of all ranks with Transformer Engine's layers."""
    kernels, spawn = "transformer_engine", get_context("spawn")
    return run_ranks(compute, num_ranks, num_ranks, kernels, cases, context=spawn)
