"""Describes the sequences of a rollout step, assembles a rank's tokens, and splits the step into
mini-batches.

Shapes: S is the number of sequences of a step or mini-batch, H the number of those whose tokens
this rank holds, and T the number of these tokens (all held sequences concatenated).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.loss import Aggregation, sequence_weights
from dapo_megatron.algo.overlong import Reward, completion_reward
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.packing import minibatch_ranges
from dapo_megatron.segments import Segment, branches, is_sampled, num_sampled
from dapo_megatron.types import (
    Completion,
    Finish,
    Group,
    LogProbs,
    SequenceDiagnostics,
    SequenceTokens,
    TokenBatch,
    TrainingSequence,
)

T = TypeVar("T")

_OF_SEQUENCES = ("lengths", "loss_tokens", "group_ids", "sequence_names", "owners")
_OF_TOKENS = (
    *("tokens", "loss_mask", "advantages", "weights"),
    *("engine_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs", "routes"),
    *("top_ids", "teacher_top_logprobs"),
)
"""Fields of TokenBatch with an element per sequence of the step, and per held token."""


def valid_completions(group: Group, overlong: OverlongConfig) -> list[Completion]:
    """Return the completions that count for their group's verdict, its mean and the batch.

    With `overlong.filter` and without `overlong.filtered_in_mean`, truncated completions do not
    count. Otherwise all completions do.
    """
    if not overlong.filter or overlong.filtered_in_mean:
        return list(group.completions)
    return [c for c in group.completions if not c.finish.is_cut]


def reward(completion: Completion, overlong: OverlongConfig) -> Reward | None:
    """Return the reward of a completion, or None if it has no grade."""
    if completion.grade is None:
        return None
    return completion_reward(
        completion.grade.score,
        max(num_sampled(segments) for _, segments in branches(completion.segments)),
        penalty=overlong.penalty,
        max_tokens=overlong.max_tokens,
        buffer_tokens=overlong.buffer_tokens,
    )


def _ends_void(completion: Completion) -> bool:
    """Return whether the last turn has neither a call of a tool nor an answer."""
    has_answer = completion.grade is not None and completion.grade.parsed
    return completion.finish.is_cut or (completion.finish is Finish.STOP and not has_answer)


def describe(
    groups: Sequence[Group],
    *,
    overlong: OverlongConfig,
    eps: float,
    divide_by_std: bool = True,
    mask_void: bool = False,
) -> list[TrainingSequence]:
    """Return descriptions of the branches of the valid completions of `groups`, in order.

    All branches have the advantage of their completion, which is relative to the valid completions
    of its group. Truncated completions that are filtered but valid are excluded from the loss, and
    with `mask_void` those that end with a void turn (loss.correction.void_turns). `eps` and
    `divide_by_std` are arguments of `group_advantage`. Raises ValueError naming a completion that
    has no grade.
    """
    completions = [(group, c) for group in groups for c in valid_completions(group, overlong)]
    rewards: list[float] = []
    for group, completion in completions:
        shaped = reward(completion, overlong)
        if shaped is None:
            raise ValueError(
                f"ticket {group.ticket}, sample {completion.sample}: no grade; its group must "
                "abstain"
            )
        rewards.append(shaped.total)
    group_ids = torch.tensor([group.ticket for group, _ in completions], dtype=torch.int64)
    advantages = group_advantage(
        torch.tensor(rewards, dtype=torch.float32), group_ids, eps=eps, divide_by_std=divide_by_std
    )
    return [
        TrainingSequence(
            ticket=group.ticket,
            sample=completion.sample,
            prompt_tokens=len(group.prompt.tokens),
            response_tokens=end - start,
            segments=segments,
            advantage=advantage,
            in_loss=not (
                (overlong.filter and completion.finish.is_cut)
                or (mask_void and _ends_void(completion))
            ),
            reward=total,
            start=start,
        )
        for (group, completion), advantage, total in zip(
            completions, advantages.tolist(), rewards, strict=True
        )
        for start, end, segments in _branches(completion)
    ]


def _branches(completion: Completion) -> Iterator[tuple[int, int, tuple[Segment, ...]]]:
    """Yield (first token, end, segments) of each branch."""
    parts = branches(completion.segments)
    ends = [*(start for start, _ in parts[1:]), completion.num_tokens]
    for (start, segments), end in zip(parts, ends, strict=True):
        yield start, end, segments


def assemble(
    sequences: Sequence[TrainingSequence],
    tokens: Mapping[int, SequenceTokens],
    owners: Sequence[int] | None = None,
    *,
    with_routes: bool = False,
) -> TokenBatch:
    """Return the batch of a rollout step. All loss weights are 1.

    sequences  all sequences of the step
    tokens     tokens of the sequences that this rank holds, by index in `sequences`
    owners     data-parallel index that trains on each sequence; None if `tokens` has all sequences

    With `with_routes` all tokens must have routes; otherwise those that they have are left out.
    Without sequences the batch is empty (S = T = 0). Raises ValueError naming a sequence whose
    segments, tokens, log-probs or routes do not match its description.
    """
    held = list(range(len(sequences))) if owners is None else sorted(tokens)
    for sequence in sequences:
        _check_segments(sequence)
    for index in held:
        _check_tokens(sequences[index], tokens.get(index))
    own = [sequences[index] for index in held]
    values = [tokens[index] for index in held]
    num_tokens = sum(sequence.num_tokens for sequence in own)
    return TokenBatch(
        lengths=_int64([sequence.num_tokens for sequence in sequences]),
        loss_tokens=_int64([sequence.loss_tokens for sequence in sequences]),
        group_ids=_int64([sequence.ticket for sequence in sequences]),
        tokens=_concatenated(
            chain.from_iterable((v.prompt, v.response) for v in values), np.int32, num_tokens
        ),
        loss_mask=_on_sampled(own, np.array([s.in_loss for s in own], np.bool_)),
        advantages=_on_sampled(own, np.array([s.advantage for s in own], np.float32)),
        # A single 1 in memory, seen from every token.
        weights=torch.ones(1, dtype=torch.float32).expand(num_tokens),
        engine_logprobs=_concatenated(
            chain.from_iterable((np.zeros(len(v.prompt)), v.logprobs) for v in values),
            np.float32,
            num_tokens,
        ),
        routes=_concatenate_routes(own, values) if with_routes and own else None,
        sequence_names=tuple(map(str, sequences)),
        owners=None if owners is None else _int64(owners),
        held=None if owners is None else _int64(held),
    )


def fresh_mask(
    sequences: Sequence[TrainingSequence],
    batch: TokenBatch,
    *,
    version: int,
    engine: int | None = None,
    only_whole: bool = False,
) -> Tensor:
    """Return a bool mask [T] over the batch that `assemble` makes of the same sequences: True for
    tokens sampled by weights `version`, with `engine` only by this one, and with `only_whole` only
    in responses without tokens of other weights.

    The gap between engine and policy is measured on these tokens only, because log-probs of older
    weights differ anyway.
    """
    spans: list[int] = []
    is_fresh: list[bool] = []
    for index in _held(batch):
        sequence = sequences[index]
        spans += [sequence.prompt_tokens, *(part.num_tokens for part in sequence.segments)]
        fresh = [part.version == version for part in sequence.segments]
        if only_whole:
            fresh = [all(fresh)] * len(fresh)
        is_fresh += [False]
        for is_new, part in zip(fresh, sequence.segments, strict=True):
            is_right = not part.is_observed and engine in (None, part.engine)
            is_fresh.append(is_new and is_right)
    return _repeat(np.array(is_fresh, dtype=np.bool_), spans)


def diagnose(
    sequences: Sequence[TrainingSequence], batch: TokenBatch, policy: LogProbs
) -> Iterator[SequenceDiagnostics]:
    """Yield the diagnostics of each held sequence of `batch`, in order, computed lazily.

    sequences  those that `assemble` made `batch` from
    policy     log-probs and entropy [T] of the policy
    """
    ends = batch.held_lengths.cumsum(0).tolist()
    for index, end in zip(_held(batch), ends, strict=True):
        sequence = sequences[index]
        response = slice(end - sequence.response_tokens, end)
        logprobs = policy.logprobs[response]
        gap = (logprobs - batch.engine_logprobs[response]).abs()
        if any(part.is_observed for part in sequence.segments):
            gap = gap[torch.from_numpy(is_sampled(sequence.segments))]
        yield SequenceDiagnostics(
            ticket=sequence.ticket,
            sample=sequence.sample,
            advantage=sequence.advantage,
            gap_mean=float(gap.mean()),
            gap_max=float(gap.amax()) if sequence.response_tokens else math.nan,
            logprobs=logprobs,
            entropy=policy.entropy[response],
        )


def of_all(batch: TokenBatch, values: Sequence[Sequence[T]]) -> list[T]:
    """Return the values of all sequences of the step, in order. `values[index]` are those of the
    sequences that the data-parallel index owns, in order."""
    if batch.owners is None:
        return list(values[0])
    of_index = [iter(owned) for owned in values]
    return [next(of_index[owner]) for owner in batch.owners.tolist()]


def penalize(
    batch: TokenBatch,
    sequences: Sequence[TrainingSequence],
    penalties: Sequence[float],
    *,
    eps: float,
    divide_by_std: bool,
) -> TokenBatch:
    """Return `batch` with the group advantages of the rewards minus `penalties`.

    sequences  those that `assemble` made `batch` from
    penalties  one per sequence

    `eps` and `divide_by_std`: see `group_advantage`.
    """
    rewards: dict[tuple[int, int], float] = {}
    for sequence, penalty in zip(sequences, penalties, strict=True):  # branches share a reward
        key = sequence.ticket, sequence.sample
        rewards[key] = rewards.get(key, sequence.reward) - penalty
    of_completions = group_advantage(
        torch.tensor(list(rewards.values()), dtype=torch.float32),
        torch.tensor([ticket for ticket, _ in rewards], dtype=torch.int64),
        eps=eps,
        divide_by_std=divide_by_std,
    )
    by_key = dict(zip(rewards, of_completions.tolist(), strict=True))
    own = [sequences[index] for index in _held(batch)]
    advantages = np.array([by_key[s.ticket, s.sample] for s in own], np.float32)
    return replace(batch, advantages=_on_sampled(own, advantages))


def sampled_mask(batch: TokenBatch, sequences: Sequence[TrainingSequence]) -> Tensor:
    """Return a bool mask [T]: True for sampled tokens, whether or not they enter the loss."""
    own = [sequences[index] for index in _held(batch)]
    return _on_sampled(own, np.ones(len(own), np.bool_))


def split(
    batch: TokenBatch, num_updates: int, aggregation: Aggregation, *, divisor: int | None = None
) -> list[TokenBatch]:
    """Return the mini-batches of a step; see `minibatch_ranges`.

    Loss weights are multiplied by `aggregation`'s, with the denominators of each mini-batch
    over all ranks. `divisor`: see `sequence_weights`.
    """
    return [
        _reweigh(_slice(batch, minibatch), aggregation, divisor)
        for minibatch in minibatch_ranges(batch.num_sequences, num_updates)
    ]


def _check_segments(sequence: TrainingSequence) -> None:
    if sum(segment.num_tokens for segment in sequence.segments) != sequence.response_tokens:
        raise ValueError(
            f"{sequence}: segments {sequence.segments} for {sequence.response_tokens} tokens"
        )


def _check_tokens(sequence: TrainingSequence, values: SequenceTokens | None) -> None:
    if values is None:
        raise ValueError(f"{sequence}: its tokens are missing")
    expected = (sequence.prompt_tokens, sequence.response_tokens, sequence.response_tokens)
    actual = (len(values.prompt), len(values.response), len(values.logprobs))
    if actual != expected:
        raise ValueError(
            "{}: {} prompt tokens, {} response tokens and {} log-probs for {}, {} and {}".format(
                sequence, *actual, *expected
            )
        )


def _concatenated(spans: Iterable[ArrayLike], dtype: DTypeLike, num_tokens: int) -> Tensor:
    """Return the values of all spans in new memory."""
    result = np.empty(num_tokens, dtype=dtype)
    return torch.from_numpy(np.concatenate([result[:0], *spans], out=result))


def _concatenate_routes(
    sequences: Sequence[TrainingSequence], values: Sequence[SequenceTokens]
) -> Tensor:
    """Return the routes [T, layers * k]. Those of last tokens are 0."""
    first = values[0].routes if values[0].routes is not None else np.zeros(0, np.uint8)
    width = first.size // max(sequences[0].num_tokens - 1, 1)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    result = np.zeros((num_tokens, width), first.dtype)
    end = 0
    for sequence, value in zip(sequences, values, strict=True):
        start, end = end, end + sequence.num_tokens
        size = 0 if value.routes is None else value.routes.size
        if value.routes is None or size != (sequence.num_tokens - 1) * width:
            raise ValueError(
                f"{sequence}: {size} experts in its routes for {sequence.num_tokens - 1} tokens "
                f"with {width} experts each"
            )
        result[start : end - 1] = value.routes.reshape(-1, width)
    return torch.from_numpy(result)


def _on_sampled(sequences: Sequence[TrainingSequence], values: NDArray[Any]) -> Tensor:
    """Return the value of each sequence on all tokens that were sampled, and 0 on the others."""
    spans, repeated = [], []
    for sequence, value in zip(sequences, values, strict=True):
        spans += [sequence.prompt_tokens, *(part.num_tokens for part in sequence.segments)]
        repeated += [0, *(0 if part.is_observed else value for part in sequence.segments)]
    return _repeat(np.array(repeated, values.dtype), spans)


def _repeat(values: NDArray[np.generic], counts: Sequence[int]) -> Tensor:
    """Repeat each value. `Tensor.repeat_interleave` would also make an index of 8 bytes per
    token."""
    return torch.from_numpy(np.repeat(values, np.array(counts, dtype=np.int64)))


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _held(batch: TokenBatch) -> Sequence[int]:
    """Return the indices of the held sequences."""
    return range(batch.num_sequences) if batch.held is None else batch.held.tolist()


def _slice(batch: TokenBatch, minibatch: range) -> TokenBatch:
    """Return consecutive sequences of `batch`. Their tokens are views."""
    rows = slice(minibatch.start, minibatch.stop)
    positions = rows
    if batch.held is not None:
        bounds = torch.tensor([minibatch.start, minibatch.stop])
        positions = slice(*torch.searchsorted(batch.held, bounds).tolist())
    starts = [0, *batch.held_lengths.cumsum(0).tolist()]
    tokens = slice(starts[positions.start], starts[positions.stop])
    parts = dict.fromkeys(_OF_SEQUENCES, rows) | dict.fromkeys(_OF_TOKENS, tokens)
    values = {name: getattr(batch, name) for name in parts}
    sliced: dict[str, Any] = {
        name: None if value is None else value[parts[name]] for name, value in values.items()
    }
    held = None if batch.held is None else batch.held[positions] - minibatch.start
    return replace(batch, **sliced, held=held)


def _reweigh(mini: TokenBatch, aggregation: Aggregation, divisor: int | None) -> TokenBatch:
    weights = sequence_weights(
        aggregation, loss_tokens=mini.loss_tokens, group_ids=mini.group_ids, divisor=divisor
    ).to(torch.float32)
    held_weights = weights if mini.held is None else weights[mini.held]
    weights_T = _repeat(held_weights.numpy(), mini.held_lengths.tolist())
    return replace(mini, weights=weights_T.mul_(mini.loss_mask).mul_(mini.weights))
