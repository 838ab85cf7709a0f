"""Findings on the policy: does it learn, does it still explore, are its updates sound."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from dapo_megatron.report.curves import ghosts
from dapo_megatron.report.finding import Column, Finding, Level, Track, fall_from_best
from dapo_megatron.report.folder import Evaluation, RunData
from dapo_megatron.report.rule import Case, Rule, RunRule, always, first_of, lately
from dapo_megatron.report.wording import times

ACCURACY = "accuracy/raw"

ACCURACY_CHANGE = 0.03  # least change, end against start, that is learning (or falling)
ACCURACY_FROM_BEST = 0.08  # fallen so far from its best, and 4 times the noise of the series
ACCURACY_TOP = 0.95  # flat above this is no fault
ACCURACY_FLAT_STEPS = 100  # steps; flat for so long is a warning, before a note


def _has_fallen(accuracy: Case) -> bool:
    _, fall, noise = fall_from_best(accuracy.values)
    return fall >= ACCURACY_FROM_BEST and fall > 4 * noise and accuracy.change > -fall / 2


def _since_best(accuracy: Case) -> tuple[int, ...]:
    return accuracy.steps[fall_from_best(accuracy.values)[0] :]


def _is_flat(accuracy: Track) -> bool:
    return abs(accuracy.change) < ACCURACY_CHANGE


def _on_learning(accuracy: Case) -> dict[str, Any]:
    evaluations_rise = _evaluations_rise(accuracy.run, accuracy)
    return {
        "figures": f"{accuracy.early:.3f} → {accuracy.late:.3f}",
        "fall": fall_from_best(accuracy.values)[1],
        "though": ", though the evaluations rise" if evaluations_rise else "",
        "lately": _lately(accuracy),
        "trend": "Flat" if _is_flat(accuracy) else "No clear trend",
        "length": times(len(accuracy), "step"),
    }


def _lately(accuracy: Case) -> str:
    """Describe the second half. "No further rise" needs many steps, because in a few a slow rise
    cannot be told from noise, and evaluations that do not rise either."""
    half = accuracy.half
    if half.rises:
        return f" It still rises since step {half.steps[0]}."
    if (
        len(half) < ACCURACY_FLAT_STEPS
        or not _is_flat(half)
        or _evaluations_rise(accuracy.run, half)
    ):
        return ""
    return f" No further rise beyond noise since step {half.steps[0]}."


_FASTER = (
    "optimizer.lr: higher; optimizer.warmup_rollout_steps: shorter; data.train: problems of which "
    "some answers are right"
)
_MEDIANS = (
    "Accuracy of sampled answers, medians of the first and last {s.window} steps: {figures} "
    "({s.change:+.3f})."
)
_accuracy = partial(Rule, ACCURACY, text=_MEDIANS, trend=True, facts=_on_learning)

learning = first_of(
    _accuracy(
        {"warn": _has_fallen},
        "Accuracy has fallen by {fall:.2f} from its best around step {s.hits[0]}",
        text=_MEDIANS + " Look at what changed there: entropy, length, gap, gradient norm.",
        knob="optimizer.lr: lower; resume: a checkpoint from before it",
        steps=_since_best,
    ),
    _accuracy(
        {"good": lambda s: s.rises and s.change >= ACCURACY_CHANGE},
        "Learning: accuracy {figures}",
        text=_MEDIANS + "{lately}",
    ),
    _accuracy(
        {"bad": lambda s: s.falls and s.change <= -ACCURACY_CHANGE},
        "Accuracy is falling: {figures}",
        knob="optimizer.lr: lower; data.train: its grader; loss.clip_low; loss.clip_high",
    ),
    _accuracy(
        {"good": lambda s: s.late >= ACCURACY_TOP},
        "Flat at the top: accuracy {s.late:.3f}",
        text=_MEDIANS + " Little is left to learn from this data.",
    ),
    _accuracy(
        {"warn": lambda s: len(s) >= ACCURACY_FLAT_STEPS, "note": always},
        "{trend}: accuracy {figures} over {length}",
        text=_MEDIANS + " No trend beyond noise{though}.",
        knob=lambda s: _FASTER if _is_flat(s) else None,
    ),
)


def evaluation(run: RunData) -> Iterator[Finding]:
    """Judge the mean accuracy on held-out sets, by its 95% intervals."""
    for (name, figure), points in _by_set(run).items():
        if len(points) < 2:
            continue
        first, last = points[0], points[-1]
        best = max(points, key=lambda point: point.value)
        level, title = _compared(first, best, last)
        knob = f"checkpoint.keep_every: so that step {best.step}, the best, stays"
        text = f"{figure} of {name}: {_point(first)}, {_point(last)}"
        if best not in (first, last):
            text += f"; best {_point(best)}"
        yield Finding(
            level,
            f"{title}: {name}",
            f"{text}.",
            f"eval/{name}/{figure}",
            (first.step, last.step),
            knob if level == "warn" else None,
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
    """Compare intervals, which must not touch; without intervals, use ACCURACY_FROM_BEST."""
    if a.high is None or b.low is None:
        return b.value - a.value >= ACCURACY_FROM_BEST
    return a.high < b.low


def _evaluations_rise(run: RunData, within: Track) -> bool:
    """Return True if a set's mean accuracy rises, from the last one before these steps on."""
    for points in _by_set(run).values():
        before = [point for point in points if point.step < within.steps[0]]
        if before and _is_below(before[-1], points[-1]):
            return True
    return False


def _by_set(run: RunData) -> dict[tuple[str, str], list[Evaluation]]:
    """Return the mean accuracies in step order, by set and figure."""
    by_set: dict[tuple[str, str], list[Evaluation]] = {}
    for point in sorted(run.evaluations, key=lambda point: (point.set, point.figure, point.step)):
        if point.figure.startswith("avg@"):
            by_set.setdefault((point.set, point.figure), []).append(point)
    return by_set


def _point(point: Evaluation) -> str:
    has_interval = point.low is not None and point.high is not None
    interval = f" [{point.low:.3f}, {point.high:.3f}]" if has_interval else ""
    return f"{point.value:.3f}{interval} at step {point.step}"


ENTROPY_LOW = 0.4  # of its start; below it and still falling: a note
ENTROPY_COLLAPSED = 0.15  # of its start; below it: a warning
ENTROPY_NONE = 0.02  # nats; below it nearly all answers to a prompt are the same
ENTROPY_GROWTH = 2.0  # times its start; above it, above 1 nat, and rising: it comes apart


def _still_falls(entropy: Case) -> bool:
    return entropy.early > 0 and entropy.falls and entropy.half.score < 0


def _still_rises(entropy: Case) -> bool:
    return entropy.rises and entropy.half.score > 0


def _paper_entropy(entropy: Case) -> dict[str, Any]:
    last = entropy.steps[-1]
    paper, collapsed = (_share_at(key, last) for key in ("entropy", "entropy_collapse"))
    return {"last": last, "paper": paper, "collapsed": collapsed}


@cache
def _share_at(key: str, step: int) -> float:
    """Return a paper curve at a rollout step (its last after its end), as a share of its start."""
    points = ghosts([key])[key]["points"]
    before = [value for at, value in points if at <= step] or [points[0][1]]
    return float(before[-1] / points[0][1])


_entropy = partial(
    Rule,
    "policy/entropy",
    text="{s.early!n} → {s.late!n} nats, {s.growth!p} of its start. At step {last} the paper's run "
    "has {paper!p} of its start, its run without clip-higher {collapsed!p} (figures 7c, 2b).",
    knob="loss.clip_high: higher (0.28 in the paper); optimizer.lr: lower",
    facts=_paper_entropy,
)

entropy = first_of(
    _entropy(
        {"bad": lambda s: s.early > 0 and s.falls and s.late < ENTROPY_NONE},
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
        {"warn": lambda s: _still_rises(s) and s.growth > ENTROPY_GROWTH and s.late > 1},
        "Entropy has grown to {s.growth:.1f} times its start, and rises",
        knob="overlong.filter: on; overlong.penalty: on; loss.aggregation: token; "
        "optimizer.lr: lower",
    ),
)

LENGTH_GROWTH = 1.5  # times, over the second half of the run, that accuracy does not follow
LENGTH_SHRINK = 0.5  # of its start


def _runs_away(length: Case) -> bool:
    half = length.half
    return half.rises and half.growth >= LENGTH_GROWTH and not length.other(ACCURACY).half.rises


_length = partial(Rule, "response_tokens/mean")

response_length = first_of(
    _length(
        {"warn": _runs_away},
        "Answers grow {s.half.growth:.1f} times longer while accuracy does not rise",
        "Mean length {s.early!n} → {s.late!n} tokens; {s.half.early!n} → {s.half.late!n} since "
        "step {s.half.steps[0]}.",
        "overlong.penalty: on; loss.aggregation: token",
        steps=lambda s: s.half.steps,
    ),
    _length(
        {"note": lambda s: s.falls and s.growth <= LENGTH_SHRINK},
        "Answers have become short: {s.growth!p} of their length",
        "Mean length {s.early!n} → {s.late!n} tokens. Read some: do they still reason?",
        "overlong.buffer_tokens: smaller, if the penalty does it",
    ),
)

CLIPPED_HIGH = 0.2  # of completions cut at the limit
CLIPPED_RISE = 0.1  # of completions, end against start

_cut_off = partial(
    Rule,
    "response_tokens/clipped_fraction",
    text="{s.early!p} → {s.late!p} of completions ({s.change:+.3f}). What is cut off is graded "
    "wrong.",
    knob="rollout.max_response_tokens: higher; overlong.penalty: on; overlong.filter: on",
    steps=lately,
)

cut_off = first_of(
    _cut_off(
        {"warn": lambda s: s.late >= CLIPPED_HIGH},
        "{s.late!p} of answers are cut off at the token limit",
    ),
    _cut_off(
        {"warn": lambda s: s.rises and s.change >= CLIPPED_RISE},
        "More and more answers are cut off: {s.late!p}",
    ),
)

GRADIENT_SPIKE = 5.0  # times the median of the 20 steps before, and 10 times their spread above it
GRADIENT_SPIKES = 0.05  # of the steps; more spikes, and more than two: a warning
GRADIENT_CLIPPED = 0.9  # of the steps have a norm above optimizer.clip_grad

_gradient = partial(Rule, "policy/grad_norm")

gradient = (
    _gradient(
        {"warn": lambda s: len(s.hits) > max(2, GRADIENT_SPIKES * len(s)), "note": always},
        "Gradient norm spikes at {steps}",
        f"Up to {{s.most!n}} at step {{s.peak}}, over {GRADIENT_SPIKE:g} times the median of the "
        "steps before.",
        "optimizer.clip_grad: lower, if accuracy suffers; optimizer.lr: lower",
        steps=lambda s: s.spikes(GRADIENT_SPIKE),
    ),
    _gradient(
        {"note": lambda s: _clipped_share(s) >= GRADIENT_CLIPPED},
        "The gradient is clipped at {share!p} of the steps",
        "Its norm is {s.late!n} lately; optimizer.clip_grad is {s.bound:g}.",
        "optimizer.clip_grad: higher, if steps are to differ in size",
        trend=True,
        bound="optimizer.clip_grad",
        facts=lambda s: {"share": _clipped_share(s)},
    ),
)


def _clipped_share(norm: Case) -> float:
    return len(norm.where(lambda value: value > norm.bound)) / len(norm)


POLICY_CLIPPED_TOKENS = 0.1  # of tokens outside the clip range on either side
POLICY_DUAL_CLIPPED = 0.01  # of tokens stopped by the dual clip
POLICY_KL = 0.1  # nats; size of policy/approx_kl within a step

_clipping = partial(Rule, knob="optimizer.lr: lower; train.updates_per_step: lower", steps=lately)


def _clipped_tokens(run: RunData) -> Column:
    """Return the share of tokens outside the clip range, on both sides together."""
    sides = (run.metrics.column(f"policy/clip_fraction_{side}") for side in ("high", "low"))
    return [
        None if high is None or low is None else high + low
        for high, low in zip(*sides, strict=True)
    ]


clipping = (
    _clipping(
        "policy/clip_fraction_high",
        {"warn": lambda s: s.late >= POLICY_CLIPPED_TOKENS},
        "{s.late!p} of tokens are clipped",
        "Above and below the range together; {s.early!p} early. The policy moves far within one "
        "step.",
        column=_clipped_tokens,
    ),
    _clipping(
        "policy/dual_clip_fraction",
        {"warn": lambda s: s.late >= POLICY_DUAL_CLIPPED},
        "The dual clip stops {s.late!p} of tokens",
        "{s.early!p} early. Their probability grew at negative advantage.",
    ),
    _clipping(
        "policy/approx_kl",
        {"warn": lambda s: abs(s.late) >= POLICY_KL},
        "The policy moves by {s.late!n} nats of KL within a step",
        "{s.early!n} early.",
    ),
)

GAP_NEAR_BOUND = 0.5  # of sync.max_gap, where the run stops
GAP_GROWTH = 3.0  # times its start, of the mean gap

_gap = partial(Rule, knob="sync.max_gap; policy.precision; engine.quantization; loss.tis_cap: set")

gap = (
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

RULES: tuple[RunRule, ...] = (
    learning,
    evaluation,
    entropy,
    response_length,
    cut_off,
    *gradient,
    *clipping,
    *gap,
)
