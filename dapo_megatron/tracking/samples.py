"""Files with the rollouts of a step.

samples/step_000012.jsonl         one group per line, exact values; replay reads it
samples/index/step_000012.json    byte offset of each group, and a row per completion
samples/policy/step_000012.jsonl  policy log-probs and entropy of each sequence trained on, before
                                  the step's first update

Each file is written atomically.
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
from dapo_megatron.types import Completion, Group, SequenceDiagnostics, Verdict

LOGPROB_DECIMALS = 6
"""Decimal places of policy log-probs. On a CPU they normally differ from the engine's by 1e-6."""


def samples_path(folder: Path, step: int) -> Path:
    """Return the path of the groups that ended in `step`; `folder` is the run's samples/."""
    return folder / f"step_{step:06d}.jsonl"


def index_path(folder: Path, step: int) -> Path:
    """Return the path of the index of `step`."""
    return folder / "index" / f"step_{step:06d}.json"


def policy_path(folder: Path, step: int) -> Path:
    """Return the path of the policy's log-probs of `step`."""
    return folder / "policy" / f"step_{step:06d}.jsonl"


def write_samples(
    folder: Path,
    step: int,
    groups: Iterable[tuple[Group, str]],
    reward: Callable[[Completion], float | None] | None = None,
) -> tuple[Path, Index]:
    """Write a step's groups, one per line with exact values; return the path and the unwritten
    index.

    groups   (group, outcome) of each group whose outcome became final in the step (trained,
             all_correct, ...)
    reward   adds to each completion its `reward`: score plus length penalty, null without a grade

    A line has `fate`, `verdict` (from the grades only; null without any), the weight `versions`
    that sampled the group, and the fields of serialization.group_to_json. The index and policy
    files of an earlier attempt at the step are deleted, because they describe other lines. Raises
    OSError.
    """
    for old in (index_path(folder, step), policy_path(folder, step)):
        old.unlink(missing_ok=True)
    path, index = samples_path(folder, step), Index(step)
    with _open(path) as file:
        for group, outcome in groups:
            line: dict[str, Any] = {
                "fate": str(outcome),
                "verdict": _verdict(group),
                "versions": sorted({s.version for c in group.completions for s in c.segments}),
                **group_to_json(group),
            }
            if reward is not None:
                for entry, completion in zip(line["completions"], group.completions, strict=True):
                    entry["reward"] = reward(completion)
            index.add(line, offset=file.tell())
            # UTF-8 cannot encode a lone surrogate: write it as a JSON escape.
            text = json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace")
            file.write(text + b"\n")
    return path, index


def write_policy(
    folder: Path, step: int, sequences: Iterable[SequenceDiagnostics], num_detailed_groups: int
) -> Path:
    """Write the policy's diagnostics of a step's sequences, one per line; return the path.

    Per-token log-probs and entropy are written for the first `num_detailed_groups` groups only, and
    are null for the others. Raises OSError.
    """
    path = policy_path(folder, step)
    tickets: set[int] = set()
    with _open(path) as file:
        for sequence in sequences:
            tickets.add(sequence.ticket)
            is_detailed = len(tickets) <= num_detailed_groups
            logprobs, entropy = sequence.logprobs.tolist(), sequence.entropy.tolist()
            line = {
                "ticket": sequence.ticket,
                "sample": sequence.sample,
                "advantage": rounded(sequence.advantage),
                "gap_mean": significant(sequence.gap_mean),
                "gap_max": significant(sequence.gap_max),
                "logprobs": _all_rounded(logprobs, LOGPROB_DECIMALS) if is_detailed else None,
                "entropy": _all_rounded(entropy, DECIMALS) if is_detailed else None,
            }
            file.write(json.dumps(line).encode() + b"\n")
    return path


class Index(SampleIndex):
    """Index of a step's completions that can be written to disk."""

    def write(self, folder: Path) -> Path:
        """Write the index of the samples in `folder`; return its path. Raises OSError."""
        path = index_path(folder, self.step)
        with _open(path) as file:
            file.write(json.dumps(self.columns()).encode())
        return path


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return atomic_write(path)


def _verdict(group: Group) -> str | None:
    grades = {c.grade.correct for c in group.completions if c.grade is not None}
    if not grades:
        return None
    if grades == {True, False}:
        return Verdict.MIXED.value
    return (Verdict.ALL_CORRECT if grades == {True} else Verdict.ALL_WRONG).value


def _all_rounded(values: Iterable[float], decimals: int) -> list[float | None]:
    return [rounded(value, decimals) for value in values]
