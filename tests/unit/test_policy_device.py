"""Replacements for CUDA functions of Megatron-core on machines without a GPU."""

from __future__ import annotations

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer

from dapo_megatron.policy.device import ALIGNMENT_BYTES, megatron_device, to_device


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


def test_one_transfer_keeps_values_shapes_and_dtypes() -> None:
    tensors = [
        torch.arange(6).view(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.tensor([0.1, float("nan")], dtype=torch.float64),
        torch.arange(2 * ALIGNMENT_BYTES, dtype=torch.int32)[::2],
    ]
    moved = to_device(tensors, torch.device("cpu"))
    for tensor, copy in zip(tensors, moved, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0, equal_nan=True)
        assert copy.is_contiguous()
        assert copy.storage_offset() * copy.element_size() % ALIGNMENT_BYTES == 0
    assert len({copy.untyped_storage().data_ptr() for copy in moved}) == 1
    assert to_device([], torch.device("cpu")) == []
