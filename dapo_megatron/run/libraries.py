"""Import the heavy libraries, on all ranks at the same time."""

from __future__ import annotations

from importlib import import_module

from dapo_megatron.cluster.imports import quick_imports
from dapo_megatron.cluster.ranks import Ranks


def import_libraries(ranks: Ranks, *, has_engine: bool) -> None:
    """Import Megatron, transformers and vLLM.

    Otherwise each library is imported at its first use, sometimes on rank 0 while other ranks wait.
    """
    from dapo_megatron.engine import device

    device.prepare_environment((ranks.engine or ranks).rank, ranks.local_rank)
    with quick_imports():
        if ranks.policy is not None:
            import_module("dapo_megatron.policy.policy")
        import_module("transformers.models.auto.auto_factory")
        if has_engine and ranks.engine is not None:
            device.import_vllm()
