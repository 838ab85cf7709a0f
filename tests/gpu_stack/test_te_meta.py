"""Compare `layout_of` with the layers of the real Transformer Engine on the meta device: names and
shapes of all parameters, in bfloat16 and with every FP8 recipe.

Nothing is computed, so no GPU is needed, but the package is (`make test-gpu-stack`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import FAMILIES as RULES
from dapo_megatron.model import architecture
from tests.helpers.meta import differences
from tests.helpers.models import FAMILIES
from tests.helpers.ranks import run_ranks
from tests.parity.test_families import published_cases, small

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
    for case, by_rank in zip(cases, results, strict=True):
        for rank, (mismatches, num_parameters, _) in by_rank.items():
            assert not mismatches, (case, rank, mismatches)
            assert num_parameters > 10


def test_names_and_shapes_are_those_of_transformer_engine_at_published_sizes() -> None:
    cases = published_cases().items()
    check({name: case for name, case in cases if not architecture(case[0]).only_local})


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_and_shapes_are_those_of_transformer_engine_in_every_family(recipe: str) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "whole": {},
        "cut": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
    }
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    cases = {}
    for family in (
        name for name in sorted(FAMILIES) if not (RULES[name].has_latent or RULES[name].has_delta)
    ):
        for tied in (False, True):
            for name, layout in layouts.items():
                keys = {**layout, "precision": "bfloat16", "fp8": RECIPES[recipe]}
                policy = PolicyConfig(**keys, fused_rope=name == "cut")
                cases[f"{family} {tied=} {name}"] = (small(family, tied, **sizes), policy)
    check(cases)


def test_a_shard_of_a_quantized_transformer_engine_tensor_is_dequantized() -> None:
    import torch
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    from dapo_megatron.policy.fp8 import is_quantized
    from dapo_megatron.policy.shards import QuantizedShard, shard_of
    from dapo_megatron.types import Region, TensorSlice

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
    tensor_slice = TensorSlice("a", (2, 2), torch.bfloat16, Region((0, 0), (2, 2)))
    shard = shard_of(tensor_slice, parameter, slice(1, 3))
    assert is_quantized(parameter) and isinstance(shard, QuantizedShard)
    read = shard.read()
    assert read.dtype == torch.bfloat16 and not is_quantized(read) and not read.requires_grad
    assert read.float().tolist() == (values[1:] * 0.5).tolist()


def blockwise(values: Any) -> Any:
    """Return a blockwise FP8 tensor of Transformer Engine, with the transposed copy that an update
    leaves."""
    import torch
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
    )

    number = DType.kFloat8E4M3
    return Float8BlockwiseQTensor(
        shape=values.shape,
        dtype=torch.bfloat16,
        rowwise_data=values.to(torch.float8_e4m3fn).view(torch.uint8),
        rowwise_scale_inv=torch.full((1, 4), 0.5),
        columnwise_data=values.T.to(torch.float8_e4m3fn).contiguous().view(torch.uint8),
        columnwise_scale_inv=torch.full((1, 4), 0.5),
        fp8_dtype=number,
        quantizer=Float8BlockQuantizer(fp8_dtype=number, rowwise=True, columnwise=True),
        is_2D_scaled=True,
        device=torch.device("cpu"),
    )


def test_offloading_frees_all_data_of_a_quantized_transformer_engine_tensor() -> None:
    from types import SimpleNamespace

    import torch
    from transformer_engine.pytorch.tensor.utils import replace_raw_data

    from dapo_megatron.policy import fp8
    from dapo_megatron.policy.offload import Offload

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(blockwise(torch.randn(128, 128)))
    buffer = torch.zeros(128 * 128 + 7, dtype=torch.uint8)
    replace_raw_data(model.weight, buffer[: 128 * 128].view(128, 128))  # as Megatron does
    expected = model.weight.dequantize()
    flat = SimpleNamespace(param_data=buffer, grad_data=torch.zeros(4))
    chunk = SimpleNamespace(buffers=[flat], expert_parallel_buffers=[], module=model)
    memory = Offload(["weights"], [chunk], SimpleNamespace(chained_optimizers=[]))
    fp8.drop_cached_weights([model])
    memory.offload()
    held = {
        key: tensor
        for key, tensor in model.weight.get_metadata().items()
        if torch.is_tensor(tensor)
    }
    assert held.keys() == {"rowwise_data", "rowwise_scale_inv"}
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held.values())
    memory.reload()
    assert torch.equal(model.weight.dequantize(), expected)


def test_delayed_scales_are_updated_from_amax_seen_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.quantization import (
        DelayedScalingRecipeState,
        FP8GlobalStateManager,
    )

    from dapo_megatron.policy.fp8 import update_scales

    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")  # the fused update runs only on GPUs
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, reduce_amax=False)
    state = DelayedScalingRecipeState(
        recipe, mode="forward", num_quantizers=2, device=torch.device("cpu")
    )
    meta = {"scaling_fwd": state, "recipe": recipe, "fp8_group": None}
    key = FP8GlobalStateManager.get_unique_autocast_key(recipe, None)
    FP8GlobalStateManager.quantization_state.autocast_arguments[key] = (recipe, None)
    with torch.no_grad():
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        state.amax_history[0] = torch.tensor([7.0, 0.5])  # maxima that the kernels record
        update_scales()
    assert state.scale.tolist() == [448 / 7.0, 448 / 0.5]
