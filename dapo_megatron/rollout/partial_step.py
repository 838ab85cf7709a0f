"""A rollout step that is under way, as far as it has come.

A run can be stopped after any optimizer step, and goes on from there: the groups of the step, their
old log-probs (which the weights of its begin gave, and later ones would not) and the updates made
are part of the checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.config import Config, refuse
from dapo_megatron.rollout.serialization import group_from_json, group_to_json
from dapo_megatron.types import Group, StepStats, dtype_name, torch_dtype


def cut_by(config: Config) -> dict[str, Any]:
    """What a step's batch and mini-batches are made by: it cannot change in the middle of one."""
    return {
        "train.updates_per_step": config.train.updates_per_step,
        "loss.aggregation": config.loss.aggregation,
        "loss.advantage_eps": config.loss.advantage_eps,
        **{f"overlong.{key}": value for key, value in config.overlong.model_dump().items()},
    }


@dataclass
class OpenStep:
    """All empty between two steps."""

    train: list[Group] | None = None
    """What the step trains on, once it is collected."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of what is done so far, but the updates."""
    old_logprobs: Tensor | None = None
    """[T] of all tokens of the step's batch."""
    updates: list[StepStats] = field(default_factory=list)

    def begin(self, train: list[Group], metrics: Mapping[str, float]) -> None:
        """The groups are collected."""
        self.train, self.metrics = train, dict(metrics)

    def close(self) -> None:
        """The step is done."""
        self.train, self.old_logprobs = None, None
        self.metrics, self.updates = {}, []

    def state(self, config: Config) -> dict[str, Any] | None:
        """Plain values for a checkpoint; None between two steps."""
        if self.train is None:
            return None
        return {
            "cut_by": cut_by(config),
            "train": [group_to_json(group) for group in self.train],
            "metrics": self.metrics,
            "old_logprobs": None if self.old_logprobs is None else _to_text(self.old_logprobs),
            "updates": [asdict(one) for one in self.updates],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, config: Config) -> OpenStep:
        """What `state` was taken of. Raises ConfigError naming a key that has changed since."""
        if state is None:
            return cls()
        refuse(
            f"{key}: the checkpoint is from the middle of a step that was begun with {value!r}; "
            "go on with that until the step is over, or resume from a checkpoint before it"
            for key, value in state["cut_by"].items()
            if cut_by(config).get(key) != value
        )
        logprobs = state["old_logprobs"]
        return cls(
            train=[group_from_json(group) for group in state["train"]],
            metrics=state["metrics"],
            old_logprobs=None if logprobs is None else _from_text(logprobs),
            updates=[StepStats(**one) for one in state["updates"]],
        )


def _to_text(values: Tensor) -> dict[str, str]:
    """Exactly, in a third of the space that digits take."""
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype_name(values.dtype), "base64": base64.b64encode(data).decode()}


def _from_text(value: Mapping[str, str]) -> Tensor:
    data = bytearray(base64.b64decode(value["base64"]))
    return torch.frombuffer(data, dtype=torch_dtype(value["dtype"]))
