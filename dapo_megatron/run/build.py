"""Build the loop's parts from the config. This is the only file that connects the loop to Megatron
and vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dapo_megatron.algo.loss import dapo_loss
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.bridge.bounds import canary_bounds
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.checkpoints import CheckpointSaver
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, blocks
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.watchdog import Watchdog
from dapo_megatron.config import (
    Columns,
    Config,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    Source,
    TrainConfig,
)
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.prompts import PromptStream, load_source
from dapo_megatron.model import hf_tensors, read_architecture
from dapo_megatron.plan.compatibility import check
from dapo_megatron.plan.compatibility.rule import Machine
from dapo_megatron.plan.estimate import save_estimate
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.protocols import LossFn, MicrobatchPlanner, Parts, Policy, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rewards.registry import user_function
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.metrics import METRICS_OF_AN_UPDATE
from dapo_megatron.rollout.replay import NoEvaluation, NoSync, Replay
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.tracking.recorder import RunRecorder, SilentRecorder
from dapo_megatron.types import ConfigError, LossOutput, MicroTokens, Prompt, torch_dtype, whole


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
    grading: GradingPool | None
    driver: EngineDriver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Stop the grading processes and, without an error, the engine. Closing it is collective,
        and after an error the other ranks may never come."""
        if self.grading is not None:
            self.grading.close()
        if error is None:
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


def loss_function(loss: LossConfig) -> LossFn:
    """Return the configured loss function, with its numbers bound.

    A user-defined loss is tried on two tokens. Raises ConfigError naming loss.function if it cannot
    be imported or called, or does not return a valid LossOutput.
    """
    if loss.function is None:
        return partial(dapo_loss, **loss.numbers)
    try:
        function = partial(user_function(loss.function), **loss.numbers)
        _try_loss(function)
    except ConfigError as error:
        raise ConfigError(f"loss.function: {loss.function}: {error}") from error
    return function


def _try_loss(function: Callable[..., Any]) -> None:
    ones = torch.ones(2)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = MicroTokens(
        old_logprobs=logprobs.detach(),
        advantages=ones,
        weights=ones,
        engine_logprobs=logprobs.detach(),
        mask=ones.bool(),
    )
    try:
        output = function(logprobs, tokens)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"raised {error!r} when called with two tokens; it must accept (logprobs, tokens, *, "
            f"{', '.join(LossConfig.NUMBERS)})"
        ) from error
    if not isinstance(output, LossOutput) or not isinstance(output.sums, Mapping):
        raise ConfigError(
            f"returned {output!r:.60}; it must return a dapo_megatron.types.LossOutput"
        )
    if reserved := output.sums.keys() & METRICS_OF_AN_UPDATE:
        raise ConfigError(
            f"sums: {', '.join(sorted(reserved))} would hide a metric of the trainer; rename it"
        )
    for name, value in {"total": output.total, **output.sums}.items():
        if not isinstance(value, Tensor) or value.dim() or not value.isfinite():
            raise ConfigError(f"{name} is {value!r:.60}, not a finite scalar tensor")
        if value.requires_grad != (name == "total"):
            raise ConfigError(
                f"its {name}: total must require a gradient, and sums must not (use detach())"
            )


STOP_CHECK_SECONDS = 10.0
"""Approximate time between two stop checks within a mini-batch."""


class StoppableLoss:
    """A loss that also checks, about every STOP_CHECK_SECONDS, whether the run must stop.

    A stop abandons the mini-batch. `check` is collective; at every micro-batch it would make all
    ranks wait for the slowest. It is therefore called at every n-th micro-batch, where n is
    computed from the seconds since this loss's previous check. `check` returns a clock in seconds,
    the same on all ranks, and all ranks have the same number of micro-batches, so they call it
    together.
    """

    def __init__(self, loss: LossFn, check: Callable[[], float]) -> None:
        self._loss, self._check = loss, check
        self._interval = self._left = 1
        self._checked_at = 0.0

    def __call__(self, logprobs: Tensor, tokens: MicroTokens) -> LossOutput:
        """Compute the loss. Raises Stopped."""
        self._left -= 1
        if self._left == 0:
            now = self._check()
            per_call, self._checked_at = (now - self._checked_at) / self._interval, now
            fitting = int(STOP_CHECK_SECONDS / max(per_call, 1e-6))
            self._left = self._interval = min(max(fitting, 1), 2 * self._interval)
        return self._loss(logprobs, tokens)


def stoppable(loss: LossFn, policy: PolicyConfig, check: Callable[[], float]) -> LossFn:
    """Return `loss` with stop checks. With pipeline parallelism `loss` is returned unchanged,
    because only the last stage computes it."""
    return loss if policy.pipeline_parallel > 1 else StoppableLoss(loss, check)


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
    """Build models and graders. Collective."""
    loss = loss_function(config.loss)  # first, so that its errors come before models are built
    policy, engine, sync = build_models(config, ranks)
    grading = None
    if engine.is_leader:
        sources = (*config.data.train, *config.evaluation.sets)
        grading = GradingPool(
            {source.name: source.grader for source in sources},
            config.rewards.workers,
            config.rewards.timeout_seconds,
            config.rewards.memory_mib,
            config.rewards.environment,
        )
    driver = EngineDriver(
        engine,
        grading,
        ranks,
        deterministic=config.rollout.deterministic,
        stop=lambda: (stop and stop.signal) or "",
    )
    return Core(policy, engine, sync, loss, grading, driver)


def build_evaluator(config: Config, prompts: Prompts, core: Core) -> Evaluator:
    """Build the evaluator, which samples with the run's engines."""
    return Evaluator(
        config=config.evaluation,
        sets=prompts.evaluation,
        driver=core.driver,
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
    recorder: RunRecorder | SilentRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[], float],
) -> Parts:
    """Build the loop's parts. `check_stop` raises Stopped on all ranks if any of them received a
    signal."""
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        save_estimate(config, folder.plan, recorder.note, ranks.world_size, gpu_bytes)
    if core.engine.is_leader:
        engine, timeline = core.engine, instruments.timeline
        core.driver.on_running = timeline.follow(engine.replica, engine.max_sequences)
        where = f" in replica {engine.replica}" if engine.num_replicas > 1 else ""
        recorder.ask_requests(lambda: f"{timeline.requests} of {engine.max_sequences}{where}")
    return Parts(
        policy=core.policy,
        sync=core.sync,
        loss=stoppable(core.loss, config.policy, check_stop),
        learning_rate=learning_rate(config.optimizer),
        coordinator=Coordinator(
            config=config.rollout,
            overlong=config.overlong,
            stream=PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle),
            driver=core.driver,
            seed=config.seed,
        ),
        evaluator=build_evaluator(config, prompts, core),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, core.policy, folder, recorder),
        instruments=instruments,
        check_stop=check_stop,
    )


def build_replay(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    recorded: Path,
    *,
    recorder: RunRecorder | SilentRecorder,
    instruments: StepInstruments,
    check_stop: Callable[[], float],
) -> Parts:
    """Build the loop's parts for training on the rollouts recorded in the run folder `recorded`.
    This needs a policy but no engine and no graders. Collective."""
    from dapo_megatron.policy.policy import MegatronPolicy

    loss = loss_function(config.loss)
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    return Parts(
        policy=policy,
        sync=NoSync(),
        loss=stoppable(loss, config.policy, check_stop),
        learning_rate=learning_rate(config.optimizer),
        coordinator=Replay(recorded),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, folder, recorder),
        instruments=instruments,
        check_stop=check_stop,
    )


def build_instruments(
    config: Config, ranks: Ranks, recorder: RunRecorder | SilentRecorder, watchdog: Watchdog
) -> StepInstruments:
    """Build the timers and meters of this rank."""
    timeline = TimelineRecorder(ranks, config.tracking.timeline_every, recorder.timeline)
    return StepInstruments(watchdog, MemoryMeter(ranks), timeline)


def _checkpoints(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    folder: RunFolder,
    recorder: RunRecorder | SilentRecorder,
) -> CheckpointSaver:
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
        describe=partial(
            copy_companions,
            Path(config.model.path),
            dtype=torch_dtype(config.policy.precision),
        ),
        extra={"mlflow_run": recorder.run_id},
    )


class HfExport:
    """Exports a training checkpoint as an HF folder, without the policy. Implements
    checkpoints.Export."""

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


def open_checkpoint(config: Config, checkpoint: Path) -> Store:
    """Open the weights of a checkpoint. Raises ConfigError if its architecture differs from that of
    model.path: a different rope, for example, would load without an error and compute wrong
    values."""
    store = open_store(checkpoint, config.model.ignore_fields)
    expected, actual = (asdict(arch) for arch in (read_architecture(config), store.arch))
    if differing := [name for name in expected if expected[name] != actual[name]]:
        raise ConfigError(
            f"checkpoint: {checkpoint} is of another model than model.path: "
            + ", ".join(f"{name} {actual[name]}, not {expected[name]}" for name in differing)
        )
    return store
