"""tools/gpu_check.py on a machine without a GPU: its output and plan, and checks with tiny shapes
where their code runs on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

import gpu_check
from gpu_checks.catalog import BY_NAME, CHECKS

NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def tool(*words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    return run("tools/gpu_check.py", *words, environment=NO_GPU, timeout=timeout)


def last_line(completed: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return line


def test_without_a_gpu_it_lists_the_skipped_checks() -> None:
    completed = tool()
    assert completed.returncode == 0, completed.stderr
    assert "No NVIDIA GPU here" in completed.stderr
    line = last_line(completed)
    assert line["gpu"] is None and line["torch"]
    assert [entry["check"] for entry in line["checks"]] == [check.name for check in CHECKS]
    for entry in line["checks"]:
        assert entry["verdict"] == "skipped"
        assert entry["reason"].startswith("needs an NVIDIA GPU with")
        assert entry["check"] in completed.stderr
    assert "transformer_engine" in " ".join(entry["reason"] for entry in line["checks"])


def test_every_entry_of_the_catalog_can_be_imported() -> None:
    assert len(BY_NAME) == len(CHECKS)
    for check in CHECKS:
        assert callable(check.run())


def test_a_check_that_crashes_or_hangs_fails_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, sys, time\n"
        "name, figures = sys.argv[2], sys.argv[4]\n"
        "open(figures, 'a').write(json.dumps({'name': 'a', 'value': 1.0}) + '\\n')\n"
        "print('something went wrong', flush=True)\n"
        "os.abort() if name == 'bf16' else time.sleep(600)\n"
    )

    class PatientPopen(subprocess.Popen[bytes]):
        """Process whose time limit starts when it has written its figures."""

        def wait(self, timeout: float | None = None) -> int:
            deadline = time.monotonic() + 60.0
            while not (tmp_path / "te.jsonl").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_check, "__file__", str(child))
    crashed = gpu_check.run_check(BY_NAME["bf16"], tmp_path, [], 60.0)
    assert (crashed.verdict, [figure.name for figure in crashed.figures]) == ("failed", ["a"])
    assert "something went wrong" in crashed.reason
    monkeypatch.setattr(gpu_check.subprocess, "Popen", PatientPopen)
    hung = gpu_check.run_check(BY_NAME["te"], tmp_path, [], 1.0)
    assert (hung.verdict, len(hung.figures)) == ("failed", 1)
    assert hung.reason == "not done after 1 s" and hung.seconds < 120.0
    cut = gpu_check.run_check(BY_NAME["te"], tmp_path, [], 60.0, left=1.0)
    assert (cut.verdict, len(cut.figures)) == ("skipped", 1)
    assert cut.reason == "not done after 1 s, the end of --minutes"


def run_tiny(tmp_path: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Run checks on CPU with tiny shapes. Return the result of each, none of them failed."""
    only = [word for name in names for word in ("--only", name)]
    completed = tool(
        *only, "--tiny", "--minutes", "30", "--workspace", str(tmp_path), timeout=1800.0
    )
    by_name = {entry["check"]: entry for entry in last_line(completed)["checks"]}
    assert all(entry["verdict"] != "failed" for entry in by_name.values()), by_name
    assert completed.returncode == 0
    return by_name


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", [check.name for check in CHECKS if check.on_cpu])
def test_every_cpu_check_runs_with_tiny_shapes(name: str, tmp_path: Path) -> None:
    entry = run_tiny(tmp_path, name)[name]
    assert entry["figures"] and entry["verdict"] == "ok", entry


def test_the_timed_updates_fit_one_gpu(tmp_path: Path) -> None:
    from gpu_checks.rig import GIB, Setting, make_config
    from gpu_checks.shapes import SHAPES
    from gpu_checks.speed import LAYERS_18, MANY

    from dapo_megatron.plan.estimate import NodeSpec, estimate_memory

    (tmp_path / "config.json").write_text(json.dumps(SHAPES[LAYERS_18]))
    overrides = (f"model.path={tmp_path}", "policy.precision=bfloat16")
    config = make_config(Setting(tmp_path), "tiny", *overrides, row_tokens=MANY)
    needed = estimate_memory(config, 1, NodeSpec(1, 79.1)).num_bytes("update") / GIB
    assert 0.6 * 79.1 < needed < 0.95 * 79.1
