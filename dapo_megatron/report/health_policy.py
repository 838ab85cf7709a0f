"""Findings on the policy: does it learn, does it still explore, are its updates sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from dapo_megatron.report.finding import Finding, Level, named, number, percent, times
from dapo_megatron.report.folder import Evaluation, RunData
from dapo_megatron.report.paper import ghosts
from dapo_megatron.report.thresholds import limit
from dapo_megatron.report.trend import Track, fall_from_best, track, track_of

ACCURACY = "accuracy/raw"
LENGTH = "response_tokens/mean"
CLIPPED = "response_tokens/clipped_fraction"


_FLAT = (
    "optimizer.lr: higher; optimizer.warmup_rollout_steps: shorter; data.train: problems of which "
    "some answers are right"
)


def learning(run: RunData) -> Iterator[Finding]:
    """Whether accuracy while training rises."""
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
    if fall >= limit("accuracy.from_best") and fall > 4 * noise and change > -fall / 2:
        best = accuracy.steps[place]
        yield Finding(
            "warn",
            f"Accuracy has fallen by {fall:.2f} from its best around step {best}",
            f"{text} Look at what changed there: entropy, length, gap, gradient norm.",
            metric=ACCURACY,
            steps=(best, accuracy.steps[-1]),
            knob="optimizer.lr: lower; resume: a checkpoint from before it",
        )
    elif accuracy.rises and change >= limit("accuracy.change"):
        yield Finding(
            "good",
            f"Learning: accuracy {figures}",
            f"{text}{_lately(run, accuracy)}",
            metric=ACCURACY,
            steps=accuracy.span,
        )
    elif accuracy.falls and change <= -limit("accuracy.change"):
        yield Finding(
            "bad",
            f"Accuracy is falling: {figures}",
            text,
            metric=ACCURACY,
            steps=accuracy.span,
            knob="optimizer.lr: lower; data.train: its grader; loss.clip_low; loss.clip_high",
        )
    elif accuracy.late >= limit("accuracy.top"):
        yield Finding(
            "good",
            f"Flat at the top: accuracy {accuracy.late:.3f}",
            f"{text} Little is left to learn from this data.",
            metric=ACCURACY,
            steps=accuracy.span,
        )
    else:
        is_long = len(accuracy) >= limit("accuracy.flat_steps")
        word = "Flat" if abs(change) < limit("accuracy.change") else "No clear trend"
        yield Finding(
            "warn" if is_long else "note",
            f"{word}: accuracy {figures} over {times(len(accuracy), 'step')}",
            f"{text} No trend beyond noise{_though(run, accuracy)}.",
            metric=ACCURACY,
            steps=accuracy.span,
            knob=_FLAT if word == "Flat" else None,
        )


def _lately(run: RunData, accuracy: Track) -> str:
    """Of the second half. That it is at rest is said of many steps alone, for of few a slow rise
    cannot be told from noise; and not if the evaluations rise."""
    half = accuracy.second_half()
    since = f"since step {half.steps[0]}"
    if half.rises:
        return f" It still rises {since}."
    is_level = abs(half.late - half.early) < limit("accuracy.change")
    if len(half) < limit("accuracy.flat_steps") or not is_level or _evaluations_rise(run, half):
        return ""
    return f" No further rise beyond noise {since}."


def _though(run: RunData, accuracy: Track) -> str:
    return ", though the evaluations rise" if _evaluations_rise(run, accuracy) else ""


def _evaluations_rise(run: RunData, within: Track) -> bool:
    """Whether a set's mean accuracy does, from the last one before these steps on."""
    for points in _by_set(run).values():
        before = [one for one in points if one.step < within.steps[0]]
        inside = [one for one in points if one.step >= within.steps[0]]
        if before and inside and _is_below(before[-1], inside[-1]):
            return True
    return False


def _by_set(run: RunData) -> dict[tuple[str, str], list[Evaluation]]:
    """Mean accuracies in step order, by set and figure."""
    found: dict[tuple[str, str], list[Evaluation]] = {}
    for one in run.evaluations:
        if one.figure.startswith("avg@"):
            found.setdefault((one.set, one.figure), []).append(one)
    return {key: sorted(found[key], key=lambda one: one.step) for key in sorted(found)}


def evaluation(run: RunData) -> Iterator[Finding]:
    """The mean accuracy on held-out sets, by its 95% intervals."""
    for (of_set, figure), points in _by_set(run).items():
        if len(points) < 2:
            continue
        first, last = points[0], points[-1]
        best = max(points, key=lambda one: one.value)
        level, title = _compared(points)
        knob = None
        if level == "warn":
            knob = f"checkpoint.keep_every: so that step {best.step}, the best, stays"
        text = f"{figure} of {of_set}: {_point(first)}, {_point(last)}"
        if best not in (first, last):
            text += f"; best {_point(best)}"
        metric, steps = f"eval/{of_set}/{figure}", (first.step, last.step)
        yield Finding(level, f"{title}: {of_set}", f"{text}.", metric, steps, knob)


def _compared(points: Sequence[Evaluation]) -> tuple[Level, str]:
    first, last = points[0], points[-1]
    best = max(points, key=lambda one: one.value)
    if _is_below(last, first):
        return "bad", "Evaluation is below its start"
    if _is_below(last, best):
        return "warn", "Evaluation has fallen from its best"
    if _is_below(first, last):
        return "good", "Evaluation confirms the learning"
    return "note", "Evaluation shows no change beyond its intervals"


def _is_below(a: Evaluation, b: Evaluation) -> bool:
    """By intervals that do not touch; without intervals, by accuracy.from_best."""
    if a.high is None or b.low is None:
        return b.value - a.value >= limit("accuracy.from_best")
    return a.high < b.low


def _point(one: Evaluation) -> str:
    interval = "" if one.low is None or one.high is None else f" [{one.low:.3f}, {one.high:.3f}]"
    return f"{one.value:.3f}{interval} at step {one.step}"


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
    up = "loss.clip_high: higher (0.28 in the paper); optimizer.lr: lower"
    level: Level | None = None
    if series.falls and series.late < limit("entropy.none"):
        level, title = "bad", "Entropy has collapsed: answers to a prompt are nearly all alike"
    elif falls and share < limit("entropy.collapsed"):
        level, title = "warn", f"Entropy is down to {percent(share)} of its start, and falling"
    elif falls and share < limit("entropy.low"):
        level, title = "note", f"Entropy is down to {percent(share)} of its start, and falling"
    elif series.rises and half.score > 0 and share > limit("entropy.growth") and series.late > 1:
        level, title = "warn", f"Entropy has grown to {share:.1f} times its start, and rises"
        up = "overlong.filter: on; overlong.penalty: on; loss.aggregation: token; "
        up += "optimizer.lr: lower"
    if level is not None:
        yield Finding(level, title, text, "policy/entropy", series.span, up)


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


def response_length(run: RunData) -> Iterator[Finding]:
    """Running away, or gone."""
    series = track(run, LENGTH)
    if not series.is_long:
        return
    half = series.second_half()
    accuracy = track(run, ACCURACY).second_half()
    figures = f"Mean length {number(series.early)} → {number(series.late)} tokens"
    if half.rises and half.growth >= limit("length.growth") and not accuracy.rises:
        yield Finding(
            "warn",
            f"Answers grow {half.growth:.1f} times longer while accuracy does not rise",
            f"{figures}; {number(half.early)} → {number(half.late)} since step {half.steps[0]}.",
            LENGTH,
            half.span,
            "overlong.penalty: on; loss.aggregation: token",
        )
    elif series.falls and series.growth <= limit("length.shrink"):
        yield Finding(
            "note",
            f"Answers have become short: {percent(series.growth)} of their length",
            f"{figures}. Read some: do they still reason?",
            LENGTH,
            series.span,
            "overlong.buffer_tokens: smaller, if the penalty does it",
        )


def cut_off(run: RunData) -> Iterator[Finding]:
    """Answers cut at the token limit."""
    series = track(run, CLIPPED)
    if not series:
        return
    rise = series.late - series.early
    if series.late >= limit("clipped.high"):
        title = f"{percent(series.late)} of answers are cut off at the token limit"
    elif series.rises and rise >= limit("clipped.rise"):
        title = f"More and more answers are cut off: {percent(series.late)}"
    else:
        return
    yield Finding(
        "warn",
        title,
        f"{percent(series.early)} → {percent(series.late)} of completions "
        f"({rise:+.3f}). What is cut off is graded wrong.",
        CLIPPED,
        series.late_span,
        "rollout.max_response_tokens: higher; overlong.penalty: on; overlong.filter: on",
    )


def gradient(run: RunData) -> Iterator[Finding]:
    """Spikes of the norm, and clipping at every step."""
    name = "policy/grad_norm"
    series = track(run, name)
    if spikes := series.spikes(limit("gradient.spike")):
        steps = [series.steps[place] for place in spikes]
        worst = max(spikes, key=series.values.__getitem__)
        many = len(spikes) > max(2, limit("gradient.spikes") * len(series))
        yield Finding(
            "warn" if many else "note",
            f"Gradient norm spikes at {named(steps)}",
            f"Up to {number(series.values[worst])} at step {series.steps[worst]}, over "
            f"{limit('gradient.spike'):g} times the median of the steps before.",
            name,
            (steps[0], steps[-1]),
            "optimizer.clip_grad: lower, if accuracy suffers; optimizer.lr: lower",
        )
    bound = run.number("optimizer.clip_grad")
    if not series.is_long or bound is None or bound <= 0:
        return
    share = sum(value > bound for value in series.values) / len(series)
    if share >= limit("gradient.clipped"):
        yield Finding(
            "note",
            f"The gradient is clipped at {percent(share)} of the steps",
            f"Its norm is {number(series.late)} lately; optimizer.clip_grad is {bound:g}.",
            name,
            series.span,
            "optimizer.clip_grad: higher, if steps are to differ in size",
        )


def clipping(run: RunData) -> Iterator[Finding]:
    """Updates that leave the clip range for many tokens."""
    high = run.metrics.column("policy/clip_fraction_high")
    low = run.metrics.column("policy/clip_fraction_low")
    both = [None if a is None or b is None else a + b for a, b in zip(high, low, strict=True)]
    clipped = track_of(run.metrics.steps, both)
    dual = track(run, "policy/dual_clip_fraction")
    moved = track(run, "policy/approx_kl")
    knob = "optimizer.lr: lower; train.updates_per_step: lower"
    if clipped and clipped.late >= limit("policy.clipped_tokens"):
        yield Finding(
            "warn",
            f"{percent(clipped.late)} of tokens are clipped",
            f"Above and below the range together; {percent(clipped.early)} early. The policy "
            "moves far within one step.",
            "policy/clip_fraction_high",
            clipped.late_span,
            knob,
        )
    if dual and dual.late >= limit("policy.dual_clipped"):
        yield Finding(
            "warn",
            f"The dual clip stops {percent(dual.late)} of tokens",
            f"{percent(dual.early)} early. Their probability grew at negative advantage.",
            "policy/dual_clip_fraction",
            dual.late_span,
            knob,
        )
    if moved and abs(moved.late) >= limit("policy.kl"):
        yield Finding(
            "warn",
            f"The policy moves by {number(moved.late)} nats of KL within a step",
            f"{number(moved.early)} early.",
            "policy/approx_kl",
            moved.late_span,
            knob,
        )


def gap(run: RunData) -> Iterator[Finding]:
    """Engine and policy drift apart."""
    largest, mean = track(run, "mismatch/gap_max"), track(run, "mismatch/gap_mean")
    bound = run.number("sync.max_gap")
    knob = "sync.max_gap; policy.precision; engine.quantization; loss.tis_cap: set"
    if largest and bound is not None and bound > 0:
        worst = max(range(len(largest)), key=largest.values.__getitem__)
        near = [
            step
            for step, value in zip(largest.steps, largest.values, strict=True)
            if value > limit("gap.near_bound") * bound
        ]
        if near:
            yield Finding(
                "warn",
                f"The gap of engine and policy came near sync.max_gap at {named(near)}",
                f"Largest {number(largest.values[worst])} at step {largest.steps[worst]}; the run "
                f"stops above {bound:g}.",
                "mismatch/gap_max",
                (near[0], near[-1]),
                knob,
            )
    if mean.rises and mean.growth >= limit("gap.growth"):
        yield Finding(
            "warn",
            f"The gap of engine and policy grows: {mean.growth:.1f} times its start",
            f"Mean {number(mean.early)} → {number(mean.late)} nats per token.",
            "mismatch/gap_mean",
            mean.span,
            knob,
        )


RULES: tuple[Callable[[RunData], Iterator[Finding]], ...] = (
    learning,
    evaluation,
    entropy,
    response_length,
    cut_off,
    gradient,
    clipping,
    gap,
)
