"""`doctor grades`: grade a run's recorded answers again, and count the verdicts that changed.

Graders become stricter or more lenient between versions, and users change their own. This shows
whether a run was paid for answers that are wrong now, or not paid for right ones.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dapo_megatron.config.file import load_config
from dapo_megatron.files import write_result
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.record import COMPLETIONS, read_groups, require_steps

MAX_SHOWN = 3
"""Changed verdicts that are shown, per data set and direction."""
CHANGES = {
    (False, True): "wrong before, right now",
    (True, False): "right before, wrong now",
    (False, None): "no grade now",
    (True, None): "no grade now",
}


def command(run_folder: Path, json_file: Path | None) -> bool:
    """Print the counts and some examples. Return whether no verdict changed.

    Raises ConfigError if the run has no recorded answers or its config cannot be read.
    """
    config = load_config(run_folder / "config.yaml")
    rewards = config.rewards
    counts: dict[str, Counter[str]] = {}
    examples: list[dict[str, Any]] = []
    with GradingPool(
        config.graders,
        rewards.workers,
        rewards.timeout_seconds,
        rewards.memory_mib,
        rewards.environment,
    ) as pool:
        for step, folder in require_steps(run_folder).items():
            for recorded in read_groups(folder / COMPLETIONS):
                group, prompt = recorded.group, recorded.group.prompt
                for answer in group.completions:
                    if answer.grade is not None and prompt.source in config.graders:
                        key = group.ticket, answer, prompt
                        turns = [{"role": "assistant", "content": answer.text}]
                        extra = {"turns": turns, **prompt.extra}
                        pool.submit(key, prompt.source, answer.text, prompt.truth, extra)
            while pool.pending:
                for (ticket, answer, prompt), grade, _ in pool.collect(wait=True):
                    of_source = counts.setdefault(prompt.source, Counter())
                    of_source["graded"] += 1
                    now = None if grade is None else grade.correct
                    change = CHANGES.get((answer.grade.correct, now), "")
                    of_source[change] += bool(change)
                    if change and of_source[change] <= MAX_SHOWN:
                        where = {"step": step, "ticket": ticket, "sample": answer.sample}
                        shown = {"truth": prompt.truth, "answer": answer.text[-100:]}
                        examples.append(
                            {"source": prompt.source, "change": change, **where, **shown}
                        )
    _print(run_folder, counts, examples)
    write_result(json_file, json.dumps({"counts": counts, "examples": examples}))
    return not examples


def _print(
    run_folder: Path, counts: dict[str, Counter[str]], examples: list[dict[str, Any]]
) -> None:
    for source, of_source in counts.items():
        changes = [
            f"{number} {kind}" for kind, number in of_source.items() if kind in CHANGES.values()
        ]
        print(f"{source}: {of_source['graded']} graded, {', '.join(changes) or 'none changed'}")
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
