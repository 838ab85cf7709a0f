"""The rollouts of a step on disk, and beside them what makes reading them quick and telling.

samples/step_000012.jsonl         one group a line, exactly: replay reads it, people too
samples/index/step_000012.json    what is where, by group and completion, without reading it
samples/policy/step_000012.jsonl  what the policy said of each sequence trained on, before the
                                  step's first update

Each is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.files import atomic_write
from dapo_megatron.rollout.serialization import (
    DECIMALS,
    SampleIndex,
    group_to_json,
    rounded,
    significant,
)
from dapo_megatron.types import Completion, Group, Inspected, Verdict

LOGPROB_DECIMALS = 6
"""Of the policy's log-probs: their distance to the engine's is 1e-6 where all is well on a CPU."""


def samples_path(folder: Path, step: int) -> Path:
    """Of the groups that ended in `step`; `folder` is the run's samples/."""
    return folder / f"step_{step:06d}.jsonl"


def index_path(folder: Path, step: int) -> Path:
    """Of the index beside them."""
    return folder / "index" / f"step_{step:06d}.json"


def policy_path(folder: Path, step: int) -> Path:
    """Of what the policy said of those trained on."""
    return folder / "policy" / f"step_{step:06d}.jsonl"


def write_samples(
    folder: Path,
    step: int,
    groups: Iterable[tuple[Group, str]],
    reward: Callable[[Completion], float | None] | None = None,
) -> tuple[Path, Index]:
    """Write a step's groups, one per line, exactly; the path, and the index to write beside it.

    `groups` are those whose fate became final in the step, with it (trained, all_correct, ...).
    A line is serialization.group_to_json and, before it, `fate`, `verdict` (of the grades only;
    null without any) and the weight `versions` that sampled it. With `reward`
    each completion has one: its score and length penalty, null without a grade. What an earlier
    attempt at the step left beside them goes: it is of other lines. Raises OSError.
    """
    for old in (index_path(folder, step), policy_path(folder, step)):
        old.unlink(missing_ok=True)
    path, index = samples_path(folder, step), Index(step)
    with _open(path) as file:
        for group, fate in groups:
            line: dict[str, Any] = {
                "fate": str(fate),
                "verdict": _verdict(group),
                "versions": sorted({s.version for c in group.completions for s in c.segments}),
                **group_to_json(group),
            }
            if reward is not None:
                for entry, completion in zip(line["completions"], group.completions, strict=True):
                    entry["reward"] = reward(completion)
            index.add(line, offset=file.tell())
            # A lone surrogate, which is no UTF-8, becomes JSON's own escape of it.
            text = json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace")
            file.write(text + b"\n")
    return path, index


def write_policy(
    folder: Path, step: int, sequences: Iterable[Inspected], num_whole_groups: int
) -> Path:
    """Write what the policy said of the sequences of a step, one per line; the path.

    The log-prob and the entropy of every token are kept for the first `num_whole_groups` groups
    alone, and null for the others. Raises OSError.
    """
    path = policy_path(folder, step)
    tickets: set[int] = set()
    with _open(path) as file:
        for one in sequences:
            tickets.add(one.ticket)
            is_whole = len(tickets) <= num_whole_groups
            line = {
                "ticket": one.ticket,
                "sample": one.sample,
                "advantage": rounded(one.advantage),
                "gap_mean": significant(one.gap_mean),
                "gap_max": significant(one.gap_max),
                "logprobs": _all_rounded(one.logprobs.tolist(), LOGPROB_DECIMALS)
                if is_whole
                else None,
                "entropy": _all_rounded(one.entropy.tolist(), DECIMALS) if is_whole else None,
            }
            file.write(json.dumps(line).encode() + b"\n")
    return path


class Index(SampleIndex):
    """Index of a step's completions, on disk."""

    def write(self, folder: Path) -> Path:
        """Write it beside the samples in `folder`; the path. Raises OSError."""
        path = index_path(folder, self.step)
        with _open(path) as file:
            file.write(json.dumps(self.columns()).encode())
        return path


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return atomic_write(path)


def _verdict(group: Group) -> str | None:
    found = {c.grade.correct for c in group.completions if c.grade is not None}
    if not found:
        return None
    if found == {True, False}:
        return Verdict.MIXED.value
    return (Verdict.ALL_CORRECT if found == {True} else Verdict.ALL_WRONG).value


def _all_rounded(values: Iterable[float], decimals: int) -> list[float | None]:
    return [rounded(value, decimals) for value in values]
