"""The layouts nearest to one that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, product
from math import gcd, log2
from typing import Any

from dapo_megatron.config import PolicyConfig

Changes = dict[str, Any]
"""New values of the keys that make a layout, by their names in PolicyConfig."""


def nearest(
    policy: PolicyConfig,
    world_size: int,
    num_layers: int,
    num_experts: int,
    fits: Callable[[PolicyConfig], bool],
    *,
    count: int = 3,
) -> list[str]:
    """Up to `count` layouts of `world_size` processes that `fits` accepts, nearest first.

    Each as `policy.key=value` overrides with only what changes. The distance is the sum over the
    axes of |log2(size / asked size)|, and 1 for each of first_stage_layers and last_stage_layers
    given up. `num_experts` is 0 for a dense model.
    """
    candidates = sorted(_candidates(policy, world_size, num_layers, num_experts), key=_key(policy))
    found = (changes for changes in candidates if fits(policy.model_copy(update=changes)))
    return [
        " ".join(f"policy.{key}={_yaml(value)}" for key, value in _changed(policy, changes))
        for changes in islice(found, count)
    ]


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _candidates(
    policy: PolicyConfig, world: int, num_layers: int, num_experts: int
) -> Iterator[Changes]:
    first, last = policy.first_stage_layers, policy.last_stage_layers
    # A set has no order, and what is proposed must not change from run to run.
    ends = list(dict.fromkeys([(first, last), (first, None), (None, last), (None, None)]))
    # Interleaving is kept, changed or given up, never proposed.
    chunks = [*divisors(num_layers)[1:], None] if policy.virtual_pipeline_parallel else [None]
    for tensor, pipeline, context in product(divisors(world), repeat=3):
        if world % (tensor * pipeline * context):
            continue
        for virtual, (at_first, at_last), expert in product(
            chunks if pipeline > 1 else [None],
            ends if pipeline > 1 else [(None, None)],
            divisors(gcd(world // pipeline, num_experts)) if num_experts else [1],
        ):
            yield {
                "tensor_parallel": tensor,
                "sequence_parallel": tensor > 1 and (policy.sequence_parallel or num_experts > 0),
                "pipeline_parallel": pipeline,
                "virtual_pipeline_parallel": virtual,
                "first_stage_layers": at_first,
                "last_stage_layers": at_last,
                "context_parallel": context,
                "expert_parallel": expert,
            }


def _key(policy: PolicyConfig) -> Callable[[Changes], tuple[float, int, list[int]]]:
    """A sort key: the distance from `policy`, then fewer changed keys, then the values."""

    def key(changes: Changes) -> tuple[float, int, list[int]]:
        distance = 0.0
        for name, value in changes.items():
            asked = getattr(policy, name)
            if name.endswith("_layers"):
                distance += value != asked
            elif name != "sequence_parallel":  # it follows from the others
                distance += abs(log2((value or 1) / (asked or 1)))
        values = [value or 0 for value in changes.values()]
        return round(distance, 6), len(_changed(policy, changes)), values

    return key


def _changed(policy: PolicyConfig, changes: Changes) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in changes.items() if value != getattr(policy, key)]


def _yaml(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()
