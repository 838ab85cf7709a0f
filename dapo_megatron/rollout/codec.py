"""Groups as plain JSON values and back, exactly: for checkpoints and recorded rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt


def group_to_json(group: Group) -> dict[str, Any]:
    """Plain values; floats survive JSON to the last bit."""
    return asdict(group)


def group_from_json(value: Mapping[str, Any]) -> Group:
    """The group that `group_to_json` was given."""
    prompt = {**value["prompt"], "tokens": tuple(value["prompt"]["tokens"])}
    return Group(
        ticket=value["ticket"],
        prompt=Prompt(**prompt),
        completions=tuple(_completion(completion) for completion in value["completions"]),
    )


def _completion(value: Mapping[str, Any]) -> Completion:
    grade = value["grade"]
    return Completion(
        **{
            **value,
            "tokens": tuple(value["tokens"]),
            "logprobs": tuple(value["logprobs"]),
            "finish": Finish(value["finish"]),
            "grade": None if grade is None else Grade(**grade),
        }
    )
