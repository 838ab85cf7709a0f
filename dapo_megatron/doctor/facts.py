"""What figures are worth nothing without: commit, machine, versions."""

from __future__ import annotations

import os

import torch

from dapo_megatron.tracking.provenance import commit, cpu_name, versions

DIRTY = "-dirty"


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
    gpus = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([cpu_name(), *gpus])
