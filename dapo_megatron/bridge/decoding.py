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
    max_gap: float,
) -> float:
    """Return the largest gap, in nats, between the log-probs of decoded and of scored tokens.

    Each engine decodes the most likely tokens after the beginnings of `sequences`, which have the
    same length. Raises SyncError if the gap is above `max_gap` on any rank. Collective.
    """
    gaps = exchange.all_gather(_gap(engine, sequences), float)
    gap = max(gaps)
    if gap > max_gap:
        ranks = ", ".join(str(rank) for rank, value in enumerate(gaps) if value > max_gap)
        raise SyncError(
            f"weights {version}: decoded tokens have other log-probs than the same tokens scored "
            f"in one pass, by {gap:.3g}, engine ranks {ranks}; sync.max_gap is {max_gap:g}. "
            "Scoring agrees with the policy, so CUDA graphs read stale memory, or the kernels of "
            "decoding compute something else. Try engine.enforce_eager=true"
        )
    return gap


def _gap(engine: RolloutEngine, sequences: Sequence[Sequence[int]]) -> float:
    """Return the largest gap of this rank's engine. NaN counts as infinity."""
    num_tokens = min(NUM_TOKENS, len(sequences[0]) - 1)
    prompts = [list(tokens[:-num_tokens]) for tokens in sequences]
    decoded = engine.decode(prompts, num_tokens)
    scores = engine.score(
        [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, decoded, strict=True)]
    )
    expected = torch.tensor(scores, dtype=torch.float64)[:, -num_tokens:]
    logprobs = torch.tensor([logprobs for _, logprobs in decoded], dtype=torch.float64)
    gaps = (logprobs - expected).abs()
    return float(torch.where(gaps.isnan(), torch.inf, gaps).max())
