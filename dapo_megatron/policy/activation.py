"""SwiGLU that keeps only its input for the backward pass.

Megatron-core 0.16.1 computes silu(gate) * (up + 0.0) with torch's operations. They keep five
numbers per column of the MLP: gate and up, silu(gate), up + 0.0, and the product, which is the next
layer's input. Here three are kept: the backward pass computes silu(gate) again. The roundings are
those of torch's operations, and so of HF and of vLLM's kernel. (Megatron's own fused SwiGLU rounds
once instead of twice.)

Shape letters: T tokens, F columns of the MLP on this rank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    """silu(gate_TF) * up_TF, times scale_T1 if there is one, for x = (gate, up) of [T, 2 F]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        product = _product(x)
        return product if scale is None else (product * scale).to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        (gradient,) = gradients
        scale_gradient = None
        if scale is not None:
            # The product was rounded before it was scaled in the (higher) precision of the scale.
            scaled = gradient.to(torch.promote_types(x.dtype, scale.dtype))
            scale_gradient = (scaled * _product(x)).sum(-1, keepdim=True).to(scale.dtype)
            gradient = (scaled * scale).to(x.dtype)
        gate, up = x.chunk(2, -1)
        x_gradient = torch.empty_like(x)
        gate_gradient, up_gradient = x_gradient.chunk(2, -1)
        torch.mul(gradient, silu(gate), out=up_gradient)
        torch.mul(gradient, up, out=gate_gradient)
        torch.ops.aten.silu_backward(gate_gradient, gate, grad_input=gate_gradient)
        return x_gradient, scale_gradient


def _product(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def swiglu(x: Tensor, bias: Tensor | None, *_: bool) -> Tensor:
    """Return silu(gate) * up for x = (gate, up). Stands in for Megatron's `bias_swiglu_impl`."""
    assert bias is None, "linear layers of this project's models have no bias before SwiGLU"
    return _SwiGLU.apply(x, None)  # type: ignore[no-any-return, no-untyped-call]


def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *_: bool) -> Tensor:
    """Return silu(gate) * up * weights, for an expert's share of each token. Stands in for
    Megatron's `weighted_bias_swiglu_impl`."""
    assert bias is None, "experts of this project's models have no bias"
    return _SwiGLU.apply(x, weights)  # type: ignore[no-any-return, no-untyped-call]


@cache
def use_in_megatron() -> None:
    """Make Megatron's layers, where `bias_activation_fusion` is on, compute SwiGLU here."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import experts, shared_experts

    mlp.bias_swiglu_impl = swiglu
    mlp.weighted_bias_swiglu_impl = weighted_swiglu
    experts.weighted_bias_swiglu_impl = weighted_swiglu
    shared_experts.bias_swiglu_impl = swiglu
