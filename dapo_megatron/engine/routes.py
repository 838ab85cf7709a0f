"""Experts that an engine's routers choose for each token, for router replay.

They are kept like keys and values: by slot of the KV cache. So a cached prefix has the routes that
were computed with its keys and values, and chunked prefills and interrupts need no code of their
own. When a request is preempted, its routes are copied before its blocks are used again.

vLLM 0.32 can return routes itself (enable_return_routed_experts), but not on CPU and not for
interrupted requests. With tensor parallelism under the external launcher only the first rank's
worker has them, and the schedulers of the other ranks fail.

This reads internals of vLLM 0.32: `BaseRouter.set_capture_fn`, the slot mapping of the forward
context, and the scheduler's block ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dapo_megatron.model import Architecture
from dapo_megatron.types import ConfigError, DapoError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm import LLM


class RouteCapture:
    """Routes of the tokens in the KV cache of one engine, on the rank that reads them."""

    def __init__(self, arch: Architecture) -> None:
        self._columns = {layer: column for column, layer in enumerate(arch.expert_layers)}
        self._topk = arch.experts_per_token
        self._dtype = getattr(torch, arch.route_dtype)
        self._routes = torch.empty(0)
        """[slots + 1, layers, k]. The last row takes the padding of a batch, whose slot is -1."""
        self._block_size = 0
        self._scheduler: Any = None
        self._copies: dict[str, Tensor] = {}
        """Routes of requests whose blocks were freed, by vLLM's request id, [slots, layers, k]."""

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Bind to the engine that is constructed inside this context: after its KV cache has a
        size, and before CUDA graphs are captured, because they contain the capture of routes.

        Raises ConfigError if a kernel of the engine chooses the experts itself.
        """
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        originals = {
            runner: runner.initialize_kv_cache for runner in (GPUModelRunner, GPUModelRunnerV2)
        }

        def initialize(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            original = next(originals[kind] for kind in originals if isinstance(runner, kind))
            original(runner, kv_cache_config, *args, **kwargs)
            self._bind(runner.get_model(), kv_cache_config, runner.device)

        for kind in originals:
            kind.initialize_kv_cache = initialize
        try:
            yield
        finally:
            for kind, original in originals.items():
                kind.initialize_kv_cache = original

    def _bind(self, model: torch.nn.Module, kv_cache_config: Any, device: torch.device) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        num_slots = kv_cache_config.num_blocks * self._block_size
        shape = (num_slots + 1, len(self._columns), self._topk)
        # The policy refuses routes that were never captured: k times the same expert.
        unknown = torch.iinfo(self._dtype).max
        self._routes = torch.full(shape, unknown, dtype=self._dtype, device=device)
        columns = dict(self._columns)
        for module in model.modules():
            if isinstance(module, MoERunner):
                if module._quant_method.is_monolithic:
                    raise ConfigError(
                        "policy.router_replay: engine needs an expert kernel that gets its experts "
                        f"from vLLM's router; {type(module._quant_method).__name__} chooses them "
                        "itself. Set it to policy or off, or change engine.quantization"
                    )
                column = columns.pop(module.layer_id)
                module.router.set_capture_fn(partial(self._capture, column))
        assert not columns, f"no router in layers {sorted(columns)}"

    def _capture(self, column: int, experts_Tk: Tensor) -> None:
        """Store the experts of the tokens of one forward pass in one layer."""
        from vllm.forward_context import get_forward_context

        slots = next(iter(get_forward_context().slot_mapping.values()), None)
        if slots is not None:  # else a profiling run, without a KV cache
            self._routes[slots, column] = experts_Tk.to(self._dtype)

    def follow(self, llm: LLM) -> None:
        """Follow the requests of the engine that was constructed."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        free = scheduler._free_request_blocks

        def copy_and_free(request: Any) -> None:
            # Of a finished request, or of one that is preempted. Its blocks may be overwritten in
            # the next forward pass. On a GPU the copy is behind the pass in flight.
            rows = self._rows(request.request_id)
            if len(rows):
                self._copies[request.request_id] = rows
            free(request)

        self._scheduler = scheduler
        scheduler._free_request_blocks = copy_and_free

    def read(self, request_id: str, num_tokens: int) -> NDArray[np.generic]:
        """Return the routes of the first tokens of a request, flattened [tokens, layers, k].

        `request_id` is vLLM's. The request is in flight, or finished in the last step. Raises
        DapoError if fewer tokens were computed.
        """
        request = self._scheduler.requests.get(request_id)
        if request is not None and request.num_computed_tokens >= num_tokens:
            rows = self._rows(request_id)
        else:  # finished, or preempted and not computed again yet
            rows = self._copies.pop(request_id, self._routes[:0])
        if len(rows) < num_tokens:
            raise DapoError(
                f"request {request_id}: the engine computed the routes of {len(rows)} tokens, and "
                f"{num_tokens} are needed"
            )
        return rows[:num_tokens].flatten().cpu().numpy()

    def forget(self) -> None:
        """Drop what is kept. No request is in flight."""
        self._copies.clear()

    def _rows(self, request_id: str) -> Tensor:
        """Return a copy of the routes in the blocks of a request, [slots, layers, k]."""
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        by_block = self._routes[:-1].unflatten(0, (-1, self._block_size))
        indices = torch.tensor(blocks, dtype=torch.int64, device=self._routes.device)
        return by_block[indices].flatten(0, 1)
