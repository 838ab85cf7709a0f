"""The state of a rollout step in progress.

A run can be stopped after any optimizer step and continues from there. The checkpoint contains the
sequences of the step, their old log-probs and the statistics of its updates so far. The old
log-probs cannot be recomputed, because they are of the weights at the start of the step.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.config import Config, refuse
from dapo_megatron.protocols import DataParallel
from dapo_megatron.types import (
    Segment,
    SequenceTokens,
    StepStats,
    TrainingSequence,
    dtype_name,
    torch_dtype,
)


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

    sequences: list[TrainingSequence] | None = None
    """All sequences that the step trains on; None until they are collected."""
    tokens: dict[int, SequenceTokens] = field(default_factory=dict)
    """Tokens of the sequences that this rank holds, by index in `sequences`, ascending."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step so far, except those of its updates."""
    old_logprobs: Tensor | None = None
    """float [T], for the tokens of all sequences that this rank holds, prompts included."""
    updates: list[StepStats] = field(default_factory=list)

    def begin(
        self,
        sequences: list[TrainingSequence],
        tokens: dict[int, SequenceTokens],
        metrics: Mapping[str, float],
    ) -> None:
        """Record the collected sequences and their metrics."""
        self.sequences, self.tokens, self.metrics = sequences, tokens, dict(metrics)

    def keep(self, held: Sequence[int]) -> None:
        """Drop the tokens and log-probs of all sequences except `held`, which is ascending."""
        if self.old_logprobs is not None and list(self.tokens) != list(held):
            of_sequence = dict(zip(self.tokens, self._split(self.old_logprobs), strict=True))
            parts = [of_sequence[index] for index in held]
            self.old_logprobs = torch.cat([self.old_logprobs[:0], *parts])
        self.tokens = {index: self.tokens[index] for index in held}

    def close(self) -> None:
        """Clear all fields at the end of the step."""
        self.sequences, self.old_logprobs = None, None
        self.tokens, self.metrics, self.updates = {}, {}, []

    def state(self, config: Config, data_parallel: DataParallel) -> dict[str, Any] | None:
        """Return JSON-compatible state for a checkpoint; None between two steps. Collective."""
        if self.sequences is None:
            return None
        logprobs = self.old_logprobs
        texts = (
            [None] * len(self.tokens) if logprobs is None else map(_encode, self._split(logprobs))
        )
        own = {
            index: {**_tokens_to_json(values), "old_logprobs": text}
            for (index, values), text in zip(self.tokens.items(), texts, strict=True)
        }
        gathered = data_parallel.all_gather(own, dict[int, dict[str, str | None]])
        tokens = {index: values for part in gathered for index, values in part.items()}
        return {
            "cut_by": batching_keys(config),
            "sequences": [asdict(sequence) for sequence in self.sequences],
            "tokens": [tokens[index] for index in range(len(self.sequences))],
            "logprobs_dtype": None if logprobs is None else dtype_name(logprobs.dtype),
            "metrics": self.metrics,
            "updates": [asdict(update) for update in self.updates],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, config: Config) -> PartialStep:
        """Return the step that `state` describes, with the tokens of all sequences.

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
        logprobs, dtype = None, state["logprobs_dtype"]
        if dtype is not None:
            parts = [base64.b64decode(values["old_logprobs"]) for values in state["tokens"]]
            logprobs = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch_dtype(dtype))
        return cls(
            sequences=[_sequence(value) for value in state["sequences"]],
            tokens={index: _tokens(values) for index, values in enumerate(state["tokens"])},
            metrics=state["metrics"],
            old_logprobs=logprobs,
            updates=[StepStats(**update) for update in state["updates"]],
        )

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split a tensor [T] by held sequence."""
        assert self.sequences is not None
        return torch.split(values, [self.sequences[index].num_tokens for index in self.tokens])


def _tokens_to_json(values: SequenceTokens) -> dict[str, str]:
    """Encode the tokens exactly. Base64 takes about a third of the space of decimal digits."""
    return {
        name: base64.b64encode(values_of).decode() for name, values_of in asdict(values).items()
    }


def _encode(values: Tensor) -> str:
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return base64.b64encode(data).decode()


def _tokens(value: Mapping[str, str]) -> SequenceTokens:
    def numbers(name: str, typecode: str) -> array[Any]:
        return array(typecode, base64.b64decode(value[name]))

    return SequenceTokens(
        numbers("prompt", "i"), numbers("response", "i"), numbers("logprobs", "f")
    )


def _sequence(value: Mapping[str, Any]) -> TrainingSequence:
    segments = tuple(Segment(**segment) for segment in value["segments"])
    return TrainingSequence(**{**value, "segments": segments})
