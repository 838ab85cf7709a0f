"""Findings on the health of a run. Each is a function that compares a few numbers.

A trend compares the first and the last eighth of the steps. Runs shorter than LEAST_STEPS are
judged by facts only. Metrics that a run did not record are not judged. docs/report.md explains how
to read findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dapo_megatron.report.charts import all_charts
from dapo_megatron.report.derived import (
    CLIPPED,
    DECIDED,
    KEPT,
    OUTCOMES,
    totals,
)
from dapo_megatron.report.run_data import Evaluation, RunData, StateWord
from dapo_megatron.report.trend import LEAST_STEPS, last_part, spikes, trend
from dapo_megatron.report.wording import named, number, percent, times
from dapo_megatron.rewards.pool import CAUSES
from dapo_megatron.types import STEP_PHASES, Outcome, Phase

ACCURACY = "accuracy/raw"

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
"""Levels, worst first."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run, with its evidence."""

    level: Level
    title: str
    text: str
    """Evidence for the title: values and steps."""
    metric: str | None = None
    """The page links to the first chart of this metric."""
    setting: str = ""
    """Config keys to change, and the direction: "optimizer.lr: lower; loss.clip_high: higher"."""

    @property
    def settings(self) -> list[tuple[str, str]]:
        """`setting` as [(key, direction or ""), ...]."""
        pairs = [pair.partition(": ") for pair in self.setting.split("; ") if pair]
        return [(key, direction) for key, _, direction in pairs]


Findings = Iterator[Finding]


def findings(run: RunData) -> list[Finding]:
    """Return the findings: problems and warnings, then learning, then notes and good findings."""
    results = [finding for judge in JUDGES for finding in judge(run)]
    return sorted(results, key=_rank)


def _rank(finding: Finding) -> tuple[int, bool, int]:
    level = LEVELS.index(finding.level)
    is_trouble = finding.level in ("bad", "warn")
    return (level if is_trouble else len(LEVELS), finding.metric != ACCURACY, level)


# ---------------------------------------------------------------------------- the run itself


def end(run: RunData) -> Findings:
    """Report a run that did not finish."""
    ends: dict[StateWord, tuple[Level, str]] = {
        StateWord.CRASHED: ("bad", "The run crashed"),
        StateWord.HUNG: ("bad", "The run hung"),
        StateWord.STOPPED: ("note", "The run stopped"),
        StateWord.UNKNOWN: ("note", "How the run ended is unknown"),
    }
    if run.state.word in ends:
        level, title = ends[run.state.word]
        text = f"{run.state.text[:1].upper()}{run.state.text[1:]}."
        yield Finding(level, f"{title} after step {run.last_step}", text)
    if len(run.steps) < LEAST_STEPS:
        title = f"{times(len(run.steps), 'step')}: too few to judge trends"
        text = f"Learning, growth and decline are judged from {LEAST_STEPS} steps on."
        yield Finding("note", title, text)


def restarts(run: RunData) -> Findings:
    """Report earlier starts. Three that did not stop on request are a warning."""
    if len(run.attempts) < 2:
        return
    ends = Counter(attempt.end or "cut short" for attempt in run.attempts[:-1])
    num_bad = ends.total() - ends[StateWord.STOPPED]
    text = f"Earlier starts: {', '.join(f'{count} {end}' for end, count in ends.items())}."
    title = f"Started {times(len(run.attempts), 'time')}"
    setting = "checkpoint.max_minutes: lower" if num_bad else ""
    yield Finding("warn" if num_bad >= 3 else "note", title, text, setting=setting)


def missing(run: RunData) -> Findings:
    """Report steps without metrics, without an update, or with non-finite values."""
    steps = run.steps
    # A run that continues from another run's checkpoint starts later.
    lost = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    if lost:
        text = f"metrics.jsonl has no line for {named(lost)}: a full disk, or a corrupt file."
        yield Finding("warn", f"{times(len(lost), 'step')} without metrics", text)
    for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step"):
        values = run.series(name)
        gaps = list(values.index[values.isna()])
        if gaps and len(gaps) < len(steps):
            title = f"{name} is missing at {times(len(gaps), 'step')}"
            text = f"No finite value at {named(gaps)}: the step trained nothing, or it was NaN."
            yield Finding("warn", title, text, name)


# ---------------------------------------------------------------------------- does it learn


def learning(run: RunData) -> Findings:
    """Judge the accuracy on the training prompts."""
    accuracy = trend(run.series(ACCURACY))
    if accuracy is None:
        return
    values = run.series(ACCURACY).dropna()
    best = values.rolling(max(4, len(values) // 10)).median()
    fall, noise = float(best.max()) - accuracy.late, float(values.diff().abs().median())
    change = f"accuracy {accuracy.early:.3f} → {accuracy.late:.3f}"
    text = f"Medians at the start and at the end: {change} ({accuracy.change:+.3f})."
    settings = "optimizer.lr: lower; data.train: its grader"
    if accuracy.falls and -accuracy.change >= max(0.05, 3 * noise):
        yield Finding("bad", f"Accuracy is falling: {change}", text, ACCURACY, settings)
    elif fall >= max(0.08, 3 * noise):
        title = f"Accuracy has fallen by {fall:.2f} from its best around step {best.idxmax()}"
        yield Finding("warn", title, text, ACCURACY, settings)
    elif accuracy.rises and accuracy.change >= 0.03:
        yield Finding("good", f"Learning: {change}", text, ACCURACY)
    elif accuracy.late >= 0.95:
        yield Finding("good", f"Flat at the top: accuracy {accuracy.late:.3f}", text, ACCURACY)
    else:
        level: Level = "warn" if len(values) >= 100 else "note"
        title = f"No trend: {change} over {len(values)} steps"
        settings = "optimizer.lr: higher; data.train: problems with some right answers"
        yield Finding(level, title, text, ACCURACY, settings)


def evaluation(run: RunData) -> Findings:
    """Judge the mean accuracy on held-out sets by its 95% intervals."""
    means = [point for point in run.evaluations if point.metric.startswith("avg@")]
    for name, figure in dict.fromkeys((point.set, point.metric) for point in means):
        points = [point for point in means if (point.set, point.metric) == (name, figure)]
        first, last, best = points[0], points[-1], max(points, key=lambda point: point.value)
        level: Level = "note"
        title, setting = "Evaluation shows no change beyond its intervals", ""
        if _is_below(last, first):
            level, title = "bad", "Evaluation is below its start"
        elif _is_below(last, best):
            level, title = "warn", "Evaluation has fallen from its best"
            setting = f"checkpoint.keep_every: a value that keeps step {best.step}, the best"
        elif _is_below(first, last):
            level, title = "good", "Evaluation confirms the learning"
        if len(points) > 1:
            shown = dict.fromkeys((first, best, last))
            text = ", ".join(f"{point.value:.3f} at step {point.step}" for point in shown)
            text, metric = f"{figure} of {name}: {text}.", f"eval/{name}/{figure}"
            yield Finding(level, f"{title}: {name}", text, metric, setting)


def _is_below(a: Evaluation, b: Evaluation) -> bool:
    """Return True if the intervals do not overlap or, without intervals, values differ by 0.08."""
    if a.high is None or b.low is None:
        return b.value - a.value >= 0.08
    return a.high < b.low


# ---------------------------------------------------------------------------- the policy


def entropy(run: RunData) -> Findings:
    """Judge whether the policy still explores. In the paper (arXiv 2503.14476, figures 2b and 7c)
    entropy never fell below 0.44 of its start, but to 0.02 nats without clip-higher."""
    metric, setting = "policy/entropy", "loss.clip_high: higher; optimizer.lr: lower"
    whole, half = trend(run.series(metric)), trend(last_part(run.series(metric)))
    if whole is None or half is None or whole.early <= 0:
        return
    text = f"{whole} nats, {percent(whole.growth)} of its start."
    still_falls = whole.falls and half.change < 0
    if whole.falls and whole.late < 0.02:
        title = "Entropy has collapsed: nearly all answers to a prompt are equal"
        yield Finding("bad", title, text, metric, setting)
    elif still_falls and whole.growth < 0.4:
        title = f"Entropy is down to {percent(whole.growth)} of its start, and falling"
        yield Finding("warn" if whole.growth < 0.15 else "note", title, text, metric, setting)
    elif whole.rises and whole.growth > 2 and whole.late > 1:
        title = f"Entropy has grown to {whole.growth:.1f} times its start"
        setting = "overlong.filter: on; loss.aggregation: token; optimizer.lr: lower"
        yield Finding("warn", title, text, metric, setting)


def length(run: RunData) -> Findings:
    """Report answers that grow over the second half of the run while accuracy does not rise."""
    metric = "response_tokens/mean"
    half, accuracy = trend(last_part(run.series(metric))), trend(last_part(run.series(ACCURACY)))
    follows = accuracy is not None and accuracy.rises
    if half is not None and half.rises and half.growth >= 1.5 and not follows:
        title = f"Answers grow {half.growth:.1f} times longer while accuracy does not rise"
        text = f"Mean length over the second half of the run: {half} tokens."
        setting = "overlong.penalty: on; loss.aggregation: token"
        yield Finding("warn", title, text, metric, setting)


def gradient(run: RunData) -> Findings:
    """Report single gradients that are much larger than usual; optimizer.clip_grad handles few."""
    metric = "policy/grad_norm"
    values = run.series(metric).dropna()
    if steps := spikes(values, 5):
        most, where = values[steps].max(), values[steps].idxmax()
        level: Level = "warn" if len(steps) > max(2, 0.05 * len(values)) else "note"
        setting = "optimizer.clip_grad: lower, if accuracy suffers; optimizer.lr: lower"
        text = f"Up to {number(most)} at step {where}."
        yield Finding(level, f"Gradient norm spikes at {named(steps)}", text, metric, setting)


def mismatch(run: RunData) -> Findings:
    """Report a gap between engine and policy that grows, or nears the bound of the run."""
    setting = "sync.max_gap; policy.precision; engine.quantization; loss.correction: set"
    bound, largest = run.number("sync.max_gap"), run.series("mismatch/gap_max").dropna()
    near = largest[largest > 0.5 * bound] if bound else largest[:0]
    if bound and len(near):
        title = f"The gap between engine and policy nears sync.max_gap at {named(near.index)}"
        text = f"Largest {number(near.max())} at step {near.idxmax()}; the bound is {bound:g}."
        yield Finding("warn", title, text, "mismatch/gap_max", setting)
    gap = trend(run.series("mismatch/gap_mean"))
    if gap is not None and gap.rises and gap.growth >= 3:
        title = f"The gap between engine and policy grows: {gap.growth:.1f} times its start"
        yield Finding("warn", title, f"Mean {gap} nats per token.", "mismatch/gap_mean", setting)


def bounds(run: RunData) -> Findings:
    """Compare shares of tokens, completions or time at the end of the run with their bounds."""
    for chart, bound in ((shown, bound) for shown in all_charts() for bound in shown.bounds):
        share = trend(run.series(bound.metric))
        # GSPO's narrow range clips whole completions as a matter of course, and CISPO's clipped
        # tokens keep their gradient.
        is_usual = bound.metric == CLIPPED and run.word("loss.objective") in ("gspo", "cispo")
        if share is not None and share.late >= min(bound.warn, bound.note) and not is_usual:
            level: Level = "warn" if share.late >= bound.warn else "note"
            title, metric = bound.title.format(percent(share.late)), next(iter(chart.series))
            yield Finding(level, title, f"{share.percent}. {bound.text}", metric, bound.setting)


# ---------------------------------------------------------------------------- prompts and grades


def mixed(run: RunData) -> Findings:
    """Report data that is too easy or too hard for the model."""
    kept = trend(run.series(KEPT))
    if kept is not None and kept.late < 0.2:
        title = f"Only {percent(kept.late)} of groups are mixed"
        text = f"{kept.percent}: the other prompts train nothing."
        setting = "data.train: harder problems if most are all right, easier ones if all wrong"
        yield Finding("warn", title, text, KEPT, setting)


def starved(run: RunData) -> Findings:
    """Report steps that trained on fewer groups than configured."""
    wanted, trained = run.number("rollout.prompts_per_step"), run.series("groups/trained").dropna()
    few = trained[trained < (wanted or 0)]
    if len(few):
        level: Level = "bad" if len(few) >= 0.1 * len(trained) and len(trained) > 1 else "warn"
        title = f"Starved: {times(len(few), 'step')} trained on fewer than {wanted:,.0f} groups"
        text = f"At {named(few.index)}; the minimum was {few.min():,.0f}."
        setting = "data.train: problems of other difficulty; rollout.max_prompts_per_step: higher"
        yield Finding(level, title, text, "groups/trained", setting)


def lost(run: RunData) -> Findings:
    """Report groups that were sampled for nothing. On-policy, open groups expire at every step."""
    settings = {
        Outcome.ABSTAINED: "rewards.timeout_seconds: higher; data.train: its grader",
        Outcome.EXPIRED: "rollout.max_age: higher; rollout.lookahead: lower",
    }
    issued = run.total("groups/issued")
    for outcome, setting in settings.items():
        num = run.total(f"groups/{outcome}")
        if issued > 0 and num / issued >= 0.01 and not (run.is_on_policy and outcome == "expired"):
            title = f"{percent(num / issued)} of groups {outcome}"
            yield Finding("warn", title, f"{num:,.0f} groups.", f"groups/{outcome}", setting)


def ledger(run: RunData) -> Findings:
    """Check that the outcomes of all groups add up to the issued groups."""
    sums, steps = totals(run), run.steps
    # Older versions had other outcomes. If steps are missing, the sums cannot match.
    is_complete = bool(steps) and len(steps) == steps[-1]
    has_all = all(f"groups/{outcome}" in run.metrics for outcome in OUTCOMES)
    if not (sums.get("issued") and is_complete and has_all):
        return
    words = {**OUTCOMES, "open": "carried on, open"}
    ends = ", ".join(f"{sums[name]:,} {word}" for name, word in words.items() if sums[name])
    text = f"{sums['issued']:,} issued: {ends}."
    if num := sums["unaccounted"]:
        title = f"{abs(num):,} groups are unaccounted for"
        yield Finding("warn", title, f"{text} metrics.jsonl is incomplete.", "groups/issued")
    else:
        yield Finding("good", "Every prompt is accounted for", text, "groups/trained")


def grading(run: RunData) -> Findings:
    """Count the completions whose grader failed, by cause."""
    completions = run.total(DECIDED) * (run.count("rollout.samples_per_prompt") or 0)
    sums = {cause: run.total(f"grading/{cause}") for cause in CAUSES}
    failed = sum(sums.values())
    share = failed / completions if completions else 0.0
    if failed:
        level: Level = "bad" if share >= 0.1 else "warn" if share >= 0.01 else "note"
        title = f"Graders failed on {times(round(failed), 'completion')}"
        causes = ", ".join(f"{count:,.0f} {cause}" for cause, count in sums.items() if count)
        text = f"{causes} ({percent(share)} of completions). Their groups are not trained on."
        setting = (
            "rewards.timeout_seconds: higher; rewards.memory_mib: higher; data.train: its grader"
        )
        yield Finding(level, title, text, f"grading/{max(sums, key=sums.__getitem__)}", setting)
    elif completions and f"grading/{CAUSES[0]}" in run.metrics:
        text = f"{completions:,.0f} completions without a timeout, crash or error of a grader."
        yield Finding("good", "Every completion was graded", text, f"grading/{CAUSES[0]}")


def sync(run: RunData) -> Findings:
    """Report how many syncs compared the fingerprints of the weights."""
    compared, gaps = run.series("sync/fingerprinted").dropna(), run.values("mismatch/gap_max")
    num, unread = int((compared > 0).sum()), max(run.values("sync/unread_tensors"), default=0.0)
    gap = f"; largest gap to the policy {number(max(gaps))} nats" if gaps else ""
    if num:
        weights = "all weights" if (compared[compared > 0] == 1).all() else "all compared weights"
        title = f"Sync verified at {num:,} of {times(len(compared), 'sync')}"
        text = f"The fingerprints of {weights} were equal{gap}."
        yield Finding("good", title, text, "mismatch/gap_mean")
    elif len(compared) >= LEAST_STEPS:
        title = "The engines' weights were never compared with the policy's"
        text = f"At none of {times(len(compared), 'sync')}{gap}."
        yield Finding("note", title, text, "mismatch/gap_mean", "sync.fingerprint_every: lower")
    if unread:
        title = f"{unread:.0f} tensors of the engines cannot be read back"
        text = "Their fingerprints are not compared."
        yield Finding("note", title, text, setting="engine.quantization: none, to compare all")


# ---------------------------------------------------------------------------- time and memory


def slower(run: RunData) -> Findings:
    """Report phases that take longer than at the start, also in seconds per token."""
    tokens = run.series("throughput/tokens_per_second") * run.series("time/step")
    step, per_step = trend(run.series("time/step")), trend(tokens)
    for phase in (Phase.GENERATE, Phase.LOGPROBS, Phase.UPDATE, Phase.SYNC):
        seconds = trend(run.series(f"time/{phase}"))
        if seconds is None or step is None or seconds.late < 0.1 * step.late:
            continue
        growth = seconds.growth / max(1.0, per_step.growth if per_step else 1.0)
        if seconds.rises and growth >= 1.5:
            title = f"{phase} takes {seconds.growth:.1f} times as long as at the start"
            text = f"{seconds} s per step, and more seconds per token."
            yield Finding("warn" if growth >= 3 else "note", title, text, "time/update")
    speed = trend(run.series("throughput/tokens_per_second"))
    if speed is not None and speed.falls and speed.growth <= 0.7:
        title = f"Throughput is down to {percent(speed.growth)} of its start"
        level: Level = "warn" if speed.growth <= 0.5 else "note"
        yield Finding(level, title, f"{speed} tokens per second.", "throughput/tokens_per_second")


def memory(run: RunData) -> Findings:
    """Report memory above the plan, and memory that still grows at the end of the run."""
    for phase in STEP_PHASES:
        metric, planned = f"memory/{phase}_gib", run.plan.phases.get(phase, 0.0)
        peak = max(run.values(metric), default=0.0)
        if planned > 0 and peak > max(1.1 * planned, planned + 0.5):
            title = f"{phase} takes more memory than planned"
            text = f"Peak {number(peak)} GiB, planned {number(planned)}."
            setting = "train.max_tokens_per_microbatch: lower; engine.memory_fraction: lower"
            yield Finding("warn", title, text, metric, setting)
        quarter, half = (
            trend(last_part(run.series(metric), 0.25)),
            trend(last_part(run.series(metric))),
        )
        if half is None or quarter is None or not (half.rises and quarter.rises):
            continue
        if half.change >= max(0.5, 0.1 * half.early):
            text = f"{half} GiB over the second half of the run. A leak will crash a long run."
            yield Finding("warn", f"Memory keeps growing: {phase}", text, metric)


JUDGES = (
    *(learning, evaluation, end, restarts, missing),
    *(entropy, length, gradient, mismatch, bounds),
    *(starved, lost, grading, mixed, sync, ledger),
    *(slower, memory),
)
