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
from gpu_checks.catalog import BY_NAME, CHECKS, SHOWN

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
    assert [entry["check"] for entry in line["checks"]] == [check.name for check in SHOWN]
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


def run_tiny(tmp_path: Path, *names: str, ranks: int = 1) -> dict[str, dict[str, Any]]:
    """Run checks on CPU with tiny shapes. Return the result of each, none of them failed."""
    only = [word for name in names for word in ("--only", name)]
    completed = tool(
        *only, "--tp", str(ranks), "--tiny", "--minutes", "30",
        "--workspace", str(tmp_path), timeout=1800.0,
    )  # fmt: skip
    by_name = {entry["check"]: entry for entry in last_line(completed)["checks"]}
    assert all(entry["verdict"] != "failed" for entry in by_name.values()), by_name
    assert completed.returncode == 0
    return by_name


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", [check.name for check in SHOWN if check.on_cpu])
def test_every_cpu_check_runs_with_tiny_shapes(name: str, tmp_path: Path) -> None:
    entry = run_tiny(tmp_path, name)[name]
    assert entry["figures"] and entry["verdict"] == "ok", entry


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_checks_run_with_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    names = ("bf16", "moe_repeats", "checkpoint", "sync_0.6b")
    for name, outcome in run_tiny(tmp_path, *names, ranks=2).items():
        assert outcome["figures"] and outcome["verdict"] == "ok", outcome
        figures = [tmp_path / f"{name}.jsonl", tmp_path / f"{name}.rank1.jsonl"]
        assert len({len(path.read_text().splitlines()) for path in figures}) == 1


def test_a_gpu_gets_the_largest_model_whose_update_fits(tmp_path: Path) -> None:
    from gpu_checks.rig import GIB, Setting, make_config
    from gpu_checks.shapes import LAYERS_OF_4B
    from gpu_checks.speed import MANY, fitting_layers

    from dapo_megatron.plan.estimate import NodeSpec, estimate_memory

    setting = Setting(tmp_path)
    chosen = {gib: fitting_layers(setting, gib) for gib in (40.0, 79.1, 139.0, 250.0)}
    assert sorted(chosen.values()) == list(chosen.values()), "a larger GPU gets a larger model"
    assert chosen[250.0] == LAYERS_OF_4B[0] and chosen[79.1] > LAYERS_OF_4B[-1]
    for gib in (79.1, 139.0):
        model = f"model.path={tmp_path / 'configs' / f'4b_{chosen[gib]}_layers'}"
        precision = "policy.precision=bfloat16"
        config = make_config(setting, "tiny", model, precision, row_tokens=MANY)
        needed = estimate_memory(config, 1, NodeSpec(1, gib)).num_bytes("update") / GIB
        assert 0.6 * gib < needed < 0.95 * gib
