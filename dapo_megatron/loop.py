"""The training loop: collect, log-probs, update, sync. It names no backend and no rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from dapo_megatron.algo import correction, kl
from dapo_megatron.algo.mismatch import GapStatistics, check_gaps, gap_statistics, merge
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.config import Config
from dapo_megatron.data.batch import (
    assemble,
    diagnose,
    fresh_mask,
    of_all,
    penalize,
    sampled_mask,
    split,
)
from dapo_megatron.protocols import Collector, Evaluations, LossFn, Policy, Recorder, Sync
from dapo_megatron.rollout import metrics as step_metrics
from dapo_megatron.types import (
    DapoError,
    EnginesLost,
    LogProbs,
    Phase,
    RankError,
    Rollouts,
    StarvedError,
    StepStats,
    Stopped,
    TokenBatch,
    TooFewEnginesError,
)

if TYPE_CHECKING:
    from dapo_megatron.checkpoints.saver import CheckpointSaver
    from dapo_megatron.cluster.instruments import StepInstruments
    from dapo_megatron.cluster.stop import Stop
    from dapo_megatron.data.owners import DataParallelRanks
    from dapo_megatron.rollout.engines import SamplingAhead


@dataclass
class Parts:
    """The objects that the loop works with."""

    policy: Policy
    sync: Sync
    loss: LossFn
    data_parallel: DataParallelRanks
    collector: Collector
    evaluator: Evaluations
    recorder: Recorder
    checkpoints: CheckpointSaver
    instruments: StepInstruments
    stop: Stop
    ahead: SamplingAhead | None = None
    """Sampling for the next step while the policy trains, if engines have separate GPUs."""


@dataclass
class Progress:
    """Completed steps of a run, and values for its summary. `seconds` is over all its starts."""

    step: int = 0
    seconds: float = 0.0
    max_gap: float = 0.0
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)
    not_logged: tuple[dict[str, float], int] | None = None
    """Metrics and number of tokens of the last step, until the engines have its weights."""


def train(config: Config, parts: Parts, progress: Progress, *, started: float) -> Progress:
    """Train from `progress.step` to `train.rollout_steps`. Collective: every rank calls it.

    `progress.seconds` is measured from `started` (as time.time()). Raises StarvedError,
    TooFewEnginesError or Stopped after saving a checkpoint.
    """
    phase = parts.instruments.phase
    try:
        train_steps(config, parts, progress, started)
    except (StarvedError, TooFewEnginesError, Stopped) as error:
        with phase(Phase.CHECKPOINT):
            parts.sync.switch_to_policy()
            parts.checkpoints.stage()
            save(parts, progress, started)()
            parts.checkpoints.wait()
        raise type(error)(
            f"{error}. Saved after step {progress.step}; to continue, start with resume=auto"
        ) from error
    except RankError:  # the lost rank would never finish its part of a checkpoint
        raise
    except DapoError:
        # An earlier checkpoint that is being written is still good.
        parts.checkpoints.settle()
        raise
    with phase(Phase.CHECKPOINT):
        parts.checkpoints.wait()
    progress.seconds = time.time() - started
    return progress


def train_steps(config: Config, parts: Parts, progress: Progress, started: float) -> None:
    """Run the remaining steps. `progress` is kept up to date, so that the caller can save a
    checkpoint after an exception."""
    parts.instruments.begin(progress.step)
    finish_step(config, parts, progress, started)
    while progress.step < config.train.rollout_steps:
        step = progress.step + 1
        parts.instruments.begin(step)
        parts.stop.check()
        progress.not_logged = train_step(config, parts, step)
        progress.step = step
        finish_step(config, parts, progress, started)


def finish_step(config: Config, parts: Parts, progress: Progress, started: float) -> None:
    """Send the weights of the last step to the engines, evaluate them, and log the step. It saves a
    checkpoint if one is due."""
    phase, step, last = parts.instruments.phase, progress.step, config.train.rollout_steps
    is_due = progress.not_logged is not None and parts.checkpoints.due(step)
    if is_due:
        with phase(Phase.CHECKPOINT):
            parts.checkpoints.stage()
    with phase(Phase.SYNC):
        report = parts.sync(step)
    is_new = progress.not_logged is not None or (step == 0 and not progress.first_evaluation)
    if is_new and parts.evaluator.due(step, last):
        with phase(Phase.EVALUATE):
            progress.last_evaluation = parts.evaluator.run(step)
        if step == 0:
            progress.first_evaluation = progress.last_evaluation
            parts.recorder.log(0, progress.first_evaluation)
    if progress.not_logged is None:
        return
    metrics, num_tokens = progress.not_logged
    metrics |= step_metrics.sync_metrics(report)
    if parts.evaluator.due(step, last):
        metrics |= progress.last_evaluation
    progress.max_gap = max(progress.max_gap, metrics.get("mismatch/gap_max", 0.0))
    progress.not_logged = None
    publish = None
    if is_due:
        with phase(Phase.CHECKPOINT):
            publish = save(parts, progress, started)
    parts.recorder.log(step, metrics | parts.instruments.metrics(num_tokens))
    # Published last, so that the metrics and samples of every checkpoint are on disk.
    if publish is not None:
        publish()


def train_step(config: Config, parts: Parts, step: int) -> tuple[dict[str, float], int]:
    """Run one rollout step without its sync: sample with the weights of step - 1, update them.

    Afterwards the policy has the accelerator. Returns the step's metrics and its number of tokens
    (prompts and responses).
    """
    phase = parts.instruments.phase
    rollouts = None
    while rollouts is None:
        try:
            with phase(Phase.GENERATE):
                rollouts = parts.collector.collect(step - 1)
        except EnginesLost:
            with phase(Phase.SYNC):  # waits for engines
                parts.sync(step - 1)
    parts.sync.switch_to_policy()
    with parts.ahead.sampling(step - 1) if parts.ahead else nullcontext():
        return train_on_rollouts(config, parts, rollouts)


def train_on_rollouts(
    config: Config, parts: Parts, rollouts: Rollouts
) -> tuple[dict[str, float], int]:
    """Compute log-probs and update the policy. Returns metrics and the number of tokens."""
    sequences, metrics = rollouts.sequences, rollouts.metrics
    owners = parts.data_parallel.owners(sequences)
    replays = config.policy.router_replay == "engine"
    batch = assemble(sequences, rollouts.tokens, owners, with_routes=replays)
    rollouts.tokens.clear()  # the batch has copies
    if config.loss.old_logprobs == "engine":
        batch = dataclasses.replace(batch, old_logprobs=batch.engine_logprobs)
    elif config.needs_logprob_pass:
        batch = with_policy_logprobs(config, parts, rollouts, batch)
        batch = correct(config, parts, batch, metrics)
    if config.loss.kl.is_on or config.loss.distill is not None:
        batch = with_other_logprobs(config, parts, batch)
    if batch.old_logprobs is not None:
        measure_divergences(config, parts, batch, metrics)
    if config.loss.kl.is_on and not config.loss.kl.is_in_loss:
        batch = penalize_rewards(config, parts, rollouts, batch)
    with parts.instruments.phase(Phase.UPDATE):
        updates = update(config, parts, rollouts, batch)
    return metrics | step_metrics.update_metrics(updates), int(batch.lengths.sum())


def with_policy_logprobs(
    config: Config, parts: Parts, rollouts: Rollouts, batch: TokenBatch
) -> TokenBatch:
    """Return `batch` with the log-probs of the policy before the step's first update."""
    with parts.instruments.phase(Phase.LOGPROBS):
        outputs = parts.policy.logprobs(batch)
    examine(config, parts, rollouts, batch, outputs)
    routes = batch.routes if outputs.routes is None else outputs.routes
    return dataclasses.replace(batch, old_logprobs=outputs.logprobs, routes=routes)


def examine(
    config: Config, parts: Parts, rollouts: Rollouts, batch: TokenBatch, outputs: LogProbs
) -> None:
    """Record the policy's log-probs of `batch` before the step's first update, and compare them
    with the engines' (`check_mismatch`) and those of other models that the batch has."""
    diagnostics = diagnose(rollouts.sequences, batch, outputs)
    parts.recorder.sequence_diagnostics(
        rollouts.version + 1, diagnostics, rollouts.sequences, parts.data_parallel
    )
    check_mismatch(config, parts, rollouts, batch, outputs)
    batch = dataclasses.replace(batch, old_logprobs=outputs.logprobs)
    measure_divergences(config, parts, batch, rollouts.metrics)


def check_mismatch(
    config: Config, parts: Parts, rollouts: Rollouts, batch: TokenBatch, outputs: LogProbs
) -> None:
    """Compare policy and engine on the tokens of `batch` that the current weights sampled, and add
    mismatch/* to the step's metrics. Collective. Raises SyncError naming an engine that differs by
    more than sync.* allows."""
    # A completion that continued replays the experts of older weights in front of its new tokens.
    replays = config.policy.router_replay == "engine"
    sequences, version = rollouts.sequences, rollouts.version
    compared = dataclasses.replace(batch, old_logprobs=outputs.logprobs)
    segments = [part for sequence in sequences for part in sequence.segments]
    engines = sorted({part.engine for part in segments if not part.is_observed})
    own_gaps = []
    for engine in engines:
        mask = fresh_mask(sequences, batch, version=version, engine=engine, only_whole=replays)
        if config.loss.old_logprobs == "engine":  # only loss tokens have log-probs
            mask = mask & batch.loss_mask
        own_gaps.append(gap_statistics(compared, mask))
    of_ranks = parts.data_parallel.all_gather(own_gaps, list[GapStatistics])
    gaps = dict(zip(engines, map(merge, zip(*of_ranks, strict=True)), strict=True))
    limits = config.sync
    check_gaps(gaps, version=version, max_gap=limits.max_gap, max_mean_gap=limits.max_mean_gap)
    rollouts.metrics.update(step_metrics.mismatch_metrics(merge([*gaps.values()])))


def correct(
    config: Config, parts: Parts, batch: TokenBatch, metrics: dict[str, float]
) -> TokenBatch:
    """Return `batch` with the loss weights of loss.correction, and add correction/* to the step's
    metrics."""
    if not config.loss.correction.is_on:
        return batch
    numbers = correction.Correction(**config.loss.correction_numbers)
    batch, own = correction.correct(batch, numbers)
    parts_of_ranks = parts.data_parallel.all_gather(own, correction.CorrectionStatistics)
    statistics = correction.merge(parts_of_ranks)
    metrics |= step_metrics.correction_metrics(statistics, numbers.names)
    return batch


def with_other_logprobs(config: Config, parts: Parts, batch: TokenBatch) -> TokenBatch:
    """Return `batch` with the log-probs of loss.kl's reference and of loss.distill's teacher, if
    they are configured."""
    with parts.instruments.phase(Phase.LOGPROBS):
        if config.loss.kl.is_on:
            reference = parts.policy.reference_logprobs(batch)
            batch = dataclasses.replace(batch, reference_logprobs=reference)
        if config.loss.distill is not None:
            teacher = parts.policy.teacher_logprobs(batch)
            batch = dataclasses.replace(
                batch,
                teacher_logprobs=teacher.logprobs,
                top_ids=teacher.top_ids,
                teacher_top_logprobs=teacher.top_logprobs,
            )
    return batch


def measure_divergences(
    config: Config, parts: Parts, batch: TokenBatch, metrics: dict[str, float]
) -> None:
    """Add kl/* and distill/* to the step's metrics, for the models whose log-probs `batch` has
    besides the old ones. Of a teacher it is the mean of d, clamped. Collective."""
    others = {
        "kl/reference": (batch.reference_logprobs, kl.KL(**config.loss.kl_numbers)),
        "distill/teacher": (
            batch.teacher_logprobs,
            kl.KL(1.0, "k1", config.loss.log_ratio_limit),
        ),
    }
    for name, (other, numbers) in others.items():
        if other is not None:
            own = kl.statistics(batch, other, numbers)
            statistics = kl.merge(parts.data_parallel.all_gather(own, kl.KLStatistics))
            metrics |= step_metrics.kl_metrics(statistics, name)


def penalize_rewards(
    config: Config, parts: Parts, rollouts: Rollouts, batch: TokenBatch
) -> TokenBatch:
    """Return `batch` with the advantages of rewards that include loss.kl's penalty."""
    numbers, sequences = kl.KL(**config.loss.kl_numbers), rollouts.sequences
    own = kl.penalties(batch, sampled_mask(batch, sequences), numbers)
    penalties = of_all(batch, parts.data_parallel.all_gather(own, list[float]))
    rollouts.metrics.update(step_metrics.penalty_metrics(penalties))
    eps, divide_by_std = config.loss.advantage_eps, config.loss.advantage_std
    batch = dataclasses.replace(batch, reference_logprobs=None)
    return penalize(batch, sequences, penalties, eps=eps, divide_by_std=divide_by_std)


def update(config: Config, parts: Parts, rollouts: Rollouts, batch: TokenBatch) -> list[StepStats]:
    """Run the optimizer steps of one rollout step. Return the statistics of each.

    If there was no pass for log-probs, the first update compares policy and engine before its
    optimizer step.
    """
    minis = split(
        batch,
        config.train.updates_per_step,
        config.loss.aggregation,
        divisor=config.rollout.max_response_tokens,
    )
    starts = accumulate((mini.num_sequences for mini in minis), initial=0)
    updates: list[StepStats] = []
    lr = warmup_lr(
        rollouts.version + 1,
        lr=config.optimizer.lr,
        warmup_rollout_steps=config.optimizer.warmup_rollout_steps,
    )
    for start, mini in zip(starts, minis):
        if not mini.num_loss_tokens:
            # There is no gradient, but Adam's momentum would still move the weights.
            continue
        check = None
        if mini.old_logprobs is None:
            check = partial(examine, config, parts, rollouts, mini)
        elif config.loss.old_logprobs == "engine" and not updates:
            own = rollouts.sequences[start : start + mini.num_sequences]
            of_mini = dataclasses.replace(rollouts, sequences=own)
            check = partial(check_mismatch, config, parts, of_mini, mini)
        updates.append(parts.policy.update(mini, parts.loss, lr, check=check))
        parts.recorder.trained(mini.lengths.tolist(), mini.num_loss_tokens)
    return updates


def save(parts: Parts, progress: Progress, started: float) -> Callable[[], None]:
    """Prepare a checkpoint of the current state, with the policy snapshot that
    `parts.checkpoints.stage` made. Calling the returned function writes and publishes it in the
    background."""
    progress.seconds = time.time() - started
    state = {"progress": dict(vars(progress)), "coordinator": parts.collector.state()}
    return parts.checkpoints.commit(progress.step, state, [parts.collector.snapshot()])
