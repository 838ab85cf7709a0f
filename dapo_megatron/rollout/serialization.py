"""Groups as plain JSON values and back, exactly: the one form of a group on disk.

Checkpoints (carried groups), samples/ (recorded rollouts) and replay all use it. It is flat and its
texts come first, so that a line of samples/ can be read by people too. What is only to be looked at
has fewer digits: the index of a step's samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment

DECIMALS = 4
"""Of what is to be looked at; what is to be computed with is in the samples to the last bit."""
GROUP_COLUMNS = ("offset", "ticket", "source", "fate", "verdict")
COMPLETION_COLUMNS = (
    *("group", "sample", "score", "correct", "parsed", "num_tokens", "finish", "age"),
    *("logprob_mean", "logprob_min"),
)
"""Of a SampleIndex."""


def group_to_json(group: Group) -> dict[str, Any]:
    """Plain values; floats survive JSON to the last bit. A segment is [version, tokens]; score,
    correct, pred and parsed of a completion without a grade are null."""
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
    """The group that `group_to_json` was given; keys it does not know are left alone."""
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
        completions=tuple(completion_from_json(one) for one in value["completions"]),
    )


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """One completion, finished or not, as it stands in `group_to_json`."""
    no_grade = dict.fromkeys(Grade.__dataclass_fields__)
    return {
        "sample": completion.sample,
        "text": completion.text,
        "finish": completion.finish.value,
        **(no_grade if completion.grade is None else asdict(completion.grade)),
        "segments": [[one.version, one.num_tokens] for one in completion.segments],
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
    }


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    """The completion that `completion_to_json` was given."""
    grade = {name: value[name] for name in Grade.__dataclass_fields__}
    return Completion(
        sample=value["sample"],
        tokens=tuple(value["tokens"]),
        logprobs=tuple(value["logprobs"]),
        text=value["text"],
        finish=Finish(value["finish"]),
        segments=tuple(Segment(*one) for one in value["segments"]),
        grade=None if grade["score"] is None else Grade(**grade),
    )


class SampleIndex:
    """What of a step's completions can be shown without reading them, made of the lines of its
    samples: `group_to_json` with `fate` and `verdict`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._groups: list[tuple[Any, ...]] = []
        self._completions: list[tuple[Any, ...]] = []

    def add(self, line: Mapping[str, Any], offset: int) -> None:
        """The next line, which begins at byte `offset`."""
        place = len(self._groups)
        rows = [(place, *summary(self.step, one).values()) for one in line["completions"]]
        self._groups.append((offset, *(line[name] for name in GROUP_COLUMNS[1:])))
        self._completions += rows

    def columns(self) -> dict[str, Any]:
        """`{"step", "groups": {column: [...]}, "completions": {column: [...]}}`; `group` of a
        completion is the place of its group."""
        return {
            "step": self.step,
            "groups": _columns(GROUP_COLUMNS, self._groups),
            "completions": _columns(COMPLETION_COLUMNS, self._completions),
        }


def summary(step: int, completion: Mapping[str, Any]) -> dict[str, Any]:
    """The COMPLETION_COLUMNS but `group` of a completion as JSON that ended in `step`. `age` is in
    versions behind the weights that the step began with; log-probs are the engine's. Without a
    grade score, correct and parsed are null; without a token age and log-probs are."""
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
    """For looking at; JSON has no number that is not finite."""
    return round(value, decimals) if value is not None and math.isfinite(value) else None


def significant(value: float | None) -> float | None:
    """To four digits, however small: a gap of 1e-6 is not 0."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}
