"""Findings on a run's health: a table of rules, and functions for findings that need more than one
series.

Each threshold is a constant next to its rule, and docs/report.md explains it. Short runs are judged
by facts, not by trends. Metrics that a run did not record are not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from dapo_megatron.report import work_rules
from dapo_megatron.report.finding import (
    LEVELS,
    TREND_LEAST_STEPS,
    Finding,
    Level,
    Track,
    fall_from_best,
)
from dapo_megatron.report.finding_rule import (
    CLIPPED_TOKENS,
    FindingRule,
    JudgedSeries,
    RunRule,
    always,
    first_of,
    judged,
)
from dapo_megatron.report.run_data import Evaluation, RunData, StateWord
from dapo_megatron.report.wording import named, times

ACCURACY = "accuracy/raw"

_RECORDED = ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step")
"""Metrics of every step that makes an update."""


def findings(run: RunData) -> list[Finding]:
    """Return the findings: problems and warnings, then learning, then notes and good findings."""
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
    StateWord.UNKNOWN: ("note", "How the run ended is unknown"),
}
RESTARTS_MANY = 3  # starts that crashed, hung or were cut short


def state(run: RunData) -> Iterator[Finding]:
    """Report how a run ended, its earlier starts, and whether it is too short to judge trends."""
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
            setting="checkpoint.max_minutes: lower" if wrong else None,
        )
    num_steps = len(run.metrics.steps)
    if num_steps < TREND_LEAST_STEPS:
        title = f"{times(num_steps, 'step')}: too few to judge trends"
        text = f"Learning, growth and decline are judged from {TREND_LEAST_STEPS} steps on."
        yield Finding("note", title, text)


def missing(run: RunData) -> Iterator[Finding]:
    """Report steps without metrics, without an update, or with non-finite values."""
    steps = run.metrics.steps
    # A run that continues from another run's checkpoint starts later.
    lost = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    if lost:
        text = f"metrics.jsonl has no line for {named(lost)}: a full disk, or a corrupt file."
        yield Finding("warn", f"{times(len(lost), 'step')} without metrics", text)
    for name in _RECORDED:
        values = run.metrics.series(name)
        gaps = list(values.index[values.isna()])
        if gaps and len(gaps) < len(steps):
            text = f"No finite value at {named(gaps)}: the step trained nothing, or it was NaN."
            title = f"{name} is missing at {times(len(gaps), 'step')}"
            yield Finding("warn", title, text, name)


# ---------------------------------------------------------------------------- does it learn

ACCURACY_CHANGE = 0.03  # minimum change from start to end that counts as learning (or falling)
ACCURACY_FROM_BEST = 0.08  # minimum fall from the best, which must also exceed 4 times the noise
ACCURACY_TOP = 0.95  # flat above this is good
ACCURACY_FLAT_STEPS = 100  # steps; a flat accuracy is a warning from here on, before that a note


def _has_fallen(accuracy: JudgedSeries) -> bool:
    _, fall, noise = fall_from_best(accuracy.series)
    return fall >= ACCURACY_FROM_BEST and fall > 4 * noise and accuracy.change > -fall / 2


_accuracy = partial(
    FindingRule,
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
        setting="optimizer.lr: lower; resume: a checkpoint from before it",
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
        setting="optimizer.lr: lower; data.train: its grader; loss.clip_low; loss.clip_high",
    ),
    _accuracy({"good": lambda s: s.late >= ACCURACY_TOP}, "Flat at the top: accuracy {s.late:.3f}"),
    _accuracy(
        {"warn": lambda s: len(s) >= ACCURACY_FLAT_STEPS, "note": always},
        "No trend: accuracy {s.early:.3f} → {s.late:.3f} over {length} steps",
        setting="optimizer.lr: higher; optimizer.warmup_rollout_steps: shorter; data.train: "
        "problems with some right answers",
    ),
)


def evaluation(run: RunData) -> Iterator[Finding]:
    """Judge the mean accuracy on held-out sets by its 95% intervals."""
    means = [point for point in run.evaluations if point.metric.startswith("avg@")]
    for name, figure in dict.fromkeys((point.set, point.metric) for point in means):
        points = [point for point in means if (point.set, point.metric) == (name, figure)]
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
            f"checkpoint.keep_every: a value that keeps step {best.step}, the best"
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
    """Return True if `a` is below `b`: their intervals do not overlap or, without intervals, they
    differ by ACCURACY_FROM_BEST."""
    if a.high is None or b.low is None:
        return b.value - a.value >= ACCURACY_FROM_BEST
    return a.high < b.low


def _point(point: Evaluation) -> str:
    has_interval = point.low is not None and point.high is not None
    interval = f" [{point.low:.3f}, {point.high:.3f}]" if has_interval else ""
    return f"{point.value:.3f}{interval} at step {point.step}"


# ---------------------------------------------------------------------------- the policy

ENTROPY_LOW = 0.4  # of its start; lower and still falling: a note
ENTROPY_COLLAPSED = 0.15  # of its start; lower and still falling: a warning
ENTROPY_NONE = 0.02  # nats; lower means that nearly all answers to a prompt are equal
ENTROPY_GROWTH = 2.0  # times its start; higher, above 1 nat and rising: the policy diverges
LENGTH_GROWTH = 1.5  # times, over the second half of the run, while accuracy does not rise
LENGTH_SHRINK = 0.5  # of its start
CLIPPED_HIGH = 0.2  # of completions truncated at the limit
CLIPPED_RISE = 0.1  # of completions, increase from start to end
GRADIENT_SPIKE = 5.0  # times the median of the 20 steps before, and 10 times their spread above it
GRADIENT_SPIKES = 0.05  # of the steps; more spikes than this, and more than two: a warning
GRADIENT_CLIPPED = 0.9  # of the steps have a norm above optimizer.clip_grad
POLICY_CLIPPED_TOKENS = 0.1  # of tokens outside the clip range on either side
POLICY_DUAL_CLIPPED = 0.01  # of tokens stopped by the dual clip
POLICY_KL = 0.1  # nats; size of policy/approx_kl within a step
GAP_NEAR_BOUND = 0.5  # of sync.max_gap, at which the run stops
GAP_GROWTH = 3.0  # growth of the mean gap, times its start
CORRECTION_MASKED = 0.1  # of tokens masked by loss.correction: a note
CORRECTION_MASKED_MUCH = 0.5  # a warning
CORRECTION_EFFECTIVE = 0.5  # of the tokens; a smaller effective sample size: a warning

_entropy = partial(
    FindingRule,
    "policy/entropy",
    text="{s.early!n} → {s.late!n} nats, {s.growth!p} of its start.",
    setting="loss.clip_high: higher (0.28 in the paper); optimizer.lr: lower",
    trend=True,
)
_length = partial(
    FindingRule,
    "response_tokens/mean",
    text="Mean length {s.early!n} → {s.late!n} tokens, {s.half.early!n} halfway through the run.",
    trend=True,
)
_gradient = partial(FindingRule, "policy/grad_norm")
_moves = partial(
    FindingRule,
    text="{s.early!n} → {s.late!n}. The policy moves far within a step.",
    setting="optimizer.lr: lower; train.updates_per_step: lower",
)
_gap = partial(
    FindingRule,
    setting="sync.max_gap; policy.precision; engine.quantization; loss.correction: set",
)

POLICY: tuple[RunRule, ...] = (
    first_of(
        _entropy(
            {"bad": lambda s: s.falls and s.late < ENTROPY_NONE and s.early > 0},
            "Entropy has collapsed: nearly all answers to a prompt are equal",
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
            setting="overlong.filter: on; overlong.penalty: on; loss.aggregation: token; "
            "optimizer.lr: lower",
        ),
    ),
    _length(
        {"warn": lambda s: _runs_away(s.half) and not s.other(ACCURACY).half.rises},
        "Answers grow {s.half.growth:.1f} times longer while accuracy does not rise",
        setting="overlong.penalty: on; loss.aggregation: token",
    ),
    _length(
        {"note": lambda s: s.falls and s.growth <= LENGTH_SHRINK},
        "Answers have become short: {s.growth!p} of their initial length",
        setting="overlong.buffer_tokens: smaller, if the penalty is the cause",
    ),
    FindingRule(
        "response_tokens/clipped_fraction",
        {"warn": lambda s: s.late >= CLIPPED_HIGH or (s.rises and s.change >= CLIPPED_RISE)},
        "{s.late!p} of answers are cut off at the token limit",
        "{s.early!p} → {s.late!p} of completions. They are graded wrong.",
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
        "The recent norm is {s.late!n}; optimizer.clip_grad is {s.bound:g}.",
        "optimizer.clip_grad: higher, so that updates can differ in size",
        trend=True,
        bound="optimizer.clip_grad",
        steps=lambda s: s.where(lambda norm: norm > s.bound),
        facts=lambda s: {"share": len(s.hits) / len(s)},
    ),
    _moves(
        CLIPPED_TOKENS,
        {"warn": lambda s: s.late >= POLICY_CLIPPED_TOKENS},
        "{s.late!p} of tokens are clipped",
        # GSPO's narrow range clips whole completions as a matter of course, and CISPO's clipped
        # tokens keep their gradient.
        only=lambda run: run.word("loss.objective") not in ("gspo", "cispo"),
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
        "The gap between engine and policy came near sync.max_gap at {steps}",
        "Largest {s.most!n} at step {s.peak}; the run stops above {s.bound:g}.",
        bound="sync.max_gap",
        steps=lambda s: s.where(lambda gap: gap > GAP_NEAR_BOUND * s.bound),
    ),
    _gap(
        "mismatch/gap_mean",
        {"warn": lambda s: s.rises and s.growth >= GAP_GROWTH},
        "The gap between engine and policy grows: {s.growth:.1f} times its start",
        "Mean {s.early!n} → {s.late!n} nats per token.",
    ),
    FindingRule(
        "correction/masked_tokens",
        {
            "warn": lambda s: s.late >= CORRECTION_MASKED_MUCH,
            "note": lambda s: s.late >= CORRECTION_MASKED,
        },
        "Corrections mask {s.late!p} of the tokens",
        "{s.early!p} → {s.late!p}. They were sampled, but train nothing.",
        "loss.correction: wider bounds; rollout.max_age: lower; engine.quantization: none",
        chart="masked",
    ),
    FindingRule(
        "correction/effective_sample_share",
        {
            "warn": lambda s: (
                s.late < CORRECTION_EFFECTIVE
                and s.other("correction/masked_tokens").late < CORRECTION_MASKED_MUCH
            )
        },
        "A few heavy tokens decide the updates: the effective sample size is {s.late!p}",
        "Importance weights and masks make the step count as {s.late!p} of its tokens.",
        "loss.correction: masks instead of weights; loss.tis_cap: lower",
        chart="masked",
    ),
)


def _still_falls(entropy: JudgedSeries) -> bool:
    return entropy.early > 0 and entropy.falls and entropy.half.change < 0


def _runs_away(length: Track) -> bool:
    return length.rises and length.growth >= LENGTH_GROWTH


RULES: tuple[RunRule, ...] = (
    state,
    missing,
    learning,
    evaluation,
    *POLICY,
    *work_rules.PROMPTS,
    *work_rules.TIME,
)
