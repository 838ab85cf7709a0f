"""SwiGLU of the policy: equal to torch bit for bit, and it saves only its input for backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from dapo_megatron.policy.activation import swiglu, weighted_swiglu


def swiglu_by_torch(x: Tensor, scale: Tensor | None) -> Tensor:
    """Compute SwiGLU as Megatron-core does without fusion."""
    gate, up = x.chunk(2, -1)
    product = silu(gate) * (up + 0.0)
    return product if scale is None else (product * scale).to(product.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    num_tokens=st.integers(0, 5),
    columns=st.integers(1, 40),
    seed=st.integers(0, 100),
    is_scaled=st.booleans(),
)
def test_values_and_gradients_equal_torch_bit_for_bit(
    dtype: torch.dtype, num_tokens: int, columns: int, seed: int, is_scaled: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return (3 * torch.randn(shape, generator=generator)).to(of).requires_grad_()

    x = draw(num_tokens, 2 * columns)
    scale = draw(num_tokens, 1, of=torch.promote_types(dtype, torch.float32)) if is_scaled else None
    inputs = [x] if scale is None else [x, scale]
    expected = swiglu_by_torch(x, scale)
    actual = swiglu(x, None) if scale is None else weighted_swiglu(x, None, scale)
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype
    gradient = draw(*expected.shape).detach()
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad(actual, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        assert (
            torch.equal(actual_gradient, expected_gradient)
            and actual_gradient.dtype == expected_gradient.dtype
        )


def saved_bytes(function: object, *inputs: Tensor) -> int:
    """Return the bytes of distinct memory that a function saves for its backward pass."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)  # type: ignore[operator]
    assert result.requires_grad
    return sum(saved.values())


def test_only_the_input_is_saved_for_the_backward_pass() -> None:
    x = torch.randn(64, 2 * 32, requires_grad=True)
    scale = torch.rand(64, 1)
    assert saved_bytes(lambda x: swiglu(x, None), x) == x.nbytes
    assert saved_bytes(lambda x, scale: weighted_swiglu(x, None, scale), x, scale) == (
        x.nbytes + scale.nbytes
    )
    assert saved_bytes(lambda x: swiglu_by_torch(x, None), x) == 2 * x.nbytes
