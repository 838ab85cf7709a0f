"""Findings on a run's health, the worst first: each rule looks at a few series and yields findings,
or none.

Short runs are judged on facts, not on trends. What a run did not record is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dapo_megatron.report import health_policy, health_time, health_work
from dapo_megatron.report.charts import columns_of
from dapo_megatron.report.finding import LEVELS, TREND_LEAST_STEPS, Finding, Level
from dapo_megatron.report.folder import Metrics, RunData, StateWord
from dapo_megatron.report.rule import RunRule
from dapo_megatron.report.wording import named, times

ALWAYS = ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step")
"""Metrics that every step has which trains on something. (A step in which no group was decided,
because enough were carried, has no accuracy.)"""

_ENDS: dict[StateWord, tuple[Level, str]] = {
    StateWord.CRASHED: ("bad", "The run crashed"),
    StateWord.HUNG: ("bad", "The run hung"),
    StateWord.STOPPED: ("note", "The run stopped"),
    StateWord.UNKNOWN: ("note", "It is not known how the run ended"),
}


def findings(run: RunData) -> list[Finding]:
    """Return problems and warnings first, then whether it learns, then notes and what is good.
    Findings of one kind keep the order of RULES."""
    run = replace(run, metrics=Metrics(run.metrics.steps, columns_of(run)))
    return sorted((finding for rule in RULES for finding in rule(run)), key=_rank)


def _rank(finding: Finding) -> tuple[int, bool, int]:
    level = LEVELS.index(finding.level)
    is_trouble = finding.level in ("bad", "warn")
    is_learning = finding.metric == health_policy.ACCURACY
    return (level if is_trouble else len(LEVELS), not is_learning, level)


def state(run: RunData) -> Iterator[Finding]:
    """Report a run that crashed, hung or stopped."""
    if run.state.word in _ENDS:
        level, title = _ENDS[run.state.word]
        text = run.state.text[:1].upper() + run.state.text[1:]
        yield Finding(level, f"{title} after step {run.metrics.last_step}", f"{text}.")


RESTARTS_MANY = 3  # starts that crashed, hung or were cut short


def restarts(run: RunData) -> Iterator[Finding]:
    """Count the starts that went wrong. The last one is the run's state."""
    if len(run.attempts) < 2:
        return
    ends = Counter(attempt.end or "cut short" for attempt in run.attempts[:-1])
    wrong = ends.total() - ends[StateWord.STOPPED]
    steps = [attempt.step for attempt in run.attempts if attempt.step is not None]
    yield Finding(
        "warn" if wrong >= RESTARTS_MANY else "note",
        f"Started {times(len(run.attempts), 'time')}",
        f"Earlier starts: {', '.join(f'{count} {end}' for end, count in ends.items() if count)}."
        + (f" They began after {named(steps)}." if steps else ""),
        knob="checkpoint.max_minutes: lower" if wrong else None,
    )


def length(run: RunData) -> Iterator[Finding]:
    """Report a run that is too short to be judged."""
    num_steps = len(run.metrics.steps)
    if num_steps == 0:
        text = "There are no metrics of a rollout step to judge."
        yield Finding("note", "No step is finished yet", text)
    elif num_steps < TREND_LEAST_STEPS:
        title = f"{times(num_steps, 'step')}: too few to judge trends"
        text = f"Learning, growth and decline are judged from {TREND_LEAST_STEPS} steps on."
        yield Finding("note", title, text)


def missing(run: RunData) -> Iterator[Finding]:
    """Report steps without a line, without an update, or with values that are no numbers."""
    steps = run.metrics.steps
    # A run that went on from another's checkpoint begins later.
    lost = sorted(set(range(steps[0], steps[-1])) - set(steps)) if steps else []
    if lost:
        yield Finding(
            "warn",
            f"{times(len(lost), 'step')} without metrics",
            f"metrics.jsonl has no line for {named(lost)}: a full disk, or a damaged file.",
            steps=(lost[0], lost[-1]),
        )
    for name in ALWAYS:
        column = run.metrics.column(name)
        gaps = [step for step, value in zip(steps, column, strict=True) if value is None]
        if gaps and len(gaps) < len(steps):
            yield Finding(
                "warn",
                f"{name} is missing at {times(len(gaps), 'step')}",
                f"No finite value at {named(gaps)}: nothing was trained there, or the value "
                "was not a number.",
                name,
                (gaps[0], gaps[-1]),
            )


RULES: tuple[RunRule, ...] = (
    state,
    missing,
    length,
    *health_policy.RULES,
    *health_work.RULES,
    *health_time.RULES,
    restarts,
)
