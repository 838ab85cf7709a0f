"""Findings on a run's health: a table of rules, and what none of its rows can say.

Each threshold is a constant next to its rule, and docs/report.md has the reason for each. Short
runs are judged on facts, not on trends. What a run did not record is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from dapo_megatron.report import rules_work
from dapo_megatron.report.finding import (
    LEVELS,
    TREND_LEAST_STEPS,
    Finding,
    Level,
    Track,
    fall_from_best,
)
from dapo_megatron.report.folder import Evaluation, RunData, StateWord
from dapo_megatron.report.rule import (
    CLIPPED_TOKENS,
    Case,
    Rule,
    RunRule,
    always,
    first_of,
    judged,
)
from dapo_megatron.report.wording import named, times

ACCURACY = "accuracy/raw"

_RECORDED = ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step")
"""Metrics of every step that trains."""


def findings(run: RunData) -> list[Finding]:
    """Return problems and warnings first, then whether it learns, then notes and what is good."""
    judged_run = judged(run)
    return sorted((finding for rule in RULES for finding in rule(judged_run)), key=_rank)


def _rank(finding: Finding) -> tuple[int, bool, int]:
    level = LEVELS.index(finding.level)
    is_trouble = finding.level in ("bad", "warn")
    return (level if is_trouble else len(LEVELS), finding.metric != ACCURACY, level)


# ---------------------------------------------------------------------------- the run itself

_ENDS: dict[StateWord, tuple[Level, str]] = {
    StateWord.CRASHED: ("bad", "The run crashed"),
    StateWord.HUNG: ("bad", "The run hung"),
    StateWord.STOPPED: ("note", "The run stopped"),
    StateWord.UNKNOWN: ("note", "It is not known how the run ended"),
}
RESTARTS_MANY = 3  # starts that crashed, hung or were cut short


def state(run: RunData) -> Iterator[Finding]:
    """Report how a run ended, its earlier starts, and a run that is too short to be judged."""
    if run.state.word in _ENDS:
        level, title = _ENDS[run.state.word]
        text = run.state.text[:1].upper() + run.state.text[1:]
        yield Finding(level, f"{title} after step {run.metrics.last_step}", f"{text}.")
    if len(run.attempts) > 1:
        ends = Counter(attempt.end or "cut short" for attempt in run.attempts[:-1])
        wrong = ends.total() - ends[StateWord.STOPPED]
        counts = ", ".join(f"{count} {end}" for end, count in ends.items() if count)
        yield Finding(
            "warn" if wrong >= RESTARTS_MANY else "note",
            f"Started {times(len(run.attempts), 'time')}",
            f"Earlier starts: {counts}.",
            knob="checkpoint.max_minutes: lower" if wrong else None,
        )
    num_steps = len(run.metrics.steps)
    if num_steps < TREND_LEAST_STEPS:
        title = f"{times(num_steps, 'step')}: too few to judge trends"
        text = f"Learning, growth and decline are judged from {TREND_LEAST_STEPS} steps on."
        yield Finding("note", title, text)


def missing(run: RunData) -> Iterator[Finding]:
    """Report steps without a line, without an update, or with values that are no numbers."""
    steps = run.metrics.steps
    # A run that continues from another run's checkpoint starts later.
    lost = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    if lost:
        text = f"metrics.jsonl has no line for {named(lost)}: a full disk, or a damaged file."
        yield Finding("warn", f"{times(len(lost), 'step')} without metrics", text)
    for name in _RECORDED:
        values = run.metrics.series(name)
        gaps = list(values.index[values.isna()])
        if gaps and len(gaps) < len(steps):
            text = f"No finite value at {named(gaps)}: nothing was trained there, or it is NaN."
            title = f"{name} is missing at {times(len(gaps), 'step')}"
            yield Finding("warn", title, text, name)


# ---------------------------------------------------------------------------- does it learn

ACCURACY_CHANGE = 0.03  # least change, end against start, that is learning (or falling)
ACCURACY_FROM_BEST = 0.08  # fallen so far from its best, and 4 times the noise of the series
ACCURACY_TOP = 0.95  # flat above this is no fault
ACCURACY_FLAT_STEPS = 100  # steps; flat for so long is a warning, before a note


def _has_fallen(accuracy: Case) -> bool:
    _, fall, noise = fall_from_best(accuracy.series)
    return fall >= ACCURACY_FROM_BEST and fall > 4 * noise and accuracy.change > -fall / 2


_accuracy = partial(
    Rule,
    ACCURACY,
    text="Medians of the first and last {s.window} steps of {length}: {s.early:.3f} → "
    "{s.late:.3f} ({s.change:+.3f}).",
    trend=True,
    facts=lambda s: {
        "best": fall_from_best(s.series),
        "length": len(s),
    },
)

learning = first_of(
    _accuracy(
        {"warn": _has_fallen},
        "Accuracy has fallen by {best[1]:.2f} from its best around step {best[0]}",
        knob="optimizer.lr: lower; resume: a checkpoint from before it",
    ),
    _accuracy(
        {
            "good": lambda s: s.rises and s.change >= ACCURACY_CHANGE,
        },
        "Learning: accuracy {s.early:.3f} → {s.late:.3f}",
    ),
    _accuracy(
        {"bad": lambda s: s.falls and s.change <= -ACCURACY_CHANGE},
        "Accuracy is falling: {s.early:.3f} → {s.late:.3f}",
        knob="optimizer.lr: lower; data.train: its grader; loss.clip_low; loss.clip_high",
    ),
    _accuracy({"good": lambda s: s.late >= ACCURACY_TOP}, "Flat at the top: accuracy {s.late:.3f}"),
    _accuracy(
        {"warn": lambda s: len(s) >= ACCURACY_FLAT_STEPS, "note": always},
        "No trend: accuracy {s.early:.3f} → {s.late:.3f} over {length} steps",
        knob="optimizer.lr: higher; optimizer.warmup_rollout_steps: shorter; data.train: problems "
        "of which some answers are right",
    ),
)


def evaluation(run: RunData) -> Iterator[Finding]:
    """Judge the mean accuracy on held-out sets, by its 95% intervals."""
    means = [point for point in run.evaluations if point.figure.startswith("avg@")]
    for name, figure in dict.fromkeys((point.set, point.figure) for point in means):
        points = [point for point in means if (point.set, point.figure) == (name, figure)]
        first, last = points[0], points[-1]
        best = max(points, key=lambda point: point.value)
        if len(points) < 2:
            continue
        level, title = _compared(first, best, last)
        shown = dict.fromkeys((first, best, last))
        yield Finding(
            level,
            f"{title}: {name}",
            f"{figure} of {name}: {', '.join(map(_point, shown))}.",
            f"eval/{name}/{figure}",
            f"checkpoint.keep_every: so that step {best.step}, the best, stays"
            if level == "warn"
            else None,
        )


def _compared(first: Evaluation, best: Evaluation, last: Evaluation) -> tuple[Level, str]:
    if _is_below(last, first):
        return "bad", "Evaluation is below its start"
    if _is_below(last, best):
        return "warn", "Evaluation has fallen from its best"
    if _is_below(first, last):
        return "good", "Evaluation confirms the learning"
    return "note", "Evaluation shows no change beyond its intervals"


def _is_below(a: Evaluation, b: Evaluation) -> bool:
    """Compare intervals, which must not touch. Without intervals, use ACCURACY_FROM_BEST."""
    if a.high is None or b.low is None:
        return b.value - a.value >= ACCURACY_FROM_BEST
    return a.high < b.low


def _point(point: Evaluation) -> str:
    has_interval = point.low is not None and point.high is not None
    interval = f" [{point.low:.3f}, {point.high:.3f}]" if has_interval else ""
    return f"{point.value:.3f}{interval} at step {point.step}"


# ---------------------------------------------------------------------------- the policy

ENTROPY_LOW = 0.4  # of its start; below it and still falling: a note
ENTROPY_COLLAPSED = 0.15  # of its start; below it: a warning
ENTROPY_NONE = 0.02  # nats; below it nearly all answers to a prompt are the same
ENTROPY_GROWTH = 2.0  # times its start; above it, above 1 nat, and rising: it comes apart
LENGTH_GROWTH = 1.5  # times, over the second half of the run, that accuracy does not follow
LENGTH_SHRINK = 0.5  # of its start
CLIPPED_HIGH = 0.2  # of completions cut at the limit
CLIPPED_RISE = 0.1  # of completions, end against start
GRADIENT_SPIKE = 5.0  # times the median of the 20 steps before, and 10 times their spread above it
GRADIENT_SPIKES = 0.05  # of the steps; more spikes, and more than two: a warning
GRADIENT_CLIPPED = 0.9  # of the steps have a norm above optimizer.clip_grad
POLICY_CLIPPED_TOKENS = 0.1  # of tokens outside the clip range on either side
POLICY_DUAL_CLIPPED = 0.01  # of tokens stopped by the dual clip
POLICY_KL = 0.1  # nats; size of policy/approx_kl within a step
GAP_NEAR_BOUND = 0.5  # of sync.max_gap, where the run stops
GAP_GROWTH = 3.0  # times its start, of the mean gap

_entropy = partial(
    Rule,
    "policy/entropy",
    text="{s.early!n} → {s.late!n} nats, {s.growth!p} of its start.",
    knob="loss.clip_high: higher (0.28 in the paper); optimizer.lr: lower",
    trend=True,
)
_length = partial(
    Rule,
    "response_tokens/mean",
    text="Mean length {s.early!n} → {s.late!n} tokens, {s.half.early!n} at half of the run.",
    trend=True,
)
_gradient = partial(Rule, "policy/grad_norm")
_moves = partial(
    Rule,
    text="{s.early!n} → {s.late!n}. The policy moves far within a step.",
    knob="optimizer.lr: lower; train.updates_per_step: lower",
)
_gap = partial(Rule, knob="sync.max_gap; policy.precision; engine.quantization; loss.tis_cap: set")

POLICY: tuple[RunRule, ...] = (
    first_of(
        _entropy(
            {"bad": lambda s: s.falls and s.late < ENTROPY_NONE and s.early > 0},
            "Entropy has collapsed: answers to a prompt are nearly all alike",
        ),
        _entropy(
            {
                "warn": lambda s: _still_falls(s) and s.growth < ENTROPY_COLLAPSED,
                "note": lambda s: _still_falls(s) and s.growth < ENTROPY_LOW,
            },
            "Entropy is down to {s.growth!p} of its start, and falling",
        ),
        _entropy(
            {"warn": lambda s: s.rises and s.growth > ENTROPY_GROWTH and s.late > 1},
            "Entropy has grown to {s.growth:.1f} times its start",
            knob="overlong.filter: on; overlong.penalty: on; loss.aggregation: token; "
            "optimizer.lr: lower",
        ),
    ),
    _length(
        {"warn": lambda s: _runs_away(s.half) and not s.other(ACCURACY).half.rises},
        "Answers grow {s.half.growth:.1f} times longer while accuracy does not rise",
        knob="overlong.penalty: on; loss.aggregation: token",
    ),
    _length(
        {"note": lambda s: s.falls and s.growth <= LENGTH_SHRINK},
        "Answers have become short: {s.growth!p} of their length",
        knob="overlong.buffer_tokens: smaller, if the penalty does it",
    ),
    Rule(
        "response_tokens/clipped_fraction",
        {"warn": lambda s: s.late >= CLIPPED_HIGH or (s.rises and s.change >= CLIPPED_RISE)},
        "{s.late!p} of answers are cut off at the token limit",
        "{s.early!p} → {s.late!p} of completions. What is cut off is graded wrong.",
        "rollout.max_response_tokens: higher; overlong.penalty: on; overlong.filter: on",
    ),
    _gradient(
        {"warn": lambda s: len(s.hits) > max(2, GRADIENT_SPIKES * len(s)), "note": always},
        "Gradient norm spikes at {steps}",
        "Up to {s.most!n} at step {s.peak}.",
        "optimizer.clip_grad: lower, if accuracy suffers; optimizer.lr: lower",
        steps=lambda s: s.spikes(GRADIENT_SPIKE),
    ),
    _gradient(
        {"note": lambda s: len(s.hits) >= GRADIENT_CLIPPED * len(s)},
        "The gradient is clipped at {share!p} of the steps",
        "Its norm is {s.late!n} lately; optimizer.clip_grad is {s.bound:g}.",
        "optimizer.clip_grad: higher, if steps are to differ in size",
        trend=True,
        bound="optimizer.clip_grad",
        steps=lambda s: s.where(lambda norm: norm > s.bound),
        facts=lambda s: {"share": len(s.hits) / len(s)},
    ),
    _moves(
        CLIPPED_TOKENS,
        {"warn": lambda s: s.late >= POLICY_CLIPPED_TOKENS},
        "{s.late!p} of tokens are clipped",
        chart="clipping",
    ),
    _moves(
        "policy/dual_clip_fraction",
        {"warn": lambda s: s.late >= POLICY_DUAL_CLIPPED},
        "The dual clip stops {s.late!p} of tokens",
    ),
    _moves(
        "policy/approx_kl",
        {"warn": lambda s: abs(s.late) >= POLICY_KL},
        "The policy moves by {s.late!n} nats of KL within a step",
    ),
    _gap(
        "mismatch/gap_max",
        {"warn": always},
        "The gap of engine and policy came near sync.max_gap at {steps}",
        "Largest {s.most!n} at step {s.peak}; the run stops above {s.bound:g}.",
        bound="sync.max_gap",
        steps=lambda s: s.where(lambda gap: gap > GAP_NEAR_BOUND * s.bound),
    ),
    _gap(
        "mismatch/gap_mean",
        {"warn": lambda s: s.rises and s.growth >= GAP_GROWTH},
        "The gap of engine and policy grows: {s.growth:.1f} times its start",
        "Mean {s.early!n} → {s.late!n} nats per token.",
    ),
)


def _still_falls(entropy: Case) -> bool:
    return entropy.early > 0 and entropy.falls and entropy.half.change < 0


def _runs_away(length: Track) -> bool:
    return length.rises and length.growth >= LENGTH_GROWTH


RULES: tuple[RunRule, ...] = (
    state,
    missing,
    learning,
    evaluation,
    *POLICY,
    *rules_work.PROMPTS,
    *rules_work.TIME,
)
