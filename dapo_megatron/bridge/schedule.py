"""The tensors whose fingerprints each sync compares.

The first sync of a start compares all tensors, and so does every sync of a small model. Between two
full comparisons each sync compares a rotating tenth, so that ten syncs in a row compare every
tensor. All ranks choose the same tensors, because they know the same names and count the same
syncs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import count

from dapo_megatron.protocols import Exchange

SMALL_MODEL = 200_000_000
"""Largest model, in elements, for which every sync compares all fingerprints. They take 12 ms per
million elements on one CPU core."""
NUM_PARTS = 10
"""Parts of the tensors. A sync between two full comparisons compares one of them."""
SYNC_SHARE = 0.05
"""Share of the time of syncs that full comparisons may take."""
STEP_SHARE = 0.005
"""Share of the time of whole steps that they may take, if that is more."""


class FingerprintSchedule:
    """Chooses the tensors of each sync. `next` is collective, the other methods are not."""

    def __init__(
        self, names: Collection[str], num_elements: int, every: int | None, exchange: Exchange
    ) -> None:
        """Take the names of all tensors and `sync.fingerprint_every`."""
        self._names = sorted(names)
        self._every = 1 if every is None and num_elements <= SMALL_MODEL else every
        self._exchange = exchange
        self._syncs = count()
        self._sync_seconds = 0.0  # of the syncs since the last full comparison
        self._full_seconds = 0.0  # that the last full comparison took
        self._full_ended = 0.0

    def next(self) -> frozenset[str]:
        """Return the names of the tensors that the next sync compares."""
        number = next(self._syncs)
        if self._every is not None:
            is_full = number % self._every == 0
        else:
            is_full = self._exchange.broadcast(number == 0 or self._is_affordable(), bool)
        return frozenset(self._names if is_full else self._names[number % NUM_PARTS :: NUM_PARTS])

    def share(self, names: Collection[str]) -> float:
        """Return the share of all tensors that these are."""
        return len(names) / len(self._names)

    def record(self, names: Collection[str], sync_seconds: float, seconds: float) -> None:
        """Record the seconds of a sync without its verification, and of comparing `names`."""
        self._sync_seconds += sync_seconds
        if self.share(names) == 1.0:
            self._sync_seconds, self._full_seconds = 0.0, seconds
            self._full_ended = time.perf_counter()

    def _is_affordable(self) -> bool:
        """Return whether a full comparison fits into its share of the time since the last one."""
        elapsed = time.perf_counter() - self._full_ended
        return self._full_seconds <= max(SYNC_SHARE * self._sync_seconds, STEP_SHARE * elapsed)
