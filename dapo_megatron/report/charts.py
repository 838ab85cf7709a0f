"""The report's charts: which metrics each shows, and what it means. figures.py draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pandas as pd

from dapo_megatron.report import groups, phases
from dapo_megatron.report.folder import RunData, frame_of
from dapo_megatron.report.groups import DECIDED, FORECAST, IN_WORDS, KEPT
from dapo_megatron.report.phases import COLORS, GENERATE, IDLE, LABELS, MOVED, PLANNED, REST
from dapo_megatron.types import STEP_PHASES

Section = Literal["dynamics", "groups", "time"]


@dataclass(frozen=True)
class Chart:
    """What is drawn over the rollout steps, with a sentence for a newcomer."""

    section: Section
    id: str
    title: str
    help: str
    y: str
    """Title of the axis, with its unit."""
    series: Mapping[str, str] = field(default_factory=dict)
    """Metric -> label."""
    tick: str = ""
    """Format of d3 for values."""
    ghosts: tuple[str, ...] = ()
    """Keys of curves.GHOSTS, drawn when the reader asks for them."""
    evaluations: tuple[str, ...] = ()
    """Prefixes of evaluation figures ("avg@"): points with 95% intervals, a trace for each set."""
    stacked: bool = False
    lines: tuple[str, ...] = ()
    """Metrics that are lines over what is stacked."""
    colors: Mapping[str, int] = field(default_factory=dict)
    """Metric -> position in curves.PALETTE, if it is not its place in the chart."""
    log: bool = False

    @property
    def overlay(self) -> bool:
        """True if all runs are in one figure, not only the chosen one."""
        return self.section == "dynamics"

    def draws(self, figure: str) -> bool:
        """Return True for a figure of evaluations, such as avg@4, that the chart draws."""
        return bool(self.evaluations) and figure.startswith(self.evaluations)


_training = partial(Chart, "dynamics")
_groups = partial(Chart, "groups")
_time = partial(Chart, "time")

_PHASES = {
    {"generate": GENERATE, "rest": REST}.get(phase, f"time/{phase}"): phase for phase in COLORS
}

CHARTS: list[Chart] = [
    _training(
        "evaluation",
        "Accuracy on held-out problems",
        "The figure that counts: problems never trained on, each answered several times. Whiskers "
        "are 95% intervals.",
        "mean accuracy",
        {},
        ".0%",
        ("aime_avg",),
        ("avg@",),
    ),
    _training(
        "accuracy",
        "Accuracy while training",
        "Share of sampled answers that are right, over all groups decided in the step; and of "
        "groups where every answer is, which teach nothing.",
        "share",
        {"accuracy/raw": "answers right", "accuracy/perfect_fraction": "groups all right"},
        ".0%",
        ("perfect",),
    ),
    _training(
        "evaluation_best_and_vote",
        "Best of k and majority of k",
        "pass@k: at least one of k answers is right. cons@k: the answer most often given is.",
        "share of problems",
        {},
        ".0%",
        ("aime_pass", "aime_cons"),
        ("pass@", "cons@"),
    ),
    _training(
        "reward",
        "Reward",
        "Mean reward of the answers, penalties for length included: 1 is right, -1 is wrong.",
        "reward",
        {"reward/mean": "mean reward"},
        "",
        ("reward",),
    ),
    _training(
        "length",
        "Response length",
        "Growth with accuracy is a good sign; growth without it, or up to the limit, is not.",
        "tokens",
        {"response_tokens/mean": "mean", "response_tokens/max": "longest"},
        "",
        ("length",),
    ),
    _training(
        "too_long",
        "Answers too long",
        "Share of answers cut off at the token limit, and of those that pay the soft penalty.",
        "share of answers",
        {
            "response_tokens/clipped_fraction": "cut off",
            "overlong/penalised_fraction": "penalised",
            "overlong/filtered_fraction": "left out of the loss",
        },
        ".1%",
    ),
    _training(
        "entropy",
        "Entropy",
        "How undecided the policy is about its next token. A fall to nearly 0 means it explores no "
        "more: the collapse that clip-higher is there to prevent.",
        "nats per token",
        {"policy/entropy": "entropy"},
        "",
        ("entropy", "entropy_collapse"),
    ),
    _training(
        "probability",
        "Probability of the sampled tokens",
        "Mean probability that the policy gives to the tokens it sampled; the mirror of entropy.",
        "probability",
        {"policy/mean_prob": "mean"},
        "",
        ("probability",),
    ),
    _training(
        "clipping",
        "Clipped tokens",
        "Share of tokens whose update was cut off because the policy had moved too far from the "
        "one that sampled them: up (more likely) and down (less likely).",
        "share of tokens",
        {
            "policy/clip_fraction_high": "up",
            "policy/clip_fraction_low": "down",
            "policy/dual_clip_fraction": "dual clip",
        },
        ".2%",
    ),
    _training(
        "movement",
        "Movement of the policy",
        "Approximate KL divergence between the policy that sampled and the one being updated.",
        "nats per token",
        {"policy/approx_kl": "approx. KL"},
    ),
    _training(
        "gradient",
        "Gradient norm",
        "Before clipping, mean over the step's updates. Peaks are updates to look at.",
        "norm",
        {"policy/grad_norm": "gradient norm"},
    ),
    _training(
        "loss",
        "Loss",
        "Policy-gradient losses stay near 0 and need not fall; a jump is what matters.",
        "loss",
        {"policy/loss": "loss"},
    ),
    _training(
        "mismatch",
        "Engine against policy",
        "|log-probability by the engine - by the policy| of the same tokens under the same "
        "weights. It should be rounding; if it grows, the engine samples from another policy.",
        "nats, log scale",
        {
            "mismatch/gap_mean": "mean gap",
            "mismatch/gap_max": "largest gap",
            "mismatch/kl": "KL",
        },
        ".0e",
        (),
        log=True,
    ),
    _training(
        "correction",
        "Correction for stale samples",
        "Mean weight of truncated importance sampling, and the share of tokens at its cap.",
        "weight, or share of tokens",
        {"policy/tis_weight": "mean weight", "policy/tis_capped_fraction": "at the cap"},
    ),
    _training(
        "learning_rate",
        "Learning rate",
        "At the step's last update.",
        "learning rate",
        {"policy/lr": "learning rate"},
        ".1e",
    ),
    _groups(
        "groups_fates",
        "What became of the prompts",
        "Groups that ended in each step. Only mixed groups, with right and wrong answers, teach "
        "anything. The line is what goes on in the next step.",
        "groups",
        {
            **{f"groups/{fate}": IN_WORDS[fate] for fate in groups.FATES},
            "groups/carried": "carried on",
        },
        stacked=True,
        lines=("groups/carried",),
    ),
    _groups(
        "groups_keep_rate",
        "Keep rate",
        "Share of decided groups that are mixed: what came, and the forecast from which prompts "
        "are issued. At 0.25 a step samples four prompts for each that it trains on.",
        "share of decided groups",
        {KEPT: "came", FORECAST: "forecast"},
        ".0%",
    ),
    _groups(
        "groups_open",
        "Prompts in flight",
        "Issued in the step and decided in it; carried to the next one, and how many of those are "
        "mixed and only wait for their turn.",
        "groups",
        {
            "groups/issued": "issued",
            DECIDED: "decided",
            "groups/carried": "carried on",
            "groups/carried_ready": "carried on, ready",
        },
    ),
    _groups(
        "groups_age",
        "Age of what is trained on",
        "How many weight versions ago the groups of a step were started. 0 is on-policy; "
        "rollout.lookahead sets the mean.",
        "versions",
        {"groups/age_mean": "mean", "groups/age_max": "oldest"},
    ),
    _groups(
        "groups_fresh",
        "Fresh tokens",
        "Share of the trained tokens that the current weights sampled.",
        "share of tokens",
        {"groups/fresh_token_fraction": "fresh tokens"},
        ".0%",
    ),
    _groups(
        "groups_interrupted",
        "Interrupted completions",
        "Completions that go on in the next step.",
        "completions",
        {"groups/interrupted_completions": "interrupted"},
    ),
    _groups(
        "groups_grading",
        "Completions without a grade, or without an answer",
        "timeout, memory, crash and error: the grader failed, and the group is not trained on. "
        "The line: no answer was found in the text, which is graded wrong.",
        "completions",
        {
            "grading/unparsed": "no answer found",
            **{f"grading/{cause}": cause for cause in ("timeout", "crash", "memory", "error")},
        },
        stacked=True,
        lines=("grading/unparsed",),
    ),
    _time(
        "time_phases",
        "Where a step's time goes",
        "Seconds of each phase, on top of each other. Sampling answers (generate) is usually the "
        "most of it; what is in no phase is the rest.",
        "seconds",
        {metric: LABELS.get(phase, phase) for metric, phase in _PHASES.items()},
        stacked=True,
        colors={metric: COLORS[phase] for metric, phase in _PHASES.items()},
    ),
    _time(
        "time_tokens",
        "Tokens per second",
        "Prompt and response tokens trained on, over the seconds of the whole step.",
        "tokens per second",
        {
            "throughput/tokens_per_second": "all devices",
            "throughput/tokens_per_second_per_device": "per device",
        },
    ),
    _time(
        "time_device",
        "Work per device",
        "Floating-point operations of the model itself, over the whole step; divide them by the "
        "device's peak for its utilisation.",
        "TFLOP/s",
        {"throughput/model_tflops_per_device": "model operations"},
    ),
    _time(
        "time_engines",
        "Engines at work",
        "Share of generation in which engines had nothing to run, and how many of their sequences "
        "(engine.max_sequences) were running on average.",
        "share",
        {IDLE: "idle", "throughput/running_mean": "running"},
        ".0%",
    ),
    _time(
        "time_sync",
        "Bringing the weights to the engines",
        "Seconds of each sync: moving weights, checking that they arrived (verify), and policy and "
        "engine taking turns in memory.",
        "seconds",
        {MOVED: "move", "time/sync_verify": "verify", "time/sync_turns": "turns in memory"},
        stacked=True,
    ),
    _time(
        "time_sync_bytes",
        "Bytes of a sync",
        "Bytes that moved between ranks.",
        "bytes",
        {"sync/bytes": "bytes moved"},
        ".3s",
    ),
    _time(
        "memory",
        "Memory",
        "The most that each phase took, on the rank that took most: of the device, or on CPU of "
        "the process. Dashed: what the plan said before the run, if there was one.",
        "GiB",
        {f"memory/{phase}_gib": phase for phase in STEP_PHASES}
        | {PLANNED.format(phase): f"{phase}, planned" for phase in STEP_PHASES},
        colors={
            metric.format(phase): COLORS[phase]
            for metric in ("memory/{}_gib", PLANNED)
            for phase in STEP_PHASES
        },
    ),
    _time(
        "memory_tensors",
        "Memory of tensors",
        "The same as far as torch allocated it; the rest is CUDA itself, its libraries and what "
        "lies idle in between.",
        "GiB",
        {f"memory/{phase}_torch_gib": f"{phase}, tensors" for phase in STEP_PHASES},
        colors={f"memory/{phase}_torch_gib": COLORS[phase] for phase in STEP_PHASES},
    ),
]


def columns_of(run: RunData) -> pd.DataFrame:
    """Return the metrics of a run by step, and the series derived from them."""
    columns = dict(run.metrics.frame.items()) | groups.derived(run) | phases.derived(run)
    return frame_of(run.metrics.steps, columns)


def recorded(charts: Iterable[Chart], names: set[str], figures: set[str]) -> list[Chart]:
    """Return the charts without the series that no run has. Those with nothing left are left out.

    `names`: metrics that some run has a value of. `figures`: of evaluations, as avg@4.
    """
    shown = []
    for chart in charts:
        series = {metric: label for metric, label in chart.series.items() if metric in names}
        if series or any(map(chart.draws, figures)):
            shown.append(replace(chart, series=series))
    return shown


def chart_of(metric: str | None, charts: Sequence[Chart]) -> str | None:
    """Return the id of the first chart that shows a metric or, by its name, an evaluation."""
    prefix, _, figure = (metric or "").rpartition("/")
    is_evaluation = prefix.startswith("eval/")
    for chart in charts:
        if metric in chart.series or (is_evaluation and chart.draws(figure)):
            return chart.id
    return None
