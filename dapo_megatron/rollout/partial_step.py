"""The state of a rollout step in progress.

A run can be stopped after any optimizer step and continues from there. The checkpoint contains the
sequences of the step, their old log-probs and routes, the log-probs of the reference of loss.kl,
and the statistics of its updates so far. The old log-probs and routes cannot be recomputed, because
they are of the weights at the start of the step. Tokens, log-probs and routes are in files of the
ranks that train on them, everything else is in the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.config import Config, KLConfig, refuse
from dapo_megatron.config.section import Section
from dapo_megatron.data.owners import own_sequences
from dapo_megatron.protocols import DataParallel
from dapo_megatron.rollout.checkpoint_files import OPEN_STEP, CompletionsSnapshot
from dapo_megatron.rollout.completion_files import read_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.parquet import parts_among
from dapo_megatron.types import (
    CheckpointError,
    Completion,
    Finish,
    Prompt,
    Rollouts,
    Segment,
    SequenceTokens,
    StepStats,
    TrainingSequence,
    packed,
)


def batching_keys(config: Config) -> dict[str, Any]:
    """Return the config keys that determine a step's batch and mini-batches, with their values.

    They cannot change in the middle of a step.
    """
    loss = config.loss
    return {
        "train.updates_per_step": config.train.updates_per_step,
        "loss.aggregation": loss.aggregation,
        "loss.old_logprobs": loss.old_logprobs,
        "policy.router_replay": config.policy.router_replay,
        "loss.advantage_std": loss.advantage_std,
        "loss.advantage_eps": loss.advantage_eps,
        "loss.tis_cap": loss.tis_cap,
        "loss.log_ratio_limit": loss.log_ratio_limit,
        **_keys("loss.correction", loss.correction),
        **_keys("loss.kl", loss.kl),
        **_keys("overlong", config.overlong),
    }


def _keys(prefix: str, section: Section) -> dict[str, Any]:
    """Return the keys of a section with their values, as JSON has them."""
    return {f"{prefix}.{key}": value for key, value in section.model_dump(mode="json").items()}


_BEFORE = {
    "policy.router_replay": "off",
    "loss.old_logprobs": "policy",
    **_keys("loss.kl", KLConfig()),
}
"""Values of keys that did not exist when an older checkpoint was saved."""


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
    reference_logprobs: Tensor | None = None
    """The same under the weights of loss.kl's reference."""
    routes: Tensor | None = None
    """Experts of the same tokens in each layer that the pass for old log-probs chose, integer
    [T, layers * k]; None without policy.router_replay policy. Those of engines are in `tokens`."""
    updates: list[StepStats] = field(default_factory=list)

    def begin(self, rollouts: Rollouts) -> None:
        """Record the collected sequences and their metrics."""
        self.sequences, self.tokens = rollouts.sequences, rollouts.tokens
        self.metrics = dict(rollouts.metrics)

    def close(self) -> None:
        """Clear all fields at the end of the step."""
        self.sequences, self.old_logprobs = None, None
        self.reference_logprobs, self.routes = None, None
        self.tokens, self.metrics, self.updates = {}, {}, []

    def state(self, config: Config) -> dict[str, Any] | None:
        """Return JSON-compatible state for a checkpoint, without tokens; None between two steps."""
        if self.sequences is None:
            return None
        return {
            "cut_by": batching_keys(config),
            "sequences": [_to_json(sequence) for sequence in self.sequences],
            "metrics": dict(self.metrics),
            "has_logprobs": self.old_logprobs is not None,
            "has_reference": self.reference_logprobs is not None,
            "routes": None if self.routes is None else list(self.routes.shape[1:]),
            "updates": [asdict(update) for update in self.updates],
        }

    def snapshot(self, data_parallel: DataParallel) -> CompletionsSnapshot:
        """Return the sequences that this data-parallel index trains on, for a checkpoint. Only its
        first rank writes them."""
        rows = self._rows() if data_parallel.is_first else []
        return CompletionsSnapshot(OPEN_STEP, data_parallel.index, rows)

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, config: Config) -> PartialStep:
        """Return the step that `state` describes, without tokens.

        Raises ConfigError naming each batching key that has changed since.
        """
        if state is None:
            return cls()
        refuse(
            f"{key}: the checkpoint is from the middle of a step that started with {value!r}; "
            "keep this value until the step is done, or resume from an earlier checkpoint"
            for key, value in (_BEFORE | state["cut_by"]).items()
            if batching_keys(config).get(key) != value
        )
        return cls(
            sequences=[_from_json(value) for value in state["sequences"]],
            metrics=state["metrics"],
            # The values are loaded later, on the ranks that train on them.
            old_logprobs=torch.empty(0) if state["has_logprobs"] else None,
            reference_logprobs=torch.empty(0) if state.get("has_reference") else None,
            routes=None if (shape := state.get("routes")) is None else torch.empty(0, prod(shape)),
            updates=[StepStats(**update) for update in state["updates"]],
        )

    def load(self, folder: Path, data_parallel: DataParallel) -> None:
        """Load tokens, log-probs and routes of this rank's sequences from the checkpoint `folder`.
        The layout may have changed.

        Raises CheckpointError naming a sequence that is missing or does not match its description.
        """
        if self.sequences is None:
            return
        own = own_sequences(self.sequences, data_parallel)
        tokens: dict[int, SequenceTokens] = {}
        old: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        routes: dict[int, Tensor] = {}
        for path in parts_among(folder.iterdir(), OPEN_STEP).values():
            for row in read_completions(path, sequences=own):
                index = own[row.ticket, row.completion.sample]
                tokens[index] = tokens_of(row)
                self._check(path, index, tokens[index])
                for loaded, values in (
                    (old, row.old_logprobs),
                    (reference, row.reference_logprobs),
                ):
                    if values is not None:
                        values = np.pad(values, (len(row.prompt.tokens), 0))
                        loaded[index] = torch.from_numpy(values)
                if self.routes is not None:
                    routes[index] = self._routes_of(path, index, tokens[index].routes)
                    tokens[index] = replace(tokens[index], routes=None)
        for index in own.values():
            has_old = self.old_logprobs is None or index in old
            has_reference = self.reference_logprobs is None or index in reference
            if not (index in tokens and has_old and has_reference):
                raise CheckpointError(
                    f"{folder}: {self.sequences[index]} is missing from open_step_*.parquet; "
                    "resume from another checkpoint"
                )
        self.tokens = dict(sorted(tokens.items()))
        if self.old_logprobs is not None:
            self.old_logprobs = self._of_held(old)
        if self.reference_logprobs is not None:
            self.reference_logprobs = self._of_held(reference)
        if routes:
            self.routes = self._of_held(routes)

    def _of_held(self, values: Mapping[int, Tensor]) -> Tensor:
        """Concatenate the values of the held sequences."""
        parts = [values[index] for index in self.tokens]
        return torch.cat(parts) if parts else torch.empty(0)

    def _check(self, path: Path, index: int, tokens: SequenceTokens) -> None:
        assert self.sequences is not None
        sequence = self.sequences[index]
        lengths = len(tokens.prompt), len(tokens.response)
        if lengths != (sequence.prompt_tokens, sequence.response_tokens):
            raise CheckpointError(
                f"{path}: {sequence} has {lengths[0]} prompt tokens and {lengths[1]} response "
                f"tokens, but {sequence.prompt_tokens} and {sequence.response_tokens} in "
                "state.json; resume from another checkpoint"
            )

    def _routes_of(self, path: Path, index: int, values: NDArray[Any] | None) -> Tensor:
        """Return the routes [tokens, layers * k] of a sequence, from a row of a file."""
        assert self.sequences is not None and self.routes is not None
        shape = (self.sequences[index].num_tokens, *self.routes.shape[1:])
        size = 0 if values is None else values.size
        if values is None or size != prod(shape):
            raise CheckpointError(
                f"{path}: {self.sequences[index]} has {size} experts in its routes, but {shape[0]} "
                f"tokens with {shape[1]} experts each; resume from another checkpoint"
            )
        return torch.from_numpy(values).view(shape)

    def _rows(self) -> list[CompletionRow]:
        """Return the sequences that this rank holds, as rows of a file."""
        if self.sequences is None:
            return []
        lengths = [self.sequences[index].num_tokens for index in self.tokens]

        def split(values: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(lengths) if values is None else torch.split(values, lengths)

        held = map(split, (self.old_logprobs, self.reference_logprobs, self.routes))
        rows = zip(self.tokens.items(), *held, strict=True)
        return [_row(self.sequences[index], tokens, *values) for (index, tokens), *values in rows]


def _row(
    sequence: TrainingSequence,
    tokens: SequenceTokens,
    old: Tensor | None,
    reference: Tensor | None,
    routes: Tensor | None,
) -> CompletionRow:
    """Return the row of a sequence. Log-probs of the prompt are never used again."""
    prompt = tokens.prompt.tolist()
    response = slice(sequence.prompt_tokens, None)
    experts = tokens.routes if routes is None else routes.numpy()
    return CompletionRow(
        ticket=sequence.ticket,
        prompt=Prompt(source="", index=0, tokens=tuple(prompt), text="", truth=""),
        completion=Completion(
            sample=sequence.sample,
            tokens=packed(tokens.response),
            logprobs=packed(tokens.logprobs),
            text="",
            finish=Finish.STOP,
            segments=sequence.segments,
            routes=None if experts is None else packed(experts),
        ),
        old_logprobs=None if old is None else old[response].numpy(),
        reference_logprobs=None if reference is None else reference[response].numpy(),
    )


def tokens_of(row: CompletionRow) -> SequenceTokens:
    """Return the tokens of a row of a file."""
    return SequenceTokens(
        prompt=np.array(row.prompt.tokens, np.int32),
        response=np.asarray(row.completion.tokens),
        logprobs=np.asarray(row.completion.logprobs),
        routes=None if row.completion.routes is None else np.asarray(row.completion.routes),
    )


def _to_json(sequence: TrainingSequence) -> list[Any]:
    """Return a sequence as a list, because a step may have tens of thousands."""
    return [
        sequence.ticket,
        sequence.sample,
        0,  # earlier versions: the engine that sampled it
        sequence.prompt_tokens,
        sequence.response_tokens,
        [[segment.version, segment.num_tokens] for segment in sequence.segments],
        sequence.advantage,
        sequence.in_loss,
        sequence.reward,
    ]


def _from_json(value: Sequence[Any]) -> TrainingSequence:
    ticket, sample, _, prompt_tokens, response_tokens, segments, advantage, in_loss = value[:8]
    return TrainingSequence(
        ticket=ticket,
        sample=sample,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        segments=tuple(Segment(*segment) for segment in segments),
        advantage=advantage,
        in_loss=in_loss,
        reward=value[8] if len(value) > 8 else math.nan,  # older versions saved none
    )
