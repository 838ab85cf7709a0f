"""The bridge's table against the layers of the real Transformer Engine, on the meta device: names
and shapes of every parameter, in bfloat16 and with every kind of FP8. Nothing is computed, so it
needs no GPU; the package it needs (`make test-gpu-stack`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from dapo_megatron.config import PolicyConfig
from tests.helpers.meta import differences
from tests.helpers.models import FAMILIES
from tests.helpers.ranks import run_ranks
from tests.parity.test_families import small
from tests.parity.test_meta import published_cases

pytestmark = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="transformer_engine is not installed"
)

RECIPES: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "delayed": {"recipe": "delayed"},
    "current": {"recipe": "current", "bf16_first_layers": 1, "bf16_last_layers": 1},
    "blockwise": {"recipe": "blockwise"},
    "parameters": {"recipe": "blockwise", "parameters": True, "bf16_last_layers": 1},
}


def check(cases: dict[str, tuple[dict[str, Any], PolicyConfig]]) -> None:
    [results] = run_ranks(differences, 1, list(cases.values()), True)
    for case, found in zip(cases, results, strict=True):
        for rank, (wrong, num_parameters) in found.items():
            assert not wrong, (case, rank, wrong)
            assert num_parameters > 10


def test_published_sizes() -> None:
    # Latent attention runs in Megatron's own layers alone.
    check({name: case for name, case in published_cases().items() if "kv_lora_rank" not in case[0]})


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_family(recipe: str) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "whole": {},
        "cut": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    }
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    cases = {}
    for family in sorted(FAMILIES.keys() - {"deepseek_v3"}):
        for tied in (False, True):
            for name, layout in layouts.items():
                keys = {**layout, "precision": "bfloat16", "fp8": RECIPES[recipe]}
                policy = PolicyConfig(**keys, fused_rope=name == "cut")
                cases[f"{family} {tied=} {name}"] = (small(family, tied, **sizes), policy)
    check(cases)


def test_a_shard_of_transformer_engines_own_tensor_is_dequantised() -> None:
    import torch
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    from dapo_megatron.bridge.shards import Piece, QuantizedShard, Region, shard_of
    from dapo_megatron.policy.fp8 import is_quantized

    values = torch.tensor([[1.0, 1.5], [-2.0, 0.25], [448.0, 0.0]])
    tensor = Float8Tensor(
        shape=values.shape,
        dtype=torch.bfloat16,
        data=values.to(torch.float8_e4m3fn).view(torch.uint8),
        fp8_scale_inv=torch.tensor([0.5]),
        fp8_dtype=DType.kFloat8E4M3,
        quantizer=None,
        device=torch.device("cpu"),
    )
    parameter = torch.nn.Parameter(tensor)
    piece = Piece("a", (2, 2), torch.bfloat16, Region((0, 0), (2, 2)))
    shard = shard_of(piece, parameter, slice(1, 3))
    assert is_quantized(parameter) and isinstance(shard, QuantizedShard)
    read = shard.read()
    assert read.dtype == torch.bfloat16 and not is_quantized(read) and not read.requires_grad
    assert read.float().tolist() == (values[1:] * 0.5).tolist()
