"""Findings on the policy: does it learn, does it still explore, are its updates sound."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from dapo_megatron.report.curves import ghosts
from dapo_megatron.report.finding import Finding, Level, Track, fall_from_best, track, track_of
from dapo_megatron.report.folder import Evaluation, RunData
from dapo_megatron.report.wording import named, number, percent, times

ACCURACY = "accuracy/raw"

ACCURACY_CHANGE = 0.03  # least change, end against start, that is learning (or falling)
ACCURACY_FROM_BEST = 0.08  # fallen so far from its best, and 4 times the noise of the series
ACCURACY_TOP = 0.95  # flat above this is no fault
ACCURACY_FLAT_STEPS = 100  # steps; flat for so long is a warning, before a note

_FLAT = (
    "optimizer.lr: higher; optimizer.warmup_rollout_steps: shorter; data.train: problems of which "
    "some answers are right"
)


def learning(run: RunData) -> Iterator[Finding]:
    """Trend of the accuracy while training."""
    accuracy = track(run, ACCURACY)
    if not accuracy.is_long:
        return
    change = accuracy.late - accuracy.early
    figures = f"{accuracy.early:.3f} → {accuracy.late:.3f}"
    text = (
        f"Accuracy of sampled answers, medians of the first and last {accuracy.window} steps: "
        f"{figures} ({change:+.3f})."
    )
    place, fall, noise = fall_from_best(accuracy.values)
    if fall >= ACCURACY_FROM_BEST and fall > 4 * noise and change > -fall / 2:
        best = accuracy.steps[place]
        yield accuracy.finding(
            "warn",
            f"Accuracy has fallen by {fall:.2f} from its best around step {best}",
            f"{text} Look at what changed there: entropy, length, gap, gradient norm.",
            "optimizer.lr: lower; resume: a checkpoint from before it",
            steps=(best, accuracy.steps[-1]),
        )
    elif accuracy.rises and change >= ACCURACY_CHANGE:
        title = f"Learning: accuracy {figures}"
        yield accuracy.finding("good", title, f"{text}{_lately(run, accuracy)}")
    elif accuracy.falls and change <= -ACCURACY_CHANGE:
        yield accuracy.finding(
            "bad",
            f"Accuracy is falling: {figures}",
            text,
            "optimizer.lr: lower; data.train: its grader; loss.clip_low; loss.clip_high",
        )
    elif accuracy.late >= ACCURACY_TOP:
        title = f"Flat at the top: accuracy {accuracy.late:.3f}"
        yield accuracy.finding("good", title, f"{text} Little is left to learn from this data.")
    else:
        is_flat = abs(change) < ACCURACY_CHANGE
        though = ", though the evaluations rise" if _evaluations_rise(run, accuracy) else ""
        yield accuracy.finding(
            "warn" if len(accuracy) >= ACCURACY_FLAT_STEPS else "note",
            f"{'Flat' if is_flat else 'No clear trend'}: accuracy {figures} over "
            f"{times(len(accuracy), 'step')}",
            f"{text} No trend beyond noise{though}.",
            _FLAT if is_flat else None,
        )


def _lately(run: RunData, accuracy: Track) -> str:
    """Describe the second half. "No further rise" needs many steps, because in a few a slow rise
    cannot be told from noise, and evaluations that do not rise either."""
    half = accuracy.second_half()
    since = f"since step {half.steps[0]}"
    if half.rises:
        return f" It still rises {since}."
    is_level = abs(half.late - half.early) < ACCURACY_CHANGE
    if len(half) < ACCURACY_FLAT_STEPS or not is_level or _evaluations_rise(run, half):
        return ""
    return f" No further rise beyond noise {since}."


def _evaluations_rise(run: RunData, within: Track) -> bool:
    """True if a set's mean accuracy rises, from the last one before these steps on."""
    for points in _by_set(run).values():
        before = [point for point in points if point.step < within.steps[0]]
        inside = [point for point in points if point.step >= within.steps[0]]
        if before and inside and _is_below(before[-1], inside[-1]):
            return True
    return False


def _by_set(run: RunData) -> dict[tuple[str, str], list[Evaluation]]:
    """Mean accuracies in step order, by set and figure."""
    by_set: dict[tuple[str, str], list[Evaluation]] = {}
    for point in run.evaluations:
        if point.figure.startswith("avg@"):
            by_set.setdefault((point.set, point.figure), []).append(point)
    return {key: sorted(by_set[key], key=lambda point: point.step) for key in sorted(by_set)}


def evaluation(run: RunData) -> Iterator[Finding]:
    """The mean accuracy on held-out sets, by its 95% intervals."""
    for (of_set, figure), points in _by_set(run).items():
        if len(points) < 2:
            continue
        first, last = points[0], points[-1]
        best = max(points, key=lambda point: point.value)
        level, title = _compared(first, best, last)
        knob = None
        if level == "warn":
            knob = f"checkpoint.keep_every: so that step {best.step}, the best, stays"
        text = f"{figure} of {of_set}: {_point(first)}, {_point(last)}"
        if best not in (first, last):
            text += f"; best {_point(best)}"
        metric, steps = f"eval/{of_set}/{figure}", (first.step, last.step)
        yield Finding(level, f"{title}: {of_set}", f"{text}.", metric, steps, knob)


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


def _point(point: Evaluation) -> str:
    has_interval = point.low is not None and point.high is not None
    interval = f" [{point.low:.3f}, {point.high:.3f}]" if has_interval else ""
    return f"{point.value:.3f}{interval} at step {point.step}"


ENTROPY_LOW = 0.4  # of its start; below it and still falling: a note
ENTROPY_COLLAPSED = 0.15  # of its start; below it: a warning
ENTROPY_NONE = 0.02  # nats; below it nearly all answers to a prompt are the same
ENTROPY_GROWTH = 2.0  # times its start; above it, above 1 nat, and rising: it comes apart


def entropy(run: RunData) -> Iterator[Finding]:
    """Collapse, or growth without end."""
    series = track(run, "policy/entropy")
    if not series.is_long or series.early <= 0:
        return
    share, half = series.growth, series.second_half()
    falls = series.falls and half.score < 0
    text = (
        f"{number(series.early)} → {number(series.late)} nats, {percent(share)} of its start. "
        f"{_paper_entropy(series.steps[-1])}"
    )
    knob = "loss.clip_high: higher (0.28 in the paper); optimizer.lr: lower"
    if series.falls and series.late < ENTROPY_NONE:
        title = "Entropy has collapsed: answers to a prompt are nearly all alike"
        yield series.finding("bad", title, text, knob)
    elif falls and share < ENTROPY_LOW:
        level: Level = "warn" if share < ENTROPY_COLLAPSED else "note"
        title = f"Entropy is down to {percent(share)} of its start, and falling"
        yield series.finding(level, title, text, knob)
    elif series.rises and half.score > 0 and share > ENTROPY_GROWTH and series.late > 1:
        yield series.finding(
            "warn",
            f"Entropy has grown to {share:.1f} times its start, and rises",
            text,
            "overlong.filter: on; overlong.penalty: on; loss.aggregation: token; "
            "optimizer.lr: lower",
        )


def _paper_entropy(step: int) -> str:
    kept, collapsed = (_share_at(key, step) for key in ("entropy", "entropy_collapse"))
    return (
        f"At step {step} the paper's run has {percent(kept)} of its start, "
        f"its run without clip-higher {percent(collapsed)} (figures 7c, 2b)."
    )


@cache
def _share_at(key: str, step: int) -> float:
    """A paper curve at a rollout step (its last after its end), as a share of its start."""
    points = ghosts([key])[key]["points"]
    before = [value for at, value in points if at <= step] or [points[0][1]]
    return float(before[-1] / points[0][1])


LENGTH_GROWTH = 1.5  # times, over the second half of the run, that accuracy does not follow
LENGTH_SHRINK = 0.5  # of its start


def response_length(run: RunData) -> Iterator[Finding]:
    """Running away, or gone."""
    series = track(run, "response_tokens/mean")
    if not series.is_long:
        return
    half = series.second_half()
    accuracy = track(run, ACCURACY).second_half()
    figures = f"Mean length {number(series.early)} → {number(series.late)} tokens"
    if half.rises and half.growth >= LENGTH_GROWTH and not accuracy.rises:
        yield half.finding(
            "warn",
            f"Answers grow {half.growth:.1f} times longer while accuracy does not rise",
            f"{figures}; {number(half.early)} → {number(half.late)} since step {half.steps[0]}.",
            "overlong.penalty: on; loss.aggregation: token",
        )
    elif series.falls and series.growth <= LENGTH_SHRINK:
        yield series.finding(
            "note",
            f"Answers have become short: {percent(series.growth)} of their length",
            f"{figures}. Read some: do they still reason?",
            "overlong.buffer_tokens: smaller, if the penalty does it",
        )


CLIPPED_HIGH = 0.2  # of completions cut at the limit
CLIPPED_RISE = 0.1  # of completions, end against start


def cut_off(run: RunData) -> Iterator[Finding]:
    """Answers cut at the token limit."""
    series = track(run, "response_tokens/clipped_fraction")
    if not series:
        return
    rise = series.late - series.early
    if series.late >= CLIPPED_HIGH:
        title = f"{percent(series.late)} of answers are cut off at the token limit"
    elif series.rises and rise >= CLIPPED_RISE:
        title = f"More and more answers are cut off: {percent(series.late)}"
    else:
        return
    yield series.finding(
        "warn",
        title,
        f"{percent(series.early)} → {percent(series.late)} of completions "
        f"({rise:+.3f}). What is cut off is graded wrong.",
        "rollout.max_response_tokens: higher; overlong.penalty: on; overlong.filter: on",
        steps=series.late_span,
    )


GRADIENT_SPIKE = 5.0  # times the median of the 20 steps before, and 10 times their spread above it
GRADIENT_SPIKES = 0.05  # of the steps; more spikes, and more than two: a warning
GRADIENT_CLIPPED = 0.9  # of the steps have a norm above optimizer.clip_grad


def gradient(run: RunData) -> Iterator[Finding]:
    """Spikes of the norm, and clipping at every step."""
    series = track(run, "policy/grad_norm")
    if spikes := series.spikes(GRADIENT_SPIKE):
        steps = [series.steps[place] for place in spikes]
        worst = max(spikes, key=series.values.__getitem__)
        many = len(spikes) > max(2, GRADIENT_SPIKES * len(series))
        yield series.finding(
            "warn" if many else "note",
            f"Gradient norm spikes at {named(steps)}",
            f"Up to {number(series.values[worst])} at step {series.steps[worst]}, over "
            f"{GRADIENT_SPIKE:g} times the median of the steps before.",
            "optimizer.clip_grad: lower, if accuracy suffers; optimizer.lr: lower",
            steps=steps,
        )
    bound = run.number("optimizer.clip_grad")
    if not series.is_long or bound is None or bound <= 0:
        return
    share = len(series.steps_where(lambda value: value > bound)) / len(series)
    if share >= GRADIENT_CLIPPED:
        yield series.finding(
            "note",
            f"The gradient is clipped at {percent(share)} of the steps",
            f"Its norm is {number(series.late)} lately; optimizer.clip_grad is {bound:g}.",
            "optimizer.clip_grad: higher, if steps are to differ in size",
        )


POLICY_CLIPPED_TOKENS = 0.1  # of tokens outside the clip range on either side
POLICY_DUAL_CLIPPED = 0.01  # of tokens stopped by the dual clip
POLICY_KL = 0.1  # nats; size of policy/approx_kl within a step


def clipping(run: RunData) -> Iterator[Finding]:
    """Updates that leave the clip range for many tokens."""
    name = "policy/clip_fraction_high"
    sides = zip(run.metrics.column(name), run.metrics.column("policy/clip_fraction_low"))
    both = [None if high is None or low is None else high + low for high, low in sides]
    clipped = track_of(run.metrics.steps, both, name)
    dual = track(run, "policy/dual_clip_fraction")
    moved = track(run, "policy/approx_kl")
    knob = "optimizer.lr: lower; train.updates_per_step: lower"
    if clipped and clipped.late >= POLICY_CLIPPED_TOKENS:
        yield clipped.finding(
            "warn",
            f"{percent(clipped.late)} of tokens are clipped",
            f"Above and below the range together; {percent(clipped.early)} early. The policy "
            "moves far within one step.",
            knob,
            steps=clipped.late_span,
        )
    if dual and dual.late >= POLICY_DUAL_CLIPPED:
        title = f"The dual clip stops {percent(dual.late)} of tokens"
        text = f"{percent(dual.early)} early. Their probability grew at negative advantage."
        yield dual.finding("warn", title, text, knob, steps=dual.late_span)
    if moved and abs(moved.late) >= POLICY_KL:
        title = f"The policy moves by {number(moved.late)} nats of KL within a step"
        text = f"{number(moved.early)} early."
        yield moved.finding("warn", title, text, knob, steps=moved.late_span)


GAP_NEAR_BOUND = 0.5  # of sync.max_gap, where the run stops
GAP_GROWTH = 3.0  # times its start, of the mean gap


def gap(run: RunData) -> Iterator[Finding]:
    """Engine and policy drift apart."""
    largest, mean = track(run, "mismatch/gap_max"), track(run, "mismatch/gap_mean")
    bound = run.number("sync.max_gap")
    knob = "sync.max_gap; policy.precision; engine.quantization; loss.tis_cap: set"
    near_bound = GAP_NEAR_BOUND * (bound or 0.0)
    if near := largest.steps_where(lambda value: 0 < near_bound < value):
        most = max(largest.values)
        step = largest.steps[largest.values.index(most)]
        yield largest.finding(
            "warn",
            f"The gap of engine and policy came near sync.max_gap at {named(near)}",
            f"Largest {number(most)} at step {step}; the run stops above {bound:g}.",
            knob,
            steps=near,
        )
    if mean.rises and mean.growth >= GAP_GROWTH:
        yield mean.finding(
            "warn",
            f"The gap of engine and policy grows: {mean.growth:.1f} times its start",
            f"Mean {number(mean.early)} → {number(mean.late)} nats per token.",
            knob,
        )


RULES = (
    learning,
    evaluation,
    entropy,
    response_length,
    cut_off,
    gradient,
    clipping,
    gap,
)
