"""Lossless conversion of groups to JSON values and back, for the open groups of checkpoints."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment


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
