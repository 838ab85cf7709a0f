"""Test the installed H100 stack (`make test-gpu-stack`): versions as locked, and compatible.

No GPU is needed. In the CPU environment these tests are skipped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from dapo_megatron.doctor.check_result import Status
from dapo_megatron.doctor.env import check_packages, installed_packages

ROOT = Path(__file__).resolve().parents[2]

if torch.version.cuda is None:
    pytest.skip("not the H100 stack: torch is a CPU build", allow_module_level=True)


def locked() -> dict[str, str]:
    text = (ROOT / "requirements.txt").read_text()
    return dict(re.findall(r"^([a-z0-9][^=\s]*)==(\S+)", text, flags=re.MULTILINE))


def test_every_locked_package_is_installed_in_its_version() -> None:
    wrong = {}
    for name, wanted in locked().items():
        try:
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            installed = "not installed"
        if installed != wanted:
            wrong[name] = (installed, wanted)
    assert wrong == {}


def test_all_extensions_import_in_one_process() -> None:
    child = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_extensions.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "import together" in child.stdout


def test_nvcc_has_the_cuda_version_of_torch() -> None:
    code = "import nvidia; print(list(nvidia.__path__)[0])"
    packages = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    nvcc = Path(packages.strip()) / "cu13" / "bin" / "nvcc"
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"release {torch.version.cuda}," in output


def test_doctor_accepts_the_packages() -> None:
    checks = check_packages(installed_packages(), "gpu")
    assert [check for check in checks if check.status is not Status.OK] == []


def test_doctor_env_fails_only_for_a_missing_gpu(tmp_path: Path) -> None:
    """The check `accelerator` may fail, because there may be no GPU."""
    file = tmp_path / "env.json"
    command = [sys.executable, "-m", "dapo_megatron", "doctor", "env", "--json", str(file)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert file.is_file(), child.stdout + child.stderr
    failed = {
        check["name"]: check["finding"]
        for check in json.loads(file.read_text())["checks"]
        if check["status"] == "fail" and check["name"] != "accelerator"
    }
    assert failed == {}
