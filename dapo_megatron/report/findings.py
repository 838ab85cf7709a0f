"""Findings on a run's health, the worst first: each rule looks at a few series and yields findings,
or none.

Of a run of few steps only facts are told, no trends. What a run did not record is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dapo_megatron.report import health_policy, health_time, health_work
from dapo_megatron.report.charts import columns_of
from dapo_megatron.report.finding import LEVELS, TREND_LEAST_STEPS, Finding, Level, Rule
from dapo_megatron.report.folder import Metrics, RunData, StateWord
from dapo_megatron.report.wording import named, times

ALWAYS = ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step")
"""Metrics that every step has which trains on something. (A step in which no group was decided,
because enough were carried, has no accuracy.)"""


def findings(run: RunData) -> list[Finding]:
    """Problems and warnings first, then whether it learns, then notes and what is good. Findings of
    one kind keep the order of RULES."""
    run = replace(run, metrics=Metrics(run.metrics.steps, columns_of(run)))
    ordered = sorted(
        ((rule, finding) for rule in RULES for finding in rule(run)),
        key=lambda pair: _rank(*pair),
    )
    return [finding for _, finding in ordered]


def _rank(rule: Rule, finding: Finding) -> tuple[int, bool, int]:
    level = LEVELS.index(finding.level)
    is_trouble = finding.level in ("bad", "warn")
    return (level if is_trouble else len(LEVELS), rule is not health_policy.learning, level)


def state(run: RunData) -> Iterator[Finding]:
    """Crashed, hung or stopped."""
    ends: dict[StateWord, tuple[Level, str]] = {
        StateWord.CRASHED: ("bad", "The run crashed"),
        StateWord.HUNG: ("bad", "The run hung"),
        StateWord.STOPPED: ("note", "The run stopped"),
        StateWord.UNKNOWN: ("note", "It is not known how the run ended"),
    }
    if run.state.word in ends:
        level, title = ends[run.state.word]
        text = run.state.text[:1].upper() + run.state.text[1:]
        yield Finding(level, f"{title} after step {run.metrics.last_step}", f"{text}.")


RESTARTS_MANY = 3  # starts that crashed, hung or were cut short


def restarts(run: RunData) -> Iterator[Finding]:
    """Starts that went wrong. The last one is the run's state."""
    if len(run.attempts) < 2:
        return
    before = [str(attempt.get("end") or "cut short") for attempt in run.attempts[:-1]]
    wrong = sum(end != "stopped" for end in before)
    ends = {end: before.count(end) for end in dict.fromkeys(before)}
    steps = [start["step"] for start in run.attempts if isinstance(start.get("step"), int)]
    yield Finding(
        "warn" if wrong >= RESTARTS_MANY else "note",
        f"Started {times(len(run.attempts), 'time')}",
        f"Earlier starts: {', '.join(f'{count} {end}' for end, count in ends.items())}."
        + (f" They began after {named(steps)}." if steps else ""),
        knob="checkpoint.max_minutes: lower" if wrong else None,
    )


def length(run: RunData) -> Iterator[Finding]:
    """Too short to be judged."""
    num_steps = len(run.metrics.steps)
    if num_steps == 0:
        yield Finding(
            "note", "No step is finished yet", "There are no metrics of a rollout step to judge."
        )
    elif num_steps < TREND_LEAST_STEPS:
        yield Finding(
            "note",
            f"{times(num_steps, 'step')}: too few to judge trends",
            "Whether it learns, and what grows or falls, is said from "
            f"{TREND_LEAST_STEPS} steps on.",
        )


def missing(run: RunData) -> Iterator[Finding]:
    """Steps without a line, without an update, or with values that are no numbers."""
    steps = run.metrics.steps
    if not steps:
        return
    have = set(steps)
    # A run that went on from another's checkpoint begins later.
    lost = [step for step in range(steps[0], steps[-1]) if step not in have]
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
                metric=name,
                steps=(gaps[0], gaps[-1]),
            )


RULES: tuple[Rule, ...] = (
    state,
    missing,
    length,
    *health_policy.RULES,
    *health_work.RULES,
    *health_time.RULES,
    restarts,
)
