"""Read the resources of this machine (disk, memory, cores, GPUs). Check them, and the environment
variables.

The checks take a `MachineResources`, so that tests can describe any machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from dapo_megatron.doctor.check_result import Check, Status
from dapo_megatron.doctor.gpus import GpuError, read_gpus

GIB = 2**30


@dataclass(frozen=True)
class MachineResources:
    """Resources available to this process. Sizes are in bytes; `gpus` has one model name per
    device."""

    python: tuple[int, int]
    memory_bytes: int
    cores: int
    has_avx2: bool
    free_bytes: Mapping[str, int]
    """Free space by folder."""
    gpus: tuple[str, ...] = ()
    interfaces: frozenset[str] = field(default_factory=frozenset)
    """Names of the network interfaces."""


def this_machine() -> MachineResources:
    """Read the resources of this machine (Linux)."""
    # vLLM and NCCL pass messages between ranks through /dev/shm; containers often have 64 MB of it.
    folders = {os.getcwd(), tempfile.gettempdir(), "/dev/shm"}
    return MachineResources(
        python=sys.version_info[:2],
        memory_bytes=_memory_bytes(),
        cores=len(os.sched_getaffinity(0)),
        has_avx2=" avx2 " in _read("/proc/cpuinfo").replace("\n", " "),
        free_bytes={f: shutil.disk_usage(f).free for f in sorted(folders) if os.path.isdir(f)},
        gpus=_gpus(),
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _memory_bytes() -> int:
    """Return the available memory in bytes, limited by the cgroups of this process."""
    limits = [int(psutil.virtual_memory().available)]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        root, file = Path("/sys/fs/cgroup"), "memory.max"
        if "memory" in controllers.split(","):  # cgroups v1
            root, file = root / "memory", "memory.limit_in_bytes"
        own = root / group.lstrip("/")
        texts = [_read(folder / file).strip() for folder in (own, *own.parents)]
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)


def _gpus() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs, read from the driver and not from torch."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [line for file in files for line in _read(file).splitlines() if "Model:" in line]
    if models:
        return tuple(line.split(":", 1)[1].strip() for line in models)
    try:
        return tuple(gpu.name for gpu in read_gpus(timeout_seconds=20.0))
    except (GpuError, OSError):
        return ()


def check_machine(machine: MachineResources) -> Iterator[Check]:
    """Check Python, cores, memory and disk against the needs of the quickstart."""
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        remedy = "make clean env PYTHON=python3.11 (or 3.12, 3.13)"
        yield Check("python", Status.FAIL, f"{version}; needs 3.11 to 3.13", remedy)
    elif machine.python > (3, 13):
        remedy = "make clean env PYTHON=python3.13: Megatron-core has no wheel for a newer one"
        yield Check("python", Status.WARN, f"{version} is newer than the tested versions", remedy)
    else:
        yield Check("python", Status.OK, version)

    if machine.has_avx2 or machine.gpus:
        yield Check("processor", Status.OK, f"{machine.cores} cores")
    else:
        remedy = "use another machine; in a virtual machine, pass the host's processor through"
        yield Check("processor", Status.FAIL, "no AVX2, which vLLM needs on a CPU", remedy)
    if machine.cores < 2:
        remedy = "set run.processes=1, policy.tensor_parallel=1 and engine.tensor_parallel=1"
        yield Check("cores", Status.WARN, "1 core, which two ranks would share", remedy)

    remedy = "end other programs, or request more (Slurm: --mem; Docker: --memory)"
    yield _size("memory", machine.memory_bytes, ok=8, least=4, remedy=remedy)
    for folder, free in machine.free_bytes.items():
        if folder == "/dev/shm":
            remedy = "docker run --shm-size=8g (or --ipc=host)"
            yield _size(folder, free, ok=1, least=0.25, remedy=remedy)
        else:
            remedy = f"free space in {folder}, or point TMPDIR or run.directory at another disk"
            yield _size(f"disk {folder}", free, ok=10, least=2, remedy=remedy)


def _size(name: str, size_bytes: int, *, ok: float, least: float, remedy: str) -> Check:
    """Check a size: warn below `ok` GiB, fail below `least` GiB."""
    size = size_bytes / GIB
    if size >= ok:
        return Check(name, Status.OK, f"{size:.1f} GiB available")
    status = Status.WARN if size >= least else Status.FAIL
    return Check(name, status, f"{size:.1f} GiB available, {ok} GiB recommended", remedy)


class VariableRule(NamedTuple):
    """An environment variable that may break a run. `is_harmful` tests its value."""

    variable: str
    is_harmful: Callable[[str, MachineResources], bool]
    status: Status
    reason: str
    remedy: str


def _is_count(value: str, most: float) -> bool:
    return value.isdigit() and 1 <= int(value) <= most


VARIABLE_RULES = (
    VariableRule(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        lambda value, _: value != "0",
        Status.FAIL,
        "runs the engine in a separate process, where it cannot receive new weights",
        "unset it",
    ),
    VariableRule(
        "VLLM_CPU_KVCACHE_SPACE",
        lambda value, machine: not _is_count(value, machine.memory_bytes / GIB / 4),
        Status.WARN,
        "is the number of GiB that each rank uses for its KV cache",
        "unset it, or set an integer of at most a quarter of the memory",
    ),
    VariableRule(
        "OMP_NUM_THREADS",
        lambda value, machine: not _is_count(value, machine.cores),
        Status.WARN,
        "is the number of threads of each rank, and must be at most the number of cores",
        "unset it, or set the number of cores divided by the number of ranks",
    ),
    VariableRule(
        "WORLD_SIZE",
        lambda _value, _machine: True,
        Status.WARN,
        "makes `train` wait for other ranks, as if a launcher had started it",
        "unset RANK LOCAL_RANK WORLD_SIZE, unless torchrun or srun started this command",
    ),
    VariableRule(
        "CUDA_VISIBLE_DEVICES",
        lambda value, machine: bool(machine.gpus) and value in ("", "-1"),
        Status.WARN,
        "hides every GPU of this machine",
        "unset it",
    ),
    VariableRule(
        "CUDA_LAUNCH_BLOCKING",
        lambda value, _: value not in ("", "0"),
        Status.WARN,
        "makes each kernel launch wait until the kernel has ended; only for debugging",
        "unset it",
    ),
    VariableRule(
        "GLOO_SOCKET_IFNAME",
        lambda value, machine: not set(value.split(",")) <= machine.interfaces,
        Status.FAIL,
        "names a network interface that this machine does not have",
        "unset it, or set an interface that `ip -brief link` lists",
    ),
    VariableRule(
        "PYTHONPATH",
        lambda value, _: bool(value),
        Status.WARN,
        "modules in these folders hide installed ones",
        "unset it",
    ),
)


def check_variables(environ: Mapping[str, str], machine: MachineResources) -> Iterator[Check]:
    """Check the environment variables that may break a run. Yield a single ok if none does."""
    checks = [
        Check(rule.variable, rule.status, f"{environ[rule.variable]!r}: {rule.reason}", rule.remedy)
        for rule in VARIABLE_RULES
        if rule.variable in environ and rule.is_harmful(environ[rule.variable], machine)
    ]
    yield from checks or [Check("environment variables", Status.OK, "no harmful values")]
