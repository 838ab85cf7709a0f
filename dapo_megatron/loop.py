"""The training loop: collect, log-probs, update, sync. It names no backend and no rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from dapo_megatron.algo import correction, kl
from dapo_megatron.algo.mismatch import GapStatistics, check_gap, gap_statistics, merge
from dapo_megatron.config import Config
from dapo_megatron.data.batch import (
    assemble,
    diagnose,
    fresh_mask,
    of_all,
    penalize,
    response_tokens,
    split,
    tokens_in,
)
from dapo_megatron.protocols import Parts
from dapo_megatron.rollout import metrics as step_metrics
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.types import (
    DapoError,
    EnginesLost,
    LogProbs,
    Phase,
    RankError,
    StarvedError,
    Stopped,
    TokenBatch,
    TooFewEnginesError,
    TrainingSequence,
)


@dataclass
class Progress:
    """Completed steps of a run, and values for its summary. `seconds` is over all its starts."""

    step: int = 0
    seconds: float = 0.0
    max_gap: float = 0.0
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)


def train(
    config: Config, parts: Parts, progress: Progress, partial_step: PartialStep, *, started: float
) -> Progress:
    """Train from `progress.step` to `train.rollout_steps`. Collective: every rank calls it.

    `partial_step` holds what is already done of the next step. `progress.seconds` is measured from
    `started` (as time.time()). Raises StarvedError, TooFewEnginesError or Stopped after saving a
    checkpoint.
    """
    phase = parts.instruments.phase
    try:
        train_steps(config, parts, progress, partial_step, started)
    except (StarvedError, TooFewEnginesError, Stopped) as error:
        with phase(Phase.CHECKPOINT):
            parts.sync.switch_to_policy()
            parts.checkpoints.stage()
            save(config, parts, progress, partial_step, started)()
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


def train_steps(
    config: Config, parts: Parts, progress: Progress, partial_step: PartialStep, started: float
) -> None:
    """Run the remaining steps. `progress` and `partial_step` are kept up to date, so that the
    caller can save a checkpoint after an exception."""
    phase, last = parts.instruments.phase, config.train.rollout_steps
    parts.instruments.begin(progress.step)
    with phase(Phase.SYNC):
        parts.sync(progress.step)
    if progress.step == 0 and not progress.first_evaluation and parts.evaluator.due(0, last):
        with phase(Phase.EVALUATE):
            progress.first_evaluation = parts.evaluator.run(0)
        progress.last_evaluation = progress.first_evaluation
        parts.recorder.log(0, progress.first_evaluation)
    while progress.step < last:
        step = progress.step + 1
        parts.instruments.begin(step)
        parts.check_stop()
        metrics, num_tokens = train_step(config, parts, step, partial_step)
        is_due = parts.checkpoints.due(step)
        if is_due:
            with phase(Phase.CHECKPOINT):
                parts.checkpoints.stage()
        with phase(Phase.SYNC):
            metrics |= step_metrics.sync_metrics(parts.sync(step))
        if parts.evaluator.due(step, last):
            with phase(Phase.EVALUATE):
                progress.last_evaluation = parts.evaluator.run(step)
            metrics |= progress.last_evaluation
        progress.step = step
        progress.max_gap = max(progress.max_gap, metrics.get("mismatch/gap_max", 0.0))
        partial_step.close()
        publish = None
        if is_due:
            with phase(Phase.CHECKPOINT):
                publish = save(config, parts, progress, partial_step, started)
        parts.recorder.log(step, metrics | parts.instruments.metrics(num_tokens))
        # Published last, so that the metrics and samples of every checkpoint are on disk.
        if publish is not None:
            publish()


def train_step(
    config: Config, parts: Parts, step: int, partial_step: PartialStep
) -> tuple[dict[str, float], int]:
    """Run one rollout step without its sync: sample with the weights of step - 1, update them.

    Work that `partial_step` already holds is not repeated. Afterwards the policy has the
    accelerator. Returns the step's metrics and its number of tokens (prompts and responses).
    """
    phase = parts.instruments.phase
    while partial_step.sequences is None:
        try:
            with (
                phase(Phase.GENERATE),
                parts.recorder.progress(config.rollout.prompts_per_step) as show,
            ):
                partial_step.begin(parts.collector.collect(version=step - 1, on_progress=show))
        except EnginesLost:
            with phase(Phase.SYNC):  # waits for engines
                parts.sync(step - 1)
    parts.sync.switch_to_policy()
    # In a step that goes on after some updates, the engines have weights between two versions.
    ahead = nullcontext() if partial_step.updates else parts.sampling_ahead(step - 1)
    with ahead:
        return train_on_rollouts(config, parts, step, partial_step)


def train_on_rollouts(
    config: Config, parts: Parts, step: int, partial_step: PartialStep
) -> tuple[dict[str, float], int]:
    """Compute log-probs and update the policy. Returns metrics and the number of tokens."""
    sequences = partial_step.sequences or []
    owners = parts.data_parallel.owners(sequences)
    replays = config.policy.router_replay == "engine"
    batch = assemble(sequences, partial_step.tokens, owners, with_routes=replays)
    partial_step.tokens = tokens_in(sequences, batch)
    if config.loss.old_logprobs == "engine":
        batch = dataclasses.replace(batch, old_logprobs=batch.engine_logprobs)
    else:
        batch = with_policy_logprobs(config, parts, batch, step, partial_step)
        batch = correct(config, parts, batch, partial_step)
    batch = compare_with_reference(config, parts, batch, partial_step)
    with parts.instruments.phase(Phase.UPDATE):
        update(config, parts, batch, step, partial_step)
    metrics = partial_step.metrics | step_metrics.update_metrics(partial_step.updates)
    return metrics, int(batch.lengths.sum())


def with_policy_logprobs(
    config: Config, parts: Parts, batch: TokenBatch, step: int, partial_step: PartialStep
) -> TokenBatch:
    """Return `batch` with the log-probs of the policy before the step's first update."""
    if partial_step.old_logprobs is None:
        parts.check_stop()
        with parts.instruments.phase(Phase.LOGPROBS):
            outputs = parts.policy.logprobs(batch)
        sequences = partial_step.sequences or []
        diagnostics = diagnose(sequences, batch, outputs)
        parts.recorder.sequence_diagnostics(step, diagnostics, sequences, parts.data_parallel)
        check_mismatch(config, parts, sequences, batch, step, partial_step, outputs)
        partial_step.old_logprobs, partial_step.routes = outputs.logprobs, outputs.routes
    routes = batch.routes if partial_step.routes is None else partial_step.routes
    return dataclasses.replace(batch, old_logprobs=partial_step.old_logprobs, routes=routes)


def check_mismatch(
    config: Config,
    parts: Parts,
    sequences: Sequence[TrainingSequence],
    batch: TokenBatch,
    step: int,
    partial_step: PartialStep,
    outputs: LogProbs,
) -> None:
    """Compare policy and engine on the tokens of `batch` that the current weights sampled, and add
    mismatch/* to the step's metrics. Collective. Raises SyncError if they differ by more than
    sync.* allows."""
    # A completion that continued replays the experts of older weights in front of its new tokens.
    replays = config.policy.router_replay == "engine"
    mask = fresh_mask(sequences, batch, version=step - 1, only_whole=replays)
    if config.loss.old_logprobs == "engine":  # only loss tokens have log-probs
        mask = mask & batch.loss_mask
    own_gap = gap_statistics(dataclasses.replace(batch, old_logprobs=outputs.logprobs), mask)
    gap = merge(parts.data_parallel.all_gather(own_gap, GapStatistics))
    check_gap(
        gap,
        version=step - 1,
        max_gap=config.sync.max_gap,
        max_mean_gap=config.sync.max_mean_gap,
    )
    partial_step.metrics |= step_metrics.mismatch_metrics(gap)


def correct(
    config: Config, parts: Parts, batch: TokenBatch, partial_step: PartialStep
) -> TokenBatch:
    """Return `batch` with the loss weights of loss.correction, and add correction/* to the step's
    metrics."""
    if not config.loss.correction.is_on:
        return batch
    numbers = correction.Correction(**config.loss.correction_numbers)
    batch, own = correction.correct(batch, numbers)
    parts_of_ranks = parts.data_parallel.all_gather(own, correction.CorrectionStatistics)
    statistics = correction.merge(parts_of_ranks)
    partial_step.metrics |= step_metrics.correction_metrics(statistics, numbers.names)
    return batch


def compare_with_reference(
    config: Config, parts: Parts, batch: TokenBatch, partial_step: PartialStep
) -> TokenBatch:
    """Return `batch` with the log-probs of loss.kl's reference, or with the advantages of rewards
    that include its penalty, and add kl/* to the step's metrics."""
    if not config.loss.kl.is_on:
        return batch
    if partial_step.reference_logprobs is None:
        parts.check_stop()
        with parts.instruments.phase(Phase.LOGPROBS):
            partial_step.reference_logprobs = parts.policy.reference_logprobs(batch)
    compared = dataclasses.replace(batch, reference_logprobs=partial_step.reference_logprobs)
    numbers = kl.KL(**config.loss.kl_numbers)
    statistics = parts.data_parallel.all_gather(kl.statistics(compared, numbers), kl.KLStatistics)
    partial_step.metrics |= step_metrics.kl_metrics(kl.merge(statistics))
    if config.loss.kl.is_in_loss:
        return compared
    sequences = partial_step.sequences or []
    own = kl.penalties(compared, response_tokens(batch, sequences), numbers)
    penalties = of_all(batch, parts.data_parallel.all_gather(own, list[float]))
    partial_step.metrics |= step_metrics.penalty_metrics(penalties)
    eps, divide_by_std = config.loss.advantage_eps, config.loss.advantage_std
    return penalize(batch, sequences, penalties, eps=eps, divide_by_std=divide_by_std)


def update(
    config: Config, parts: Parts, batch: TokenBatch, step: int, partial_step: PartialStep
) -> None:
    """Run the optimizer steps of one rollout step that `partial_step` does not hold yet.

    With loss.old_logprobs engine, the first one also compares policy and engine.
    """
    minis = split(
        batch,
        config.train.updates_per_step,
        config.loss.aggregation,
        divisor=config.rollout.max_response_tokens,
    )
    starts = accumulate((mini.num_sequences for mini in minis), initial=0)
    # Without loss tokens there is no gradient, but Adam's momentum would still move the weights.
    trained = [(start, mini) for start, mini in zip(starts, minis) if mini.num_loss_tokens]
    for start, mini in trained[len(partial_step.updates) :]:
        parts.check_stop()
        check = None
        if config.loss.old_logprobs == "engine" and not partial_step.updates:
            sequences = (partial_step.sequences or [])[start : start + mini.num_sequences]
            check = partial(check_mismatch, config, parts, sequences, mini, step, partial_step)
        stats = parts.policy.update(mini, parts.loss, parts.learning_rate(step), check=check)
        partial_step.updates.append(stats)
        parts.recorder.trained(mini.lengths.tolist(), mini.num_loss_tokens)


def save(
    config: Config, parts: Parts, progress: Progress, partial_step: PartialStep, started: float
) -> Callable[[], None]:
    """Prepare a checkpoint of the current state, with the policy snapshot that
    `parts.checkpoints.stage` made. Calling the returned function writes and publishes it in the
    background."""
    progress.seconds = time.time() - started
    state = {
        "progress": dict(vars(progress)),
        "open_step": partial_step.state(config),
        "coordinator": parts.collector.state(),
    }
    rollouts = (parts.collector.snapshot(), partial_step.snapshot(parts.data_parallel))
    return parts.checkpoints.commit(
        progress.step, state, rollouts, is_open=partial_step.sequences is not None
    )
