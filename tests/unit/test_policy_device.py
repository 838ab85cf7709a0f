"""What stands in for CUDA in Megatron-core where there is no GPU."""

from __future__ import annotations

import pytest
import torch
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
def test_norms_need_no_cuda_where_transformer_engine_is_installed(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Transformer Engine, Megatron-core binds these names to CUDA kernels at import."""
    monkeypatch.setattr(module, name, _needs_a_gpu)
    with megatron_device():
        assert getattr(module, name) in vars(utils).values()
    assert getattr(module, name) is _needs_a_gpu


def test_the_norm_of_gradients_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("l2_norm_impl", "multi_tensor_applier", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, _needs_a_gpu)
    with megatron_device():
        norm = clip_grads.get_grad_norm_fp32([torch.full((4,), 3.0), torch.full((7,), 2.0)])
    assert float(norm) == pytest.approx(8.0)
