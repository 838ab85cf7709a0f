"""What data-parallel ranks do together: Megatron's wrapper around each chunk of the model, which
reduces gradients during the backward pass; and the gathers of updated weights.

A rank's optimizer updates its part of every buffer. Megatron would gather a buffer when the forward
pass first needs it. Here all gathers start as soon as the update is done, first layers first, so
that to wait for them is nobody else's business: whoever reads weights, at any time, calls
`finish_gathers`; a forward pass waits module by module (Megatron's hooks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from dapo_megatron.config import PolicyConfig
from dapo_megatron.policy import fp8
from dapo_megatron.policy.model import Decoder

BUCKET_ELEMENTS: int | None = None
"""Parameters that are reduced, and gathered, at once. None: as Megatron has it, 40 million or more;
stages after the first have one bucket."""


def distribute(models: Sequence[Decoder], config: PolicyConfig) -> list[Any]:
    """Each chunk in Megatron's wrapper, its parameters and gradients in flat buffers."""
    overlap = config.overlap and _num_ranks() > 1
    chunks = [
        DistributedDataParallel(
            config=model.config,
            ddp_config=_settings(model, config, overlap=overlap),
            module=model,
            # Later chunks: as Megatron-LM does.
            disable_bucketing=model is not models[0],
        )
        for model in models
    ]
    if overlap:
        functions = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
        for chunk in chunks:
            _wait_for_the_head(chunk)
            for group in _groups(chunk):
                group.param_gather_dispatched = True  # every rank has read every weight
    return chunks


def start_gathers(chunks: Sequence[Any]) -> None:
    """After an update: every rank gets the others' part of the weights. Collective. Without
    overlap the optimizer has done it."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in _groups(chunk):
                group.start_param_sync()


def finish_gathers(chunks: Sequence[Any]) -> None:
    """Wait until this rank's weights are those of the last update. Not collective."""
    for chunk in chunks:
        for group in _groups(chunk):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def unshard_gradients(chunks: Sequence[Any]) -> None:
    """Give every data-parallel rank the whole reduced gradient (the optimizer needs a part)."""
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                parts = [torch.empty_like(part) for _ in range(group.size())]
                dist.all_gather(parts, part, group=group)
                bucket.grad_data.copy_(torch.cat(parts))


def _num_ranks() -> int:
    """Over which gradients are added up: with one, there is nothing to overlap."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def _settings(
    model: Decoder, config: PolicyConfig, *, overlap: bool
) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        # In float32 at least.
        grad_reduce_in_fp32=model.config.params_dtype != torch.float64,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        # That is: a hook waits, and starts no gather of its own.
        align_param_gather=overlap,
        bucket_size=BUCKET_ELEMENTS,
        average_in_collective=False,
        **fp8.ddp_settings(config),
    )


def _groups(chunk: Any) -> Iterator[Any]:
    """Buckets that are sent together, in the order of the forward pass (Megatron's is that of the
    backward pass)."""
    yield from reversed(chunk.bucket_groups)
    yield from reversed(chunk.expert_parallel_bucket_groups)


def _wait_for_the_head(chunk: Any) -> None:
    """Megatron's hooks wait when a module is called. The head's weight is read without a call,
    after the forward pass (policy/vocab_parallel.py)."""

    def hook(model: Decoder, *_: Any) -> None:
        chunk.param_to_bucket_group[model.head_weight].finish_param_sync(
            skip_next_bucket_dispatch=True
        )

    if chunk.module.post_process:
        chunk.module.register_forward_hook(hook)
