"""Choice of the policy's layers (Transformer Engine's or Megatron's own), and how it is logged."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from dapo_megatron.config import PolicyConfig
from dapo_megatron.config.computing import Kernels, kernels_for
from dapo_megatron.model import Architecture
from dapo_megatron.policy.device import has_cuda


def kernels(config: PolicyConfig, arch: Architecture) -> Kernels:
    """Resolve policy.kernels for this machine and model.

    plan/compatibility has already refused combinations that cannot run.
    """
    installed = find_spec("transformer_engine") is not None
    chosen = kernels_for(
        config, has_gpu=has_cuda(), is_installed=installed, only_local=arch.only_local
    )
    assert chosen == "transformer_engine" or not config.fp8, "see plan/compatibility"
    return chosen


def kernels_chosen(config: PolicyConfig, arch: Architecture) -> dict[str, str]:
    """Return how the policy computes, for the header of a run and its parameters in MLflow.

    Keys are config keys of policy, values are the resolved settings.
    """
    if kernels(config, arch) == "local":
        facts = {"kernels": f"local (Megatron-core {_version('megatron-core')})"}
        return facts | {"rope": "plain", "fp8": "none"}
    facts = {"kernels": f"transformer_engine {_version('transformer-engine')}"}
    facts["rope"] = "fused" if config.fused_rope else "plain"
    facts["fp8"] = "none"
    if fp8 := config.fp8:
        ends = f"{fp8.bf16_first_layers} first and {fp8.bf16_last_layers} last layers in bfloat16"
        weights = "weights only in FP8" if fp8.parameters else "weights in bfloat16"
        facts["fp8"] = f"{fp8.recipe}, {ends}, {weights}"
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # built without its metadata
        return "of unknown version"
