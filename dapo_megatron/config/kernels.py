"""What `policy.kernels: auto` comes to, for those who compute, check and plan alike."""

from __future__ import annotations

from typing import Literal

from dapo_megatron.config.computing import PolicyConfig

Kernels = Literal["transformer_engine", "local"]


def kernels_for(
    config: PolicyConfig, *, has_gpu: bool, is_installed: bool, is_latent: bool
) -> Kernels:
    """Whose layers are used; what is asked for by name is not judged.

    `is_installed`: Transformer Engine; its fused attention has no other precision than bfloat16.
    `is_latent`: the model has multi-head latent attention, which is built of Megatron's own layers
    alone.
    """
    if config.kernels != "auto":
        return config.kernels
    usable = has_gpu and is_installed and not is_latent
    return "transformer_engine" if usable and config.precision == "bfloat16" else "local"
