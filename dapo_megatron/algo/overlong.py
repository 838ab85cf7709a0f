"""Reward of a completion, with the soft overlong punishment exactly as in the paper
(arXiv 2503.14476, eq. 13).

verl's form goes on below -1 past max_tokens; generation stops there, so both agree in a run.
"""

from __future__ import annotations

from typing import NamedTuple


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Reward to add to a completion of `num_tokens` tokens, end-of-sequence included.

    0 up to max_tokens - buffer_tokens, then linear down to -1 at max_tokens, -1 beyond.
    Raises ValueError unless 0 < buffer_tokens < max_tokens and num_tokens >= 0.
    """
    if not 0 < buffer_tokens < max_tokens:
        raise ValueError(
            f"need 0 < buffer_tokens < max_tokens, got {buffer_tokens=}, {max_tokens=}"
        )
    if num_tokens < 0:
        raise ValueError(f"num_tokens is negative: {num_tokens}")
    excess = num_tokens - (max_tokens - buffer_tokens)
    return max(-1.0, min(0.0, -excess / buffer_tokens))


class Reward(NamedTuple):
    """Reward of one completion, in its two parts."""

    score: float
    """Score by the grader."""
    penalty: float
    """Overlong penalty, from -1 to 0."""

    @property
    def total(self) -> float:
        """Sum of both, which advantages are computed from."""
        return self.score + self.penalty


def completion_reward(
    score: float, num_tokens: int, *, penalty: bool, max_tokens: int, buffer_tokens: int
) -> Reward:
    """Return the reward of a completion of `num_tokens` tokens; without `penalty`, the score."""
    if not penalty:
        return Reward(score, 0.0)
    return Reward(
        score, overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    )
