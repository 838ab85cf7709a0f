"""The training loop: collect, train, sync, repeat. It names no backend and no rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dapo_megatron.algo.loss import make_loss
from dapo_megatron.algo.mismatch import GapStatistics, gap_statistics
from dapo_megatron.algo.schedule import warmup_lr
from dapo_megatron.config import Config
from dapo_megatron.data.batch import assemble, fresh_mask, split
from dapo_megatron.parts import Parts
from dapo_megatron.protocols import Policy
from dapo_megatron.rollout import metrics as figures
from dapo_megatron.rollout.coordinator import Collected
from dapo_megatron.types import (
    Group,
    StarvedError,
    StepStats,
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


def train(config: Config, parts: Parts, progress: Progress, *, started: float) -> Progress:
    """Train from `progress.step` to `train.rollout_steps`. Collective: every rank calls it.

    `started` is the time (as time.time()) from which `progress.seconds` counts on.
    """
    last = config.train.rollout_steps
    parts.sync(progress.step)
    if progress.step == 0 and parts.evaluator.due(0, last):
        progress.first_evaluation = parts.evaluator.run()
        progress.last_evaluation = progress.first_evaluation
        parts.recorder.log(0, progress.first_evaluation)
    while progress.step < last:
        step = progress.step + 1
        clock = Clock()
        try:
            collected, metrics = train_step(config, parts, step, clock)
        except StarvedError as error:
            save_at_end(parts, progress, started)
            raise StarvedError(
                f"{error}. Saved after step {progress.step}: resume=auto goes on from there"
            ) from error
        progress.step = step
        progress.max_gap = max(progress.max_gap, metrics.get("mismatch/gap_max", 0.0))
        if parts.evaluator.due(step, last):
            with clock("evaluate"):
                progress.last_evaluation = parts.evaluator.run()
            metrics |= progress.last_evaluation
        publish = None
        if parts.checkpoints.due(step):
            with clock("checkpoint"):
                publish = save(parts, progress, started)
        parts.recorder.samples(step, collected.ended)
        parts.recorder.log(step, metrics | clock.metrics())
        # Published last: a checkpoint that exists has its metrics and samples on disk.
        if publish is not None:
            publish()
    progress.seconds = time.time() - started
    return progress


def save(parts: Parts, progress: Progress, started: float) -> Callable[[], None]:
    """A checkpoint after the steps done so far; calling what is returned publishes it."""
    progress.seconds = time.time() - started
    state = {"progress": vars(progress), "coordinator": parts.coordinator.state()}
    return parts.checkpoints.save(progress.step, state)


def save_at_end(parts: Parts, progress: Progress, started: float) -> None:
    """A checkpoint from the middle of a step that cannot be finished."""
    parts.engine.sleep()
    parts.policy.onload()
    save(parts, progress, started)()


def train_step(
    config: Config, parts: Parts, step: int, clock: Clock
) -> tuple[Collected, dict[str, float]]:
    """One rollout step: sample with the weights of step - 1, update them, sync."""
    with clock("generate"), parts.recorder.progress(config.rollout.prompts_per_step) as watch:
        collected = parts.coordinator.collect(version=step - 1, on_progress=watch)
        # Policy and engine take turns in the accelerator's memory.
        parts.engine.sleep()
        parts.policy.onload()
    batch = assemble(collected.train, overlong=config.overlong, eps=config.loss.advantage_eps)
    with clock("logprobs"):
        old = parts.policy.logprobs(batch).logprobs
    batch = dataclasses.replace(batch, old_logprobs=old)
    gap = check_gap(config, batch, collected.train, version=step - 1)
    with clock("update"):
        stats = update(config, parts.policy, batch, step)
    with clock("sync"):
        parts.engine.wake()
        report = parts.sync(step)
        parts.policy.offload()
    clock.tokens = int(batch.tokens.numel())
    return collected, {
        **figures.rollout_metrics(collected, config.overlong),
        **figures.mismatch_metrics(gap),
        **figures.update_metrics(stats),
        **figures.sync_metrics(report),
    }


def check_gap(
    config: Config, batch: TokenBatch, groups: list[Group], version: int
) -> GapStatistics:
    """The gap on what the weights `version`, the policy's own, sampled. Raises SyncError naming
    the worst token."""
    assert batch.old_logprobs is not None
    fresh = fresh_mask(groups, version=version, overlong=config.overlong)
    gap = gap_statistics(batch.engine_logprobs, batch.old_logprobs, fresh)
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


def update(config: Config, policy: Policy, batch: TokenBatch, step: int) -> list[StepStats]:
    """The optimizer steps of one rollout step."""
    numbers = config.loss
    loss = make_loss(
        clip_low=numbers.clip_low,
        clip_high=numbers.clip_high,
        dual_clip=numbers.dual_clip,
        tis_cap=numbers.tis_cap,
    )
    lr = warmup_lr(
        step,
        lr=config.optimizer.lr,
        warmup_rollout_steps=config.optimizer.warmup_rollout_steps,
    )
    minis = split(batch, config.train.updates_per_step, numbers.aggregation)
    # Without a loss token there is no gradient, and momentum alone must not move the weights.
    return [policy.update(mini, loss, lr) for mini in minis if mini.num_loss_tokens]


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self.tokens = 0
        """Prompt and response tokens trained on in the step."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what is inside."""
        begun = time.perf_counter()
        yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """time/*, and throughput/tokens_per_second."""
        whole = time.perf_counter() - self._started
        metrics = {f"time/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**metrics, "time/step": whole, "throughput/tokens_per_second": self.tokens / whole}
