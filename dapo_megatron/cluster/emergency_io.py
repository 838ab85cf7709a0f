"""What a rank reports before it ends by itself, wherever it hangs.

Its log or its disk may be what hangs, so nothing is written but in a thread that is waited for no
longer than a given time, and never by a thread that holds the interpreter while it writes (as
faulthandler does): none other could then end the process.

torch 2.13 records gloo's collectives in every build and NCCL's in CUDA builds, by default
(TORCH_FR_BUFFER_SIZE entries). torch is not imported here: a rank may hang before it did.
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

Result = TypeVar("Result")

NUM_SHOWN = 8
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def within(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What `work` gives; None if it takes longer or fails (Python then prints its traceback)."""
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else None


def say(file: int, text: str) -> None:
    """Past Python's buffers: the thread that hangs may hold their locks. May block."""
    with contextlib.suppress(OSError):
        os.write(file, f"{text}\n".encode(errors="replace"))


def stacks() -> str:
    """Of all threads, as faulthandler writes them: here into memory."""
    try:
        with open(os.memfd_create("stacks"), "w+", errors="replace") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # too many open files
        return f"no stacks: {error}"


@dataclass(frozen=True, slots=True)
class Flight:
    """What torch's flight recorder has of this rank."""

    text: str = "flight recorder: nothing"
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of the last collective by process group; torch gives a group the same name on all of
    its ranks."""


def last_collectives() -> Flight:
    """The last collectives, torch's own view. May block where CUDA does."""
    entries = sorted(_entries(), key=lambda entry: int(entry["time_created_ns"]))
    counts: dict[str, int] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            counts[_group(entry)] = int(entry["collective_seq_id"])
    if not entries:
        return Flight()
    lines = [_line(entry) for entry in entries[-NUM_SHOWN:]]
    return Flight("\n  ".join([f"flight recorder, last {len(lines)}:", *lines]), counts)


def _entries() -> Iterator[dict[str, Any]]:
    distributed = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    seen = set()
    for name in _DUMPS:
        dump = getattr(distributed, name, None)
        for entry in json.loads(dump())["entries"] if dump else ():
            # Newer versions may give the same entries under both names.
            key = (entry["profiling_name"], entry["record_id"], entry["time_created_ns"])
            if key not in seen:
                seen.add(key)
                yield entry


def _group(entry: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    plain = description in ("", "undefined", name)
    return name if plain else f"{name} ({description})"


def _line(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    shapes = " ".join("x".join(map(str, shape)) or "1" for shape in entry["input_sizes"])
    seconds = time.time() - int(entry["time_created_ns"]) / 1e9
    return (
        f"{entry['profiling_name']} {number} in group {_group(entry)}, {shapes}, {seconds:.1f} s "
        f"ago: {'finished' if entry['retired'] else 'not finished'} ({entry['state']})"
    )
