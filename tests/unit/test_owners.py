"""Owners of sequences: one data-parallel index trains on each, and only it has the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algo.loss import Aggregation
from dapo_megatron.data.batch import assemble, fresh_mask, split
from dapo_megatron.data.owners import DataParallelRanks, owners
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.segments import Segment
from tests.helpers.batches import described, tokens_of
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

PLAN = partial(plan_microbatches, max_tokens=64)
PADDED = partial(plan_microbatches, max_tokens=64, packed=False, num_multiple=2)


def groups_of(responses: list[list[int]]) -> list[Any]:
    """Make groups whose completions have these numbers of tokens, the first of an older version."""
    return [
        group(ticket, *(
            completion(
                sample, num_tokens, (RIGHT, WRONG)[sample % 2],
                segments=(Segment(2, num_tokens // 2), Segment(3, num_tokens - num_tokens // 2)),
            )
            for sample, num_tokens in enumerate(row)
        ), num_prompt_tokens=1 + ticket % 3)
        for ticket, row in enumerate(responses)
    ]  # fmt: skip


@given(
    responses=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=6),
    num_updates=st.integers(1, 7),
    num_ranks=st.integers(1, 5),
    plan=st.sampled_from([PLAN, PADDED]),
    aggregation=st.sampled_from(["token", "prompt", "sequence"]),
)
def test_local_batches_are_disjoint_parts_of_the_whole_one(
    responses: list[list[int]],
    num_updates: int,
    num_ranks: int,
    plan: Any,
    aggregation: Aggregation,
) -> None:
    groups = groups_of(responses)
    sequences = described(groups, overlong())
    tokens = tokens_of(groups, overlong())
    lengths = [sequence.num_tokens for sequence in sequences]
    owner = owners(lengths, num_updates, plan, num_ranks)
    whole = assemble(sequences, tokens)
    whole_minis = split(whole, num_updates, aggregation)
    whole_fresh = fresh_mask(sequences, whole, version=3)
    seen = []
    for rank in range(num_ranks):
        own = {index: tokens[index] for index in tokens if owner[index] == rank}
        batch = assemble(sequences, own, owner)
        assert batch.held is not None and batch.owners is not None
        assert batch.owners.tolist() == owner and whole.owners is whole.held is None
        seen += batch.held.tolist()
        assert torch.equal(
            fresh_mask(sequences, batch, version=3), of_held(whole_fresh, whole, batch)
        )
        minis = split(batch, num_updates, aggregation)
        for mini, whole_mini in zip(minis, whole_minis, strict=True):
            share = plan(mini.lengths.tolist(), num_ranks)[rank]
            assert sorted(index for micro in share for index in micro) == mini.held.tolist()
            for name in ("lengths", "loss_tokens", "group_ids"):
                assert torch.equal(getattr(mini, name), getattr(whole_mini, name))
            assert mini.sequence_names == whole_mini.sequence_names
            assert mini.num_loss_tokens == int(whole_mini.loss_mask.sum())
            for name in ("tokens", "loss_mask", "advantages", "weights", "engine_logprobs"):
                expected = of_held(getattr(whole_mini, name), whole_mini, mini)
                assert torch.equal(getattr(mini, name), expected), name
    assert sorted(seen) == list(range(len(sequences)))


def of_held(values_T: torch.Tensor, whole: Any, batch: Any) -> torch.Tensor:
    """Return the values of a whole batch at the tokens of the sequences that `batch` holds."""
    parts = values_T.split(whole.lengths.tolist())
    return torch.cat([values_T[:0], *(parts[index] for index in batch.held.tolist())])


@dataclass
class Exchange:
    """One rank's end of an exchange in which the others give `values`."""

    rank: int
    values: list[Any]
    sent: Any = None

    def all_gather(self, value: Any, of: Any) -> list[Any]:
        assert of == (str | None)
        self.sent = value
        return self.values


def test_values_are_gathered_from_the_first_rank_of_each_index() -> None:
    indices = (1, 0, 1, 0, 2)
    values = ["of 0", "of 1", None, None, "of 4"]
    for rank, value in enumerate(values):
        exchange = Exchange(rank, values)
        ranks = DataParallelRanks(exchange, indices, PLAN, 1)  # type: ignore[arg-type]
        assert ranks.all_gather(f"of {rank}", str) == ["of 1", "of 0", "of 4"]
        assert exchange.sent == value
    alone = DataParallelRanks(Exchange(1, []), (0, 0), PLAN, 1)  # type: ignore[arg-type]
    assert alone.all_gather("own", str) == ["own"]
