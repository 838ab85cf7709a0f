"""Tools of all benchmarks: seconds and peak memory of a block, a table, and one line of JSON.

Every benchmark prints a table for people. Its last line is a JSON object with the same figures and
the conditions of the measurement: commit, machine, versions.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.tracking.provenance import facts

MB, MIB, GIB = 10**6, 2**20, 2**30


class Meter:
    """Seconds, CPU seconds and memory of a block. On a GPU it waits for the kernels of the block.

        with Meter() as meter: work()
        meter.seconds, meter.cpu_seconds, meter.peak_bytes

    `peak_bytes` is what the block had at its peak in addition to the memory before it: tensors on a
    GPU, or resident memory of the process.
    """

    seconds = cpu_seconds = 0.0
    peak_bytes = 0

    def __enter__(self) -> Meter:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            # Return freed memory to the system, so that it is not counted as used before.
            ctypes.CDLL(None).malloc_trim(0)
            forget_peak()
            self._before = resident_bytes("VmRSS")
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = time.process_time() - self._cpu_started
        peak = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
        self.peak_bytes = peak - self._before


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row per mapping and a column per key. None is an empty cell."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    # Wider than many terminals, because truncated figures are useless.
    Console(soft_wrap=True, width=200).print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def finish(bench: str, **figures: Any) -> None:
    """Print the last line: conditions and figures as JSON."""
    print(json.dumps({"bench": bench, **facts(), **figures}))
