"""The rollouts of a step on disk, and beside them what makes reading them quick and telling.

samples/step_000012.jsonl         one group a line, exactly: replay reads it, people too
samples/index/step_000012.json    what is where, by group and completion, without reading it
samples/policy/step_000012.jsonl  what the policy said of each sequence trained on, before the
                                  step's first update

Each is there whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.codec import group_to_json
from dapo_megatron.types import Completion, Group, Inspected, Verdict

DECIMALS = 4
"""Of what is to be looked at; what is to be computed with is in the samples to the last bit."""
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
    folder: Path, step: int, groups: Iterable[tuple[Group, str]]
) -> tuple[Path, Index]:
    """Write a step's groups, one per line, exactly; the path, and the index to write beside it.

    `groups` are those whose fate became final in the step, with it (trained, all_correct, ...).
    A line is codec.group_to_json and, before it, `fate`, `verdict` (of the grades alone; null
    without any) and the weight `versions` that sampled it. What an earlier attempt at the step left
    beside them goes: it is of other lines. Raises OSError.
    """
    for old in (index_path(folder, step), policy_path(folder, step)):
        old.unlink(missing_ok=True)
    path, index = samples_path(folder, step), Index(step)
    with _whole(path) as file:
        for group, fate in groups:
            verdict = _verdict(group)
            line = {
                "fate": str(fate),
                "verdict": verdict,
                "versions": sorted({s.version for c in group.completions for s in c.segments}),
                **group_to_json(group),
            }
            index.add(group, str(fate), verdict, offset=file.tell())
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
    with _whole(path) as file:
        for one in sequences:
            tickets.add(one.ticket)
            is_whole = len(tickets) <= num_whole_groups
            line = {
                "ticket": one.ticket,
                "sample": one.sample,
                "advantage": _rounded(one.advantage),
                "gap_mean": _significant(one.gap_mean),
                "gap_max": _significant(one.gap_max),
                "logprobs": _all_rounded(one.logprobs.tolist(), LOGPROB_DECIMALS)
                if is_whole
                else None,
                "entropy": _all_rounded(one.entropy.tolist(), DECIMALS) if is_whole else None,
            }
            file.write(json.dumps(line).encode() + b"\n")
    return path


class Index:
    """What of a step's completions can be shown without reading them.

    A completion without a grade has null for score, correct and parsed; one without a token has
    null for its log-probs and its age.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._groups: list[tuple[Any, ...]] = []
        self._completions: list[tuple[Any, ...]] = []

    def add(self, group: Group, fate: str, verdict: str | None, *, offset: int) -> None:
        """The next line of the samples, which begins at byte `offset`."""
        place = len(self._groups)
        self._groups.append((offset, group.ticket, group.prompt.source, fate, verdict))
        self._completions += [self._row(place, one) for one in group.completions]

    def columns(self) -> dict[str, Any]:
        """`age` is in versions behind the weights that the step began with; log-probs are the
        engine's."""
        groups = ("offset", "ticket", "source", "fate", "verdict")
        completions = (
            *("group", "sample", "score", "correct", "parsed", "num_tokens", "finish", "age"),
            *("logprob_mean", "logprob_min"),
        )
        return {
            "step": self._step,
            "groups": _columns(groups, self._groups),
            "completions": _columns(completions, self._completions),
        }

    def write(self, folder: Path) -> Path:
        """Write it beside the samples in `folder`; the path. Raises OSError."""
        path = index_path(folder, self._step)
        with _whole(path) as file:
            file.write(json.dumps(self.columns()).encode())
        return path

    def _row(self, place: int, one: Completion) -> tuple[Any, ...]:
        grade, logprobs = one.grade, one.logprobs
        return (
            place,
            one.sample,
            None if grade is None else _rounded(grade.score),
            None if grade is None else grade.correct,
            None if grade is None else grade.parsed,
            len(one.tokens),
            one.finish.value,
            self._step - 1 - one.oldest_version if one.segments else None,
            _rounded(sum(logprobs) / len(logprobs)) if logprobs else None,
            _rounded(min(logprobs)) if logprobs else None,
        )


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when all is written; a part that was written goes, for it holds
    room that others need."""
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _verdict(group: Group) -> str | None:
    found = {c.grade.correct for c in group.completions if c.grade is not None}
    if not found:
        return None
    if found == {True, False}:
        return Verdict.MIXED.value
    return (Verdict.ALL_CORRECT if found == {True} else Verdict.ALL_WRONG).value


def _rounded(value: float, decimals: int = DECIMALS) -> float | None:
    return round(value, decimals) if math.isfinite(value) else None


def _all_rounded(values: Iterable[float], decimals: int) -> list[float | None]:
    return [_rounded(value, decimals) for value in values]


def _significant(value: float) -> float | None:
    """To four digits, however small: a gap of 1e-6 is not 0."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
