"""Build the loop's parts from the config, around policy and engine (models.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import torch

from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.checkpoints import CheckpointSaver
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions, declare_without_mtp
from dapo_megatron.cluster.collectives import EnginesChanged
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.messages import Hub, Member, open_channel
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import Stop
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
from dapo_megatron.protocols import LossFn, Parts, Policy, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rewards.trial import try_graders
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery, RouteSize
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.rollout.roles import SeparateSync, SeparateTraining, taking_out_failed
from dapo_megatron.rollout.worker import Follower, Leader
from dapo_megatron.run.exports import exports_of
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.loss import loss_function, stoppable
from dapo_megatron.run.models import Models, build_policy, build_sync, planner
from dapo_megatron.run.other_weights import keep_reference
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import Prompt, torch_dtype


@dataclass
class Prompts:
    """The prompts of a run, and notes about prompts that were left out."""

    train: list[Prompt]
    evaluation: dict[str, Sequence[Prompt]]
    notes: list[str]


@dataclass
class Core:
    """Policy, engine and graders, which training and evaluation both need."""

    policy: Policy
    engine: RolloutEngine
    sync: WeightSync
    loss: LossFn
    engines: Engines
    grading: GradingPool | None
    channel: list[Member | Hub]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Stop the grading processes and, without an error, close the sockets and the engine. After
        an error the coordinator's thread may still use the sockets, and the other ranks may never
        come to the engine's collective. After EnginesChanged, the engine is used again."""
        if self.grading is not None:
            self.grading.close()
        if error is None or issubclass(error, EnginesChanged):
            for end in self.channel:
                end.close()
        if error is None:
            self.engine.close()


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


def build_core(config: Config, ranks: Ranks, models: Models, stop: Stop | None = None) -> Core:
    """Build graders, the channel to the coordinator, and the sync of `models`. Collective."""
    loss = loss_function(config.loss)
    policy, engine = models.policy, models.engine
    with taking_out_failed(ranks.by_role.members, None) if ranks.by_role else nullcontext():
        sync = build_sync(config, ranks, models)
    replicas = ranks.all_gather(engine.replica, int)
    # Ranks without an engine form a group, too.
    peers = ranks.subgroup(
        [rank for rank, replica in enumerate(replicas) if replica == engine.replica]
    )
    if ranks.engine is not None:
        # A leader exchanges with its engine's ranks every second, even if rank 0 hangs. This must
        # not count as a sign of life.
        peers = replace(peers, on_activity=lambda _: None)
    hub, member = open_channel(
        ranks,
        engine.replica if engine.is_leader else None,
        engine.num_replicas,
        None if ranks.by_role is None else ranks.by_role.members.check_present,
    )
    driver: EngineDriver | None = None
    if hub is not None:
        driver = EngineDriver(
            hub,
            engine.num_replicas,
            engine.max_sequences,
            deterministic=config.rollout.deterministic,
            silence_seconds=max(config.watchdog.generate, config.watchdog.evaluate),
            is_elastic=config.roles.are_separate,
        )

    def signal() -> str:
        return (stop and stop.signal) or ""

    grading = None if member is None else _grading_pool(config)
    worker = _worker(config, ranks, models, peers, member, grading, signal)
    return Core(
        policy=policy,
        engine=engine,
        sync=sync,
        loss=loss,
        engines=Engines(worker, driver, ranks, None if worker else peers, signal),
        grading=grading,
        channel=[end for end in (member, hub) if end is not None],
    )


def _worker(
    config: Config,
    ranks: Ranks,
    models: Models,
    peers: Ranks,
    member: Member | None,
    grading: GradingPool | None,
    stop: Callable[[], str],
) -> Leader | Follower | None:
    """Return the worker of this rank's engine, None without an engine. A leader has a `member` of
    the channel and a grading pool."""
    if member is not None and grading is not None:
        return Leader(
            models.engine,
            grading,
            member,
            peers,
            deterministic=config.rollout.deterministic,
            is_elastic=config.roles.are_separate,
            stop=stop,
            on_activity=ranks.on_activity,
        )
    if ranks.engine is not None:
        return Follower(models.engine, peers, stop=stop, on_activity=ranks.on_activity)
    return None


def _grading_pool(config: Config) -> GradingPool:
    return GradingPool(
        config.graders,
        config.rewards.workers,
        config.rewards.timeout_seconds,
        config.rewards.memory_mib,
        config.rewards.environment,
    )


def build_evaluator(config: Config, prompts: Prompts, core: Core) -> Evaluator:
    """Build the evaluator, which samples with the run's engines."""
    return Evaluator(
        config=config.evaluation,
        sets=prompts.evaluation,
        engines=core.engines,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
    )


def build_parts(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    core: Core,
    prompts: Prompts,
    *,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[Ranks], float],
) -> Parts:
    """Build the loop's parts. `check_stop` raises Stopped on the given ranks if any of them got a
    signal."""
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        save_estimate(config, folder.plan, recorder.note, ranks.num_ranks, gpu_bytes)
    engine, worker = core.engine, core.engines.worker
    if isinstance(worker, Leader):
        timeline = instruments.timeline
        worker.on_running = timeline.follow(engine.replica, engine.max_sequences)
        where = f" in replica {engine.replica}" if engine.num_replicas > 1 else ""
        recorder.ask_requests(lambda: f"{timeline.requests} of {engine.max_sequences}{where}")
    data_parallel = _data_parallel(config, ranks, core.policy)
    check_policy_stop = partial(check_stop, ranks.policy or ranks)
    coordinator = _coordinator(config, core, prompts)
    parts = Parts(
        policy=core.policy,
        sync=core.sync,
        loss=stoppable(core.loss, config.policy, check_policy_stop),
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=EngineCollector(
            config=config,
            coordinator=coordinator,
            engines=core.engines,
            delivery=_delivery(config, ranks, data_parallel),
            recorder=recorder,
        ),
        evaluator=build_evaluator(config, prompts, core),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, core.policy, folder, recorder),
        instruments=instruments,
        check_stop=partial(check_stop, ranks),
        check_policy_stop=check_policy_stop,
    )
    if config.roles.are_separate:
        ahead = coordinator if config.rollout.samples_ahead else None
        parts.on_policy_ranks = SeparateTraining(
            core.engines, ahead, ranks.policy, instruments.serving
        )
        parts.sync = SeparateSync(core.sync, ranks.engines_apart, core.engines.driver)
    return parts


def route_size(config: Config) -> RouteSize:
    """Return the size of the routes that engines send with the tokens."""
    if config.policy.router_replay != "engine":
        return RouteSize()
    arch = read_architecture(config)
    return RouteSize(arch.route_bytes, arch.route_dtype)


def _coordinator(config: Config, core: Core, prompts: Prompts) -> Coordinator | None:
    """Return the coordinator on rank 0, None on other ranks."""
    if core.engines.driver is None:
        return None
    return Coordinator(
        config=config.rollout,
        overlong=config.overlong,
        stream=PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle),
        driver=core.engines.driver,
        seed=config.seed,
        is_elastic=config.roles.are_separate,
    )


def build_replay(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    recorded: Path,
    *,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[Ranks], float],
) -> Parts:
    """Build the loop's parts for training on the rollouts recorded in the run folder `recorded`.
    This needs a policy but no engine and no graders. Collective."""
    check = partial(check_stop, ranks)
    loss = stoppable(loss_function(config.loss), config.policy, check)
    policy = build_policy(config, ranks)
    keep_reference(config, ranks, policy)
    data_parallel = _data_parallel(config, ranks, policy)
    delivery = _delivery(config, ranks, data_parallel)
    assert delivery is not None
    return Parts(
        policy=policy,
        sync=NoSync(),
        loss=loss,
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=Replay(config, recorded, ranks, delivery),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, folder, recorder),
        instruments=instruments,
        check_stop=check,
        check_policy_stop=check,
    )


def build_instruments(
    config: Config, ranks: Ranks, recorder: RunRecorder | RankRecorder, watchdog: Watchdog
) -> StepInstruments:
    """Build the timers and meters of this rank."""
    timeline = TimelineRecorder(ranks, config.tracking.timeline_every, recorder.timeline)
    return StepInstruments(watchdog, MemoryMeter(ranks), timeline)


def _data_parallel(config: Config, ranks: Ranks, policy: Policy) -> DataParallelRanks:
    plan, num_updates = planner(config.policy, config.train), config.train.updates_per_step
    return DataParallelRanks.join(
        ranks, policy.data_parallel_index, plan, num_updates, policy=ranks.policy
    )


def _delivery(config: Config, ranks: Ranks, data_parallel: DataParallelRanks) -> Delivery | None:
    """Return the delivery of tokens; None on a rank without a policy. Collective over the ranks
    with one."""
    policy = ranks.policy
    if policy is None:
        return None
    indices = data_parallel.indices[: policy.world_size]
    peers = [rank for rank, index in enumerate(indices) if index == data_parallel.index]
    return Delivery(data_parallel, policy.subgroup(peers), route_size(config))


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
        snapshot=policy.snapshot,
        attempt=folder.writer(ranks.generation),
        check_owner=folder.check_owner,
        note=recorder.note,
        exports=exports_of(config),
        describe=partial(_describe, config),
        extra={"mlflow_run": recorder.run_id},
        flush=recorder.flush,
    )


def _describe(config: Config, folder: Path) -> None:
    """Copy config.json, tokenizer and other files of the model into a training checkpoint."""
    copy_companions(Path(config.model.path), folder, torch_dtype(config.policy.precision))
    if config.model.drop_mtp:
        declare_without_mtp(folder)
