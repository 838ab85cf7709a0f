"""Build the loop's parts from the config, around policy and engine (models.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from dapo_megatron.checkpoints.formats.export import HfExport
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import (
    ENVIRONMENT_GRADER,
    Columns,
    Config,
    Source,
    TasksSource,
)
from dapo_megatron.data.conversation import Conversation, findings
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.prompts import PromptStream, check_template, load_source
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.environments.interface import Described
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.verifiers import Task, read_tasks
from dapo_megatron.loop import Parts
from dapo_megatron.model import read_architecture, stop_ids
from dapo_megatron.plan.estimate import save_estimate
from dapo_megatron.protocols import Policy
from dapo_megatron.rewards.pool import try_graders
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery, RouteSize
from dapo_megatron.rollout.engines import Engines, SamplingAhead
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.run.context import RunContext
from dapo_megatron.run.loss import loss_function
from dapo_megatron.run.models import Models, build_policy, planner
from dapo_megatron.run.other_weights import keep_reference, keep_teacher
from dapo_megatron.run.resume import facts_of
from dapo_megatron.tracking.recorder import RankRecorder
from dapo_megatron.types import ConfigError, Prompt


@dataclass
class Prompts:
    """The prompts of a run, and notes about prompts that were left out."""

    train: list[Prompt]
    evaluation: dict[str, Sequence[Prompt]]
    notes: list[str]


def describe_environments(config: Config, ranks: Ranks) -> dict[str, Described]:
    """Return the run's environments by name. Collective. Raises ConfigError for one that cannot be
    used, or whose messages the model's chat template cannot put between two turns."""
    if not config.environments:
        return {}
    described = on_rank0(ranks, _describe_environments, config)
    return ranks.broadcast(described or {}, dict[str, Described])


def _describe_environments(config: Config) -> dict[str, Described]:
    environments, folder = environments_of(config), Path(config.model.path)
    for source in (*config.data.train, *config.evaluation.sets):
        gives_reward = source.environment and environments[source.environment].gives_reward
        if source.grader == ENVIRONMENT_GRADER and not gives_reward:
            raise ConfigError(
                f"source {source.name!r}: grader: environment, but {source.environment!r} has no "
                "method step, which would give rewards, and is no agent; set another grader"
            )
    for name, environment in environments.items():
        conversation = conversation_of(config, environment)
        for finding in findings(conversation, environment.role):
            if finding.error:
                raise ConfigError(
                    f"environment {name!r}: the chat template of {folder} cannot continue a "
                    f"conversation: {finding.check}: {finding.error}. See doctor template"
                )
    return environments


def environments_of(config: Config) -> dict[str, Described]:
    """Return the environments of a config by name. Raises ConfigError for one that cannot be
    used."""
    rewards, seconds = config.rewards, config.rollout.turns.call_seconds
    names, variables = config.environments, rewards.environment
    with EnvironmentPool(names, seconds, rewards.memory_mib, variables) as pool:
        return pool.described


def conversation_of(config: Config, environment: Described | None = None) -> Conversation:
    """Return conversations of the config's model, with the tools of an environment. Raises
    DataError naming model.path if it has no chat template."""
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder, "model.path")
    check_template(tokenizer, "model.path")
    return Conversation(
        tokenizer,
        stop_ids(folder, tokenizer.eos_token_id),
        config.data.chat_template_kwargs,
        None if environment is None else environment.descriptions,
    )


def tasks_of(config: Config, ranks: Ranks) -> dict[str, list[Task]]:
    """Return the tasks of environments that bring their own, by source. Collective. Raises
    ConfigError."""
    sources = [
        source
        for source in (*config.data.train, *config.evaluation.sets)
        if isinstance(source, TasksSource)
    ]
    if not sources:
        return {}

    def read() -> dict[str, list[Task]]:
        variables = config.rewards.environment
        return {s.name: read_tasks(s.environment, s.limit, variables) for s in sources}

    return ranks.broadcast(on_rank0(ranks, read) or {}, dict[str, list[Task]])


def load_all_prompts(config: Config, ranks: Ranks) -> Prompts:
    """Load all prompts. Collective. Raises ConfigError or DataError."""
    return load_prompts(config, describe_environments(config, ranks), tasks_of(config, ranks))


def load_prompts(
    config: Config,
    environments: Mapping[str, Described],
    tasks: Mapping[str, Sequence[Task]],
) -> Prompts:
    """Load all prompts. Evaluation sets are loaded first, because their problems are excluded from
    training. `environments` are those of `describe_environments`, `tasks` those of `tasks_of`.
    Raises DataError naming model.path or the data."""
    tokenizer = load_tokenizer(Path(config.model.path), "model.path")
    vocab_size = read_architecture(config).vocab_size
    notes: list[str] = []

    def load(source: Source, columns: Columns, exclude: frozenset[str]) -> Sequence[Prompt]:
        environment = environments.get(source.environment or "")
        loaded = load_source(
            source,
            tokenizer,
            config.rollout.max_prompt_tokens,
            columns=columns,
            exclude=exclude,
            template_kwargs=config.data.chat_template_kwargs,
            vocab_size=vocab_size,
            tools=None if environment is None else environment.descriptions,
            tasks=tasks.get(source.name, ()),
            writes="" if environment is None else environment.writes,
        )
        left_out = {
            "too long": loaded.num_dropped_long,
            "duplicates": loaded.num_duplicates,
            "held out": loaded.num_held_out,
        }
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        notes.append(
            f"{source.name}: {len(loaded.prompts)} prompts"
            + (f" ({counts} left out)" if counts else "")
        )
        return loaded.prompts

    evaluation = {
        source.name: load(source, config.evaluation.columns, frozenset())
        for source in config.evaluation.sets
    }
    held_out = frozenset(prompt.text for prompts in evaluation.values() for prompt in prompts)
    train = [
        prompt
        for source in config.data.train
        for prompt in load(source, config.data.columns, held_out)
    ]
    return Prompts(train, evaluation, notes)


def check_graders(config: Config, prompts: Prompts) -> None:
    """Call each of the user's graders once. Raises DataError naming row and grader."""
    rewards = config.rewards
    every_prompt = chain(prompts.train, *prompts.evaluation.values())
    try_graders(
        config.graders,
        (prompt for prompt in every_prompt if prompt.source in config.graders),
        rewards.timeout_seconds,
        rewards.memory_mib,
        rewards.environment,
    )


def build_evaluator(config: Config, prompts: Prompts, models: Models) -> Evaluator:
    """Build the evaluator, which samples with the run's engines."""
    return Evaluator(
        config=config.evaluation,
        sets=prompts.evaluation,
        engines=models.engines,
        sync=models.sync,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
    )


def build_parts(
    context: RunContext,
    models: Models,
    prompts: Prompts,
    repeated: dict[int, Path],
    recorder: RankRecorder,
    instruments: StepInstruments,
) -> Parts:
    """Build the loop's parts for training with engines. The recorded steps `repeated`, given on
    rank 0, are trained on again. Collective."""
    config, ranks, engines = context.config, context.ranks, models.engines
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        plan = context.folder.plan
        if failure := save_estimate(config, plan, ranks.world_size, gpu_bytes):
            recorder.note(f"  {failure}")
    coordinator, timeline = _coordinator(config, engines, prompts), instruments.timeline
    if engines.pool is not None:
        timeline.follow(engines.pool.num_replicas, config.engine.max_sequences)
        engines.pool.timeline, engines.pool.recorder = timeline, recorder
        context.watchdog.engines = engines.pool
    data_parallel = _data_parallel(config, ranks, models.policy)
    collector = EngineCollector(
        config=config,
        coordinator=coordinator,
        engines=engines,
        delivery=_delivery(config, ranks, data_parallel),
        recorder=recorder,
        facts=facts_of(config, ranks.world_size),
        repeated=repeated,
    )
    ahead = None
    if not config.engine.colocated and config.rollout.samples_ahead:
        ahead = SamplingAhead(engines, coordinator, timeline, repeated)
    return Parts(
        policy=models.policy,
        sync=models.sync,
        loss=loss_function(config.loss),
        data_parallel=data_parallel,
        collector=collector,
        evaluator=build_evaluator(config, prompts, models),
        recorder=recorder,
        checkpoints=_checkpoints(context, models.policy, recorder),
        instruments=instruments,
        stop=context.stop,
        ahead=ahead,
    )


def build_replay(
    context: RunContext,
    recorded: Path,
    recorder: RankRecorder,
    instruments: StepInstruments,
) -> Parts:
    """Build the loop's parts for training on the rollouts recorded in the run folder `recorded`.
    This needs a policy but no engine and no graders. Collective."""
    config, ranks = context.config, context.ranks
    loss = loss_function(config.loss)
    policy = build_policy(config, ranks)
    keep_reference(config, ranks, policy)
    keep_teacher(config, ranks, policy)
    data_parallel = _data_parallel(config, ranks, policy)
    return Parts(
        policy=policy,
        sync=NoSync(),
        loss=loss,
        data_parallel=data_parallel,
        collector=Replay(config, recorded, ranks, _delivery(config, ranks, data_parallel)),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(context, policy, recorder),
        instruments=instruments,
        stop=context.stop,
    )


def route_size(config: Config) -> RouteSize:
    """Return the size of the routes that engines send with the tokens."""
    if config.policy.router_replay != "engine":
        return RouteSize()
    arch = read_architecture(config)
    return RouteSize(arch.route_bytes, arch.route_dtype)


def _coordinator(config: Config, engines: Engines, prompts: Prompts) -> Coordinator | None:
    """Return the coordinator on rank 0, None on other ranks."""
    if engines.pool is None:
        return None
    return Coordinator(
        config=config.rollout,
        overlong=config.overlong,
        stream=PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle),
        driver=engines.pool,
        seed=config.seed,
    )


def build_instruments(context: RunContext, recorder: RankRecorder) -> StepInstruments:
    """Build the timers and meters of this rank."""
    ranks, every = context.ranks, context.config.tracking.timeline_every
    timeline = TimelineRecorder(ranks, every, recorder)
    return StepInstruments(context.watchdog, MemoryMeter(ranks), timeline)


def _data_parallel(config: Config, ranks: Ranks, policy: Policy) -> DataParallelRanks:
    plan, num_updates = planner(config.policy, config.train), config.train.updates_per_step
    return DataParallelRanks.join(ranks, policy.data_parallel_index, plan, num_updates)


def _delivery(config: Config, ranks: Ranks, data_parallel: DataParallelRanks) -> Delivery:
    """Return the delivery of tokens. Collective."""
    indices = data_parallel.indices
    peers = [rank for rank, index in enumerate(indices) if index == data_parallel.index]
    return Delivery(data_parallel, ranks.subgroup(peers), route_size(config))


def _checkpoints(context: RunContext, policy: Policy, recorder: RankRecorder) -> CheckpointSaver:
    config, ranks, folder = context.config, context.ranks, context.folder
    return CheckpointSaver(
        config,
        folder.checkpoints,
        ranks,
        background=ranks.second(),
        policy=policy,
        recorder=recorder,
        companions=Companions.of(config),
        export=HfExport(config) if config.checkpoint.export_hf else None,
        attempt=folder.attempt,
    )
