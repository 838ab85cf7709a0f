"""The metrics of a rollout step, by their names in docs/architecture.md.

Accuracy, reward and lengths are over every group decided in the step, before any filtering: what
the policy does, not what the filter leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from dapo_megatron.algo.mismatch import GapStatistics
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import reward
from dapo_megatron.rewards.pool import CAUSES
from dapo_megatron.types import Collected, Finish, Group, StepStats, SyncReport

OUTCOMES = ("unparsed", *CAUSES)
"""What grading/* counts."""


def rollout_metrics(collected: Collected, overlong: OverlongConfig) -> dict[str, float]:
    """accuracy/*, reward/*, response_tokens/*, overlong/*, groups/*, grading/*, time/grade."""
    metrics = {f"groups/{name}": float(count) for name, count in collected.counts.items()}
    metrics["groups/keep_rate"] = collected.keep_rate
    metrics["groups/interrupted_completions"] = float(collected.interrupted)
    metrics["time/grade"] = collected.grade_seconds
    return {
        **metrics,
        **_age_metrics(collected),
        **_grading_metrics(collected),
        **_decided_metrics(collected.decided, overlong),
    }


def _age_metrics(collected: Collected) -> dict[str, float]:
    """How many versions ago the groups of a step were begun, and what share of their tokens is of
    the current weights."""
    ages = [
        collected.version - min(c.oldest_version for c in group.completions)
        for group in collected.train
    ]
    if not ages:
        return {}
    tokens: Counter[bool] = Counter()
    for group in collected.train:
        for completion in group.completions:
            for part in completion.segments:
                tokens[part.version == collected.version] += part.num_tokens
    return {
        "groups/age_mean": fmean(ages),
        "groups/age_max": float(max(ages)),
        "groups/fresh_token_fraction": tokens[True] / tokens.total(),
    }


def _grading_metrics(collected: Collected) -> dict[str, float]:
    """Completions without a grade by cause, and those without an answer; a data set that has any
    is also named."""
    metrics = {f"grading/{outcome}": 0.0 for outcome in OUTCOMES}
    for (source, outcome), count in collected.outcomes.items():
        if outcome in OUTCOMES:
            metrics[f"grading/{outcome}"] += count
            metrics[f"grading/{source}/{outcome}"] = float(count)
    return metrics


def _decided_metrics(groups: Sequence[Group], overlong: OverlongConfig) -> dict[str, float]:
    """Of every group decided in the step."""
    completions = [c for group in groups for c in group.completions]
    rewards = [shaped for c in completions if (shaped := reward(c, overlong)) is not None]
    if not rewards:
        return {}
    lengths = [len(c.tokens) for c in completions]
    truncated = fmean(c.finish is Finish.LENGTH for c in completions)
    penalties = [shaped.penalty for shaped in rewards]
    return {
        "accuracy/raw": fmean(c.grade.correct for c in completions if c.grade is not None),
        "accuracy/perfect_fraction": fmean(
            all(c.grade is not None and c.grade.correct for c in group.completions)
            for group in groups
        ),
        "reward/mean": fmean(shaped.score for shaped in rewards) + fmean(penalties),
        "response_tokens/mean": fmean(lengths),
        "response_tokens/max": float(max(lengths)),
        "response_tokens/clipped_fraction": truncated,
        "overlong/penalty_mean": fmean(penalties),
        "overlong/penalised_fraction": fmean(penalty < 0 for penalty in penalties),
        "overlong/filtered_fraction": truncated if overlong.filter else 0.0,
    }


METRICS_OF_AN_UPDATE = {"loss", "grad_norm", "lr", "entropy", "mean_prob", "total"}
"""Names under policy/* that a loss cannot give to its sums."""


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
    """sync/*, and what time/sync is made of."""
    return {
        "sync/bytes": float(report.num_bytes),
        "sync/tensors": float(report.num_tensors),
        "sync/fingerprinted": float(report.fingerprinted),
        "sync/unread_tensors": float(report.unread_tensors),
        "sync/canary_gap": report.canary_gap,
        "time/sync_verify": report.verify_seconds,
        "time/sync_turns": report.turn_seconds,
    }
