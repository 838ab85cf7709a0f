"""Each phase is given the memory it took, and not that of another."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster import processes
from dapo_megatron.cluster.instruments import GIB, MemoryMeter, ProcessGauge, highest_use
from dapo_megatron.cluster.ranks import Ranks

MIB = 2**20
LARGE = 200 * MIB
BYTES = st.integers(0, 100)


def take(num_bytes: int) -> None:
    """Memory that is used, and given back to the system."""
    with mmap.mmap(-1, num_bytes) as pages:
        for place in range(0, num_bytes, mmap.PAGESIZE):
            pages[place] = 1


def test_a_phase_shows_what_it_took_and_the_next_does_not() -> None:
    meter = MemoryMeter(Ranks(0, 1, 0))
    with meter.phase("before"):
        take(MIB)
    with meter.phase("large"):
        take(LARGE)
        take(MIB)
    with meter.phase("after"):
        take(MIB)
    with meter.phase("large"):  # the larger of both counts
        take(MIB)
    seen = {name: gib * GIB for name, gib in meter.metrics().items()}
    assert seen.keys() == {"memory/before_gib", "memory/large_gib", "memory/after_gib"}
    assert seen["memory/large_gib"] - seen["memory/before_gib"] > LARGE - 20 * MIB
    assert seen["memory/large_gib"] - seen["memory/after_gib"] > LARGE - 20 * MIB
    assert meter.metrics() == {}  # of the next step


def test_the_most_of_a_run_outlives_the_phases() -> None:
    """Linux forgets it with each phase, for getrusage too."""
    meter = MemoryMeter(Ranks(0, 1, 0))
    take(LARGE)
    highest = meter.highest_gib()
    with meter.phase("small"):
        pass
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert meter.highest_gib() >= highest
    assert usage < highest * GIB - LARGE / 2


class Two(Ranks):
    """The other rank took twice as much of one phase, and less of the other."""

    def all_gather(self, value: Any, of: object) -> list[Any]:
        factors = {"memory/update_gib": 2.0, "memory/sync_gib": 0.5}
        return [value, {name: factors[name] * gib for name, gib in value.items()}]


def test_the_rank_that_takes_most_counts() -> None:
    meter = MemoryMeter(Two(0, 2, 0))
    for phase in ("update", "sync"):
        with meter.phase(phase):
            pass
    peaks = dict(meter._peaks)
    assert meter.metrics() == {
        "memory/update_gib": 2 * peaks["memory/update_gib"],
        "memory/sync_gib": peaks["memory/sync_gib"],
    }


def test_without_linuxs_maximum_it_is_the_processs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_PROCESS", tmp_path / "nowhere")
    gauge = ProcessGauge()
    gauge.begin()
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert gauge.peaks()[""] == pytest.approx(usage, rel=0.1)


@given(before=BYTES, context=BYTES, grown=BYTES, peak=BYTES, after=BYTES, asleep=BYTES)
def test_a_devices_use_is_never_overstated_and_exact_while_an_engine_stays_as_it_is(
    before: int, context: int, grown: int, peak: int, after: int, asleep: int
) -> None:
    """torch reserves `before`, at most `peak` and in the end `after` bytes, and counts `asleep`
    bytes of an engine that are gone; the context grows somewhere in between."""
    peak = max(before, peak, after)
    used = (context + before, context + grown + after)
    unknown = (context - asleep, context + grown - asleep)
    found = highest_use(used, unknown, peak + asleep)
    assert context + peak <= found <= context + grown + peak
    if not grown:
        assert found == context + peak
    # The engine's memory comes back at the end: torch always counted it.
    woken = (used[0], used[1] + asleep)
    found = highest_use(woken, (unknown[0], unknown[1] + asleep), peak + asleep)
    assert found <= context + grown + max(peak, after + asleep)


def test_peak_memory_is_of_this_process() -> None:
    assert 10 * 2**20 < processes.resident_bytes() < 2**40
