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
from dapo_megatron.rollout.record import COMPLETIONS, read_groups, require_steps
from dapo_megatron.types import Completion, Group

MAX_SHOWN = 3
"""Changed verdicts that are shown, per data set and direction."""
MAX_PENDING = 1000
Answer = tuple[int, Group, Completion]
"""Step, and a completion of it with its group."""
CHANGES = {(False, True): "wrong before, right now", (True, False): "right before, wrong now"}


def command(run_folder: Path, json_file: Path | None) -> bool:
    """Print the counts and some examples. Return whether no verdict changed.

    Raises ConfigError if the run has no recorded answers or its config cannot be read.
    """
    config = load_config(run_folder / "config.yaml")
    steps = require_steps(run_folder)
    counts: Counter[tuple[str, str]] = Counter()
    examples: list[dict[str, Any]] = []
    answers = (
        (step, recorded.group, completion)
        for step, folder in steps.items()
        for recorded in read_groups(folder / COMPLETIONS)
        for completion in recorded.group.completions
    )
    for (step, group, completion), correct in _graded_again(config, answers):
        source, grade = group.prompt.source, completion.grade
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
                    "ticket": group.ticket,
                    "sample": completion.sample,
                    "truth": group.prompt.truth,
                    "answer": completion.text[-100:],
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
    config: Config, answers: Iterator[Answer]
) -> Iterator[tuple[Answer, bool | None]]:
    """Yield the answers with a grade of a data set of the config, and today's verdict; None if
    there is no grade now."""
    rewards = config.rewards
    with GradingPool(
        config.graders,
        rewards.workers,
        rewards.timeout_seconds,
        rewards.memory_mib,
        rewards.environment,
    ) as pool:

        def collect(limit: int) -> Iterator[tuple[Answer, bool | None]]:
            while pool.pending > limit:
                for answer, grade, _ in pool.collect(wait=True):
                    yield answer, None if grade is None else grade.correct

        for answer in answers:
            _, group, completion = answer
            prompt = group.prompt
            if completion.grade is not None and prompt.source in config.graders:
                pool.submit(answer, prompt.source, completion.text, prompt.truth, prompt.extra)
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
