"""Find changes that make a run fit: settings, layouts near the configured one, and more nodes. Each
change is tested by estimating the changed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dapo_megatron.config import Config, PolicyConfig, Section
from dapo_megatron.config.consistency import check_values
from dapo_megatron.model import Architecture, planned_architecture
from dapo_megatron.plan import GIB
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.estimate import GPU_MARGIN, HOST, MemoryEstimate, NodeSpec, estimate_memory
from dapo_megatron.plan.layout import check_layout, nearest, policy_problems
from dapo_megatron.plan.rows import round_up, row_multiple
from dapo_megatron.types import ConfigError

SMALLEST_GIB = 0.05
"""Changes that free less memory are not suggested."""
MAX_NODES = 128
NUM_TRIED = 12
"""Number of layouts to estimate, nearest first. More would take long with many experts."""


@dataclass(frozen=True)
class Suggestion:
    """A change (overrides for the command line, or a description), the memory that it frees, and
    whether everything then fits."""

    change: str
    freed_gib: float
    suffices: bool


def problems(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield a text for each thing that does not fit, with the changes that would free memory."""
    for excess in estimate.excesses():
        phase = excess.phases[0]
        yield (
            f"{', '.join(excess.phases)}: {excess.kind} takes "
            f"{estimate.num_bytes(phase) / GIB:.1f} GiB, {excess.gib:.1f} more than there is\n"
            f"{_advice(estimate, phase)}"
        )
    if estimate.sequences < 1:
        length = estimate.config.max_sequence_tokens
        yield (
            f"generate: the KV cache of {estimate.engine.cache.gib:.1f} GiB cannot hold one "
            f"sequence of {length:,} tokens\n{_advice(estimate, 'generate')}"
        )
    if estimate.host_excess_gib > 0:
        yield (
            f"host: the ranks of a node take {estimate.host_bytes / GIB:.0f} GiB, "
            f"{estimate.host_excess_gib:.0f} more than the {estimate.nodes.host_memory_gib:g} GiB "
            f"configured for a node\n{_advice(estimate, HOST)}"
        )


def suggest(estimate: MemoryEstimate, phase: str) -> list[Suggestion]:
    """Return changes that free memory in `phase` (or on the host, for estimate.HOST), the most
    effective first."""
    suggestions = []
    arch = estimate.arch
    for change, config, num_processes in _candidates(estimate.config, estimate.num_processes):
        changed = estimate_if_valid(config, arch, num_processes, estimate.nodes)
        if changed is None:
            continue
        freed = (estimate.num_bytes(phase) - changed.num_bytes(phase)) / GIB
        if freed >= SMALLEST_GIB or (estimate.sequences < 1 <= changed.sequences):
            suggestions.append(Suggestion(change, freed, changed.fits()))
    return sorted(suggestions, key=lambda item: (-item.freed_gib, item.change))


def _advice(estimate: MemoryEstimate, phase: str) -> str:
    suggestions = suggest(estimate, phase)
    if not suggestions:
        return "  no single setting frees memory here; use a smaller model or shorter sequences"
    lines = [
        f"  frees {item.freed_gib:6.1f} GiB: {item.change}"
        + (" (all fits)" if item.suffices else "")
        for item in suggestions
    ]
    if not any(item.suffices for item in suggestions):
        lines.append("  no single change is enough; combine several")
    return "\n".join(lines)


def estimate_if_valid(
    config: Config, arch: Architecture, num_processes: int, nodes: NodeSpec
) -> MemoryEstimate | None:
    """Estimate a changed config. Return None if the config is invalid."""
    try:
        check_values(config)
        check_layout(config, arch, num_processes)
        check_compatibility(config, arch)
        return estimate_memory(config, num_processes, nodes)
    except ConfigError:
        return None


# ------------------------------------------------------------------ layouts and nodes


def check_layout_and_memory(config: Config, num_processes: int, nodes: NodeSpec) -> None:
    """Check the layout. Raises ConfigError. If the policy's layout is at fault, the message also
    suggests layouts that fit in memory, which layout.check_layout does not consider."""
    arch = planned_architecture(config)
    try:
        check_layout(config, arch, num_processes)
    except ConfigError as error:
        if not any(policy_problems(config.policy, num_processes, arch)):
            raise
        lines = [str(error), *alternatives(config, num_processes, nodes)]
        raise ConfigError("\n".join(lines)) from None


def alternatives(config: Config, num_processes: int, nodes: NodeSpec) -> list[str]:
    """Describe layouts of the policy that fit its `num_processes` GPUs, memory included, or else
    how many nodes suffice. The list is empty if no layout could be estimated."""
    gpus = f"{num_processes} GPUs of {nodes.gpu_memory_gib:g} GiB"
    layouts, num_tried = _fitting_layouts(config, num_processes, nodes)
    if layouts:
        return ["\n  ".join([f"memory included, these fit {gpus}:", *layouts])]
    enough = _least_nodes(config, nodes) if config.engine.colocated else None
    if enough is None and not num_tried:
        return []
    text = (
        f"memory: the run does not fit {gpus} with {GPU_MARGIN:.0%} to spare, in this layout or in "
        "one near it (layouts listed above were chosen without looking at memory)"
    )
    if not config.engine.colocated:
        return [f"{text}; try more nodes"]
    if enough is None:
        return [f"{text}; nor does it fit {MAX_NODES} nodes or fewer"]
    number, layout = enough
    nodes_text = f"{number} node{'s' if number > 1 else ''} of {nodes.gpus_per_node}"
    how = f"with {layout}" if layout else "as it is configured"
    return [f"{text}; {nodes_text} GPUs would suffice, {how}"]


def _least_nodes(config: Config, nodes: NodeSpec) -> tuple[int, str] | None:
    """Return the smallest power of two of nodes on which a run fits, and the overrides of its
    layout ("" if unchanged). Return None above MAX_NODES."""
    number = 1
    while number <= MAX_NODES:
        layouts, _ = _fitting_layouts(config, number * nodes.gpus_per_node, nodes, count=1)
        if layouts:
            return number, layouts[0]
        number *= 2
    return None


def _fitting_layouts(
    config: Config, num_processes: int, nodes: NodeSpec, *, count: int = 3
) -> tuple[list[str], int]:
    """Return layouts near the configured one that fit model, ranks and memory with a margin, and
    the number of layouts that were estimated. There are at most `count` layouts, nearest first,
    each as overrides of the changed keys."""
    arch = planned_architecture(config)
    num_tried = 0

    def fits(policy: PolicyConfig) -> bool:
        nonlocal num_tried
        if num_tried == NUM_TRIED or any(policy_problems(policy, num_processes, arch)):
            return False
        changed = config.model_copy(update={"policy": policy})
        estimate = estimate_if_valid(changed, arch, num_processes, nodes)
        if estimate is None:
            return False
        num_tried += 1
        return estimate.fits() and not any(estimate.gpu_warnings())

    layouts = nearest(
        config.policy, num_processes, arch.num_layers, arch.num_experts, fits, count=count
    )
    return layouts, num_tried


# ------------------------------------------------------------------ settings


def _candidates(config: Config, world: int) -> Iterator[tuple[str, Config, int]]:
    """Yield (change, changed config, number of processes). Not all of these configs are valid."""
    turns = _of_turns(config.policy) if config.engine.colocated else ()
    for section, values in (*_of_policy(config), *turns, *_of_the_rest(config)):
        yield _keys(section, values), _changed(config, section, values), world
    # Twice the context-parallel ranks with half the tokens each: rows keep their total length.
    ranks = {"context_parallel": 2 * config.policy.context_parallel}
    tokens = {"max_tokens_per_microbatch": -(-config.train.max_tokens_per_microbatch // 2)}
    halved = _changed(_changed(config, "policy", ranks), "train", tokens)
    yield f"{_keys('policy', ranks)} {_keys('train', tokens)}", halved, world
    if config.engine.colocated:
        yield f"twice the nodes ({2 * world} GPUs)", config, 2 * world
    else:
        yield f"{2 * world} GPUs for the policy", config, 2 * world


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
    if policy.fp8 and not policy.fp8.parameters:
        yield "policy", {"fp8": policy.fp8.model_copy(update={"parameters": True})}


def _of_turns(policy: PolicyConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changes of what stays on a GPU that policy and engine share."""
    for part in ("weights", "gradients", "optimizer"):
        if part not in policy.offload:
            yield "policy", {"offload": (*policy.offload, part)}
    if set(policy.offload) != {"weights", "gradients", "optimizer"}:
        yield "policy", {"offload": ("weights", "gradients", "optimizer")}
    for part in policy.offload:
        # Frees host memory, and needs more GPU memory.
        yield "policy", {"offload": tuple(name for name in policy.offload if name != part)}
    yield "engine", {"sleep": True}


def _of_the_rest(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    optimizer, engine, policy = config.optimizer, config.engine, config.policy
    is_short = policy.precision == "bfloat16"
    if is_short and optimizer.moments == "float32" and not optimizer.cpu_offload:
        yield "optimizer", {"moments": "bfloat16"}
    has_fp8_parameters = policy.fp8 is not None and policy.fp8.parameters
    if optimizer.cpu_offload < 1.0 and optimizer.moments == "float32" and not has_fp8_parameters:
        yield "optimizer", {"cpu_offload": 1.0}
    if optimizer.cpu_offload:
        yield "optimizer", {"cpu_offload": 0.0}
    if config.rewards.workers > 1:
        yield "rewards", {"workers": config.rewards.workers // 2}
    bound = config.train.max_tokens_per_microbatch
    longest = round_up(config.max_sequence_tokens, row_multiple(policy))
    least = longest // policy.context_parallel
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


def _keys(section: str, values: dict[str, Any]) -> str:
    return " ".join(f"{section}.{key}={_shown(value)}" for key, value in values.items())


def _changed(config: Config, section: str, values: dict[str, Any]) -> Config:
    part: Section = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def _shown(value: Any) -> str:
    if isinstance(value, Section):
        items = value.model_dump().items()
        return "{" + ",".join(f"{key}: {_shown(item)}" for key, item in items) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
