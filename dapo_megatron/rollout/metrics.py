"""The metrics of a rollout step, by their names in docs/architecture.md.

Accuracy, reward and lengths are over every group issued in the step, before any filtering: what
the policy does, not what the filter leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from dapo_megatron.algo.mismatch import GapStatistics
from dapo_megatron.algo.overlong import overlong_penalty
from dapo_megatron.config import OverlongConfig
from dapo_megatron.rollout.coordinator import Collected
from dapo_megatron.types import Completion, Finish, StepStats, SyncReport


def rollout_metrics(collected: Collected, overlong: OverlongConfig) -> dict[str, float]:
    """accuracy/raw, reward/mean, response_tokens/*, groups/*, grading/*, time/grade."""
    completions = [c for group, _ in collected.seen for c in group.completions]
    graded = [c for c in completions if c.grade is not None]
    lengths = [len(c.tokens) for c in completions]
    metrics = {f"groups/{name}": float(count) for name, count in collected.counts.items()}
    metrics["groups/rounds"] = float(collected.rounds)
    metrics["time/grade"] = collected.grade_seconds
    for cause in ("timeout", "crash", "error"):
        metrics[f"grading/{cause}"] = float(collected.abstentions.get(cause, 0))
    if graded:
        metrics["accuracy/raw"] = fmean(bool(c.grade and c.grade.correct) for c in graded)
        metrics["reward/mean"] = fmean(_rewards(graded, overlong))
    if lengths:
        metrics["response_tokens/mean"] = fmean(lengths)
        metrics["response_tokens/max"] = float(max(lengths))
        metrics["response_tokens/clipped_fraction"] = fmean(
            c.finish is Finish.LENGTH for c in completions
        )
    return metrics


def _rewards(graded: Iterable[Completion], overlong: OverlongConfig) -> Iterable[float]:
    for completion in graded:
        assert completion.grade is not None
        penalty = 0.0
        if overlong.penalty:
            penalty = overlong_penalty(
                len(completion.tokens),
                max_tokens=overlong.max_tokens,
                buffer_tokens=overlong.buffer_tokens,
            )
        yield completion.grade.score + penalty


def update_metrics(stats: Sequence[StepStats]) -> dict[str, float]:
    """policy/*: means over the step's updates, weighted by their tokens (lr: the last)."""
    if not stats:
        return {}
    total = sum(one.num_tokens for one in stats)

    def mean(values: Iterable[float]) -> float:
        weighted = (v * one.num_tokens for v, one in zip(values, stats, strict=True))
        return sum(weighted) / total

    metrics = {f"policy/{name}": mean(one.means[name] for one in stats) for name in stats[0].means}
    metrics["policy/loss"] = mean(one.loss for one in stats)
    metrics["policy/grad_norm"] = mean(one.grad_norm for one in stats)
    metrics["policy/lr"] = stats[-1].lr
    return metrics


def mismatch_metrics(gap: GapStatistics) -> dict[str, float]:
    """mismatch/*, over the step's fresh tokens; nothing if there were none to compare."""
    if gap.num_tokens == 0:
        return {}
    return {"mismatch/gap_mean": gap.mean, "mismatch/gap_max": gap.max, "mismatch/kl": gap.kl}


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """sync/*."""
    return {
        "sync/bytes": float(report.num_bytes),
        "sync/tensors": float(report.num_tensors),
        "sync/fingerprinted": float(report.fingerprinted),
        "sync/canary_gap": report.canary_gap,
        "time/sync_verify": report.verify_seconds,
    }
