"""Test what tools/check_language.py refuses, and that the package, tools, slurm and tests pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.configs import REPOSITORY


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "tools" / "check_language.py", *paths]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('def f():\n    """Of a rank."""\n', "file.py:2: begins with a fragment: Of a rank."),
        ("for one in range(3):\n    pass\n", "file.py:1: does not say what it holds: one"),
        ("def f(found):\n    pass\n", "file.py:1: does not say what it holds: found"),
    ],
)
def test_a_fragment_and_a_vague_name_are_refused(tmp_path: Path, code: str, problem: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(code)
    for path in (file, tmp_path):
        done = check(path)
        assert done.returncode == 1
        assert problem in done.stdout


@pytest.mark.parametrize("folder", ["dapo_megatron", "tools", "slurm", "tests"])
def test_the_code_passes(folder: str) -> None:
    done = check(REPOSITORY / folder)
    assert done.returncode == 0, done.stdout


def test_make_lint_checks_the_same_folders() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert "tools/check_language.py dapo_megatron tools slurm tests\n" in makefile
