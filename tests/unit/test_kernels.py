"""Whose layers are chosen, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from dapo_megatron.config import PolicyConfig
from dapo_megatron.policy import kernels as module
from dapo_megatron.policy.kernels import kernels, kernels_chosen
from dapo_megatron.types import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes this machine have a GPU or Transformer Engine."""

    def has(gpu: bool, installed: bool) -> None:
        monkeypatch.setattr(module, "has_cuda", lambda: gpu)
        monkeypatch.setattr(module, "find_spec", lambda _: object() if installed else None)

    return has


def policy(**keys: Any) -> PolicyConfig:
    return PolicyConfig(**{"precision": "bfloat16", **keys})


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_auto(machine: Any, gpu: bool, installed: bool, precision: str) -> None:
    machine(gpu, installed)
    fused = gpu and installed and precision == "bfloat16"
    assert kernels(policy(precision=precision)) == ("transformer_engine" if fused else "local")
    assert kernels(policy(precision=precision, kernels="local")) == "local"


@pytest.mark.parametrize(("gpu", "installed"), [(False, True), (True, False)])
def test_what_is_not_there_is_refused(machine: Any, gpu: bool, installed: bool) -> None:
    machine(gpu, installed)
    with pytest.raises(ConfigError, match=r"policy\.kernels: transformer_engine needs"):
        kernels(policy(kernels="transformer_engine"))
    with pytest.raises(ConfigError, match=r"policy\.fp8: needs Transformer Engine"):
        kernels(policy(fp8={"recipe": "current"}))


def test_what_is_logged(machine: Any) -> None:
    machine(True, True)
    said = kernels_chosen(policy(fp8={"recipe": "blockwise", "bf16_last_layers": 2}))
    assert said["kernels"].startswith("transformer_engine ")
    assert said["rope"] == "plain"
    assert said["fp8"] == ("blockwise, 0 first and 2 last layers in bfloat16, weights in bfloat16")
    machine(False, True)
    said = kernels_chosen(policy(fused_rope=True))
    assert said["kernels"].startswith("local (Megatron-core 0.")
    assert (said["rope"], said["fp8"]) == ("plain", "none")
