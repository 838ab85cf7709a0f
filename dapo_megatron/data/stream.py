"""The endless, deterministic order of prompts, and a position in it that can be restored."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dapo_megatron.types import Prompt


class PromptStream:
    """Hands out prompts epoch after epoch; the order of epoch e depends on (seed, e) alone.

    Within an epoch each prompt comes once. A position is the number of prompts handed out since
    the start of the run: `seek(position)` on an equal stream gives exactly the same continuation,
    at the cost of one shuffle.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.seek(0)

    @property
    def position(self) -> int:
        """Prompts handed out so far."""
        return self._position

    def seek(self, position: int) -> None:
        """Continue as if `position` prompts had been handed out."""
        if position < 0:
            raise ValueError(f"position {position}: must not be negative")
        self._position = position
        self._order = self._order_of(position // len(self._prompts))

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next `num_prompts` prompts; may cross into the next epoch."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> Prompt:
        place = self._position % len(self._prompts)
        prompt = self._prompts[self._order[place]]
        self._position += 1
        if place + 1 == len(self._prompts):
            self._order = self._order_of(self._position // len(self._prompts))
        return prompt

    def _order_of(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            # A string seed is hashed with SHA-512: the same order on every machine.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
