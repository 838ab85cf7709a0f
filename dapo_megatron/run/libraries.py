"""Import the heavy libraries, on all ranks at the same time."""

from __future__ import annotations

from importlib import import_module

from dapo_megatron.cluster.imports import disable_compiler, quick_imports


def import_libraries() -> None:
    """Import Megatron and transformers.

    Otherwise each library is imported at its first use, sometimes on rank 0 while other ranks wait.
    """
    import torch

    if not torch.cuda.is_available():
        disable_compiler()
    with quick_imports():
        import_module("dapo_megatron.policy.policy")
        import_module("transformers.models.auto.auto_factory")
