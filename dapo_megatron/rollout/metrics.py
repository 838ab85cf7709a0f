"""Metrics of a rollout step, by name.

Accuracy, reward and lengths are computed over all groups decided in the step, before filtering.
They describe the policy, not the training batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from dapo_megatron.algo.correction import CorrectionStatistics
from dapo_megatron.algo.kl import KLStatistics
from dapo_megatron.algo.mismatch import GapStatistics
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import reward
from dapo_megatron.rewards.pool import CAUSES
from dapo_megatron.segments import branches, num_sampled, turns
from dapo_megatron.types import Collected, Finish, Group, StepStats, SyncReport

OUTCOMES = ("unparsed", *CAUSES)
"""Outcomes that grading/* counts."""

TURN_COUNTS = ("calls", "tool_errors", "unread_calls", "restarts")
"""Counts that turns/* always has: calls of tools, those that raised, those that could not be read,
and completions that were sampled again. Those of failures, failed/<cause>, are added."""


def rollout_metrics(collected: Collected, overlong: OverlongConfig) -> dict[str, float]:
    """Return accuracy/*, reward/*, response_tokens/*, overlong/*, groups/*, grading/* and
    time/grade."""
    metrics = {f"groups/{name}": float(count) for name, count in collected.counts.items()}
    metrics["groups/keep_rate"] = collected.keep_rate
    metrics["groups/interrupted_completions"] = float(collected.interrupted)
    metrics["time/grade"] = collected.grade_seconds
    return {
        **metrics,
        **_age_metrics(collected),
        **_grading_metrics(collected),
        **_turn_metrics(collected),
        **_decided_metrics(collected.decided, overlong),
    }


def _age_metrics(collected: Collected) -> dict[str, float]:
    """Return the age of the groups trained on, in weight versions since their first token, the mean
    age of their tokens, and the share of tokens that the current weights sampled."""
    ages = [
        collected.version - min(c.oldest_version for c in group.completions)
        for group in collected.train
    ]
    if not ages:
        return {}
    tokens: Counter[int] = Counter()  # by age
    for group in collected.train:
        for completion in group.completions:
            for segment in completion.segments:
                tokens[collected.version - segment.version] += num_sampled([segment])
    return {
        "groups/age_mean": fmean(ages),
        "groups/age_max": float(max(ages)),
        "groups/token_age_mean": sum(age * n for age, n in tokens.items()) / tokens.total(),
        "groups/fresh_token_fraction": tokens[0] / tokens.total(),
    }


def _grading_metrics(collected: Collected) -> dict[str, float]:
    """Return the number of failed gradings by cause, and of completions without an answer, in
    total and per data set that has any."""
    metrics = {f"grading/{outcome}": 0.0 for outcome in OUTCOMES}
    for (source, outcome), count in collected.gradings.items():
        if outcome in OUTCOMES:
            metrics[f"grading/{outcome}"] += count
            metrics[f"grading/{source}/{outcome}"] = float(count)
    return metrics


def _turn_metrics(collected: Collected) -> dict[str, float]:
    """Return turns/* and time/environments: counts of the step, and means over the completions with
    an environment of groups decided in it. Empty without any."""
    talks = [c for g in collected.decided if g.prompt.environment for c in g.completions]
    counts = {**dict.fromkeys(TURN_COUNTS, 0.0), **collected.turn_counts}
    metrics = {"time/environments": counts.pop("waiting_seconds", 0.0)}
    for name in [name.removeprefix("agent/") for name in counts if name.startswith("agent/")]:
        num_agents = counts.pop(f"agents_with/{name}")
        metrics[f"turns/agent/{name}"] = counts.pop(f"agent/{name}") / num_agents
    metrics |= {f"turns/{name}": float(count) for name, count in counts.items()}
    if not talks:
        return metrics if collected.turn_counts else {}
    num_turns = [sum(not is_observed for is_observed, *_ in turns(c.segments)) for c in talks]
    finishes = Counter(c.finish for c in talks)
    ends = [finish for finish in Finish if finish is not Finish.UNFINISHED]
    return {
        **metrics,
        "turns/mean": fmean(num_turns),
        "turns/max": float(max(num_turns)),
        "turns/branches": float(sum(len(branches(c.segments)) - 1 for c in talks)),
        "turns/observed_tokens_mean": fmean(c.num_tokens - c.num_sampled for c in talks),
        **{f"turns/ended/{end.value}": finishes[end] / len(talks) for end in ends},
    }


def _decided_metrics(groups: Sequence[Group], overlong: OverlongConfig) -> dict[str, float]:
    """Return the metrics over all groups decided in the step, before filtering."""
    completions = [c for group in groups for c in group.completions]
    rewards = [shaped for c in completions if (shaped := reward(c, overlong)) is not None]
    if not rewards:
        return {}
    lengths = [c.num_sampled for c in completions]
    truncated = fmean(c.finish.is_cut for c in completions)
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


METRICS_OF_AN_UPDATE = {
    *("loss", "grad_norm", "lr", "entropy", "mean_prob", "total"),
    *("kl_penalty", "distill_penalty", "entropy_bonus"),
}
"""Names under policy/* that a loss function must not use for its sums."""


def update_metrics(stats: Sequence[StepStats]) -> dict[str, float]:
    """Return policy/* and router/*: token-weighted means over the step's updates, and the lr of the
    last."""
    if not stats:
        return {}
    total = sum(update.num_tokens for update in stats)

    def mean(values: Iterable[float]) -> float:
        weighted = (value * update.num_tokens for value, update in zip(values, stats, strict=True))
        return sum(weighted) / total

    metrics = {
        f"policy/{name}": mean(update.means[name] for update in stats) for name in stats[0].means
    }
    for name in stats[0].router:
        metrics[f"router/{name}"] = mean(update.router[name] for update in stats)
    metrics["policy/loss"] = mean(update.loss for update in stats)
    metrics["policy/grad_norm"] = mean(update.grad_norm for update in stats)
    metrics["policy/lr"] = stats[-1].lr
    return metrics


def mismatch_metrics(gap: GapStatistics) -> dict[str, float]:
    """Return mismatch/*, over the step's fresh tokens; empty if there are none."""
    if gap.num_tokens == 0:
        return {}
    return {"mismatch/gap_mean": gap.mean, "mismatch/gap_max": gap.max, "mismatch/kl": gap.kl}


def correction_metrics(
    statistics: CorrectionStatistics, corrections: Iterable[str]
) -> dict[str, float]:
    """Return correction/*: shares of masked tokens and sequences, the share that each of
    `corrections` masked or capped, effective sample size, and quantiles of the ratios. Empty if the
    step has no loss tokens."""
    counts = statistics.counts
    if not counts.get("tokens"):
        return {}
    metrics = {
        "masked_tokens": counts["masked_tokens"] / counts["tokens"],
        "masked_sequences": counts["masked_sequences"] / counts["sequences"],
        "effective_sample_share": statistics.effective_sample_share,
    }
    for name in corrections:
        total = counts["tokens" if name == "token_band" else "sequences"]
        metrics[f"outside/{name}"] = counts[name] / total
    for kind in statistics.bins:
        for quantile, share in (("p01", 0.01), ("p99", 0.99)):
            metrics[f"{kind}_ratio_{quantile}"] = statistics.quantile(kind, share)
    return {f"correction/{name}": value for name, value in metrics.items()}


def kl_metrics(statistics: KLStatistics, name: str) -> dict[str, float]:
    """Return the estimate of a KL divergence as `name` (kl/reference, distill/teacher), and the
    share of clamped tokens. Empty if the step has no loss tokens."""
    if not statistics.num_tokens:
        return {}
    return {
        name: statistics.total / statistics.num_tokens,
        f"{name.partition('/')[0]}/clamped_fraction": (
            statistics.num_clamped / statistics.num_tokens
        ),
    }


def penalty_metrics(penalties: Sequence[float]) -> dict[str, float]:
    """Return the mean KL penalty of the rewards. Empty if the step has no sequences."""
    return {"kl/reward_penalty": fmean(penalties)} if penalties else {}


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """Return sync/*, and the verification and hand-over parts of time/sync."""
    return {
        "sync/bytes": float(report.num_bytes),
        "sync/tensors": float(report.num_tensors),
        "sync/fingerprinted": float(report.fingerprinted),
        "sync/unread_tensors": float(report.unread_tensors),
        "time/sync_verify": report.verify_seconds,
        "time/sync_turns": report.turn_seconds,
    }
