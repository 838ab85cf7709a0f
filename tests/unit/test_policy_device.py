"""Settings of the policy that only a GPU notices."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from dapo_megatron.policy import device
from dapo_megatron.policy.model import _pipeline
from tests.helpers.configs import tiny_config


def test_claiming_a_gpu_limits_its_connections_and_keeps_partial_sums_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matmul = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    claimed: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    bound: list[list[str]] = []
    monkeypatch.setattr(device, "bind_near", bound.append)
    monkeypatch.delenv("NVTE_TORCH_COMPILE", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    settings: list[str] = []
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch knows it
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    device.claim(3)
    assert claimed == [3] and bound == [["4"]] and settings == ["expandable_segments:True"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["NVTE_TORCH_COMPILE"] == "0"  # read when Transformer Engine is imported
    assert matmul.allow_bf16_reduced_precision_reduction is False
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.delenv("NVTE_TORCH_COMPILE")


@pytest.mark.parametrize("virtual", [None, 2])
def test_pipeline_stages_do_not_wait_for_the_device(virtual: int | None) -> None:
    policy = tiny_config(policy__pipeline_parallel=2).policy
    settings = _pipeline(policy.model_copy(update={"virtual_pipeline_parallel": virtual}))
    assert settings["batch_p2p_sync"] is False
    # Interleaved stages may still be sending an output when Megatron would free it.
    assert settings["deallocate_pipeline_outputs"] is (virtual is None)
