"""Groups as plain JSON values and back, exactly: the one form of a group on disk.

Checkpoints (carried groups), samples/ (recorded rollouts) and replay all use it. It is flat and its
texts come first, so that a line of samples/ can be read by people too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, Segment


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
