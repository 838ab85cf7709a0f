"""The choice between Megatron's local layers and Transformer Engine, and how it is logged."""

from __future__ import annotations

from typing import Any

import pytest

from dapo_megatron.config import PolicyConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.model import Architecture, architecture
from dapo_megatron.plan.compatibility import Machine, RunFacts
from dapo_megatron.plan.estimate import kernels_of
from dapo_megatron.policy import kernels as module
from dapo_megatron.policy.kernels import kernels
from tests.helpers.configs import TINY
from tests.helpers.published import PUBLISHED


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets whether this machine has a GPU and Transformer Engine."""

    def set_machine(gpu: bool, installed: bool) -> None:
        monkeypatch.setattr(module, "has_cuda", lambda: gpu)
        monkeypatch.setattr(module, "find_spec", lambda _: object() if installed else None)

    return set_machine


def model(family: str = "qwen3") -> Architecture:
    return architecture(next(hf for _, hf in PUBLISHED.values() if hf["model_type"] == family))


def policy(**keys: Any) -> PolicyConfig:
    return PolicyConfig(**{"precision": "bfloat16", **keys})


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("setting", ["auto", "local"])
def test_policy_plan_and_compatibility_agree(
    machine: Any, gpu: bool, family: str, setting: str
) -> None:
    machine(gpu, True)
    config = load_config(TINY, ["policy.precision=bfloat16", f"policy.kernels={setting}"])
    arch = model(family)
    chosen = kernels(config.policy, arch)
    assert kernels_of(config, arch, has_gpu=gpu) == chosen
    here = Machine((9, 0) if gpu else None, (13, 0), frozenset({"transformer_engine"}))
    assert RunFacts(config, arch, here).fused == (chosen == "transformer_engine")
    assert (chosen == "transformer_engine") == (gpu and setting == "auto" and family == "qwen3")
