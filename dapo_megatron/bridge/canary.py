"""The canary: log-probs of the same few token sequences, by the policy and by an engine.

It sees what fingerprints cannot: an engine that holds the right numbers and computes with others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_megatron.types import TokenBatch

NUM_SEQUENCES = 4
SEED = 20250318  # any fixed number: the same sequences in every run


def sequences(vocab: int, num_tokens: int) -> list[list[int]]:
    """Fixed sequences of `num_tokens` tokens below `vocab`."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(vocab, (NUM_SEQUENCES, num_tokens), generator=generator)
    return [list(map(int, row)) for row in drawn]


def as_batch(tokens: list[list[int]]) -> TokenBatch:
    """The sequences for Policy.logprobs; nothing in them is trained on."""
    num_tokens = sum(map(len, tokens))
    nothing = torch.zeros(num_tokens)
    return TokenBatch(
        tokens=torch.tensor([token for one in tokens for token in one]),
        lengths=torch.tensor([len(one) for one in tokens]),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        advantages=nothing,
        weights=nothing,
        engine_logprobs=nothing,
        group_ids=torch.arange(len(tokens)),
    )


def worst(policy: Tensor, engine: list[list[float]]) -> tuple[float, int, int]:
    """Largest |log-prob by engine - by policy|, with the sequence and token where it is.

    `policy` has every token of all sequences, end to end; `engine` all but each first one.
    """
    num_tokens = len(engine[0]) + 1
    ours = policy.view(-1, num_tokens)[:, 1:].double()
    gaps = (torch.tensor(engine, dtype=torch.float64) - ours).abs()
    # What is not a number is the worst there is.
    gaps = torch.where(gaps.isnan(), torch.inf, gaps)
    where = int(gaps.argmax())
    return float(gaps.max()), where // (num_tokens - 1), where % (num_tokens - 1) + 1
