"""Replacements for CUDA functions of Megatron-core on machines without a GPU."""

from __future__ import annotations

import pytest
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer

from dapo_megatron.policy.device import megatron_device


def _needs_a_gpu(*_: object) -> None:
    raise RuntimeError("CUDA driver version is insufficient")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (clip_grads, "l2_norm_impl"),
        (clip_grads, "multi_tensor_applier"),
        (clip_grads, "multi_tensor_scale_impl"),
        (optimizer, "multi_tensor_applier"),
        (optimizer, "multi_tensor_scale_impl"),
    ],
)
def test_gradient_norms_need_no_cuda_even_with_transformer_engine_installed(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Transformer Engine, Megatron-core binds these names to CUDA kernels at import."""
    monkeypatch.setattr(module, name, _needs_a_gpu)
    with megatron_device():
        assert getattr(module, name) in vars(utils).values()
    assert getattr(module, name) is _needs_a_gpu
