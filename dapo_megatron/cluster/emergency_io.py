"""Diagnostics of a hanging rank: stacks, last collectives, and writes that cannot block its exit.

The log or the disk may be the cause of the hang. So all writes run in a separate thread with a
timeout. They never hold the GIL while writing, as faulthandler does, because then no thread could
end the process.

torch 2.13 records the last TORCH_FR_BUFFER_SIZE collectives by default, gloo's in every build and
NCCL's in CUDA builds. This module does not import torch, because a rank may hang before it has
imported torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dapo_megatron.text import visible

Result = TypeVar("Result")

NUM_SHOWN = 8
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def run_with_timeout(seconds: float, work: Callable[[], Result]) -> Result | None:
    """Run `work` in a thread. Return its result, or None if it fails or takes longer.

    If it fails, Python prints its traceback.
    """
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def write_unbuffered(descriptor: int, text: str) -> None:
    """Write a line to a file descriptor. May block.

    Does not use Python's buffers, because the thread that hangs may hold their locks.
    """
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{visible(text)}\n".encode(errors="replace"))


def stacks() -> str:
    """Return the stacks of all threads in faulthandler's format, written to memory only."""
    try:
        with open(os.memfd_create("stacks"), "w+", errors="replace") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # too many open files
        return f"no stacks: {error}"


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """This rank's entries in torch's flight recorder."""

    text: str = "flight recorder: nothing"
    counts: Mapping[str, int] = field(default_factory=dict)
    """Sequence number of the last collective, by process group. torch gives a group the same name
    on all of its ranks."""


def last_collectives() -> FlightRecord:
    """Return the last collectives from torch's flight recorder. May block if CUDA hangs."""
    entries = sorted(_entries(), key=lambda entry: int(entry["time_created_ns"]))
    counts: dict[str, int] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            counts[_group(entry)] = int(entry["collective_seq_id"])
    if not entries:
        return FlightRecord()
    lines = [_line(entry) for entry in entries[-NUM_SHOWN:]]
    return FlightRecord("\n  ".join([f"flight recorder, last {len(lines)}:", *lines]), counts)


def _entries() -> Iterator[dict[str, Any]]:
    distributed = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    seen = set()
    for name in _DUMPS:
        dump = getattr(distributed, name, None)
        for entry in json.loads(dump()).get("entries", ()) if dump else ():
            # Newer versions may give the same entries under both names.
            key = (entry["profiling_name"], entry["record_id"], entry["time_created_ns"])
            if key not in seen:
                seen.add(key)
                yield entry


def _group(entry: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    has_description = description not in ("", "undefined", name)
    return f"{name} ({description})" if has_description else name


def _line(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    shapes = " ".join("x".join(map(str, shape)) or "1" for shape in entry["input_sizes"])
    seconds = time.time() - int(entry["time_created_ns"]) / 1e9
    return (
        f"{entry['profiling_name']} {number} in group {_group(entry)}, {shapes}, {seconds:.1f} s "
        f"ago: {'finished' if entry['retired'] else 'not finished'} ({entry['state']})"
    )
