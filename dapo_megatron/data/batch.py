"""Assembles the token batch of a rollout step from graded groups, and splits it into mini-batches.

Shapes: T is the number of tokens (all sequences concatenated), S the number of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.loss import Aggregation, aggregation_weights
from dapo_megatron.algo.overlong import Reward, completion_reward
from dapo_megatron.config import OverlongConfig
from dapo_megatron.types import Completion, Finish, Group, LogProbs, SequenceDiagnostics, TokenBatch


def valid_completions(group: Group, overlong: OverlongConfig) -> list[Completion]:
    """Return the completions that count for their group's verdict, its mean and the batch.

    With `overlong.filter` and without `overlong.filtered_in_mean`, truncated completions do not
    count. Otherwise all completions do.
    """
    if not overlong.filter or overlong.filtered_in_mean:
        return list(group.completions)
    return [c for c in group.completions if c.finish is not Finish.LENGTH]


def reward(completion: Completion, overlong: OverlongConfig) -> Reward | None:
    """Return the reward of a completion, or None if it has no grade."""
    if completion.grade is None:
        return None
    return completion_reward(
        completion.grade.score,
        len(completion.tokens),
        penalty=overlong.penalty,
        max_tokens=overlong.max_tokens,
        buffer_tokens=overlong.buffer_tokens,
    )


def assemble(groups: Sequence[Group], *, overlong: OverlongConfig, eps: float) -> TokenBatch:
    """Return a batch of the valid completions of `groups`, in order. All loss weights are 1.

    The advantage of a completion is relative to the valid completions of its group. Truncated
    completions that are filtered but valid are excluded from the loss mask. Without sequences the
    batch is empty (T = S = 0). Raises ValueError naming a completion that has no grade, or whose
    number of log-probs differs from its number of tokens.
    """
    sequences = _sequences(groups, overlong)
    rewards: list[float] = []
    for group, completion in sequences:
        shaped = reward(completion, overlong)
        if shaped is None:
            raise ValueError(f"{_name(group, completion)}: no grade; its group must abstain")
        rewards.append(shaped.total)
    group_ids = torch.tensor([group.ticket for group, _ in sequences], dtype=torch.int64)
    advantages = group_advantage(
        torch.tensor(rewards, dtype=torch.float32), group_ids, eps=eps
    ).tolist()
    # A prompt and its response are two spans, within which mask and advantage are constant.
    tokens: list[NDArray[np.int32]] = []
    logprobs: list[NDArray[np.float32]] = []
    in_loss: list[bool] = []
    advantage: list[float] = []
    for (group, completion), value in zip(sequences, advantages, strict=True):
        prompt, response = group.prompt.tokens, completion.tokens
        if len(completion.logprobs) != len(response):
            raise ValueError(
                f"{_name(group, completion)}: {len(completion.logprobs)} log-probs for "
                f"{len(response)} tokens"
            )
        tokens += [np.asarray(prompt, dtype=np.int32), np.asarray(response)]
        logprobs += [np.zeros(len(prompt), dtype=np.float32), np.asarray(completion.logprobs)]
        in_loss += [False, not (overlong.filter and completion.finish is Finish.LENGTH)]
        advantage += [0.0, value]
    spans = torch.tensor([len(span) for span in tokens], dtype=torch.int64)
    return TokenBatch(
        tokens=_concatenate(tokens, torch.int64),
        lengths=spans.view(-1, 2).sum(1),
        loss_mask=torch.tensor(in_loss, dtype=torch.bool).repeat_interleave(spans),
        advantages=torch.tensor(advantage, dtype=torch.float32).repeat_interleave(spans),
        weights=torch.ones(int(spans.sum()), dtype=torch.float32),
        engine_logprobs=_concatenate(logprobs, torch.float32),
        group_ids=group_ids,
        sequence_names=tuple(_name(group, completion) for group, completion in sequences),
    )


def fresh_mask(groups: Sequence[Group], *, version: int, overlong: OverlongConfig) -> Tensor:
    """Return a bool mask [T] over the batch that `assemble` makes of the same groups: True for
    response tokens sampled by weights `version`.

    The gap between engine and policy is measured on these tokens only, because log-probs of older
    weights differ anyway. Raises ValueError if the segments of a completion do not add up to its
    tokens.
    """
    spans: list[int] = []
    is_fresh: list[bool] = []
    for group, completion in _sequences(groups, overlong):
        if sum(segment.num_tokens for segment in completion.segments) != len(completion.tokens):
            raise ValueError(
                f"{_name(group, completion)}: segments {completion.segments} for "
                f"{len(completion.tokens)} tokens"
            )
        spans += [len(group.prompt.tokens), *(part.num_tokens for part in completion.segments)]
        is_fresh += [False, *(part.version == version for part in completion.segments)]
    return torch.tensor(is_fresh, dtype=torch.bool).repeat_interleave(
        torch.tensor(spans, dtype=torch.int64)
    )


def diagnose(
    groups: Sequence[Group], batch: TokenBatch, policy: LogProbs, *, overlong: OverlongConfig
) -> Iterator[SequenceDiagnostics]:
    """Yield the diagnostics of each sequence of `batch`, in order, computed lazily.

    groups   the groups that `assemble` made `batch` from
    policy   log-probs and entropy [T] of the policy
    """
    ends = batch.lengths.cumsum(0).tolist()
    for (group, completion), end in zip(_sequences(groups, overlong), ends, strict=True):
        response = slice(end - len(completion.tokens), end)
        logprobs = policy.logprobs[response]
        gap = (logprobs - batch.engine_logprobs[response]).abs()
        yield SequenceDiagnostics(
            ticket=group.ticket,
            sample=completion.sample,
            advantage=float(batch.advantages[end - 1]),
            gap_mean=float(gap.mean()),
            gap_max=float(gap.amax()) if completion.tokens else math.nan,
            logprobs=logprobs,
            entropy=policy.entropy[response],
        )


def split(batch: TokenBatch, num_updates: int, aggregation: Aggregation) -> list[TokenBatch]:
    """Return the mini-batches of a step: consecutive sequences, in numbers that differ by at most
    one.

    There are `num_updates` mini-batches, or one per sequence if there are fewer sequences; none is
    empty. Loss weights follow `aggregation`, with the denominators of each mini-batch.
    """
    num_minis = min(num_updates, batch.num_sequences)
    if num_minis == 0:
        return []
    bounds = [mini * batch.num_sequences // num_minis for mini in range(num_minis + 1)]
    return [_reweigh(_slice(batch, first, last), aggregation) for first, last in pairwise(bounds)]


def _name(group: Group, completion: Completion) -> str:
    return f"ticket {group.ticket}, sample {completion.sample}"


def _sequences(groups: Sequence[Group], overlong: OverlongConfig) -> list[tuple[Group, Completion]]:
    return [(group, c) for group in groups for c in valid_completions(group, overlong)]


def _concatenate(spans: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    return (
        torch.from_numpy(np.concatenate(spans)).to(dtype) if spans else torch.empty(0, dtype=dtype)
    )


def _slice(batch: TokenBatch, first: int, last: int) -> TokenBatch:
    """Return sequences first..last-1 of `batch`."""
    starts = [0, *batch.lengths.cumsum(0).tolist()]
    tokens, rows = slice(starts[first], starts[last]), slice(first, last)
    old = batch.old_logprobs
    return replace(
        batch,
        tokens=batch.tokens[tokens],
        lengths=batch.lengths[rows],
        loss_mask=batch.loss_mask[tokens],
        advantages=batch.advantages[tokens],
        weights=batch.weights[tokens],
        engine_logprobs=batch.engine_logprobs[tokens],
        group_ids=batch.group_ids[rows],
        old_logprobs=None if old is None else old[tokens],
        sequence_names=batch.sequence_names[rows],
    )


def _reweigh(mini: TokenBatch, aggregation: Aggregation) -> TokenBatch:
    weights = aggregation_weights(
        aggregation, lengths=mini.lengths, mask=mini.loss_mask, group_ids=mini.group_ids
    )
    return replace(mini, weights=weights)
