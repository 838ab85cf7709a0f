"""Reward of a completion, with the soft overlong punishment of arXiv 2503.14476, eq. 13.

verl's penalty falls below -1 past max_tokens. Generation stops at max_tokens, so both are equal
in a run.
"""

from __future__ import annotations

from typing import NamedTuple


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty to add to the reward of a completion of `num_tokens` tokens.

    `num_tokens` includes the end-of-sequence token. The penalty is 0 up to max_tokens -
    buffer_tokens, falls linearly to -1 at max_tokens, and is -1 beyond.
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
    """Reward of one completion: the grader's score and the overlong penalty."""

    score: float
    """Score from the grader."""
    penalty: float
    """Overlong penalty, in [-1, 0]."""

    @property
    def total(self) -> float:
        """Score plus penalty: the reward that advantages are computed from."""
        return self.score + self.penalty


def completion_reward(
    score: float, num_tokens: int, *, penalty: bool, max_tokens: int, buffer_tokens: int
) -> Reward:
    """Return the reward of a completion of `num_tokens` tokens.

    The overlong penalty is 0 if `penalty` is False.
    """
    if not penalty:
        return Reward(score, 0.0)
    return Reward(
        score, overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    )
