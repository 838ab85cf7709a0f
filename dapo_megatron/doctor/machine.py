"""Checks of one machine, for `doctor env` and `doctor nodes`: disks, GPUs, C compiler."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dapo_megatron.doctor.check_result import Check, Status

EXCLUDE = "exclude the node; report it to the administrators"
REMEDIES = {"/dev/shm": "remove files that ended runs left there; docker run --shm-size=8g"}
GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
)
"""Fields of `nvidia-smi --query-gpu`, of driver 535 and newer (its --help-query-gpu)."""
SLOWED_DOWN = 0x8 | 0x40 | 0x80
"""Bits of clocks_event_reasons (NVML's nvml.h): by the hardware, its heat, or its power supply."""
FREE_MIB = 1024
"""A GPU without a process has less than this in use."""
TIMED_OUT = 124
"""Exit code of `timeout`."""


def run_command(words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Return exit code and output of a command. `timeout` ends it with all its children."""
    done = subprocess.run(
        ["timeout", "--kill-after=5", str(seconds), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == TIMED_OUT:
        return TIMED_OUT, f"no answer in {seconds:g} s"
    return done.returncode, done.stdout.strip()


def check_space(folder: Path, least_gib: float, name: str = "") -> Check:
    """Check that files can be written into a folder, and that its disk has space."""
    name = name or str(folder)
    remedy = REMEDIES.get(name, "free space, or set another folder (run.directory, TMPDIR)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free_gib = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        return Check(name, Status.FAIL, f"cannot be written: {error}", remedy)
    if free_gib >= least_gib:
        return Check(name, Status.OK, f"{free_gib:.1f} GiB free in {folder}")
    text = f"{free_gib:.2f} GiB free in {folder}, {least_gib:g} GiB are required"
    return Check(name, Status.FAIL, text, remedy)


def check_gpus(num_tasks: int, seconds: float) -> Iterator[Check]:
    """Check by nvidia-smi that each of the tasks has a healthy, free GPU. A machine without
    nvidia-smi has no GPUs, and none are required."""
    if shutil.which("nvidia-smi") is None:
        yield Check("GPUs", Status.OK, "no nvidia-smi")
        return
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    code, output = run_command(["nvidia-smi", query, "--format=csv,noheader,nounits"], seconds)
    if code:  # it hangs or fails with a GPU that fell off the bus
        yield Check("GPUs", Status.FAIL, f"nvidia-smi: exit code {code}: {output[-300:]}", EXCLUDE)
        return
    rows = list(csv.reader(output.splitlines(), skipinitialspace=True))
    kinds = Counter(f"{row[0]}, driver {row[1]}" for row in rows)
    text = "; ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items())) or "none"
    if len(rows) < num_tasks:
        remedy = f"{num_tasks} tasks run here: exclude the node, and see `dmesg` for Xid lines"
        yield Check("GPUs", Status.FAIL, text, remedy)
    else:
        yield Check("GPUs", Status.OK, text)
    for index, row in enumerate(rows):
        used_mib, errors, reasons = map(_number, row[2:])
        faults = {
            f"{errors} uncorrected ECC errors: it must be reset": errors,
            "slowed down by its heat, power supply or hardware": reasons & SLOWED_DOWN,
            f"{used_mib} MiB are in use; nvidia-smi lists the processes": used_mib > FREE_MIB,
        }
        for fault, is_present in faults.items():
            if is_present:
                yield Check(f"GPU {index}", Status.FAIL, fault, EXCLUDE)


def _number(text: str) -> int:
    """Return an integer of nvidia-smi, decimal or 0x; 0 if the GPU does not report it."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def check_compiler() -> Check:
    """Check that a C compiler finds the headers of Python and C. Triton builds launchers for its
    kernels with it, at run time and on every node with GPUs; it does not look for `cc`."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    remedy = "install gcc and python3-dev (dnf: gcc, python3-devel), or a Python of uv; or set CC"
    if compiler is None:
        return Check("C compiler", Status.FAIL, "no gcc, no clang", remedy)
    # Triton uses this scheme, too: Debian's own scheme names a folder without the headers.
    include = sysconfig.get_path("include", "posix_prefix")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "module.c")
        source.write_text("#include <Python.h>\n", encoding="utf-8")
        words = ["-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{source}.so"]
        code, output = run_command([compiler, *words], 60.0)
    if code:
        finding = f"{compiler} cannot compile a module of Python: {output[-300:]}"
        return Check("C compiler", Status.FAIL, finding, remedy)
    return Check("C compiler", Status.OK, f"{compiler}, with {include}/Python.h")
