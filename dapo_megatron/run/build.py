"""Config -> parts: the only file that names Megatron and vLLM to the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.algo.loss import dapo_loss
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.checkpoints import Checkpoints
from dapo_megatron.checkpoints.formats.file import TensorInfo
from dapo_megatron.checkpoints.formats.folder import copy_companions
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, blocks
from dapo_megatron.cluster.instruments import Instruments, MemoryMeter, Timeline
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
from dapo_megatron.plan.layout import row_multiple, sequence_multiple
from dapo_megatron.protocols import LossFn, Parts, Planner, Policy, RolloutEngine
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
    """The prompts of a run and what was left out of them."""

    train: list[Prompt]
    evaluation: dict[str, Sequence[Prompt]]
    notes: list[str]


@dataclass
class Core:
    """Policy, engine and graders: what training and evaluating have in common."""

    policy: Policy
    engine: RolloutEngine
    sync: WeightSync
    loss: LossFn
    grading: GradingPool | None
    driver: EngineDriver

    def close(self) -> None:
        """End the grading processes."""
        if self.grading is not None:
            self.grading.close()


def load_prompts(config: Config) -> Prompts:
    """All prompts, held-out ones first: their problems are left out of training."""
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
        counts = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
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


def planner(policy: PolicyConfig, train: TrainConfig) -> Planner:
    """How a batch is split into micro-batches that this layout can run."""
    return partial(
        plan_microbatches,
        # The bound is of one rank; those of a context-parallel group share each row.
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
    """Return the loss that the config names, with its numbers.

    A user's own is tried on two tokens. Raises ConfigError naming loss.function if it cannot be
    imported or called, or returns something else than a LossOutput.
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
    except Exception as error:  # anyone's code may raise anything
        raise ConfigError(
            f"raised {error!r} for two tokens; it is called as function(logprobs, tokens, *, "
            f"{', '.join(LossConfig.NUMBERS)})"
        ) from error
    if not isinstance(output, LossOutput) or not isinstance(output.sums, Mapping):
        raise ConfigError(
            f"returned {output!r:.60}; it must return a dapo_megatron.types.LossOutput"
        )
    if taken := output.sums.keys() & METRICS_OF_AN_UPDATE:
        raise ConfigError(f"sums: {', '.join(sorted(taken))} would hide a metric of the trainer")
    for name, value in {"total": output.total, **output.sums}.items():
        if not isinstance(value, Tensor) or value.dim() or not value.isfinite():
            raise ConfigError(f"{name} is {value!r:.60}, not a finite scalar tensor")
        if value.requires_grad != (name == "total"):
            raise ConfigError(f"its {name}: total must carry a gradient, and sums none")


STOP_CHECK_SECONDS = 10.0
"""Between two checks for a stop within a mini-batch."""


class StoppableLoss:
    """A loss that also checks, about every STOP_CHECK_SECONDS, whether the run shall stop.

    A stop abandons the mini-batch. `check` is a collective of all ranks: at each micro-batch it
    would make every rank wait for the slowest. So it is called at every n-th micro-batch, and n
    follows from the seconds since the previous check, on which `check` makes all ranks agree. All
    ranks have equally many micro-batches.
    """

    def __init__(self, loss: LossFn, check: Callable[[], float]) -> None:
        self._loss, self._check = loss, check
        self._interval = self._left = 1

    def __call__(self, logprobs: Tensor, tokens: MicroTokens) -> LossOutput:
        """Compute the loss. Raises Stopped."""
        self._left -= 1
        if self._left == 0:
            per_call = self._check() / self._interval
            fitting = int(STOP_CHECK_SECONDS / max(per_call, 1e-6))
            self._left = self._interval = min(max(fitting, 1), 2 * self._interval)
        return self._loss(logprobs, tokens)


def stoppable(loss: LossFn, policy: PolicyConfig, check: Callable[[], float]) -> LossFn:
    """Return `loss` with checks whether the run shall stop. In a pipeline it has none: there is no
    point that all stages reach."""
    return loss if policy.pipeline_parallel > 1 else StoppableLoss(loss, check)


def build_models(config: Config, ranks: Ranks) -> tuple[Policy, RolloutEngine, WeightSync]:
    """The engine first: it sizes its cache by what memory is free. It then sleeps, and the policy
    is there; the first sync gives the engine its turn. Collective."""
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.policy.policy import MegatronPolicy

    check(config, read_architecture(config), Machine.here())
    engine = VllmEngine(
        config,
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        is_empty=True,
    )
    engine.sleep()
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    sync = WeightSync(
        policy,
        engine,
        ranks,
        config.sync,
        vocab=policy.architecture.vocab_size,
        max_tokens=config.rollout.max_prompt_tokens,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)),
    )
    return policy, engine, sync


def build_core(config: Config, ranks: Ranks, stop: Stop | None = None) -> Core:
    """Build models and graders. Collective."""
    loss = loss_function(config.loss)  # first: a mistake in it is refused before models are built
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
    """Evaluation through the run's engines."""
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
    instruments: Instruments,
    check_stop: Callable[[], float],
) -> Parts:
    """Build what the loop works with. `check_stop` raises Stopped on all ranks if a signal
    came."""
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
    instruments: Instruments,
    check_stop: Callable[[], float],
) -> Parts:
    """Build what the loop works with to train on the rollouts recorded in the run folder
    `recorded`: a policy, and nothing else that is heavy. Collective."""
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
) -> Instruments:
    """Build what observes the phases of a step on this rank."""
    timeline = Timeline(ranks, config.tracking.timeline_every, recorder.timeline)
    return Instruments(watchdog, MemoryMeter(ranks), timeline)


def _checkpoints(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    folder: RunFolder,
    recorder: RunRecorder | SilentRecorder,
) -> Checkpoints:
    return Checkpoints(
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
    """checkpoints.Export: a training checkpoint as an HF folder, made without the policy."""

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
    """Weights for the model of the config. Raises ConfigError if they are of another model: with
    the same shapes, another rope would be wrong without a sign."""
    store = open_store(checkpoint, config.model.ignore_fields)
    wanted, found = (asdict(arch) for arch in (read_architecture(config), store.arch))
    if other := [name for name in wanted if wanted[name] != found[name]]:
        raise ConfigError(
            f"checkpoint: {checkpoint} is of another model than model.path: "
            + ", ".join(f"{name} {found[name]}, not {wanted[name]}" for name in other)
        )
    return store
