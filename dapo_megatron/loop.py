"""The training loop: collect, train, sync, repeat. It names no backend and no rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import Tensor

from dapo_megatron.algo.loss import make_loss
from dapo_megatron.algo.mismatch import GapStatistics, gap_statistics
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.config import Config
from dapo_megatron.data.batch import assemble, fresh_mask, inspect, split
from dapo_megatron.protocols import LossFn, Parts
from dapo_megatron.rollout import metrics as figures
from dapo_megatron.rollout.partial_step import OpenStep
from dapo_megatron.types import (
    DapoError,
    Group,
    LossOutput,
    MicroTokens,
    StarvedError,
    Stopped,
    SyncError,
    TokenBatch,
)


@dataclass
class Progress:
    """Where a run is: the steps done, and what its summary will say."""

    step: int = 0
    seconds: float = 0.0
    max_gap: float = 0.0
    first_evaluation: dict[str, float] = field(default_factory=dict)
    last_evaluation: dict[str, float] = field(default_factory=dict)


def train(
    config: Config, parts: Parts, progress: Progress, open_step: OpenStep, *, started: float
) -> Progress:
    """Train from `progress.step` to `train.rollout_steps`. Collective: every rank calls it.

    `open_step` is the step after it, as far as it has come. `started` is the time (as time.time())
    from which `progress.seconds` counts on. Raises StarvedError and Stopped once all is saved.
    """
    try:
        with parts.watch.phase("other"):
            train_steps(config, parts, progress, open_step, started)
    except (StarvedError, Stopped) as error:
        with parts.watch.phase("checkpoint", progress.step):
            policys_turn(parts)  # whosever it was
            parts.checkpoints.copy()
            save(config, parts, progress, open_step, started)()
            parts.checkpoints.wait()
        raise type(error)(
            f"{error}. Saved after step {progress.step}: resume=auto goes on from there"
        ) from error
    except DapoError:
        with suppress(DapoError):
            parts.checkpoints.wait()  # a checkpoint from before is worth having
        raise
    with parts.watch.phase("checkpoint", progress.step):
        parts.checkpoints.wait()
    progress.seconds = time.time() - started
    return progress


def train_steps(
    config: Config, parts: Parts, progress: Progress, open_step: OpenStep, started: float
) -> None:
    """The steps; what they change is in `progress` and `open_step` at any time."""
    last = config.train.rollout_steps
    with parts.watch.phase("sync", progress.step):
        parts.sync(progress.step)
    if progress.step == 0 and not progress.first_evaluation and parts.evaluator.due(0, last):
        with parts.watch.phase("evaluate"):
            progress.first_evaluation = parts.evaluator.run()
        progress.last_evaluation = progress.first_evaluation
        parts.recorder.log(0, progress.first_evaluation)
    while progress.step < last:
        step = progress.step + 1
        clock = Clock(parts, step)
        parts.stop()
        metrics = train_step(config, parts, step, open_step, clock)
        is_due = parts.checkpoints.due(step)
        if is_due:
            with clock("checkpoint"):
                parts.checkpoints.copy()
        with clock("sync"):
            metrics |= figures.sync_metrics(parts.sync(step))
        if parts.evaluator.due(step, last):
            with clock("evaluate"):
                progress.last_evaluation = parts.evaluator.run()
            metrics |= progress.last_evaluation
        progress.step = step
        progress.max_gap = max(progress.max_gap, metrics.get("mismatch/gap_max", 0.0))
        open_step.close()
        publish = None
        if is_due:
            with clock("checkpoint"):
                publish = save(config, parts, progress, open_step, started)
        parts.recorder.log(step, metrics | clock.metrics())
        # Published last: a checkpoint that exists has its metrics and samples on disk.
        if publish is not None:
            publish()


def save(
    config: Config, parts: Parts, progress: Progress, open_step: OpenStep, started: float
) -> Callable[[], None]:
    """A checkpoint of what is done so far, with the copy of the policy that was made; calling what
    is returned has it published."""
    progress.seconds = time.time() - started
    state = {
        "progress": dict(vars(progress)),
        "open_step": open_step.state(config),
        "coordinator": parts.coordinator.state(),
    }
    return parts.checkpoints.save(progress.step, state, is_open=open_step.train is not None)


def policys_turn(parts: Parts) -> None:
    """Policy and engine take turns in the accelerator's memory; parts.sync() is the other turn."""
    parts.engine.sleep()
    parts.policy.onload()


def train_step(
    config: Config, parts: Parts, step: int, open_step: OpenStep, clock: Clock
) -> dict[str, float]:
    """One rollout step without its sync: sample with the weights of step - 1, update them. What
    `open_step` has of it already is not done again. The policy has the accelerator then."""
    if open_step.train is None:
        with clock("generate"), parts.recorder.progress(config.rollout.prompts_per_step) as watch:
            collected = parts.coordinator.collect(version=step - 1, on_progress=watch)
        parts.recorder.samples(step, collected.ended)
        metrics = figures.rollout_metrics(collected, config.overlong)
        open_step.begin(collected.train, metrics)
    groups = open_step.train or []
    policys_turn(parts)
    batch = assemble(groups, overlong=config.overlong, eps=config.loss.advantage_eps)
    if open_step.old_logprobs is None:
        parts.stop()
        with clock("logprobs"):
            found = parts.policy.logprobs(batch)
        open_step.old_logprobs = found.logprobs
        sequences = inspect(groups, batch, found, overlong=config.overlong)
        parts.recorder.inspected(step, sequences)
    batch = dataclasses.replace(batch, old_logprobs=open_step.old_logprobs)
    gap = check_gap(config, batch, groups, version=step - 1)
    open_step.metrics |= figures.mismatch_metrics(gap)
    with clock("update"):
        update(config, parts, batch, step, open_step)
    clock.tokens = int(batch.tokens.numel())
    return open_step.metrics | figures.update_metrics(open_step.updates)


def check_gap(
    config: Config, batch: TokenBatch, groups: list[Group], version: int
) -> GapStatistics:
    """The gap on what the weights `version`, the policy's own, sampled. Raises SyncError, naming
    the worst token if one is above its bound."""
    assert batch.old_logprobs is not None
    fresh = fresh_mask(groups, version=version, overlong=config.overlong)
    gap = gap_statistics(batch.engine_logprobs, batch.old_logprobs, fresh)
    mean_bound = config.sync.max_mean_gap
    if mean_bound is not None and gap.mean > mean_bound:
        raise SyncError(
            f"weights {version}: engine and policy disagree by {gap.mean:.3g} on the mean of "
            f"{gap.num_tokens} tokens; sync.max_mean_gap is {mean_bound:g}. The engine samples "
            "from other weights than are trained, or computes them too coarsely"
        )
    if gap.max > config.sync.max_gap and gap.worst_token is not None:
        where = gap.worst_token
        ends = batch.lengths.cumsum(0)
        sequence = int((ends <= where).sum())
        position = where - int(ends[sequence] - batch.lengths[sequence])
        raise SyncError(
            f"weights {version}: engine and policy disagree by {gap.max:.3g} on "
            f"{batch.sequence_names[sequence]}, token {position} (id {int(batch.tokens[where])}): "
            f"log-prob {float(batch.engine_logprobs[where]):.6f} by the engine, "
            f"{float(batch.old_logprobs[where]):.6f} by the policy; sync.max_gap is "
            f"{config.sync.max_gap:g}. The engine samples from other weights than are trained"
        )
    return gap


def update(config: Config, parts: Parts, batch: TokenBatch, step: int, open_step: OpenStep) -> None:
    """The optimizer steps of one rollout step that `open_step` does not have yet."""
    numbers = config.loss
    loss = make_loss(
        clip_low=numbers.clip_low,
        clip_high=numbers.clip_high,
        dual_clip=numbers.dual_clip,
        tis_cap=numbers.tis_cap,
    )
    if config.policy.pipeline_parallel == 1:
        # A stop abandons the mini-batch. (In a pipeline no point exists that all stages reach.)
        loss = stoppable(loss, parts.stop)
    lr = warmup_lr(
        step,
        lr=config.optimizer.lr,
        warmup_rollout_steps=config.optimizer.warmup_rollout_steps,
    )
    minis = split(batch, config.train.updates_per_step, numbers.aggregation)
    # Without a loss token there is no gradient, and momentum alone must not move the weights.
    minis = [mini for mini in minis if mini.num_loss_tokens]
    for mini in minis[len(open_step.updates) :]:
        parts.stop()
        open_step.updates.append(parts.policy.update(mini, loss, lr))
        parts.recorder.trained(mini.lengths.tolist(), mini.num_loss_tokens)


def stoppable(loss: LossFn, stop: Callable[[], None]) -> LossFn:
    """`loss`, with a look at each micro-batch whether to stop; all ranks have equally many."""

    def with_stop(logprobs: Tensor, micro: MicroTokens) -> LossOutput:
        stop()
        return loss(logprobs, micro)

    return with_stop


class Clock:
    """Seconds and memory per phase of one step."""

    def __init__(self, parts: Parts, step: int) -> None:
        self._watch = parts.watch
        self._memory = parts.memory
        self._timeline = parts.timeline
        self._timeline.begin(step)
        self._step = step
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self.tokens = 0
        """Prompt and response tokens trained on in the step."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure what is inside, under the watchdog's eyes."""
        begun = time.perf_counter()
        with (
            self._timeline.phase(phase),
            self._watch.phase(phase, self._step),
            self._memory.phase(phase),
        ):
            yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """time/*, memory/* and throughput/*. Collective."""
        whole = time.perf_counter() - self._started
        return {
            **{f"time/{phase}": seconds for phase, seconds in self._phases.items()},
            **self._memory.metrics(),
            **self._timeline.metrics(),
            "time/step": whole,
            "throughput/tokens_per_second": self.tokens / whole,
        }
