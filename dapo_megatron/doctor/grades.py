"""`doctor grades`: grade a run's recorded answers again, and count the verdicts that changed.

Graders become stricter or more lenient between versions, and users change their own. This shows
whether a run was paid for answers that are wrong now, or not paid for right ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.files import write_result
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import require_steps, step_completions

MAX_SHOWN = 3
"""Changed verdicts that are shown, per data set and direction."""
MAX_PENDING = 1000
CHANGES = {(False, True): "wrong before, right now", (True, False): "right before, wrong now"}


def command(run_folder: Path, json_file: Path | None) -> bool:
    """Print the counts and some examples. Return whether no verdict changed.

    Raises ConfigError if the run has no recorded answers or its config cannot be read.
    """
    config = load_config(run_folder / "config.yaml")
    steps = require_steps(run_folder)
    counts: Counter[tuple[str, str]] = Counter()
    examples: list[dict[str, Any]] = []
    rows = ((step, row) for step, folder in steps.items() for row in step_completions(folder))
    for step, row, correct in _graded_again(config, rows):
        source, grade = row.prompt.source, row.completion.grade
        assert grade is not None
        change = "no grade now" if correct is None else CHANGES.get((grade.correct, correct), "")
        counts[source, "graded"] += 1
        counts[source, change] += bool(change)
        if change and counts[source, change] <= MAX_SHOWN:
            examples.append(
                {
                    "source": source,
                    "change": change,
                    "step": step,
                    "ticket": row.ticket,
                    "sample": row.completion.sample,
                    "truth": row.prompt.truth,
                    "answer": row.completion.text[-100:],
                }
            )
    _print(run_folder, counts, examples)
    results = [
        {"source": source, "kind": kind, "number": number}
        for (source, kind), number in counts.items()
    ]
    write_result(json_file, json.dumps({"counts": results, "examples": examples}))
    return not examples


def _graded_again(
    config: Config, rows: Iterator[tuple[int, CompletionRow]]
) -> Iterator[tuple[int, CompletionRow, bool | None]]:
    """Yield the rows that have a grade of a data set of the config, with today's verdict; None if
    there is no grade now."""
    rewards = config.rewards
    with GradingPool(
        config.graders,
        rewards.workers,
        rewards.timeout_seconds,
        rewards.memory_mib,
        rewards.environment,
    ) as pool:

        def collect(limit: int) -> Iterator[tuple[int, CompletionRow, bool | None]]:
            while pool.pending > limit:
                for (step, row), grade, _ in pool.collect(wait=True):
                    yield step, row, None if grade is None else grade.correct

        for step, row in rows:
            if row.completion.grade is not None and row.prompt.source in config.graders:
                prompt = row.prompt
                pool.submit(
                    (step, row), prompt.source, row.completion.text, prompt.truth, prompt.extra
                )
            yield from collect(MAX_PENDING)
        yield from collect(0)


def _print(
    run_folder: Path, counts: Counter[tuple[str, str]], examples: list[dict[str, Any]]
) -> None:
    for source in dict.fromkeys(source for source, _ in counts):
        changes = [
            f"{counts[source, change]} {change}"
            for change in (*CHANGES.values(), "no grade now")
            if counts[source, change]
        ]
        print(
            f"{source}: {counts[source, 'graded']} graded, {', '.join(changes) or 'none changed'}"
        )
    for example in examples:
        print(
            f"  {example['change']}: step {example['step']}, ticket {example['ticket']}, sample "
            f"{example['sample']}: truth {example['truth']!r:.60}, answer ...{example['answer']!r}"
        )
    if examples:
        first = examples[0]
        print(
            f"look at one: python -m dapo_megatron samples {run_folder} --step {first['step']} "
            f"--ticket {first['ticket']}"
        )
