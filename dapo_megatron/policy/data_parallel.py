"""Data parallelism: reduction of gradients during the backward pass, gathers of updated weights.

Megatron's wrapper around each chunk of the model reduces the gradients. A rank's optimizer updates
its part of every buffer. Megatron would gather a buffer when the forward pass first needs it. Here
all gathers start right after the update, first layers first. Code that reads weights must call
`finish_gathers` first. A forward pass waits module by module, in Megatron's hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from dapo_megatron.config import PolicyConfig
from dapo_megatron.policy import fp8
from dapo_megatron.policy.model import Decoder
from dapo_megatron.types import TokenBatch

SLICE = 2**15
"""Tokens whose values `gather_on_host` has on the device at a time."""

BUCKET_ELEMENTS: int | None = None
"""Parameters per bucket, which is reduced or gathered at once. None: Megatron's default, 40 million
or more, and one bucket on pipeline stages after the first."""


def distribute(models: Sequence[Decoder], config: PolicyConfig) -> list[Any]:
    """Put each chunk into Megatron's wrapper, which moves parameters and gradients into flat
    buffers."""
    overlap = config.overlap and _num_ranks() > 1
    chunks = [
        DistributedDataParallel(
            config=model.config,
            ddp_config=_settings(model, config, overlap=overlap),
            module=model,
            # As in Megatron-LM: only the first chunk is divided into buckets.
            disable_bucketing=model is not models[0],
        )
        for model in models
    ]
    if overlap:
        functions = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
        for chunk in chunks:
            _add_head_hook(chunk)
            for group in _groups(chunk):
                group.param_gather_dispatched = True  # weights were just loaded: nothing to gather
    return chunks


def start_gathers(chunks: Sequence[Any]) -> None:
    """Start gathering the parts of the weights that other ranks updated. Collective.

    Call after an update. Does nothing without policy.overlap: the optimizer has gathered already.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in _groups(chunk):
                group.start_param_sync()


def finish_gathers(chunks: Sequence[Any]) -> None:
    """Wait until this rank has all weights of the last update. Not collective."""
    for chunk in chunks:
        for group in _groups(chunk):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def unshard_gradients(chunks: Sequence[Any]) -> None:
    """Give every data-parallel rank the whole reduced gradient. The optimizer needs only its part.
    Collective."""
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                parts = [torch.empty_like(part) for _ in range(group.size())]
                dist.all_gather(parts, part, group=group)
                bucket.grad_data.copy_(torch.cat(parts))


def _num_ranks() -> int:
    """Return the number of ranks that gradients are reduced over. With one, nothing overlaps."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def _settings(
    model: Decoder, config: PolicyConfig, *, overlap: bool
) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        # In float32, or in float64 for a float64 policy.
        grad_reduce_in_fp32=model.config.params_dtype != torch.float64,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        # Hooks then only wait for a gather. They start none themselves.
        align_param_gather=overlap,
        bucket_size=BUCKET_ELEMENTS,
        average_in_collective=False,
        **fp8.ddp_settings(config),
    )


def _groups(chunk: Any) -> Iterator[Any]:
    """Yield the bucket groups in the order of the forward pass. Megatron's is that of the backward
    pass."""
    yield from reversed(chunk.bucket_groups)
    yield from reversed(chunk.expert_parallel_bucket_groups)


def groups_holding(batch: TokenBatch) -> tuple[Any, ...]:
    """Return groups of this rank that together span the ranks that hold the same sequences: all
    ranks (None), or those of its data-parallel index. A run has their communicators anyway; that of
    Megatron's model-parallel group would take more GPU memory."""
    if batch.owners is None:
        return (None,)
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
    )


def gather_on_host(whole: Tensor, groups: Iterable[Any], device: torch.device) -> None:
    """Fill `whole` [T, ...], in host memory, with the elements that ranks of `groups` have: at most
    one rank has each, the others have zeros. `SLICE` tokens at a time are on the device.
    Collective."""
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    for part in whole.split(SLICE) if groups else ():
        on_device = part.to(device)
        for group in groups:
            # The sum of bytes is a gather. Neither NCCL nor gloo adds int16.
            dist.all_reduce(on_device.view(torch.uint8), group=group)
        part.copy_(on_device)


def _add_head_hook(chunk: Any) -> None:
    """Make the end of a forward pass wait for the gather of the head's weight.

    Megatron's hooks wait when a module is called, and the output layer is not called: its weight is
    read after the forward pass (policy/vocab_parallel.py).
    """

    def hook(model: Decoder, *_: Any) -> None:
        chunk.param_to_bucket_group[model.head_weight].finish_param_sync(
            skip_next_bucket_dispatch=True
        )

    if chunk.module.post_process and chunk.module.head_weight.requires_grad:
        chunk.module.register_forward_hook(hook)
