"""Which settings would free how much of a phase: each is tried, by planning the changed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Config, Section
from dapo_megatron.config.rules import check_values
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.layout import check_layout, round_up, row_multiple
from dapo_megatron.plan.parts import GIB
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from dapo_megatron.plan.estimate import Plan

SMALLEST_GIB = 0.05
"""What frees less is not told."""


@dataclass(frozen=True)
class Knob:
    """A change, as overrides for the command line or words; what it frees, and whether all phases
    then fit."""

    change: str
    freed_gib: float
    suffices: bool


def knobs(plan: Plan, phase: str) -> list[Knob]:
    """Changes that free memory of `phase` (or of the host, plan.HOST), most first."""
    from dapo_megatron.plan.estimate import make_plan

    found = []
    arch = read_architecture(plan.config)
    for change, config, num_processes in _candidates(plan.config, plan.num_processes):
        try:
            check_values(config)
            check_layout(config, arch, num_processes)
            check_compatibility(config, arch)
            other = make_plan(
                config,
                num_processes,
                gpu_memory_gib=(plan.gpu_memory_bytes or 0.0) / GIB,
                gpus_per_node=plan.gpus_per_node,
                host_memory_gib=(plan.host_memory_bytes or 0.0) / GIB,
            )
        except ConfigError:
            continue
        freed = (plan.num_bytes(phase) - other.num_bytes(phase)) / GIB
        if freed >= SMALLEST_GIB or (plan.sequences < 1 <= other.sequences):
            found.append(Knob(change, freed, other.fits()))
    return sorted(found, key=lambda knob: (-knob.freed_gib, knob.change))


def advice(plan: Plan, phase: str) -> str:
    """What frees how much of a phase, a line each."""
    found = knobs(plan, phase)
    if not found:
        return "  no single setting frees any of it; use a smaller model, or shorter sequences"
    lines = [
        f"  frees {knob.freed_gib:6.1f} GiB: {knob.change}"
        + (" (all fits)" if knob.suffices else "")
        for knob in found
    ]
    if not any(knob.suffices for knob in found):
        lines.append("  none is enough alone; take several")
    return "\n".join(lines)


def _candidates(config: Config, world: int) -> Iterator[tuple[str, Config, int]]:
    """(change, the config with it, processes); not all of them are valid."""
    for section, values in (*_of_policy(config), *_of_the_rest(config)):
        yield _keys(section, values), _changed(config, section, values), world
    # The rows that context-parallel ranks share stay as long as they are.
    ranks = {"context_parallel": 2 * config.policy.context_parallel}
    tokens = {"max_tokens_per_microbatch": -(-config.train.max_tokens_per_microbatch // 2)}
    cut = _changed(_changed(config, "policy", ranks), "train", tokens)
    yield f"{_keys('policy', ranks)} {_keys('train', tokens)}", cut, world
    yield f"twice the nodes ({2 * world} GPUs)", config, 2 * world


def _of_policy(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    policy = config.policy
    for kind in ("selective", "full"):
        if policy.recompute not in (kind, "full"):
            yield "policy", {"recompute": kind}
    if policy.tensor_parallel > 1 and not policy.sequence_parallel:
        yield "policy", {"sequence_parallel": True}
    twice = 2 * policy.tensor_parallel
    yield "policy", {"tensor_parallel": twice, "sequence_parallel": True}
    yield "policy", {"pipeline_parallel": 2 * policy.pipeline_parallel}
    yield "policy", {"expert_parallel": 2 * policy.expert_parallel}
    for part in ("weights", "gradients", "optimizer"):
        if part not in policy.offload:
            yield "policy", {"offload": (*policy.offload, part)}
    if set(policy.offload) != {"weights", "gradients", "optimizer"}:
        yield "policy", {"offload": ("weights", "gradients", "optimizer")}
    for part in policy.offload:
        # More on the GPU, less on the host.
        yield "policy", {"offload": tuple(one for one in policy.offload if one != part)}
    if policy.fp8 and not policy.fp8.parameters:
        yield "policy", {"fp8": policy.fp8.model_copy(update={"parameters": True})}


def _of_the_rest(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    optimizer, engine, policy = config.optimizer, config.engine, config.policy
    is_short = policy.precision == "bfloat16"
    if is_short and optimizer.moments == "float32" and not optimizer.cpu_offload:
        yield "optimizer", {"moments": "bfloat16"}
    fp8_alone = policy.fp8 is not None and policy.fp8.parameters
    if optimizer.cpu_offload < 1.0 and optimizer.moments == "float32" and not fp8_alone:
        yield "optimizer", {"cpu_offload": 1.0}
    if optimizer.cpu_offload:
        yield "optimizer", {"cpu_offload": 0.0}
    if config.rewards.workers > 1:
        yield "rewards", {"workers": config.rewards.workers // 2}
    bound = config.train.max_tokens_per_microbatch
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    least = round_up(longest, row_multiple(policy)) // policy.context_parallel
    if (half := max(bound // 2, least)) < bound:
        yield "train", {"max_tokens_per_microbatch": half}
    for less in (0.1, 0.2):
        if engine.memory_fraction - less > 0:
            yield "engine", {"memory_fraction": round(engine.memory_fraction - less, 2)}
    if engine.memory_fraction + 0.1 < 1.0:
        yield "engine", {"memory_fraction": round(engine.memory_fraction + 0.1, 2)}
    yield "engine", {"tensor_parallel": 2 * config.engine_tensor_parallel}
    if engine.quantization == "none":
        yield "engine", {"quantization": "fp8"}
    if not engine.sleep:
        yield "engine", {"sleep": True}


def _keys(section: str, values: dict[str, Any]) -> str:
    return " ".join(f"{section}.{key}={_shown(value)}" for key, value in values.items())


def _changed(config: Config, section: str, values: dict[str, Any]) -> Config:
    part: Section = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def _shown(value: Any) -> str:
    if isinstance(value, Section):
        given = value.model_dump()
        return "{" + ",".join(f"{key}: {_shown(one)}" for key, one in given.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
