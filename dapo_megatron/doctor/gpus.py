"""Read and check the state of a node's GPUs.

nvidia-smi needs no CUDA context and lists the processes of other users. If a query fails because
the driver does not know a field, the query is repeated without that field.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dapo_megatron.doctor.check_result import Check, Status

FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",  # its name before driver 535
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks.current.memory",
    "clocks.max.memory",
    "clocks.applications.graphics",
)
"""Fields of `nvidia-smi --query-gpu` (its --help-query-gpu)."""
REMAPPED = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
PROCESSES = ("gpu_uuid", "pid", "process_name", "used_memory")

IDLE = 0x1
REASONS = {
    0x8: ("slowed down by the hardware", Status.FAIL),
    0x20: ("too hot: slowed down by the driver", Status.WARN),
    0x40: ("too hot: slowed down by the hardware", Status.FAIL),
    0x80: ("slowed down by its power supply", Status.FAIL),
}
"""Bits of clocks_event_reasons (NVML's nvml.h, nvmlClocksEventReasons); a power cap is no fault."""
FREE_MIB = 1024
"""A GPU without a process has less than this in use."""
NEAR = 0.95
"""Share of the highest clock."""


class GpuError(Exception):
    """Failure of nvidia-smi."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Values that its driver does not report are None. Memory in MiB, clocks in MHz."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    uncorrected_errors: int | None
    reasons: int | None
    """Bits of the reasons why the GPU does not run at its highest clock; see REASONS."""
    sm_mhz: int | None
    max_sm_mhz: int | None
    memory_mhz: int | None
    max_memory_mhz: int | None
    application_mhz: int | None
    """Limit of the SM clock that an administrator has set."""
    is_remap_pending: bool
    is_remap_failed: bool
    processes: tuple[str, ...]
    """Pid, name and memory of each process."""


def read_gpus(timeout_seconds: float) -> tuple[Gpu, ...]:
    """Read the GPUs of this node. Without nvidia-smi there are none.

    Raises GpuError if nvidia-smi fails or exceeds the timeout, and kills it. It hangs if a GPU fell
    off the bus.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    rows = _query("gpu", FIELDS, timeout_seconds)
    remapped = {
        row["gpu_uuid"]: row for row in _if_known("remapped-rows", REMAPPED, timeout_seconds)
    }
    processes: dict[str, list[str]] = {}
    for row in _if_known("compute-apps", PROCESSES, timeout_seconds):
        text = f"pid {row.get('pid')} {row.get('process_name')} ({row.get('used_memory')} MiB)"
        processes.setdefault(row.get("gpu_uuid", ""), []).append(text)
    return tuple(
        Gpu(
            index=_number(row, "index") or 0,
            uuid=row.get("uuid", ""),
            name=row.get("name", "?"),
            driver=row.get("driver_version", "?"),
            memory_total_mib=_number(row, "memory.total"),
            memory_used_mib=_number(row, "memory.used"),
            uncorrected_errors=_number(row, "ecc.errors.uncorrected.volatile.total"),
            reasons=_number(row, "clocks_event_reasons.active", "clocks_throttle_reasons.active"),
            sm_mhz=_number(row, "clocks.current.sm"),
            max_sm_mhz=_number(row, "clocks.max.sm"),
            memory_mhz=_number(row, "clocks.current.memory"),
            max_memory_mhz=_number(row, "clocks.max.memory"),
            application_mhz=_number(row, "clocks.applications.graphics"),
            is_remap_pending=_is_set(remapped.get(row.get("uuid", "")), "remapped_rows.pending"),
            is_remap_failed=_is_set(remapped.get(row.get("uuid", "")), "remapped_rows.failure"),
            processes=tuple(processes.get(row.get("uuid", ""), ())),
        )
        for row in rows
    )


def describe(gpus: Sequence[Gpu]) -> str:
    """Format the number of GPUs by name and driver."""
    kinds = Counter(f"{gpu.name}, driver {gpu.driver}" for gpu in gpus)
    return "; ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"


def check_gpus(gpus: Sequence[Gpu], num_tasks: int, *, is_used: bool) -> Iterator[Check]:
    """Check that each task of the node has a healthy, free GPU. `is_used`: torch uses the GPUs."""
    kinds = describe(gpus)
    if len(gpus) < num_tasks and (is_used or gpus):
        remedy = "exclude the node; report `nvidia-smi -L` and the Xid lines of dmesg"
        status = Status.FAIL if is_used else Status.WARN
        yield Check("GPUs", status, f"{kinds}, for {num_tasks} tasks of this node", remedy)
    else:
        yield Check("GPUs", Status.OK, kinds)
    problems = [check for gpu in gpus for check in _check(gpu)]
    yield from problems
    if gpus and not problems:
        used = max(gpu.memory_used_mib or 0 for gpu in gpus)
        total = min(gpu.memory_total_mib or 0 for gpu in gpus)
        text = f"no errors, not throttled, at most {used} of {total} MiB in use"
        yield Check("GPU state", Status.OK, text)


def _check(gpu: Gpu) -> Iterator[Check]:
    name = f"GPU {gpu.index}"
    reset = "exclude the node; the GPU must be reset (nvidia-smi --gpu-reset) by an administrator"
    if gpu.uncorrected_errors:
        text = f"{gpu.uncorrected_errors} uncorrected ECC errors since the last reset"
        yield Check(name, Status.FAIL, text, reset)
    if gpu.is_remap_pending:
        yield Check(name, Status.FAIL, "a bad row of its memory waits for a reset", reset)
    if gpu.is_remap_failed:
        remedy = "exclude the node; the GPU must be replaced"
        yield Check(name, Status.FAIL, "its memory has no spare rows left", remedy)
    for bit, (text, status) in REASONS.items():
        if (gpu.reasons or 0) & bit:
            yield Check(name, status, text, "exclude the node; check its cooling and power")
    yield from _check_clocks(gpu, name)
    if gpu.processes:
        remedy = "end them if they are yours, or exclude the node"
        yield Check(name, Status.FAIL, f"in use by {', '.join(gpu.processes)}", remedy)
    elif (gpu.memory_used_mib or 0) > FREE_MIB:
        text = f"{gpu.memory_used_mib} MiB in use by a process that nvidia-smi does not list"
        yield Check(name, Status.FAIL, text, "exclude the node, or find out who uses it")


def _check_clocks(gpu: Gpu, name: str) -> Iterator[Check]:
    """Check the clocks. The current clocks of an idle GPU are not checked, because it lowers them
    itself."""
    highest = gpu.max_sm_mhz or 0
    if gpu.application_mhz and gpu.application_mhz < NEAR * highest:
        text = f"SM clock limited to {gpu.application_mhz} of {highest} MHz"
        yield Check(name, Status.WARN, text, "nvidia-smi --reset-applications-clocks")
    is_busy = gpu.reasons is not None and not gpu.reasons & IDLE
    for what, now, most in (
        ("SM", gpu.sm_mhz, gpu.max_sm_mhz),
        ("memory", gpu.memory_mhz, gpu.max_memory_mhz),
    ):
        if is_busy and now and most and now < 0.5 * most:
            text = f"{what} clock at {now} of {most} MHz though it is not idle"
            yield Check(name, Status.WARN, text, "see `nvidia-smi -q -d PERFORMANCE,CLOCK`")


# ------------------------------------------------------------------------------- queries


def _if_known(what: str, fields: Sequence[str], timeout_seconds: float) -> list[dict[str, str]]:
    """Return the rows of a query; none if the driver has no such query. Raises GpuError at the
    timeout."""
    try:
        return _query(what, fields, timeout_seconds)
    except _Refused:
        return []


class _Refused(GpuError):
    """nvidia-smi exited with an error."""


def _query(what: str, fields: Sequence[str], timeout_seconds: float) -> list[dict[str, str]]:
    """Return one row per output line of nvidia-smi, with the fields that the driver knows."""
    fields = list(fields)
    while fields:
        options = [f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        code, text = _run(["nvidia-smi", *options], timeout_seconds)
        if code == 0:
            lines = csv.reader(text.splitlines(), skipinitialspace=True)
            return [
                {key: value.strip() for key, value in zip(fields, line, strict=False)}
                for line in lines
            ]
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in fields:
            raise _Refused(f"nvidia-smi: exit code {code}, {' '.join(text.split())[:200]}")
        fields.remove(unknown[1])
    return []


def _run(command: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    """Return exit code and output. Do not wait for a process that cannot be killed."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        text, _ = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        raise GpuError(f"nvidia-smi: no answer in {timeout_seconds:g} s") from None
    return child.returncode, text


def _number(row: dict[str, str], *names: str) -> int | None:
    """Return the first of these fields that is an integer (decimal or 0x), or None."""
    for name in names:
        with suppress(ValueError):
            return int(row.get(name, ""), 0)
    return None


def _is_set(row: dict[str, str] | None, name: str) -> bool:
    """Parse a flag. Drivers report Yes or No, or a count."""
    return row is not None and row.get(name, "").lower() in ("yes", "1", "active")
