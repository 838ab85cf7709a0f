"""The gated delta rule in chunks equals its recurrence, and gradients stay finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dapo_megatron.policy import delta
from dapo_megatron.policy.delta import causal_convolution, gated_delta_rule, rule_for


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, outputs = v.new_zeros(*v.shape[::2], k.shape[-1], v.shape[-1]), []
    for n in range(v.shape[1]):
        state = state * decay[:, n].exp()[..., None, None]
        read = torch.einsum("shkv,shk->shv", state, k[:, n])
        written = (v[:, n] - read) * beta[:, n, :, None]
        state = state + torch.einsum("shk,shv->shkv", k[:, n], written)
        outputs.append(torch.einsum("shkv,shk->shv", state, q[:, n]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 100.0])
def test_chunks_give_the_outputs_and_gradients_of_the_recurrence(
    length: int, strength: float
) -> None:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, length, 3, size, dtype=torch.float64) for size in (4, 4, 5))
    decay = -strength * torch.rand(2, length, 3, dtype=torch.float64)
    inputs = [q, k, v, decay, torch.rand(2, length, 3, dtype=torch.float64)]
    grads = []
    for rule in (gated_delta_rule, recurrence):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = rule(*leaves)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        grads.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for actual, expected in zip(*grads, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_the_convolution_sees_only_the_last_tokens() -> None:
    x = torch.randn(1, 9, 2, dtype=torch.float64)
    weight = torch.randn(2, 1, 4, dtype=torch.float64)
    out = causal_convolution(x, weight)
    for n in range(9):
        seen = x[0, max(n - 3, 0) : n + 1]
        assert torch.allclose(out[0, n], (seen * weight[:, 0, 4 - len(seen) :].T).sum(0))


def test_kernels_compute_only_what_they_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(*_: Tensor) -> Tensor:
        raise AssertionError("chunk_gated_delta_rule does not support float32")

    monkeypatch.setattr(delta, "fused_rule", lambda: kernels)
    assert rule_for(torch.bfloat16) is kernels
    assert rule_for(torch.float32) is rule_for(torch.float64) is gated_delta_rule
