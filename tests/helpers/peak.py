"""The most memory that a piece of code held at once beyond what was there before: exact on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Peak:
    """Filled when its `measure_peak` ends."""

    num_bytes: int = 0
    kept_bytes: int = 0
    """What of it was still there at the end."""


@contextmanager
def measure_peak() -> Iterator[Peak]:
    """Every allocation and release that torch's CPU allocator makes inside, as its profiler sees
    them: temporaries of kernels included, oneDNN's own scratch memory not."""
    peak = Peak()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        yield peak
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        peak.kept_bytes += event.nbytes()
        peak.num_bytes = max(peak.num_bytes, peak.kept_bytes)
