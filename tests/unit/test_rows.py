"""Rows and attention without a model: each token appears once, at its place, with a causal mask.

The ranks of a context-parallel group are simulated one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.policy.attention import attend, attention_plan
from dapo_megatron.policy.rows import Rows, RowShape, make_rows
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import random_batch

CPU = torch.device("cpu")
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def on_all_ranks(
    batch: TokenBatch,
    sequences: list[int],
    *,
    packed: bool,
    cp: int,
    tokens_per: int = 1,
    with_loss: bool = False,
) -> list[Rows]:
    multiple = 2 * cp if cp > 1 else 1
    row = multiple * tokens_per
    shapes = [RowShape(packed, multiple, row, rank, cp) for rank in range(cp)]
    return [make_rows(batch, sequences, shape, CPU, with_loss=with_loss) for shape in shapes]


@settings(max_examples=60)
@given(lengths, st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.data())
def test_every_token_appears_once_with_its_position_and_target(
    lengths: list[int], packed: bool, cp: int, tokens_per: int, data: st.DataObject
) -> None:
    batch = random_batch(lengths, vocab=99, prompt=1)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    ranks = on_all_ranks(batch, chosen, packed=packed, cp=cp, tokens_per=tokens_per)
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    placed = set()
    for rows in ranks:
        assert rows.tokens.shape == ranks[0].tokens.shape  # all ranks have the same work
        assert (rows.tokens.shape[0] == 1) == (packed or len(chosen) == 1)
        assert rows.tokens.numel() * cp % tokens_per == 0
        for number, position, token in zip(
            *(x.flatten().tolist() for x in (rows.sequences, rows.positions, rows.tokens)),
            strict=True,
        ):
            if number < 0:
                assert token == 0
                continue
            placed.add((number, position))
            assert token == batch.tokens[starts[chosen[number]] + position]
    expected = {
        (number, position)
        for number, index in enumerate(chosen)
        for position in range(lengths[index])
    }
    assert placed == expected
    assert sum(int((rows.sequences >= 0).sum()) for rows in ranks) == len(expected)


@settings(max_examples=60)
@given(lengths, st.booleans(), *[st.booleans()] * 2, st.sampled_from([1, 2]), st.data())
def test_scored_tokens_follow_the_position_that_predicts_them(
    lengths: list[int],
    packed: bool,
    with_loss: bool,
    has_old: bool,
    cp: int,
    data: st.DataObject,
) -> None:
    batch = random_batch(lengths, vocab=99, prompt=2)
    num_tokens = len(batch.tokens)
    batch = replace(
        batch,
        old_logprobs=torch.rand(num_tokens) if has_old else None,
        engine_logprobs=torch.rand(num_tokens),
        weights=torch.rand(num_tokens),
        advantages=torch.rand(num_tokens),
    )
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    scored_indices = []
    for rows in on_all_ranks(batch, chosen, packed=packed, cp=cp, with_loss=with_loss):
        scored = rows.scored
        num_rows, row_length = rows.tokens.shape
        predicted_index = torch.full((row_length, num_rows), -1)
        predicted_index.view(-1)[scored.hidden_rows] = scored.indices
        for row in range(num_rows):
            for column in range(row_length):
                number, position = int(rows.sequences[row, column]), rows.positions[row, column]
                index = int(predicted_index[column, row])
                assert index < 0 or index == starts[chosen[number]] + int(position) + 1
        # Boolean indexing of the rows gave this order, which the sums of the loss depend on.
        by_row = scored.hidden_rows % num_rows * row_length + scored.hidden_rows // num_rows
        assert bool((by_row.diff() > 0).all())
        assert torch.equal(scored.targets, batch.tokens[scored.indices])
        assert (scored.loss_inputs is not None) == with_loss
        if scored.loss_inputs is not None:
            assert (scored.in_loss is None) == has_old == ("old_logprobs" in scored.loss_inputs)
            trained = scored.indices if scored.in_loss is None else scored.indices[scored.in_loss]
            assert bool(scored.loss_inputs["mask"].all())
            assert len(trained) == int(batch.loss_mask[scored.indices].sum())
            for name in ("old_logprobs", "advantages", "weights", "engine_logprobs"):
                values = scored.loss_inputs.get(name)
                assert values is None or torch.equal(values, getattr(batch, name)[trained]), name
        scored_indices += scored.indices.tolist()
    expected = [
        starts[number] + position
        for number in chosen
        for position in range(1, lengths[number])
        if not (with_loss and has_old) or batch.loss_mask[starts[number] + position]
    ]
    assert sorted(scored_indices) == sorted(expected)


def test_without_sequences_there_is_one_row_of_padding() -> None:
    for packed in (True, False):
        for rows in on_all_ranks(random_batch((3,), vocab=9), [], packed=packed, cp=2):
            assert rows.tokens.shape == (1, 2)
            assert rows.scored.indices.numel() == rows.scored.hidden_rows.numel() == 0
            assert bool((rows.sequences < 0).all())


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([1, 2, 3]))
def test_attention_is_causal_inside_each_sequence(units: list[int], cp: int) -> None:
    """Values and gradients equal those of a dense mask over all tokens."""
    multiple = 2 * cp if cp > 1 else 1
    sizes = torch.tensor(units) * multiple
    bounds = (0, *sizes.cumsum(0).tolist())
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(bounds[-1], heads, 8, dtype=torch.float64, generator=generator)

    query, key, value = (random(heads).requires_grad_() for heads in (4, 2, 2))
    upstream = random(4).flatten(1)
    expected = dense(query, key, value, sizes)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (query, key, value))

    tokens_by_rank = [tokens_of(rank, bounds, cp) for rank in range(cp)]
    gathered = torch.cat(tokens_by_rank)
    assert sorted(gathered.tolist()) == list(range(bounds[-1]))
    output = torch.zeros_like(expected)
    for rank, rank_tokens in enumerate(tokens_by_rank):
        plan = attention_plan(bounds, rank, cp, CPU)
        rank_output = attend(plan, query[rank_tokens], key[gathered], value[gathered])
        output = output.index_add(0, rank_tokens, rank_output)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad((output * upstream).sum(), (query, key, value))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-11)


def tokens_of(rank: int, bounds: tuple[int, ...], cp: int) -> Tensor:
    """Tokens of a rank in its order: chunks `rank` and `2 cp - 1 - rank` of each sequence."""
    tokens = []
    for start, end in pairwise(bounds):
        chunks = torch.arange(start, end).chunk(2 * cp if cp > 1 else 1)
        tokens += [chunks[rank], chunks[-1 - rank]] if cp > 1 else list(chunks)
    return torch.cat(tokens)


def dense(query: Tensor, key: Tensor, value: Tensor, sizes: Tensor) -> Tensor:
    sequence = torch.arange(len(sizes)).repeat_interleave(sizes)
    position = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (position[:, None] >= position)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) / query.shape[-1] ** 0.5
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knd->qnd", probs, value).flatten(1)
