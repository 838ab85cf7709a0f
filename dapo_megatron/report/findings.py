"""What is to be said of a run's health, the worst first: each rule looks at a few series and says
something, or nothing. Numbers they judge by are in thresholds.py.

Of a run of few steps only facts are told, no trends. What a run did not record is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dapo_megatron.report import health_policy, health_time, health_work
from dapo_megatron.report.finding import LEVELS, Finding, Level, named, times
from dapo_megatron.report.folder import Metrics, RunData
from dapo_megatron.report.state import StateWord
from dapo_megatron.report.thresholds import limit

__all__ = ["Finding", "Level", "findings"]

_ABSURD = 1e100

Rule = Callable[[RunData], Iterator[Finding]]

ALWAYS = ("policy/loss", "policy/grad_norm", "policy/entropy", "time/step")
"""Metrics that every step has which trains on something. (A step in which no group was decided, for
enough were carried, has no accuracy.)"""


def findings(run: RunData) -> list[Finding]:
    """Problems and warnings first, then whether it learns, then notes and what is good; of one kind
    in the order of RULES."""
    run = replace(run, metrics=_sane(run.metrics))
    found = [(rule, finding) for rule in RULES for finding in rule(run)]
    return [finding for _, finding in sorted(found, key=_place)]


def _place(said: tuple[Rule, Finding]) -> tuple[int, bool, int]:
    rule, finding = said
    level = LEVELS.index(finding.level)
    is_trouble = finding.level in ("bad", "warn")
    return (level if is_trouble else len(LEVELS), rule is not health_policy.learning, level)


def _sane(metrics: Metrics) -> Metrics:
    """Without figures so large that nothing can be made of them: they are missing."""
    return Metrics(
        metrics.steps,
        {
            name: [v if v is not None and abs(v) < _ABSURD else None for v in column]
            for name, column in metrics.columns.items()
        },
    )


def state(run: RunData) -> Iterator[Finding]:
    """Crashed, hung or stopped."""
    levels: dict[StateWord, Level] = {
        StateWord.CRASHED: "bad",
        StateWord.HUNG: "bad",
        StateWord.STOPPED: "note",
        StateWord.UNKNOWN: "note",
    }
    level = levels.get(run.state.word)
    if level is None:
        return
    last = run.metrics.steps[-1] if run.metrics.steps else 0
    titles = {
        StateWord.HUNG: "The run hung",
        StateWord.UNKNOWN: "It is not known how the run ended",
    }
    title = titles.get(run.state.word, f"The run {run.state.word.value}")
    text = run.state.text[:1].upper() + run.state.text[1:]
    yield Finding(level, f"{title} after step {last}", f"{text}.")


def restarts(run: RunData) -> Iterator[Finding]:
    """Starts that went wrong. The last one is the run's state."""
    if len(run.attempts) < 2:
        return
    before = [str(one.get("end") or "cut short") for one in run.attempts[:-1]]
    wrong = sum(end != "stopped" for end in before)
    ends = {end: before.count(end) for end in dict.fromkeys(before)}
    steps = [one["step"] for one in run.attempts if isinstance(one.get("step"), int)]
    yield Finding(
        "warn" if wrong >= limit("restarts.many") else "note",
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
    elif num_steps < limit("trend.least_steps"):
        yield Finding(
            "note",
            f"{times(num_steps, 'step')}: too few to judge trends",
            f"Whether it learns, and what grows or falls, is said from "
            f"{limit('trend.least_steps'):.0f} steps on.",
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
