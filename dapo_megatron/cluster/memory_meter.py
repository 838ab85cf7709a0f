"""The most memory that each phase of a step takes, of the rank that takes most.

On a GPU that is memory of the device in use by anybody. torch's own counts are not it: they go on
counting what an engine asleep has given up (vLLM's pools are torch's, and unmapped behind its
back), and do not see CUDA itself, NCCL and graphs. The device's figure has no maximum that could be
read. So a phase is given the largest of three: the device's use at its begin, at its end, and the
most that torch had reserved in it, plus what torch did not know of (or wrongly thought to have), at
the begin or the end, whichever is less. Where an engine wakes up in the middle this may be too low.

On CPU it is the resident memory of the process, whose maximum Linux keeps and resets.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch

from dapo_megatron.protocols import Exchange

GIB = 2**30
_PROCESS = Path("/proc/self")


class Gauge(Protocol):
    """What is measured, between two moments."""

    def begin(self) -> None: ...

    def peaks(self) -> dict[str, float]:
        """Since `begin`, in bytes: "" for all, other names for parts."""
        ...


class MemoryMeter:
    """Memory of one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._process = ProcessGauge()
        self._gauge: Gauge = DeviceGauge() if torch.cuda.is_available() else self._process
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        """Forget the phases so far."""
        self._peaks = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is inside; more of the same name is one phase."""
        self._gauge.begin()
        yield
        for part, num_bytes in self._gauge.peaks().items():
            metric = f"memory/{name}_{part}gib"
            self._peaks[metric] = max(self._peaks.get(metric, 0.0), num_bytes / GIB)

    def metrics(self) -> dict[str, float]:
        """memory/<phase>_gib, on a GPU also memory/<phase>_torch_gib, of the phases since the last
        call. Collective."""
        everyone = self._exchange.all_gather(self._peaks, dict[str, float])
        self._peaks = {}
        return {name: max(one.get(name, 0.0) for one in everyone) for name in everyone[0]}

    def highest_gib(self) -> float:
        """Largest resident memory of this process so far."""
        return self._process.highest() / GIB


class ProcessGauge:
    """Resident memory of this process. Where Linux's maximum cannot be reset, or read, all phases
    have that of the process so far."""

    def __init__(self) -> None:
        self._highest = 0

    def begin(self) -> None:
        """Forget the maximum."""
        self._highest = self.highest()
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5", encoding="ascii")

    def peaks(self) -> dict[str, float]:
        """See Gauge."""
        return {"": float(_peak_bytes())}

    def highest(self) -> int:
        """In bytes, whatever was forgotten. (getrusage forgets with it.)"""
        return max(self._highest, _peak_bytes())


def _peak_bytes() -> int:
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceGauge:
    """Memory of this rank's GPU. `torch_`: what tensors had allocated, as torch counts it."""

    def __init__(self) -> None:
        self._used = self._unknown = 0

    def begin(self) -> None:
        """Forget torch's maxima."""
        torch.cuda.reset_peak_memory_stats()
        self._used, self._unknown = _used()

    def peaks(self) -> dict[str, float]:
        """See Gauge."""
        used, unknown = _used()
        reserved = torch.cuda.max_memory_reserved()
        return {
            "": float(highest_use((self._used, used), (self._unknown, unknown), reserved)),
            "torch_": float(torch.cuda.max_memory_allocated()),
        }


def _used() -> tuple[int, int]:
    """Bytes of the device in use; how many more that is than torch has reserved."""
    free, total = torch.cuda.mem_get_info()
    return total - free, total - free - torch.cuda.memory_reserved()


def highest_use(used: tuple[int, int], unknown: tuple[int, int], reserved: int) -> int:
    """The most of a device that is known to have been in use in a phase: `used` at its begin and
    its end, `unknown` of it to torch (negative: torch counts what is gone), and the most that was
    `reserved` by torch in between."""
    return max(*used, reserved + min(unknown))
