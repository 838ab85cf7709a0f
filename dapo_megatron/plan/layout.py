"""Check parallel layouts against a model and a number of processes, and derive sizes from them.

A layout that cannot work is refused before anything starts, with every key at fault and the nearest
layouts that fit. No heavy library is imported. The rules are Megatron-core's, 0.16.1
(TransformerConfig, initialize_model_parallel), stated with the config's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2
from typing import Any

from dapo_megatron.config import Config, PolicyConfig, refuse
from dapo_megatron.model import Architecture, planned_architecture, with_teacher
from dapo_megatron.plan.rows import round_up, row_multiple, sequence_multiple
from dapo_megatron.types import ConfigError

# ------------------------------------------------------------------ derived sizes


def data_parallel(policy: PolicyConfig, world_size: int) -> int:
    """Return the number of model copies on `world_size` processes (context-parallel ranks share
    one)."""
    return world_size // _model_ranks(policy)


def _model_ranks(policy: PolicyConfig) -> int:
    return policy.tensor_parallel * policy.pipeline_parallel * policy.context_parallel


def stage_layers(policy: PolicyConfig, num_layers: int) -> list[list[range]]:
    """Return global layer indices, from 0, as [pipeline stage][virtual chunk].

    Layers are assigned to chunk 0 of every stage, then to chunk 1 of every stage, and so on
    (transformer_block.get_num_layers_to_build, transformer_layer.get_transformer_layer_offset).
    Raises ConfigError if the layers cannot be split like this.
    """
    refuse(pipeline_problems(policy, num_layers))
    num_chunks = policy.virtual_pipeline_parallel or 1
    sizes = [size // num_chunks for size in _stage_sizes(policy, num_layers)]
    stages: list[list[range]] = [[] for _ in sizes]
    first = 0
    for _ in range(num_chunks):
        for stage, size in zip(stages, sizes, strict=True):
            stage.append(range(first, first + size))
            first += size
    return stages


def describe(policy: PolicyConfig, world_size: int) -> str:
    """Format a layout: `tensor 2 (sequence) x pipeline 2 x data 4, expert 2, bfloat16`. Sizes of 1
    are left out, except the data-parallel one."""
    notes = {
        "x{} interleaved": policy.virtual_pipeline_parallel,
        "{} layers first": policy.first_stage_layers,
        "{} layers last": policy.last_stage_layers,
    }
    split = ", ".join(text.format(value) for text, value in notes.items() if value)
    sizes = [
        ("tensor", policy.tensor_parallel, "sequence" if policy.sequence_parallel else ""),
        ("pipeline", policy.pipeline_parallel, split),
        ("context", policy.context_parallel, ""),
    ]
    axes = [
        f"{name} {size}" + (f" ({note})" if note else "") for name, size, note in sizes if size > 1
    ]
    axes.append(f"data {data_parallel(policy, world_size)}")
    expert = f", expert {policy.expert_parallel}" if policy.expert_parallel > 1 else ""
    return f"{' x '.join(axes)}{expert}, {policy.precision}"


# ------------------------------------------------------------------ checks


def check_layout(
    config: Config,
    arch: Architecture,
    world_size: int,
    *,
    has_engine: bool = True,
    has_teacher: bool = True,
) -> None:
    """Raise ConfigError if the layout does not fit the number of processes, the model, or the
    teacher of loss.distill.

    The message lists every problem. If the policy's layout is at fault, it also lists up to three
    layouts near it that fit. Without an engine (replays, `doctor layouts`), the section `engine` is
    not checked, and without a teacher (`doctor layouts`) nothing of one.
    """
    policy = config.policy
    if config.loss.distill is not None and not arch.num_experts:  # experts are the teacher's
        policy = policy.model_copy(update={"expert_parallel": 1})
    of_policy = list(policy_problems(policy, world_size, arch))
    problems = [*of_policy, *_row_problems(config, arch), *_model_problems(config, arch)]
    if has_engine:
        problems += _engine_problems(config, world_size, arch)
    if of_policy:
        near = [f"  {changes(config, other)}" for other in layouts(config, world_size, arch)[:3]]
        problems += [f"layouts that fit {world_size} processes:", *(near or ["  none"])]
    refuse(problems)
    if has_teacher and config.loss.distill is not None:
        taught = with_teacher(config)
        try:
            check_layout(taught, planned_architecture(taught), world_size, has_engine=False)
        except ConfigError as error:
            raise ConfigError(f"loss.distill.teacher: {error}") from error


def policy_ranks(config: Config, num_gpus: int) -> int:
    """Return how many of a run's GPUs have the policy. Raises ConfigError if engines on other GPUs
    leave none of them."""
    if config.separate_gpus < num_gpus:
        return num_gpus - config.separate_gpus
    raise ConfigError(
        f"engine.replicas: {config.engine.replicas} engines of {config.engine_tensor_parallel} "
        f"GPUs leave none of {num_gpus} to the policy; use fewer, or more nodes"
    )


_PROCESSES = "run.processes, or the launcher's"


def policy_problems(policy: PolicyConfig, world: int, arch: Architecture) -> Iterator[str]:
    """Yield the problems of the policy's layout for this model on `world` processes."""
    num_ranks = _model_ranks(policy)
    if world % num_ranks:
        yield (
            f"policy.tensor_parallel x pipeline_parallel x context_parallel = {num_ranks} does not "
            f"divide the {world} processes ({_PROCESSES})"
        )
    yield from _tensor_problems(policy, arch)
    yield from pipeline_problems(policy, arch.num_layers)
    yield from _expert_problems(policy, world, arch)


def _tensor_problems(policy: PolicyConfig, arch: Architecture) -> Iterator[str]:
    size = policy.tensor_parallel
    heads, groups = arch.num_heads, arch.num_kv_heads
    if heads % size:
        yield (
            f"policy.tensor_parallel: {size} does not divide the model's {heads} attention heads"
        )
    elif groups % size and size % groups:
        yield (
            f"policy.tensor_parallel: {size} neither divides nor is a multiple of the model's "
            f"{groups} key-value heads"
        )
    elif (rows := 2 * arch.group_rows) % size:
        # Megatron splits the query, key and value rows as one matrix, and gathers them again.
        yield f"policy.tensor_parallel: {size} does not divide the model's {rows} key-value rows"
    if arch.delta and arch.delta.key_heads % size:
        yield (
            f"policy.tensor_parallel: {size} does not divide the {arch.delta.key_heads} key heads "
            "of the model's gated delta nets"
        )
    for name, width in arch.mlp_columns(whole_experts=True).items():
        if width % size:
            yield f"policy.tensor_parallel: {size} does not divide the {name} {width}"
    if policy.sequence_parallel and size == 1:
        yield (
            "policy.sequence_parallel: splits over the tensor-parallel ranks, but "
            "policy.tensor_parallel is 1; use false"
        )


def pipeline_problems(policy: PolicyConfig, num_layers: int) -> Iterator[str]:
    """Yield the problems of splitting the layers over pipeline stages and their chunks."""
    num_stages, num_chunks = policy.pipeline_parallel, policy.virtual_pipeline_parallel
    given = {key: getattr(policy, key) for key in _SPLIT if getattr(policy, key)}
    if num_stages == 1:
        for key, value in given.items():
            yield f"policy.{key}: {value} needs policy.pipeline_parallel above 1; use null"
        return
    sizes, num_middle = _stage_sizes(policy, num_layers), num_stages - len(_ends(policy))
    if sum(sizes) != num_layers or min(sizes) < 1:
        ends = "".join(f", {key} {value}" for key, value in _ends(policy).items())
        yield (
            f"policy.pipeline_parallel: {num_stages} does not divide the model's {num_layers} "
            f"layers{ends} (stages are of equal size, except for those of first_stage_layers and "
            "last_stage_layers)"
        )
    elif num_chunks and not num_middle:
        # get_transformer_layer_offset divides by the number of stages in between.
        yield (
            "policy.first_stage_layers and last_stage_layers: Megatron-core cannot interleave two "
            "stages if both keys are set; set only one of them"
        )
    elif num_chunks and any(size % num_chunks for size in sizes):
        yield (
            f"policy.virtual_pipeline_parallel: {num_chunks} does not divide the layers of "
            f"each pipeline stage ({', '.join(map(str, sizes))})"
        )


def _expert_problems(policy: PolicyConfig, world: int, arch: Architecture) -> Iterator[str]:
    count, size = arch.num_experts, policy.expert_parallel
    if not count:
        if size > 1:
            yield f"policy.expert_parallel: {size}, but the model has no experts; use 1"
        return
    if count % size:
        yield f"policy.expert_parallel: {size} does not divide the model's {count} experts"
    ranks = world // policy.pipeline_parallel
    if world % _model_ranks(policy) == 0 and ranks % size:
        yield (
            f"policy.expert_parallel: {size} does not divide the {ranks} processes of a pipeline "
            "stage (tensor x context x data parallel)"
        )
    if policy.tensor_parallel > 1 and not policy.sequence_parallel:
        yield (
            f"policy.sequence_parallel: must be true for a model with experts at "
            f"policy.tensor_parallel = {policy.tensor_parallel}"
        )


def _row_problems(config: Config, arch: Architecture) -> Iterator[str]:
    """Yield a problem if a row, over all context-parallel ranks, cannot hold the longest sequence,
    or if padding makes that sequence longer than the model's positions."""
    policy, bound = config.policy, config.train.max_tokens_per_microbatch
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    row_tokens, multiple = row_multiple(policy), sequence_multiple(policy)
    room = bound * policy.context_parallel // row_tokens * row_tokens
    if room < longest:
        ranks = policy.context_parallel
        shared = f" on {ranks} context-parallel ranks" if ranks > 1 else ""
        rows = f" (rows of {room}, a multiple of {row_tokens})" if row_tokens > 1 else ""
        yield (
            f"train.max_tokens_per_microbatch: {bound}{shared}{rows} cannot hold one sequence of "
            f"{longest} tokens (max_prompt_tokens + max_response_tokens); use at least "
            f"{round_up(longest, row_tokens) // ranks}"
        )
    limit = arch.max_positions
    padded = round_up(longest, multiple)
    if longest <= limit < padded:
        yield (
            f"policy.context_parallel: {policy.context_parallel} pads sequences to multiples of "
            f"{multiple}, the longest to {padded} tokens, beyond the model's {limit} positions; "
            f"lower rollout.max_response_tokens by {longest - limit // multiple * multiple}"
        )


def _model_problems(config: Config, arch: Architecture) -> Iterator[str]:
    """Yield the problems that no other layout would fix."""
    limit = arch.max_positions
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.max_sequence_tokens > max(limit, longest):
        yield (
            f"evaluation.max_response_tokens: with rollout.max_prompt_tokens, "
            f"{config.max_sequence_tokens} tokens exceed the model's {limit} positions; lower it"
        )
    if longest > limit:
        yield (
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the model's "
            f"{limit} positions (max_position_embeddings; with yarn also factor x "
            "original_max_position_embeddings); lower one of them"
        )
    if config.policy.moe_aux_loss > 0 and not arch.num_experts:
        yield (
            f"policy.moe_aux_loss: {config.policy.moe_aux_loss}, but the model has no experts to "
            "balance; use 0"
        )


def _engine_problems(config: Config, world: int, arch: Architecture) -> Iterator[str]:
    engine, size = config.engine, config.engine_tensor_parallel
    origin, room = "", world if engine.colocated else None
    if engine.tensor_parallel is None:
        if any(_tensor_problems(config.policy, arch)) or (room and size > room):
            return  # reported for the policy already
        origin = " (null: as policy.tensor_parallel)"
    if engine.expert_parallel and not arch.num_experts:
        yield "engine.expert_parallel: the model has no experts; set it to false"
    misfits = list(_engine_misfits(size, room, arch, engine.expert_parallel))
    fitting = [
        n
        for n in divisors(arch.num_heads)
        if not any(_engine_misfits(n, room, arch, engine.expert_parallel))
    ]
    for misfit in misfits:
        yield (
            f"engine.tensor_parallel: {size}{origin} {misfit}; use {' or '.join(map(str, fitting))}"
        )
    num = config.num_replicas(world)
    if room and size <= room < num * size:
        yield (
            f"engine.replicas: {num} engines of {size} ranks (engine.tensor_parallel) do not fit "
            f"the {room} processes ({_PROCESSES}); use at most {room // size}, or "
            "engine.colocated=false"
        )
    if not misfits and num < engine.min_replicas and engine.replicas is None:
        yield (
            f"engine.min_replicas: {engine.min_replicas}, but the {world} processes "
            f"({_PROCESSES}) have room for {num} engines; use at most that many"
        )


def _engine_misfits(
    size: int, room: int | None, arch: Architecture, whole_experts: bool
) -> Iterator[str]:
    """Yield the reasons why an engine of this size fits neither the model nor `room` processes, if
    it shares theirs."""
    if room is not None and size > room:
        yield f"is more than the {room} processes ({_PROCESSES})"
    heads, groups = arch.num_heads, arch.num_kv_heads
    # The engine can copy a key-value head to several ranks.
    if heads % size or (groups % size and size % groups):
        yield (
            f"does not divide the model's {heads} attention heads, or neither divides nor is a "
            f"multiple of its {groups} key-value heads"
        )
    if arch.delta and arch.delta.key_heads % size:
        yield f"does not divide the {arch.delta.key_heads} key heads of its gated delta nets"
    if whole_experts and arch.num_experts % size:
        yield f"does not divide the {arch.num_experts} experts"
    for name, width in arch.mlp_columns(whole_experts=whole_experts).items():
        if width % size:
            yield f"does not divide the {name} {width}"


# ------------------------------------------------------------------ helpers


def _ends(policy: PolicyConfig) -> dict[str, int]:
    ends = {key: getattr(policy, key) for key in ("first_stage_layers", "last_stage_layers")}
    return {key: value for key, value in ends.items() if value is not None}


def _stage_sizes(policy: PolicyConfig, num_layers: int) -> list[int]:
    """Return the layers per pipeline stage. Their sum is not `num_layers` if these cannot be
    split."""
    ends = _ends(policy)
    num_middle = policy.pipeline_parallel - len(ends)
    middle = [(num_layers - sum(ends.values())) // max(num_middle, 1)] * num_middle
    first, last = ([ends[key]] if key in ends else [] for key in _SPLIT[1:])
    return [*first, *middle, *last]


# ------------------------------------------------------------------ layouts that fit

_AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
_SPLIT = ("virtual_pipeline_parallel", "first_stage_layers", "last_stage_layers")


def layouts(config: Config, world_size: int, arch: Architecture) -> list[Config]:
    """Return `config` with each layout of the policy that fits `world_size` processes and the
    model, nearest first.

    The distance is the sum over the axes of |log2(size / configured size)|. A row keeps its tokens
    over all context-parallel ranks. Pipeline stages are split as configured, or equally.
    """
    fitting: list[tuple[float, int, Config]] = []
    row_tokens = config.train.max_tokens_per_microbatch * config.policy.context_parallel
    for sizes in _sizes(config.policy, world_size, arch.num_experts):
        policy = config.policy.model_copy(update=sizes)
        if any(policy_problems(policy, world_size, arch)):
            continue
        tokens = -(-row_tokens // policy.context_parallel)
        train = config.train.model_copy(update={"max_tokens_per_microbatch": tokens})
        other = config.model_copy(update={"policy": policy, "train": train})
        problems = list(_row_problems(other, arch))
        if config.engine.tensor_parallel is None:  # the engine then uses the policy's size
            problems += _engine_problems(other, world_size, arch)
        if not problems:
            fitting.append((_distance(config.policy, policy), len(fitting), other))
    return [other for _, _, other in sorted(fitting)]


def _sizes(policy: PolicyConfig, world: int, num_experts: int) -> Iterator[dict[str, Any]]:
    """Yield new values of the layout's keys. Not all of them fit."""
    split = {key: getattr(policy, key) for key in _SPLIT}
    splits = [split, dict.fromkeys(_SPLIT)] if any(split.values()) else [split]
    by_tokens = policy.sequence_parallel or policy.tensor_parallel == 1 or num_experts > 0
    for tensor, pipeline, context in product(divisors(world), repeat=3):
        if world % (tensor * pipeline * context):
            continue
        for expert, of_stages in product(divisors(num_experts) or [1], splits):
            yield of_stages | {
                "tensor_parallel": tensor,
                "sequence_parallel": tensor > 1 and by_tokens,
                "pipeline_parallel": pipeline,
                "context_parallel": context,
                "expert_parallel": expert,
            }


def _distance(policy: PolicyConfig, other: PolicyConfig) -> float:
    sizes = [(getattr(policy, key), getattr(other, key)) for key in _AXES]
    dropped = any(getattr(policy, key) != getattr(other, key) for key in _SPLIT)
    return sum(abs(log2(new / old)) for old, new in sizes) + dropped


def changes(config: Config, other: Config) -> str:
    """Format what differs in the sections policy and train as overrides for the command line."""
    return " ".join(
        f"{section}.{key}={'null' if value is None else str(value).lower()}"
        for section in ("policy", "train")
        for key, value in getattr(other, section)
        if value != getattr(getattr(config, section), key)
    )


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
