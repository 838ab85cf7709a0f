"""The last collectives of this rank, from torch's flight recorder.

torch 2.13 records gloo's collectives in every build and NCCL's in CUDA builds, by default
(TORCH_FR_BUFFER_SIZE entries). This module does not import torch: a rank may hang before it did.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_SHOWN = 8
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True, slots=True)
class Flight:
    """What the recorder has."""

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
