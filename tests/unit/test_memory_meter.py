"""Peak memory per phase: each phase reports its own, not that of another phase."""

from __future__ import annotations

import mmap
import resource

from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster.instruments import GIB, MemoryMeter, highest_use
from dapo_megatron.cluster.ranks import Ranks

MIB = 2**20
LARGE = 200 * MIB
BYTES = st.integers(0, 100)


def use_memory(num_bytes: int) -> None:
    """Use this much memory, then return it to the system."""
    with mmap.mmap(-1, num_bytes) as pages:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            pages[offset] = 1


def test_a_phase_reports_its_own_peak_memory_only() -> None:
    meter = MemoryMeter(Ranks(0, 1, 0))
    with meter.phase("before"):
        use_memory(MIB)
    with meter.phase("large"):
        use_memory(LARGE)
        use_memory(MIB)
    with meter.phase("after"):
        use_memory(MIB)
    with meter.phase("large"):  # the larger of both peaks counts
        use_memory(MIB)
    peaks_bytes = {name: gib * GIB for name, gib in meter.metrics().items()}
    assert peaks_bytes.keys() == {"memory/before_gib", "memory/large_gib", "memory/after_gib"}
    assert peaks_bytes["memory/large_gib"] - peaks_bytes["memory/before_gib"] > LARGE - 20 * MIB
    assert peaks_bytes["memory/large_gib"] - peaks_bytes["memory/after_gib"] > LARGE - 20 * MIB
    assert meter.metrics() == {}  # the next step starts empty


def test_the_peak_of_the_run_is_kept_when_phases_reset_the_counter() -> None:
    """Each phase resets the peak in Linux, also that of getrusage."""
    meter = MemoryMeter(Ranks(0, 1, 0))
    use_memory(LARGE)
    highest = meter.highest_gib()
    with meter.phase("small"):
        pass
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert meter.highest_gib() >= highest
    assert usage < highest * GIB - LARGE / 2


@given(before=BYTES, context=BYTES, grown=BYTES, peak=BYTES, after=BYTES, offloaded=BYTES)
def test_the_estimated_peak_of_a_device_has_tight_bounds(
    before: int, context: int, grown: int, peak: int, after: int, offloaded: int
) -> None:
    """torch reserves `before`, at most `peak` and in the end `after` bytes. It also counts the
    `offloaded` bytes of an engine. The CUDA context grows by `grown` at an unknown time. The
    estimate never exceeds the possible peak, and is exact if the context does not grow."""
    peak = max(before, peak, after)
    used = (context + before, context + grown + after)
    unknown = (context - offloaded, context + grown - offloaded)
    estimate = highest_use(used, unknown, peak + offloaded)
    assert context + peak <= estimate <= context + grown + peak
    if not grown:
        assert estimate == context + peak
    # The engine's memory is reloaded at the end. torch counted it all the time.
    used_after_wake_up = (used[0], used[1] + offloaded)
    estimate = highest_use(
        used_after_wake_up, (unknown[0], unknown[1] + offloaded), peak + offloaded
    )
    assert estimate <= context + grown + max(peak, after + offloaded)
