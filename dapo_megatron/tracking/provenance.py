"""Provenance of a run: commit of this code, versions of libraries, config hash, machine."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dapo_megatron
from dapo_megatron.cluster.versions import versions
from dapo_megatron.config import Config, FileSource
from dapo_megatron.files import sha256

DIRTY = "-dirty"
"""Suffix of a commit if a tracked file has uncommitted changes."""
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""CPU flags that decide the speed, fastest first."""

SLURM = {
    "slurm.job_id": ("SLURM_JOB_ID",),
    "slurm.restart_count": ("SLURM_RESTART_COUNT",),
    "slurm.node_list": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "slurm.cluster": ("SLURM_CLUSTER_NAME",),
}
"""MLflow tag -> Slurm variables; the first one that is set gives the value."""


def cpu_name() -> str:
    """Return the model of this machine's CPU, with the fastest of INSTRUCTIONS that it has."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    best = [name for name in INSTRUCTIONS if name in flags][:1]
    return ", ".join([fields.get("model name", platform.machine()), *best])


def commit() -> str | None:
    """Return the commit of the checkout this package runs from, with "-dirty" if a tracked file has
    uncommitted changes.

    Return None if git fails, or if the package is not tracked by the repository around it.
    """
    package = Path(dapo_megatron.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(package, "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*")


def facts() -> dict[str, str]:
    """Return the conditions of a measurement: `commit`, `dirty` ("yes" if a tracked file has
    uncommitted changes), `machine`, `cores`, and the versions of Python, torch and the other
    packages."""
    import torch

    described = commit() or "unknown"
    gpus = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return {
        "commit": described.removesuffix(DIRTY),
        "dirty": "yes" if described.endswith(DIRTY) else "no",
        "machine": ", ".join([cpu_name(), *gpus]),
        "cores": str(len(os.sched_getaffinity(0))),
    } | versions()


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of every leaf. List entries are numbered from 0."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree)) or "[]"
    if not isinstance(tree, dict):
        yield prefix, "null" if tree is None else str(tree)
        return
    for key, value in tree.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def run_tags(config: Config, attempt: str) -> dict[str, str]:
    """Return the MLflow tags of a start: commit, versions, host, hashes of the data files, and the
    Slurm job if there is one."""
    tags = {f"version.{name}": version for name, version in versions().items()}
    tags |= {
        "attempt": attempt,
        "host": socket.gethostname(),
        "mlflow.source.name": "dapo_megatron",
    }
    with suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    if described := commit():
        clean = described.removesuffix(DIRTY)
        tags |= {"git.commit": clean, "mlflow.source.git.commit": clean}
        tags["git.dirty"] = str(described != clean).lower()
    for source in (*config.data.train, *config.evaluation.sets):
        if isinstance(source, FileSource) and (path := Path(source.path)).is_file():
            tags[f"data.{source.name}.sha256"] = sha256(path)
    for tag, variables in SLURM.items():
        if value := next(filter(None, map(os.environ.get, variables)), None):
            tags[tag] = value
    return tags


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
