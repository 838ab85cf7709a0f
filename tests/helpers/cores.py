"""Measure times without the time that a thread waits for a core on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def waited_seconds() -> float:
    """Return the total seconds that this thread was ready to run but waited for a core. Return 0
    where the kernel does not count them."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


@contextmanager
def own_seconds(measured: list[float]) -> Iterator[None]:
    """Append to `measured` the seconds of the block, without those spent waiting for a core."""
    waited, start = waited_seconds(), time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        measured.append(seconds - (waited_seconds() - waited))
