"""The report's charts: which metrics each shows, and what it means. figures.py draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from dapo_megatron.report import groups, phases
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.groups import DECIDED, FORECAST, IN_WORDS, KEPT
from dapo_megatron.report.phases import COLORS, GENERATE, IDLE, LABELS, MOVED, REST
from dapo_megatron.types import STEP_PHASES

_IN_NO_METRIC = {"generate": GENERATE, "rest": REST}


@dataclass(frozen=True)
class Series:
    """One curve of a chart."""

    metric: str
    label: str
    dash: bool = False
    axis: Literal["y", "y2"] = "y"
    color: int | None = None
    """Number of a series colour; None: its place in the chart."""
    line: bool = False
    """A line over what is stacked, not part of it."""


@dataclass(frozen=True)
class Chart:
    """What is drawn over the rollout steps, with a sentence for a newcomer."""

    id: str
    title: str
    help: str
    y: str
    """Title of the axis, with its unit."""
    series: tuple[Series, ...]
    section: Literal["dynamics", "groups", "time"]
    overlay: bool = False
    """All runs in one figure, not only the chosen one."""
    stacked: Literal["", "area", "bars"] = ""
    evaluations: tuple[str, ...] = ()
    """Prefixes of evaluation figures ("avg@"): points with 95% intervals, a trace for each set."""
    ghosts: tuple[str, ...] = ()
    """Keys of curves.GHOSTS, drawn when the reader asks for them."""
    y_range: tuple[float, float] | None = None
    y_tick_format: str = ""
    y2: str = ""
    """Title of a second axis."""
    y2_tick_format: str = ""
    log_y: bool = False
    from_zero: bool = False
    smooth: bool = True
    """The reader may smooth its lines."""


def _chart(id: str, title: str, help: str, y: str, *series: Series, **more: Any) -> Chart:
    return Chart(id, title, help, y, series, **more)


training = partial(_chart, section="dynamics", overlay=True)
of_groups = partial(_chart, section="groups")
of_time = partial(_chart, section="time")
line = Series

CHARTS: list[Chart] = [
    training(
        "evaluation",
        "Accuracy on held-out problems",
        "The figure that counts: problems never trained on, each answered several times. "
        "Whiskers are 95% intervals.",
        "mean accuracy",
        evaluations=("avg@",),
        ghosts=("aime_avg",),
        y_tick_format=".0%",
    ),
    training(
        "accuracy",
        "Accuracy while training",
        "Share of sampled answers that are right, over all groups decided in the step, kept or "
        "not; and of groups where every answer is, which teach nothing.",
        "share",
        line("accuracy/raw", "answers right"),
        line("accuracy/perfect_fraction", "groups all right", dash=True),
        ghosts=("perfect",),
        y_tick_format=".0%",
    ),
    training(
        "evaluation_best_and_vote",
        "Best of k and majority of k",
        "pass@k: at least one of k answers is right. cons@k: the answer most often given is. "
        "Above the mean accuracy they show what sampling still finds.",
        "share of problems",
        evaluations=(
            "pass@",
            "cons@",
        ),
        ghosts=(
            "aime_pass",
            "aime_cons",
        ),
        y_tick_format=".0%",
    ),
    training(
        "reward",
        "Reward",
        "Mean reward of the answers, penalties for length included: 1 is right, -1 is wrong.",
        "reward",
        line("reward/mean", "mean reward"),
        ghosts=("reward",),
    ),
    training(
        "length",
        "Response length",
        "How long the answers are. Growth with accuracy is a good sign; growth without it, or up "
        "to the limit, is not.",
        "tokens",
        line("response_tokens/mean", "mean"),
        line("response_tokens/max", "longest", dash=True),
        ghosts=("length",),
    ),
    training(
        "too_long",
        "Answers too long",
        "Share of answers cut off at the token limit, and of those that pay the soft penalty "
        "before it.",
        "share of answers",
        line("response_tokens/clipped_fraction", "cut off"),
        line("overlong/penalised_fraction", "penalised", dash=True),
        line("overlong/filtered_fraction", "left out of the loss"),
        y_tick_format=".1%",
    ),
    training(
        "entropy",
        "Entropy",
        "How undecided the policy is about its next token. A fall to nearly 0 means it explores no "
        "more: the collapse that clip-higher is there to prevent.",
        "nats per token",
        line("policy/entropy", "entropy"),
        ghosts=(
            "entropy",
            "entropy_collapse",
        ),
        from_zero=True,
    ),
    training(
        "probability",
        "Probability of the sampled tokens",
        "Mean probability that the policy gives to the tokens it sampled; the mirror of entropy.",
        "probability",
        line("policy/mean_prob", "mean"),
        ghosts=("probability",),
    ),
    training(
        "clipping",
        "Clipped tokens",
        "Share of tokens whose update was cut off because the policy had moved too far from the "
        "one that sampled them: up (more likely) and down (less likely).",
        "share of tokens",
        line("policy/clip_fraction_high", "up"),
        line("policy/clip_fraction_low", "down", dash=True),
        line("policy/dual_clip_fraction", "dual clip"),
        y_tick_format=".2%",
    ),
    training(
        "movement",
        "Movement of the policy",
        "Approximate KL divergence between the policy that sampled and the one being updated, "
        "within a step.",
        "nats per token",
        line("policy/approx_kl", "approx. KL"),
    ),
    training(
        "gradient",
        "Gradient norm",
        "Before clipping, mean over the step's updates. Peaks are updates to look at.",
        "norm",
        line("policy/grad_norm", "gradient norm"),
        from_zero=True,
    ),
    training(
        "loss",
        "Loss",
        "Of the step's updates. Policy-gradient losses stay near 0 and need not fall; a jump is "
        "what matters.",
        "loss",
        line("policy/loss", "loss"),
    ),
    training(
        "mismatch",
        "Engine against policy",
        "|log-probability by the engine - by the policy| of the same tokens under the same "
        "weights. It should be rounding; if it grows, the engine samples from another policy.",
        "nats, log scale",
        line("mismatch/gap_mean", "mean gap"),
        line("mismatch/gap_max", "largest gap", dash=True),
        line("mismatch/kl", "KL"),
        log_y=True,
        y_tick_format=".0e",
    ),
    training(
        "correction",
        "Correction for stale samples",
        "Mean weight of truncated importance sampling, and the share of tokens at its cap.",
        "mean weight",
        line("policy/tis_weight", "mean weight"),
        line("policy/tis_capped_fraction", "at the cap", axis="y2", dash=True),
        y2="share of tokens",
        y2_tick_format=".2%",
    ),
    training(
        "learning_rate",
        "Learning rate",
        "At the step's last update.",
        "learning rate",
        line("policy/lr", "learning rate"),
        y_tick_format=".1e",
        smooth=False,
    ),
    of_groups(
        "groups_fates",
        "What became of the prompts",
        "Groups that ended in each step, by what became of them. Only mixed groups, with right and "
        "wrong answers, teach anything; with rollout.dynamic_sampling no others are trained on. "
        "The line is what goes on in the next step.",
        "groups",
        line("groups/trained", IN_WORDS["trained"], color=2),
        line("groups/all_correct", IN_WORDS["all_correct"], color=0),
        line("groups/all_wrong", IN_WORDS["all_wrong"], color=1),
        line("groups/overlong", IN_WORDS["overlong"], color=3),
        line("groups/abstained", IN_WORDS["abstained"], color=6),
        line("groups/expired", IN_WORDS["expired"], color=7),
        line("groups/carried", "carried on", color=4, line=True),
        stacked="bars",
    ),
    of_groups(
        "groups_keep_rate",
        "Keep rate",
        "Share of decided groups that are mixed: what came in the step, and what the coordinator "
        "expects by the end of it, from which it issues prompts. At 0.25 a step samples four "
        "prompts for each that it trains on.",
        "share of decided groups",
        line(KEPT, "came", color=2),
        line(FORECAST, "forecast", dash=True, color=0),
        y_range=(0, 1.05),
        y_tick_format=".0%",
    ),
    of_groups(
        "groups_open",
        "Prompts in flight",
        "Issued in the step and decided in it; carried to the next one, and how many of those are "
        "mixed and only wait for their turn.",
        "groups",
        line("groups/issued", "issued", color=0),
        line(DECIDED, "decided", color=2),
        line("groups/carried", "carried on", color=4),
        line("groups/carried_ready", "carried on, ready", dash=True, color=4),
    ),
    of_groups(
        "groups_age",
        "Age of what is trained on",
        "How many weight versions ago the groups of a step were begun. 0 is on-policy; "
        "rollout.lookahead sets the mean.",
        "versions",
        line("groups/age_mean", "mean", color=0),
        line("groups/age_max", "oldest", dash=True, color=1),
    ),
    of_groups(
        "groups_fresh",
        "Fresh tokens",
        "Share of the trained tokens that the current weights sampled, and completions that were "
        "interrupted and go on in the next step.",
        "share of tokens",
        line("groups/fresh_token_fraction", "fresh tokens", color=2),
        line(
            "groups/interrupted_completions",
            "interrupted completions",
            axis="y2",
            dash=True,
            color=1,
        ),
        y_range=(0, 1.05),
        y_tick_format=".0%",
        y2="completions",
    ),
    of_groups(
        "groups_grading",
        "Completions without a grade, or without an answer",
        "timeout, memory, crash and error: the grader failed, and the group is not trained on. "
        "Unparsed: no answer was found in the text, which is graded wrong.",
        "completions",
        line("grading/unparsed", "no answer found", color=7, line=True),
        line("grading/timeout", "timeout", color=0),
        line("grading/crash", "crash", color=1),
        line("grading/memory", "memory", color=3),
        line("grading/error", "error", color=6),
        stacked="bars",
    ),
    of_time(
        "time_phases",
        "Where a step's time goes",
        "Seconds of each phase, on top of each other. Sampling answers (generate) is usually the "
        "most of it; what is in no phase is the rest.",
        "seconds",
        *(
            line(_IN_NO_METRIC.get(phase, f"time/{phase}"), LABELS.get(phase, phase), color=color)
            for phase, color in COLORS.items()
        ),
        stacked="area",
    ),
    of_time(
        "time_tokens",
        "Tokens per second",
        "Prompt and response tokens trained on, over the seconds of the whole step.",
        "tokens per second",
        line("throughput/tokens_per_second", "all devices", color=0),
        from_zero=True,
    ),
    of_time(
        "time_device",
        "Work per device",
        "Tokens for each device, and floating-point operations of the model itself in 1e12 per "
        "second, over the whole step; divide these by the device's peak for its utilisation.",
        "tokens per second",
        line("throughput/tokens_per_second_per_device", "tokens", color=0),
        line(
            "throughput/model_tflops_per_device",
            "model operations",
            axis="y2",
            dash=True,
            color=1,
        ),
        from_zero=True,
        y2="TFLOP/s",
    ),
    of_time(
        "time_engines",
        "Engines at work",
        "Share of generation in which engines had nothing to run, and how many of their "
        "sequences (engine.max_sequences) were running on average.",
        "share",
        line(IDLE, "idle", color=1),
        line("throughput/running_mean", "running", color=2),
        y_range=(0, 1.05),
        y_tick_format=".0%",
    ),
    of_time(
        "time_sync",
        "Bringing the weights to the engines",
        "Seconds of each sync: moving weights, checking that they arrived (verify), and policy and "
        "engine taking turns in memory; and the bytes that moved between ranks.",
        "seconds",
        line(MOVED, "move", color=1),
        line("time/sync_verify", "verify", color=0),
        line("time/sync_turns", "turns in memory", color=3),
        line("sync/bytes", "bytes moved", axis="y2", color=7, line=True),
        stacked="area",
        y2="bytes",
        y2_tick_format=".3s",
    ),
]


def defined(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart there could be."""
    return [*CHARTS, *memory_charts(runs)]


def memory_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Charts of the memory that any of the runs measured and, dashed, of the planned memory."""
    measured = {name for run in runs for name in run.metrics.columns}
    plans = [phases.memory_plan(run) for run in runs]
    planned = [phase for phase in STEP_PHASES if any(phase in plan for plan in plans)]
    against = " Dashed: what the plan said before the run." if planned else ""

    def levels(names: Iterable[str], metric: str, what: str, **more: Any) -> list[Series]:
        return [
            line(metric.format(name), LABELS.get(name, name) + what, color=COLORS[name], **more)
            for name in names
        ]

    charts = [
        of_time(
            "memory",
            "Memory",
            "The most that each phase took, on the rank that took most: of the device, or on CPU "
            f"of the process.{against}",
            "GiB",
            *levels(STEP_PHASES, "memory/{}_gib", ""),
            *levels(planned, phases.PLANNED, ", planned", dash=True),
        ),
        of_time(
            "memory_tensors",
            "Memory of tensors",
            "The same as far as torch allocated it; the rest is CUDA itself, its libraries and "
            "what lies idle in between.",
            "GiB",
            *levels(STEP_PHASES, "memory/{}_torch_gib", ", tensors", dash=True),
        ),
    ]
    return [chart for chart in charts if measured & names_in([chart])]


def columns_of(run: RunData) -> dict[str, list[float | None]]:
    """The metrics of a run by step, and the series derived from them."""
    return {**run.metrics.columns, **groups.derived(run), **phases.derived(run)}


def names_in(charts: Iterable[Chart]) -> set[str]:
    """The metrics that these charts draw."""
    return {series.metric for chart in charts for series in chart.series}


def recorded(charts: Iterable[Chart], names: set[str], figures: set[str]) -> list[Chart]:
    """The charts without the series that no run has; those with nothing left are left out.

    `names`: metrics that some run has a value of. `figures`: of evaluations, as avg@4.
    """
    shown = []
    for chart in charts:
        series = tuple(series for series in chart.series if series.metric in names)
        if series or any(figure.startswith(chart.evaluations) for figure in figures):
            shown.append(replace(chart, series=series))
    return shown


def chart_of(metric: str | None, charts: Iterable[Chart]) -> str | None:
    """The id of the first chart that shows a metric or, by its name, an evaluation."""
    if metric is None:
        return None
    prefix, _, figure = metric.rpartition("/")
    is_evaluation = prefix.startswith("eval/")
    for chart in charts:
        if metric in names_in([chart]) or (is_evaluation and figure.startswith(chart.evaluations)):
            return chart.id
    return None
