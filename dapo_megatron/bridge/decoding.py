"""Verification that an engine decodes with the weights and the KV cache that it scores with.

Canary sequences are scored in one pass over each sequence. Rollouts are decoded token by token, on
a GPU in CUDA graphs. A graph keeps the addresses that it was captured with. If it read a stale one
after a sync, it would pass all other checks, and only the gap of the next step's rollouts would
show it.

The decoded tokens are scored by the engine, not by the policy. The policy has left the accelerator
when the engine can decode, and bringing it back would take seconds. The engine's scores are
compared with the policy's in the same sync, on the canary sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dapo_megatron.bridge.bounds import CanaryBounds
from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.protocols import Exchange, RolloutEngine
from dapo_megatron.types import SyncError

NUM_TOKENS = 4
"""Tokens decoded after each canary sequence. The first comes from the pass over the prompt."""


def check_decoding(
    engine: RolloutEngine,
    exchange: Exchange,
    sequences: Sequence[Sequence[int]],
    version: int,
    *,
    bounds: CanaryBounds,
) -> float:
    """Return the largest gap, in nats, between the log-probs of decoded and of scored tokens.

    Each engine decodes the most likely tokens after the beginnings of `sequences`, which have the
    same length. Raises SyncError with the ranks on which the largest gap or the mean exceeds the
    canary's bound, if there are any. Collective.
    """
    rank_gap = on_all_ranks(exchange, lambda: _gap(engine, sequences))
    gathered = exchange.all_gather(rank_gap, tuple[float, float])
    gaps = dict(zip(exchange.names, gathered, strict=True))
    at_fault = [
        rank for rank, (largest, mean) in gaps.items() if largest > bounds.max or mean > bounds.mean
    ]
    for key, bound, values in (
        ("sync.max_gap", bounds.max, {rank: largest for rank, (largest, _) in gaps.items()}),
        ("sync.canary_mean_gap", bounds.mean, {rank: mean for rank, (_, mean) in gaps.items()}),
    ):
        highest = max(values.values())
        if highest > bound:
            ranks = ", ".join(str(rank) for rank, value in values.items() if value > bound)
            raise SyncError(
                f"weights {version}: decoded tokens have other log-probs than the same tokens "
                f"scored in one pass, by {highest:.3g}, engine ranks {ranks}; {key} is "
                f"{bound:g}. Scoring agrees with the policy, so CUDA graphs read stale memory, or "
                "the kernels of decoding compute something else. Try engine.enforce_eager=true",
                at_fault,
            )
    return max(largest for largest, _ in gathered)


def _gap(engine: RolloutEngine, sequences: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the largest and the mean gap of this rank's engine, 0 without one. NaN counts as
    infinity."""
    num_tokens = min(NUM_TOKENS, len(sequences[0]) - 1)
    prompts = [list(tokens[:-num_tokens]) for tokens in sequences]
    decoded = engine.decode(prompts, num_tokens)
    if not decoded:
        return 0.0, 0.0
    scores = engine.score(
        [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, decoded, strict=True)]
    )
    expected = torch.tensor(scores, dtype=torch.float64)[:, -num_tokens:]
    logprobs = torch.tensor([logprobs for _, logprobs in decoded], dtype=torch.float64)
    gaps = (logprobs - expected).abs()
    gaps = torch.where(gaps.isnan(), torch.inf, gaps)
    return float(gaps.max()), float(gaps.mean())
