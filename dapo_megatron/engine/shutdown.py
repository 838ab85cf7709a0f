"""Shutting down an engine in a process that goes on.

vLLM's own cleanup ends with destroying every process group, which engine/device.py prevents. Here
only the groups that vLLM created are destroyed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM


def shut_down(llm: LLM) -> None:
    """Stop vLLM's threads, and release its workers and process groups. Collective over all ranks.

    Memory is free once nothing refers to `llm` any more.
    """
    from vllm.distributed import parallel_state

    llm.llm_engine.engine_core.shutdown()
    llm.llm_engine.renderer.shutdown()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._INNER_DP_WORLD = parallel_state._NODE_COUNT = None
