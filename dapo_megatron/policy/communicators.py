"""Communicators of the policy's process groups, created before an engine measures free memory.

torch creates NCCL's communicator of a group, and its buffers on the GPU, at the first collective.
In a run that would be the first sync or update. By then the engine has sized its KV cache.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dapo_megatron.cluster.groups import group_or_world
from dapo_megatron.config import Config
from dapo_megatron.policy.device import device, megatron_device
from dapo_megatron.policy.model import initialize_parallel


def connect(config: Config) -> None:
    """Create Megatron's process groups, and run a collective of a few numbers in each group of
    ranks that a run uses. Collective over the ranks with a policy. The policy must be built next,
    with the same layout."""
    with megatron_device():
        initialize_parallel(config.policy, config.seed)
    value = torch.zeros(1, device=device())
    groups = (
        None,  # the world
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
        # Of the gradient norm, of the experts' token exchange, and of their balance loss.
        parallel_state.get_intra_distributed_optimizer_instance_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_tensor_and_context_parallel_group(),
    )
    # Stages between the first and the last have no group of embeddings.
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    for group in groups if embedding is None else (*groups, embedding):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(value, group=group)


def connect_bridge(num_ranks: int) -> None:
    """Exchange a number between each pair of ranks of the bridge, as a sync does. Collective over
    all ranks."""
    value = torch.zeros(num_ranks, device=device())
    group_or_world(None).alltoall_base(torch.empty_like(value), value, [], []).wait()
