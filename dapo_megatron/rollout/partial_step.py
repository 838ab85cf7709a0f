"""The state of a rollout step in progress.

A run can be stopped after any optimizer step and continues from there. The checkpoint contains the
groups of the step, their old log-probs and the statistics of its updates so far. The old log-probs
cannot be recomputed, because they are of the weights at the start of the step.
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


def batching_keys(config: Config) -> dict[str, Any]:
    """Return the config keys that determine a step's batch and mini-batches, with their values.

    They cannot change in the middle of a step.
    """
    return {
        "train.updates_per_step": config.train.updates_per_step,
        "loss.aggregation": config.loss.aggregation,
        "loss.advantage_eps": config.loss.advantage_eps,
        **{f"overlong.{key}": value for key, value in config.overlong.model_dump().items()},
    }


@dataclass
class PartialStep:
    """A rollout step in progress. All fields are empty between two steps."""

    train: list[Group] | None = None
    """Groups that the step trains on; None until they are collected."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step so far, except those of its updates."""
    old_logprobs: Tensor | None = None
    """float [T], for all tokens of the step's batch."""
    updates: list[StepStats] = field(default_factory=list)

    def begin(self, train: list[Group], metrics: Mapping[str, float]) -> None:
        """Record the collected groups and their metrics."""
        self.train, self.metrics = train, dict(metrics)

    def close(self) -> None:
        """Clear all fields at the end of the step."""
        self.train, self.old_logprobs = None, None
        self.metrics, self.updates = {}, []

    def state(self, config: Config) -> dict[str, Any] | None:
        """Return JSON-compatible state for a checkpoint; None between two steps."""
        if self.train is None:
            return None
        return {
            "cut_by": batching_keys(config),
            "train": [group_to_json(group) for group in self.train],
            "metrics": self.metrics,
            "old_logprobs": None if self.old_logprobs is None else _to_text(self.old_logprobs),
            "updates": [asdict(update) for update in self.updates],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, config: Config) -> PartialStep:
        """Return the step that `state` describes.

        Raises ConfigError naming each batching key that has changed since.
        """
        if state is None:
            return cls()
        refuse(
            f"{key}: the checkpoint is from the middle of a step that started with {value!r}; "
            "keep this value until the step is done, or resume from an earlier checkpoint"
            for key, value in state["cut_by"].items()
            if batching_keys(config).get(key) != value
        )
        logprobs = state["old_logprobs"]
        return cls(
            train=[group_from_json(group) for group in state["train"]],
            metrics=state["metrics"],
            old_logprobs=None if logprobs is None else _from_text(logprobs),
            updates=[StepStats(**update) for update in state["updates"]],
        )


def _to_text(values: Tensor) -> dict[str, str]:
    """Encode a tensor exactly. Base64 takes about a third of the space of decimal digits."""
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype_name(values.dtype), "base64": base64.b64encode(data).decode()}


def _from_text(value: Mapping[str, str]) -> Tensor:
    data = bytearray(base64.b64decode(value["base64"]))
    return torch.frombuffer(data, dtype=torch_dtype(value["dtype"]))
