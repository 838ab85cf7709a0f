"""Experts that an engine's routers choose for each token, for router replay.

They are kept like keys and values: by slot of the KV cache. So a cached prefix has the routes that
were computed with its keys and values, and chunked prefills and interrupts need no code of their
own. When a request is preempted, its routes are copied before its blocks are used again.

vLLM 0.32 can return routes itself (enable_return_routed_experts), but not on CPU.

This reads internals of vLLM 0.32: `BaseRouter.set_capture_fn`, the slot mapping of the forward
context, and the scheduler's block ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.model import Architecture
from dapo_megatron.types import ConfigError, DapoError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm import LLM


ROUTES = "DAPO_MEGATRON_ROUTES"
"""Environment variable of a server's workers: layers with experts, experts per token, and dtype."""


class RouteCapture:
    """Routes of the tokens in the KV cache of one worker."""

    def __init__(self, layers: Sequence[int], topk: int, dtype: str) -> None:
        self._columns = {layer: column for column, layer in enumerate(layers)}
        self._topk = topk
        self._dtype = getattr(torch, dtype)
        self._routes = torch.empty(0)
        """[slots + 1, layers, k]. The last row takes the padding of a batch, whose slot is -1."""
        self._block_size = 0
        self._layer = ""
        """A layer with attention, whose slots are those of the routes."""
        self._reading: torch.cuda.Stream | None = None

    def bind(self, model: torch.nn.Module, kv_cache_config: Any, device: torch.device) -> None:
        """Capture the experts of `model`, whose KV cache has a size now. Call before CUDA graphs
        are captured, because they contain the capture of routes. Raises ConfigError if a kernel of
        the engine chooses the experts itself."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        group = next(filter(_is_attention, kv_cache_config.kv_cache_groups))
        self._layer = group.layer_names[0]
        self._block_size = group.kv_cache_spec.block_size
        num_slots = kv_cache_config.num_blocks * self._block_size
        shape = (num_slots + 1, len(self._columns), self._topk)
        # The policy refuses routes that were never captured: k times the same expert.
        unknown = torch.iinfo(self._dtype).max
        self._routes = torch.full(shape, unknown, dtype=self._dtype, device=device)
        if device.type == "cuda":
            self._reading = torch.cuda.Stream(device, priority=-1)
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

        slots = get_forward_context().slot_mapping.get(self._layer)
        if slots is not None:  # else a profiling run, without a KV cache
            self._routes[slots, column] = experts_Tk.to(self._dtype)

    def rows(self, blocks: Sequence[int], *, waits: bool) -> NDArray[np.generic]:
        """Return the routes in these blocks, [slots, layers, k]. With `waits` they include those of
        the pass that the GPU still computes. Without, a separate stream reads what was complete
        when the host got the tokens of the pass before."""
        with torch.cuda.stream(None if waits else self._reading):
            by_block = self._routes[:-1].unflatten(0, (-1, self._block_size))
            indices = torch.tensor(blocks, dtype=torch.int64, device=self._routes.device)
            return by_block[indices].flatten(0, 1).cpu().numpy()


def _is_attention(group: Any) -> bool:
    """Return whether layers that share blocks of the cache have attention, not states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return not isinstance(group.kv_cache_spec, MambaSpec)


def capture_routes() -> None:
    """Let model runners that are made in this process capture routes, if ROUTES is set."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def capturing(original: Callable[..., None]) -> Callable[..., None]:
        def initialize(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            original(runner, kv_cache_config, *args, **kwargs)
            if ROUTES in os.environ:
                runner.dapo_routes = RouteCapture(*json.loads(os.environ[ROUTES]))
                runner.dapo_routes.bind(runner.get_model(), kv_cache_config, runner.device)

        return initialize

    for kind in (GPUModelRunner, GPUModelRunnerV2):
        kind.initialize_kv_cache = capturing(kind.initialize_kv_cache)


class RouteReader:
    """Reader of the routes that an engine's first worker captures. Make it before the engine."""

    def __init__(self, arch: Architecture) -> None:
        layers = list(arch.expert_layers)
        os.environ[ROUTES] = json.dumps([layers, arch.experts_per_token, arch.route_dtype])
        self._empty = np.empty((0, len(layers), arch.experts_per_token), arch.route_dtype)
        self._copies: dict[str, NDArray[np.generic]] = {}
        """Routes of requests whose blocks were freed, by vLLM's request id, [slots, layers, k]."""

    def follow(self, llm: LLM) -> None:
        """Follow the requests of the engine that was constructed."""
        self._llm = llm
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        self._group = next(n for n, group in enumerate(groups) if _is_attention(group))
        free = self._scheduler._free_request_blocks

        def copy_and_free(request: Any) -> None:
            # Of a finished request, or of one that is preempted. Its blocks may be overwritten in
            # the next forward pass. The pass in flight, if there is one, may still compute tokens
            # of a preempted request, but none of a finished one that are needed.
            rows = self._rows(request.request_id, waits=not request.is_finished())
            if len(rows):
                self._copies[request.request_id] = rows
            free(request)

        self._scheduler._free_request_blocks = copy_and_free

    def read(self, request_id: str, num_tokens: int) -> NDArray[np.generic]:
        """Return the routes of the first tokens of a request, flattened [tokens, layers, k].

        `request_id` is vLLM's. The request is in flight, or finished in the last step. Raises
        DapoError if fewer tokens were computed.
        """
        request = self._scheduler.requests.get(request_id)
        if request is not None and request.num_computed_tokens >= num_tokens:
            rows = self._rows(request_id, waits=False)
        else:  # finished, or preempted and not computed again yet
            rows = self._copies.pop(request_id, self._empty)
        if len(rows) < num_tokens:
            raise DapoError(
                f"request {request_id}: the engine computed the routes of {len(rows)} tokens, and "
                f"{num_tokens} are needed"
            )
        return rows[:num_tokens].flatten()

    def forget(self) -> None:
        """Drop what is kept. No request is in flight."""
        self._copies.clear()

    def _rows(self, request_id: str, *, waits: bool) -> NDArray[np.generic]:
        """Return the routes in the blocks of a request."""
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request_id)[self._group]
        rows = self._llm.collective_rpc("read_routes", args=(blocks, waits))
        return cast("NDArray[np.generic]", rows[0])
