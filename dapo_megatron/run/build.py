"""Build the loop's parts from the config. This is the only file that connects the loop to Megatron
and vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.bridge.bounds import canary_bounds
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.checkpoints import CheckpointSaver
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import blocks
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.messages import Hub, Member, open_channel
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import (
    Columns,
    Config,
    OptimizerConfig,
    PolicyConfig,
    Source,
    TrainConfig,
)
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.prompts import PromptStream, load_source
from dapo_megatron.model import hf_tensors, read_architecture
from dapo_megatron.plan.compatibility import check
from dapo_megatron.plan.compatibility.rule import Machine
from dapo_megatron.plan.estimate import save_estimate
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.protocols import LossFn, MicrobatchPlanner, Parts, Policy, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.exchange import TokenExchange
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.rollout.store import CompletionStore
from dapo_megatron.rollout.worker import Follower, Leader
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.loss import loss_function, stoppable
from dapo_megatron.run.other_weights import keep_reference
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import Prompt, torch_dtype, whole


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
    leaders: list[int]
    """Rank of each replica's leader."""
    store: CompletionStore
    grading: GradingPool | None
    channel: list[Member | Hub]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Stop the grading processes and, without an error, close the sockets and the engine. After
        an error the coordinator's thread may still use the sockets, and the other ranks may never
        come to the engine's collective."""
        if self.grading is not None:
            self.grading.close()
        if error is None:
            for end in self.channel:
                end.close()
            self.engine.close()


def load_prompts(config: Config) -> Prompts:
    """Load all prompts. Evaluation sets are loaded first, because their problems are excluded from
    training."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    limit = config.rollout.max_prompt_tokens
    notes: list[str] = []

    def load(source: Source, columns: Columns, exclude: frozenset[str]) -> Sequence[Prompt]:
        loaded = load_source(source, tokenizer, limit, columns=columns, exclude=exclude)
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


def planner(policy: PolicyConfig, train: TrainConfig) -> MicrobatchPlanner:
    """Return the function that splits a batch into micro-batches that this layout can run."""
    return partial(
        plan_microbatches,
        # The limit is per rank, and the ranks of a context-parallel group share each row.
        max_tokens=train.max_tokens_per_microbatch * policy.context_parallel,
        packed=train.packing,
        sequence_multiple=sequence_multiple(policy),
        row_multiple=row_multiple(policy),
        num_multiple=policy.pipeline_parallel if policy.virtual_pipeline_parallel else 1,
    )


def learning_rate(optimizer: OptimizerConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the rollout step, counted from 1."""
    return partial(warmup_lr, lr=optimizer.lr, warmup_rollout_steps=optimizer.warmup_rollout_steps)


def build_models(config: Config, ranks: Ranks) -> tuple[Policy, RolloutEngine, WeightSync]:
    """Build engine, policy and their sync. Collective.

    The engine is built before the policy, because it needs its share of the GPU free. It sees the
    memory of communicators, which are created first. Afterwards it sleeps, and the policy has the
    accelerator until the first sync.
    """
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.policy.communicators import connect
    from dapo_megatron.policy.policy import MegatronPolicy

    check(config, read_architecture(config), Machine.here())
    connect(config)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    engine = VllmEngine(
        config,
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        ranks_per_node=ranks_per_node,
        is_empty=True,
    )
    engine.sleep()
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    sync = WeightSync(
        policy,
        engine,
        ranks,
        config.sync,
        bounds=canary_bounds(config, has_experts=bool(policy.architecture.num_experts)),
        vocab=policy.architecture.vocab_size,
        max_tokens=config.rollout.max_prompt_tokens,
        ranks_per_node=ranks_per_node,
    )
    return policy, engine, sync


def build_core(config: Config, ranks: Ranks, stop: Stop | None = None) -> Core:
    """Build models, graders, and the channel to the coordinator. Collective."""
    loss = loss_function(config.loss)  # first, so that its errors come before models are built
    policy, engine, sync = build_models(config, ranks)
    replicas = ranks.all_gather(engine.replica, int)
    peers = ranks.subgroup(
        [rank for rank, replica in enumerate(replicas) if replica == engine.replica]
    )
    hub, member = open_channel(
        ranks, engine.replica if engine.is_leader else None, engine.num_replicas
    )
    is_deterministic = config.rollout.deterministic
    driver: EngineDriver | None = None
    if hub is not None:
        driver = EngineDriver(
            hub,
            engine.num_replicas,
            engine.max_sequences,
            deterministic=is_deterministic,
            silence_seconds=max(config.watchdog.generate, config.watchdog.evaluate),
        )

    def signal() -> str:
        return (stop and stop.signal) or ""

    store = CompletionStore()
    grading: GradingPool | None = None
    worker: Leader | Follower
    if member is None:
        worker = Follower(engine, peers, stop=signal, on_activity=ranks.on_activity)
    else:
        grading = _grading_pool(config)
        worker = Leader(
            engine,
            grading,
            member,
            peers,
            store,
            deterministic=is_deterministic,
            stop=signal,
            on_activity=ranks.on_activity,
        )
    return Core(
        policy=policy,
        engine=engine,
        sync=sync,
        loss=loss,
        engines=Engines(worker, driver, ranks),
        leaders=[replicas.index(replica) for replica in range(engine.num_replicas)],
        store=store,
        grading=grading,
        channel=[end for end in (member, hub) if end is not None],
    )


def _grading_pool(config: Config) -> GradingPool:
    sources = (*config.data.train, *config.evaluation.sets)
    return GradingPool(
        {source.name: source.grader for source in sources},
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
    check_stop: Callable[[], float],
) -> Parts:
    """Build the loop's parts. `check_stop` raises Stopped on all ranks if any of them received a
    signal."""
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        save_estimate(config, folder.plan, recorder.note, ranks.world_size, gpu_bytes)
    engine, worker = core.engine, core.engines.worker
    if isinstance(worker, Leader):
        timeline = instruments.timeline
        worker.on_running = timeline.follow(engine.replica, engine.max_sequences)
        where = f" in replica {engine.replica}" if engine.num_replicas > 1 else ""
        recorder.ask_requests(lambda: f"{timeline.requests} of {engine.max_sequences}{where}")
    keep_reference(config, ranks, core.policy)
    data_parallel = _data_parallel(config, ranks, core.policy)
    return Parts(
        policy=core.policy,
        sync=core.sync,
        loss=stoppable(core.loss, config.policy, check_stop),
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=EngineCollector(
            config=config,
            coordinator=_coordinator(config, core, prompts),
            engines=core.engines,
            exchange_tokens=TokenExchange(ranks, data_parallel, core.leaders, core.store),
            data_parallel=data_parallel,
            recorder=recorder,
            replica=engine.replica if engine.is_leader else None,
            store=core.store,
        ),
        evaluator=build_evaluator(config, prompts, core),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, core.policy, folder, recorder),
        instruments=instruments,
        check_stop=check_stop,
    )


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
    )


def build_replay(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    recorded: Path,
    *,
    recorder: RunRecorder | RankRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[], float],
) -> Parts:
    """Build the loop's parts for training on the rollouts recorded in the run folder `recorded`.
    This needs a policy but no engine and no graders. Collective."""
    from dapo_megatron.policy.policy import MegatronPolicy

    loss = stoppable(loss_function(config.loss), config.policy, check_stop)
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    keep_reference(config, ranks, policy)
    data_parallel = _data_parallel(config, ranks, policy)
    return Parts(
        policy=policy,
        sync=NoSync(),
        loss=loss,
        learning_rate=learning_rate(config.optimizer),
        data_parallel=data_parallel,
        collector=Replay(config, recorded, ranks, data_parallel),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, folder, recorder),
        instruments=instruments,
        check_stop=check_stop,
    )


def build_instruments(
    config: Config, ranks: Ranks, recorder: RunRecorder | RankRecorder, watchdog: Watchdog
) -> StepInstruments:
    """Build the timers and meters of this rank."""
    timeline = TimelineRecorder(ranks, config.tracking.timeline_every, recorder.timeline)
    return StepInstruments(watchdog, MemoryMeter(ranks), timeline)


def _data_parallel(config: Config, ranks: Ranks, policy: Policy) -> DataParallelRanks:
    plan, num_updates = planner(config.policy, config.train), config.train.updates_per_step
    return DataParallelRanks.join(ranks, policy.data_parallel_index, plan, num_updates)


def _checkpoints(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    folder: RunFolder,
    recorder: RunRecorder | RankRecorder,
) -> CheckpointSaver:
    dtype = torch_dtype(config.policy.precision)
    return CheckpointSaver(
        config,
        folder.checkpoints,
        ranks,
        background=ranks.second(),
        snapshot=policy.snapshot,
        attempt=folder.attempt,
        check_owner=folder.check_owner,
        note=recorder.note,
        export=HfExport(config) if config.checkpoint.export_hf else None,
        describe=partial(copy_companions, Path(config.model.path), dtype=dtype),
        extra={"mlflow_run": recorder.run_id},
        flush=recorder.flush,
    )


class HfExport:
    """Exports a training checkpoint as an HF folder. Implements checkpoints.Export."""

    def __init__(self, config: Config) -> None:
        self._model = Path(config.model.path)
        self._ignore = config.model.ignore_fields
        self._dtype = torch_dtype(config.policy.precision)
        shapes = hf_tensors(read_architecture(config))
        self._infos = {name: TensorInfo(shape, self._dtype) for name, shape in shapes.items()}
        self.num_bytes = sum(info.nbytes for info in self._infos.values())

    def create(self, target: Path) -> None:
        """See checkpoints.Export."""
        HfWriter(target, self._infos).create()

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        """See checkpoints.Export."""
        store, writer = open_store(source, self._ignore), HfWriter(target, self._infos)
        for name in list(self._infos)[rank::num_ranks]:
            info = store.info(name)
            for box in blocks(whole(info.shape), info.dtype.itemsize):
                writer.write(name, store.read(name, box), box)

    def finish(self, target: Path) -> None:
        """See checkpoints.Export."""
        HfWriter(target, self._infos).finish(self._model, self._dtype)
