"""Which ranks form an engine, so that most of the weights that a rank's engine needs are in its own
policy shards.

Policy ranks hold the slices of a tensor in rank order. Take a policy of TP 4 and engines of TP 2:

    rank                               0     1     2     3
    quarter of a tensor in the policy  1st   2nd   3rd   4th
    half needed, engines 0 1 and 2 3   1st   2nd   1st   2nd     ranks 0 and 3 have half of it
    half needed, engines 0 2 and 1 3   1st   1st   2nd   2nd     all ranks have half of it
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dapo_megatron.config import Config
from dapo_megatron.model.architecture import Architecture
from dapo_megatron.model.tensors import hf_tensors

Groups = Sequence[Sequence[int]]
"""The ranks of each engine, in ascending order, which is the order of its slices."""


def engine_groups(
    config: Config, arch: Architecture, num_ranks: int, ranks_per_node: int
) -> Groups:
    """Return the ranks of the policy, of `num_ranks`, with which each colocated engine shares
    GPUs."""
    engine_tp = config.engine_tensor_parallel
    groups = place_engines(
        arch,
        num_ranks - num_ranks % engine_tp,
        engine_tp,
        policy_tp=config.policy.tensor_parallel,
        policy_ep=config.policy.expert_parallel,
        whole_experts=config.engine.expert_parallel,
        ranks_per_node=ranks_per_node,
    )
    return groups[: config.num_replicas(num_ranks)]


def place_engines(
    arch: Architecture,
    num_ranks: int,
    engine_tp: int,
    *,
    policy_tp: int,
    policy_ep: int,
    whole_experts: bool,
    ranks_per_node: int,
) -> Groups:
    """Return the ranks of each engine.

    They are consecutive, or spread evenly over the tensor- or expert-parallel ranks of the policy,
    if ranks then have more of what they need and no engine extends over more nodes.
    `whole_experts`: the engine distributes complete experts over its ranks.
    """

    def spread_over(size: int) -> Groups:
        """Return engines that take every n-th of `size` consecutive ranks."""
        num_engines = size // engine_tp
        return [
            range(first + offset, first + size, num_engines)
            for first in range(0, num_ranks, size)
            for offset in range(num_engines)
        ]

    def num_nodes(groups: Groups) -> int:
        return sum(len({rank // ranks_per_node for rank in group}) for group in groups)

    sizes = {name: prod(shape) for name, shape in hf_tensors(arch).items()}
    expert_size = sum(size for name, size in sizes.items() if ".experts." in name)
    other_size = sum(sizes.values()) - expert_size

    def num_local(groups: Groups) -> int:
        """Return how much of what ranks need they have, in elements times a constant."""
        places = [place for group in groups for place in enumerate(group)]
        others = sum(_overlap(rank % policy_tp, policy_tp, at, engine_tp) for at, rank in places)
        if not whole_experts:  # each rank has an equal share of the slices of all experts
            return others
        experts = sum(_overlap(rank % policy_ep, policy_ep, at, engine_tp) for at, rank in places)
        return experts * expert_size * policy_tp + others * other_size * policy_ep

    consecutive = spread_over(engine_tp)
    others = [
        spread_over(size)
        for size in (policy_tp, policy_ep)
        if size % engine_tp == 0 and num_ranks % size == 0
    ]
    allowed = [groups for groups in others if num_nodes(groups) <= num_nodes(consecutive)]
    return max([consecutive, *allowed], key=num_local)


def _overlap(part: int, num_parts: int, other: int, num_others: int) -> int:
    """Return the overlap of part `part` of `num_parts` of a tensor with part `other` of
    `num_others`, in units of 1 / (num_parts * num_others) of the tensor."""
    start = max(part * num_others, other * num_parts)
    return max(min((part + 1) * num_others, (other + 1) * num_parts) - start, 0)
