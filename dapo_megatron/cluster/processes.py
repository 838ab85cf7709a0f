"""Environment, memory and termination of this process and its children."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

END_SECONDS = 5.0
"""Time from asking a process to end to killing it. An engine gets as long to answer after the
transfer of weights to it has failed."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_PROCESS = Path("/proc/self")
MAX_FILES = 65536
"""Open files and sockets that a process may have. 128 ranks come near the usual 1,024."""
STARTED_ON = os.sched_getaffinity(0)
"""CPUs of this process before `bind_near`."""


def helper_environment(names: Collection[str] | None = None) -> dict[str, str]:
    """Return the environment of a helper process: this process's sys.path, no GPU, one thread.

    It inherits only the variables in `names`, or all if `names` is None.
    """
    inherited = os.environ.keys() if names is None else os.environ.keys() & set(names)
    return {name: os.environ[name] for name in inherited} | {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def raise_file_limit() -> None:
    """Raise this process's limit of open files to MAX_FILES, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def use_expandable_segments(is_on: bool) -> None:
    """Let torch's GPU memory grow by pages, or not, from now on: rows of many lengths leave gaps in
    segments of fixed size. Do nothing if the user has configured torch's allocator."""
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        import torch

        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_on}")


def visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; without it, an empty list."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def bind_near(gpus: Sequence[str]) -> None:
    """Bind this process, and the memory that it will allocate, to those of its CPUs that are near
    these GPUs, named as in CUDA_VISIBLE_DEVICES."""
    import pynvml

    with suppress(pynvml.NVMLError):  # in some virtual machines, and for a MIG device
        pynvml.nvmlInit()
        if near := set[int]().union(*map(_cpus_near, gpus)) & STARTED_ON:
            os.sched_setaffinity(0, near)


def _cpus_near(gpu: str) -> set[int]:
    import pynvml

    is_number = gpu.isdecimal()
    find = pynvml.nvmlDeviceGetHandleByIndex if is_number else pynvml.nvmlDeviceGetHandleByUUID
    num_words = max(STARTED_ON) // 64 + 1
    words = pynvml.nvmlDeviceGetCpuAffinity(find(int(gpu) if is_number else gpu), num_words)
    return {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies. Has an effect on Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that no daemon can escape. Has an effect
    on Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ignore_stop_signals() -> None:
    """Ignore Ctrl-C and the signals that Slurm sends to every process of a job: the parent handles
    them, and ends this helper process when it no longer needs it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def obey_parent() -> None:
    """Make this helper process end only when its parent wants it to, and with it."""
    ignore_stop_signals()
    die_with_parent()
    adopt_orphans()


def limit_memory(mebibytes: int) -> None:
    """Limit the address space of this process, which runs untrusted code."""
    with suppress(OSError):  # the OOM killer takes it before the training
        (_PROCESS / "oom_score_adj").write_text("1000")
    num_bytes = mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def resident_bytes(field: str = "VmHWM") -> int:
    """Return the resident memory of this process: VmHWM is its peak, VmRSS its current size.
    Raises OSError if there is no /proc."""
    lines = (_PROCESS / "status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Reset VmHWM to the current size. Raises OSError if that is not allowed."""
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended. It is not reaped, so that its number is not used again
    before its process group is killed."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another process waits for it (tests/helpers/warm.py)
        return process.poll() is not None


def kill_descendants(root: int) -> None:
    """Kill all descendants of process `root`, which adopts orphans, but not `root` itself.

    All are stopped before the first is killed, because a stopped process cannot fork.
    """
    stopped: set[int] = set()
    while running := _descendants(root) - stopped:
        _signal(running, signal.SIGSTOP)
        stopped |= running
    _signal(stopped, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a child that leads a process group and adopts orphans, and everything that it started.
    It must not be reaped yet, so that its number is not another process's."""
    if sys.platform == "linux":
        os.kill(leader, signal.SIGSTOP)  # so that it starts no new process meanwhile
        kill_descendants(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    os.kill(leader, signal.SIGKILL)  # it may not lead its group yet


def remove_folder(folder: str) -> None:
    """Remove a folder of temporary files, even if an adversary nested it too deep for Python."""
    try:
        os.rmdir(folder)
    except OSError:
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _signal(process_ids: set[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, number)


def _descendants(root: int) -> set[int]:
    # One read per process. psutil takes twice as long, and this races a program that forks.
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    descendants: set[int] = set()
    generation = [root]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, ())]
        descendants.update(generation)
    return descendants
