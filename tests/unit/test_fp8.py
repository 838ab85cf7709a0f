"""FP8 settings for Megatron, and sync, checkpoints and offload of FP8 parameters.

tests/gpu_stack/test_te_meta.py tests the same with Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import ChunkPlace, architecture, layout_of
from dapo_megatron.policy.shards import shards_of
from tests.helpers.published import PUBLISHED

PLACE = ChunkPlace(0, 2, first_layer=0, num_layers=2, has_embedding=True, has_head=True)


def policy(**fp8: Any) -> PolicyConfig:
    return PolicyConfig(precision="bfloat16", fp8=fp8 or None)


class FakeQuantized(Tensor):
    """Stand-in for a Transformer Engine tensor: bfloat16 outside, 255 steps of one scale inside,
    and a transposed copy. Only `dequantize` reads it and only `copy_` writes it."""

    codes: Tensor
    scale: Tensor
    transposed: Tensor | None
    exact: Tensor | None

    @staticmethod
    def __new__(cls, value: Tensor) -> FakeQuantized:
        made: FakeQuantized = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=torch.bfloat16
        )
        made.become(value)
        made.exact = value.bfloat16()
        return made

    def become(self, value: Tensor) -> None:
        self.scale = value.abs().max() / 127
        self.codes = (value / self.scale).round()
        self.transposed = self.codes.T.contiguous()

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return (self.codes * self.scale).bfloat16()

    def copy_(self, value: Tensor) -> None:  # type: ignore[override]
        self.become(value.float())

    def get_high_precision_init_val(self) -> Tensor | None:
        return self.exact

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage and not columnwise_usage
        self.transposed = None

    def get_metadata(self) -> dict[str, Any]:
        return {"data": self.codes, "scale": self.scale, "more": self.transposed, "name": "e4m3"}

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{func} reads a quantized tensor as if it were a plain one")


def test_shards_of_a_quantized_parameter_are_its_dequantized_values() -> None:
    published = next(hf for _, hf in PUBLISHED.values() if hf["model_type"] == "qwen3")
    sizes = {"hidden_size": 32, "head_dim": 4, "vocab_size": 10, "intermediate_size": 12}
    arch = architecture(published | sizes)
    generator = torch.Generator().manual_seed(0)
    params: dict[str, Tensor] = {
        name: torch.randn(local_parameter.shape, generator=generator).bfloat16()
        for name, local_parameter in layout_of(arch, PLACE).items()
    }
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    exact = params[name].float()
    quantized = FakeQuantized(exact)
    plain = {shard.tensor_slice: shard for shard in shards_of(params, arch, PLACE)}
    mixed = shards_of(params | {name: quantized}, arch, PLACE)
    rounded = [shard for shard in mixed if shard.view is quantized]
    assert len(rounded) == 3 * arch.num_kv_heads // PLACE.tp_size

    def largest_difference() -> float:
        # Shards are read again each time, because the parameter changes.
        assert all(shard.read().shape == shard.tensor_slice.region.shape for shard in rounded)
        assert {shard.read().dtype for shard in rounded} == {torch.bfloat16}
        differences = [
            (shard.read() - plain[shard.tensor_slice].read()).abs().max() for shard in rounded
        ]
        return float(max(differences))

    assert 0.0 < largest_difference() < 0.02
    params[name].neg_()
    assert largest_difference() > 1.0
    quantized.become(-exact)
    assert largest_difference() < 0.02
    with pytest.raises(TypeError, match=r"k_proj.*slice by slice"):
        next(shard for shard in rounded if "k_proj" in shard.tensor_slice.name).write(exact)


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """policy/fp8.py, with FakeQuantized instead of Transformer Engine's classes."""
    from dapo_megatron.policy import fp8 as module

    monkeypatch.setattr(
        module, "is_quantized", lambda parameter: isinstance(parameter, FakeQuantized)
    )
    return module


def test_values_are_written_unrounded_and_then_quantized(fp8: Any) -> None:
    plain, quantized = torch.randn(4, 3), FakeQuantized(torch.randn(4, 3))
    values = fp8.HighPrecisionValues()
    assert values(plain) is plain
    # Loading a checkpoint writes into the exact values that the optimizer will start from.
    assert values(quantized) is values(quantized) is quantized.exact
    read = torch.randn(4, 3).bfloat16()
    values(quantized).copy_(read)
    values.round()
    step = float(quantized.scale)
    assert (quantized.dequantize() - read).abs().max() <= 2 * step
    # After the optimizer took them, values start from the dequantized parameter.
    quantized.exact = None
    values = fp8.HighPrecisionValues()
    assert torch.equal(values(quantized), quantized.dequantize())
    assert values(quantized) is values(quantized)
    values(quantized).mul_(-3)
    before = quantized.dequantize()
    values.round()
    assert (quantized.dequantize() + 3 * before).abs().max() <= 0.02 * 3 * float(before.abs().max())


def test_delayed_scales_are_calibrated_without_gradients_before_the_first_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from dapo_megatron.policy import fp8 as module
    from dapo_megatron.policy.step import Runner

    calls_of_pass: list[str] = []

    class RecordingRunner(Runner):
        def _run(self, *_: Any, **keys: Any) -> list[Any]:
            assert keys["forward_only"] and not torch.is_grad_enabled()
            calls_of_pass.append("pass")
            return []

    monkeypatch.setattr(module, "update_scales", lambda: calls_of_pass.append("scales"))

    def passes(recipe: str | None) -> list[list[str]]:
        settings = SimpleNamespace(num_moe_experts=None, fp8=recipe and "hybrid", fp8_recipe=recipe)
        runner = RecordingRunner([SimpleNamespace(config=settings)], temperature=1.0, vocab=8)
        calls = []
        for _ in range(2):
            calls_of_pass.clear()
            runner.logprobs([])
            calls.append(list(calls_of_pass))
        return calls

    assert passes("delayed") == [["pass", "scales", "pass", "scales", "pass"], ["pass"]]
    assert passes("tensorwise") == passes(None) == [["pass"], ["pass"]]


RECIPES = [
    {"recipe": "delayed"},
    {"recipe": "current", "bf16_first_layers": 1, "bf16_last_layers": 2},
    {"recipe": "blockwise", "parameters": True},
]


@pytest.mark.parametrize("fp8", RECIPES, ids=lambda fp8: fp8["recipe"])
def test_megatron_accepts_the_settings(fp8: dict[str, Any]) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dapo_megatron.policy.fp8 import ddp_settings, model_settings, optimizer_settings

    config = policy(**fp8)
    model = TransformerConfig(
        num_layers=6, hidden_size=32, num_attention_heads=2, **model_settings(config)
    )
    in_bfloat16 = [layer for layer in range(6) if is_first_last_bf16_layer(model, layer)]
    assert in_bfloat16 == ([0, 4, 5] if "bf16_first_layers" in fp8 else [])
    assert model.fp8 == ("e4m3" if fp8["recipe"] == "blockwise" else "hybrid")
    has_parameters = fp8.get("parameters", False)
    assert DistributedDataParallelConfig(**ddp_settings(config)).fp8_param_gather == has_parameters
    optimizer = OptimizerConfig(optimizer="adam", **optimizer_settings(config))
    assert optimizer.fp8_recipe == (model.fp8_recipe if has_parameters else None)
