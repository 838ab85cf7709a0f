"""Lossless conversion of groups to JSON values and back: the only on-disk form of a group.

Checkpoints (carried groups), samples/ (recorded rollouts) and replay use it. It is flat and starts
with the texts, so that people can read a line of samples/ too. The index of a step's samples is for
display only and has rounded values.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment

DECIMALS = 4
"""Decimal places of display columns. Exact values are in `samples/`."""
GROUP_COLUMNS = ("offset", "ticket", "source", "fate", "verdict")
COMPLETION_COLUMNS = (
    *("group", "sample", "score", "correct", "parsed", "num_tokens", "finish", "age"),
    *("logprob_mean", "logprob_min"),
)
"""Columns of a `SampleIndex`."""


def group_to_json(group: Group) -> dict[str, Any]:
    """Return a group as JSON values, with exact floats.

    A segment is [version, number of tokens]. Without a grade, score, correct, pred and parsed of a
    completion are null.
    """
    prompt = group.prompt
    return {
        "ticket": group.ticket,
        "source": prompt.source,
        "index": prompt.index,
        "prompt": prompt.text,
        "truth": prompt.truth,
        "extra": dict(prompt.extra),
        "prompt_tokens": list(prompt.tokens),
        "completions": [completion_to_json(completion) for completion in group.completions],
    }


def group_from_json(value: Mapping[str, Any]) -> Group:
    """Return the group that `group_to_json` serialized. Unknown keys are ignored."""
    return Group(
        ticket=value["ticket"],
        prompt=Prompt(
            source=value["source"],
            index=value["index"],
            tokens=tuple(value["prompt_tokens"]),
            text=value["prompt"],
            truth=value["truth"],
            extra=value["extra"],
        ),
        completions=tuple(completion_from_json(item) for item in value["completions"]),
    )


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """Return a completion, finished or not, in the form used by `group_to_json`."""
    no_grade = dict.fromkeys(Grade.__dataclass_fields__)
    return {
        "sample": completion.sample,
        "text": completion.text,
        "finish": completion.finish.value,
        **(no_grade if completion.grade is None else asdict(completion.grade)),
        "segments": [[segment.version, segment.num_tokens] for segment in completion.segments],
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
    }


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    """Return the completion that `completion_to_json` serialized."""
    grade = {name: value[name] for name in Grade.__dataclass_fields__}
    return Completion(
        sample=value["sample"],
        tokens=array("i", value["tokens"]),
        logprobs=array("f", value["logprobs"]),
        text=value["text"],
        finish=Finish(value["finish"]),
        segments=tuple(Segment(*segment) for segment in value["segments"]),
        grade=None if grade["score"] is None else Grade(**grade),
    )


class SampleIndex:
    """Display columns of a step's groups and completions, so that the report need not read the
    samples. Built from the lines of the samples: `group_to_json` plus `fate` and `verdict`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._groups: list[tuple[Any, ...]] = []
        self._completions: list[tuple[Any, ...]] = []

    def add(self, line: Mapping[str, Any], offset: int) -> None:
        """Add the next line, which starts at byte `offset` of the samples file."""
        group_index = len(self._groups)
        rows = [
            (group_index, *summary(self.step, completion).values())
            for completion in line["completions"]
        ]
        self._groups.append((offset, *(line[name] for name in GROUP_COLUMNS[1:])))
        self._completions += rows

    def columns(self) -> dict[str, Any]:
        """Return `{"step", "groups": {column: [...]}, "completions": {column: [...]}}`. The column
        `group` of completions is an index into the columns of groups."""
        return {
            "step": self.step,
            "groups": _columns(GROUP_COLUMNS, self._groups),
            "completions": _columns(COMPLETION_COLUMNS, self._completions),
        }


def summary(step: int, completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the COMPLETION_COLUMNS, except `group`, of a completion whose group ended in `step`.

    `completion` is in JSON form. `age` is the number of versions between its first token and the
    weights at the start of the step. Log-probs are the engine's. Score, correct and parsed are
    None without a grade; age and log-probs are None without tokens.
    """
    logprobs, segments = completion["logprobs"], completion["segments"]
    return {
        "sample": completion["sample"],
        "score": rounded(completion["score"]),
        "correct": completion["correct"],
        "parsed": completion["parsed"],
        "num_tokens": len(completion["tokens"]),
        "finish": completion["finish"],
        "age": step - 1 - segments[0][0] if segments else None,
        "logprob_mean": rounded(sum(logprobs) / len(logprobs)) if logprobs else None,
        "logprob_min": rounded(min(logprobs)) if logprobs else None,
    }


def rounded(value: float | None, decimals: int = DECIMALS) -> float | None:
    """Round a value for display. Return None if it is not finite, which JSON cannot represent."""
    return round(value, decimals) if value is not None and math.isfinite(value) else None


def significant(value: float | None) -> float | None:
    """Round to four significant digits, so that a gap of 1e-6 is not displayed as 0.

    Return None if the value is not finite.
    """
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
