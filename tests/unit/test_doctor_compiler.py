"""Triton compiles a launcher at run time, so a node with GPUs needs a C compiler and Python.h."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_megatron.doctor import node
from dapo_megatron.doctor.check_result import Check, Status
from dapo_megatron.doctor.compiler import NAME, check_compiler, find_compiler
from dapo_megatron.doctor.node import check_node
from tests.helpers.configs import tiny_config

ERROR = "module.c:1:10: fatal error: stdio.h: No such file or directory"


def program(folder: Path, name: str, script: str = "exit 0") -> str:
    """Write an executable shell script and return its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def check(folder: Path, **environ: str) -> Check:
    """Check with only the programs of `folder` on PATH, and its Python.h."""
    return check_compiler(30.0, {"PATH": str(folder), **environ}, include=str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Python.h").touch()
    return tmp_path


def test_compilers_are_tried_in_the_order_of_triton(folder: Path) -> None:
    path = {"PATH": str(folder)}
    program(folder, "cc")
    assert find_compiler(path) is None  # Triton does not look for cc
    clang = program(folder, "clang")
    assert find_compiler(path) == clang
    gcc = program(folder, "gcc")
    assert find_compiler(path) == gcc
    assert find_compiler({**path, "CC": clang}) == clang
    assert find_compiler({**path, "CC": "icx"}) is None  # Triton does not fall back to gcc


def test_a_compiler_and_the_header_are_enough(folder: Path) -> None:
    # The script reads the source, as a compiler does.
    gcc = program(folder, "gcc", 'case "$*" in *-shared*module.c*) exit 0;; esac; exit 1')
    result = check(folder)
    assert result.status is Status.OK
    assert result.finding == f"{gcc}, with {folder}/Python.h"


def test_a_missing_compiler_is_named_with_its_packages(folder: Path) -> None:
    result = check(folder)
    assert result.status is Status.FAIL
    assert result.finding == "no gcc, no clang"
    assert "build-essential" in result.remedy
    assert "CC=icx is not a program" in check(folder, CC="icx").finding


def test_a_missing_header_is_named_with_its_folder_and_package(folder: Path) -> None:
    program(folder, "gcc")
    (folder / "Python.h").unlink()
    result = check(folder)
    assert result.status is Status.FAIL
    assert f"no Python.h in {folder}" in result.finding
    assert "python3-dev" in result.remedy


def test_a_compiler_without_the_c_library_is_reported_with_its_error(folder: Path) -> None:
    program(folder, "gcc", f'echo "In file included from" >&2; echo "{ERROR}" >&2; exit 1')
    result = check(folder)
    assert result.status is Status.FAIL
    assert result.finding.endswith(ERROR)


def test_a_compiler_that_hangs_is_a_failed_check(folder: Path) -> None:
    program(folder, "gcc", "exec /bin/sleep 60")
    result = check_compiler(0.2, {"PATH": str(folder)}, include=str(folder))
    assert result.status is Status.FAIL
    assert "no answer in 0.2 s" in result.finding


@pytest.mark.parametrize("is_used", [True, False])
def test_a_node_needs_a_compiler_only_for_gpus(
    is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(node, "_gpus", lambda *_, **__: [])
    state = check_node(tiny_config(run__directory=tmp_path), 1, is_used=is_used)
    statuses = [check.status for check in state.checks if check.name == NAME]
    assert statuses == ([Status.FAIL] if is_used else [])
