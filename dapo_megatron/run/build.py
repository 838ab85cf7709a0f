"""Build the loop's parts from the config, around policy and engine (models.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.checkpoints.formats.export import HfExport
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import (
    Columns,
    Config,
    OptimizerConfig,
    Source,
)
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.prompts import PromptStream, load_source
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.estimate import save_estimate
from dapo_megatron.protocols import Parts, Policy
from dapo_megatron.rewards.pool import try_graders
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery, RouteSize
from dapo_megatron.rollout.engines import Engines, SamplingAhead
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.loss import loss_function
from dapo_megatron.run.models import Models, build_policy, planner
from dapo_megatron.run.other_weights import keep_reference
from dapo_megatron.run.record import facts_of
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import Prompt


@dataclass
class Prompts:
    """The prompts of a run, and notes about prompts that were left out."""

    train: list[Prompt]
    evaluation: dict[str, Sequence[Prompt]]
    notes: list[str]


def load_prompts(config: Config) -> Prompts:
    """Load all prompts. Evaluation sets are loaded first, because their problems are excluded from
    training. Raises DataError naming model.path or the data."""
    tokenizer = load_tokenizer(Path(config.model.path), "model.path")
    vocab_size = read_architecture(config).vocab_size
    notes: list[str] = []

    def load(source: Source, columns: Columns, exclude: frozenset[str]) -> Sequence[Prompt]:
        loaded = load_source(
            source,
            tokenizer,
            config.rollout.max_prompt_tokens,
            columns=columns,
            exclude=exclude,
            template_kwargs=config.data.chat_template_kwargs,
            vocab_size=vocab_size,
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
    try_graders(
        config.graders,
        chain(prompts.train, *prompts.evaluation.values()),
        rewards.timeout_seconds,
        rewards.memory_mib,
        rewards.environment,
    )


def learning_rate(optimizer: OptimizerConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the rollout step, counted from 1."""
    return partial(warmup_lr, lr=optimizer.lr, warmup_rollout_steps=optimizer.warmup_rollout_steps)


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
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    models: Models,
    prompts: Prompts,
    repeated: dict[int, Path],
    *,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[Ranks], None],
) -> Parts:
    """Build the loop's parts. Collective. `check_stop` raises Stopped on the given ranks if any of
    them got a signal. The recorded steps `repeated`, given on rank 0, are trained on again."""
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        if failure := save_estimate(config, folder.plan, ranks.world_size, gpu_bytes):
            recorder.note(f"  {failure}")
    policy, engines = models.policy, models.engines
    coordinator = _coordinator(config, engines, prompts)
    if engines.pool is not None:
        timeline, num_replicas = instruments.timeline, engines.pool.num_replicas
        timeline.follow(num_replicas, config.engine.max_sequences)
        engines.pool.on_change = timeline.change
    data_parallel = _data_parallel(config, ranks, policy)
    check = partial(check_stop, ranks)
    parts = Parts(
        policy=policy,
        sync=models.sync,
        loss=loss_function(config.loss),
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=EngineCollector(
            config=config,
            coordinator=coordinator,
            engines=engines,
            delivery=_delivery(config, ranks, data_parallel),
            recorder=recorder,
            facts=facts_of(config, ranks.world_size),
            repeated=repeated,
        ),
        evaluator=build_evaluator(config, prompts, models),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, folder, recorder),
        instruments=instruments,
        check_stop=check,
    )
    if not config.engine.colocated and config.rollout.samples_ahead:
        # Nothing that engines sample while a step is repeated would be kept.
        ahead = SamplingAhead(engines, coordinator, instruments.serving, lambda: bool(repeated))
        parts.sampling_ahead = ahead
    return parts


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


def build_replay(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    recorded: Path,
    *,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[Ranks], None],
) -> Parts:
    """Build the loop's parts for training on the rollouts recorded in the run folder `recorded`.
    This needs a policy but no engine and no graders. Collective."""
    check = partial(check_stop, ranks)
    loss = loss_function(config.loss)
    policy = build_policy(config, ranks)
    keep_reference(config, ranks, policy)
    data_parallel = _data_parallel(config, ranks, policy)
    return Parts(
        policy=policy,
        sync=NoSync(),
        loss=loss,
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=Replay(config, recorded, ranks, _delivery(config, ranks, data_parallel)),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, folder, recorder),
        instruments=instruments,
        check_stop=check,
    )


def build_instruments(
    config: Config, ranks: Ranks, recorder: RunRecorder | RankRecorder, watchdog: Watchdog
) -> StepInstruments:
    """Build the timers and meters of this rank."""
    timeline = TimelineRecorder(ranks, config.tracking.timeline_every, recorder)
    return StepInstruments(watchdog, MemoryMeter(ranks), timeline)


def _data_parallel(config: Config, ranks: Ranks, policy: Policy) -> DataParallelRanks:
    plan, num_updates = planner(config.policy, config.train), config.train.updates_per_step
    return DataParallelRanks.join(ranks, policy.data_parallel_index, plan, num_updates)


def _delivery(config: Config, ranks: Ranks, data_parallel: DataParallelRanks) -> Delivery:
    """Return the delivery of tokens. Collective."""
    indices = data_parallel.indices
    peers = [rank for rank, index in enumerate(indices) if index == data_parallel.index]
    return Delivery(data_parallel, ranks.subgroup(peers), route_size(config))


def _checkpoints(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    folder: RunFolder,
    recorder: RunRecorder | RankRecorder,
) -> CheckpointSaver:
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
