"""What figures are worth nothing without: commit, machine, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from dapo_megatron.tracking.provenance import commit, versions

DIRTY = "-dirty"
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # best first: they decide the speed


def facts() -> dict[str, str]:
    """`commit`, `dirty` ("yes" if a tracked file differs from it), `machine`, `cores`, and the
    version of python, torch and the other parts."""
    found = commit() or "unknown"
    return {
        "commit": found.removesuffix(DIRTY),
        "dirty": "yes" if found.endswith(DIRTY) else "no",
        "machine": _machine(),
        "cores": str(len(os.sched_getaffinity(0))),
    } | versions()


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    best = [name for name in INSTRUCTIONS if name in flags][:1]
    parts = [fields.get("model name", platform.machine()), *best]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
