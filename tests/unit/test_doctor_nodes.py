"""`doctor nodes` between real ranks, each acting as a node: good nodes pass, bad ones are named."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor import nodes
from dapo_megatron.doctor.check_result import Status
from dapo_megatron.doctor.machine import check_gpus
from tests.helpers.commands import run
from tests.helpers.configs import TINY, tiny_config
from tests.helpers.nvidia_smi import install
from tests.helpers.ranks import run_ranks
from tests.unit.test_cli import environment_without_launcher

NUM_NODES = 3
ALL = ["n0", "n1", "n2"]
CASES: dict[str, tuple[list[str], str]] = {
    "sound": ([], ""),
    "gpu": (["n0"], "2 uncorrected ECC errors"),
    "driver": (["n2"], "driver 535.1 here, 1 x .* 580.65.06 on 2 of 3 nodes"),
    "version": (["n1"], "2.12.0 here, 2.13.0 on 2 of 3 nodes"),
    "clock": (["n2"], r"-(2\d|30)\.\d s"),  # less by the time that a barrier takes
    "first clock": (["n0"], r"\+(2\d|30)\.\d s"),
    "command": (["n1"], "exit code 3: the switch is off"),
    "other disk": (["n2"], "sees no file of n0"),
    "no shared disk": ([], "no node sees"),
    "full disk": (ALL, "GiB are required"),
    "slow": ([], "GB/s per GPU over all nodes"),
}
"""Fault -> (bad nodes, pattern of a failed check)."""
KEYS: dict[str, dict[str, Any]] = {
    "command": {
        "preflight__command": "echo the switch is off; [[ $SLURMD_NODENAME != n1 ]] || exit 3"
    },
    "full disk": {"preflight__min_free_disk_gib": 1e9},
    "slow": {"preflight__min_gbps_all_reduce": 1e6},
}


def run_case(rank: int, case: str, root: Path, path: str) -> nodes.Findings:
    """Inject the fault of `case` on this rank if it is bad, then check."""
    folder, node = root / case, f"n{rank}"
    is_bad = node in CASES[case][0]
    gpu = {
        "gpu": {"ecc.errors.uncorrected.volatile.total": "2"},
        "driver": {"driver_version": "535.1"},
    }
    smi = install(folder / f"bin{rank}", [gpu.get(case, {}) if is_bad else {}])
    os.environ.update(PATH=f"{smi}:{path}", SLURMD_NODENAME=node)
    is_apart = case == "no shared disk" or (case == "other disk" and is_bad)
    home = folder / (node if is_apart else "shared")
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    shift = (30.0 if rank == 0 else -30.0) if "clock" in case and is_bad else 0.0
    clock = SimpleNamespace(time=lambda: time.time() + shift, perf_counter=time.perf_counter)
    torch = {"torch": "2.12.0" if case == "version" and is_bad else "2.13.0"}
    config = tiny_config(
        run__directory="runs", preflight__max_clock_skew_seconds=15.0, **KEYS.get(case, {})
    )
    with patch.object(nodes, "time", clock), patch.object(nodes, "versions", lambda: torch):
        checks = nodes.check_node(config, folder / f"{node}.json")
        findings = nodes.check_together(config, Ranks(rank, NUM_NODES, 0), node, checks)
    if rank == 0:
        assert not os.listdir("runs")
    return findings


def run_cases(rank: int, root: Path) -> dict[str, nodes.Findings]:
    path = os.environ["PATH"]
    return {case: run_case(rank, case, root, path) for case in CASES}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, nodes.Findings]]:
    return run_ranks(run_cases, NUM_NODES, tmp_path_factory.mktemp("nodes"))


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_bad_nodes_are_named(
    case: str, findings: list[dict[str, nodes.Findings]]
) -> None:
    first, *others = [of_rank[case] for of_rank in findings]
    bad, pattern = CASES[case]
    assert all(other == first for other in others)
    assert first.bad == bad
    assert first.is_good is (case == "sound")
    everything = [*first.whole, *(check for checks in first.nodes.values() for check in checks)]
    failed = [check for check in everything if check.status is Status.FAIL]
    assert all(check.remedy for check in failed)
    assert case == "sound" or any(re.search(pattern, check.finding) for check in failed)
    if case == "sound":
        assert first.gbps.keys() == {"all_reduce", "all_to_all"}
        assert min(first.gbps.values()) > 0.0


def test_a_node_that_hangs_or_dies_in_a_check_has_a_failed_file(tmp_path: Path) -> None:
    """The command copies the file as it is while a check runs."""
    file, copy = tmp_path / "n0.json", tmp_path / "copy.json"
    nodes.check_node(tiny_config(preflight__command=f"cp {file} {copy}"), file)
    during, after = json.loads(copy.read_text()), json.loads(file.read_text())
    assert (during["status"], during["checks"][-1]["name"]) == ("fail", "preflight.command")
    assert after["status"] == "ok"


def test_a_command_that_hangs_fails_with_its_children(tmp_path: Path) -> None:
    config = tiny_config(preflight__command="sleep 600 | cat", preflight__check_seconds=0.5)
    checks = nodes.check_node(config, tmp_path / "n0.json")
    [hung] = [check for check in checks if check.status is Status.FAIL]
    assert (hung.name, hung.finding) == ("preflight.command", "exit code 124: no answer in 0.5 s")


def test_the_command_line_checks_one_node_of_two_ranks(tmp_path: Path) -> None:
    ran = run(
        *("-m", "dapo_megatron", "doctor", "nodes", TINY, "run.processes=2"),
        *("--report", tmp_path / "nodes", "--json", tmp_path / "all.json"),
        environment={**environment_without_launcher(), "SLURMD_NODENAME": "n7.rack"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "bad nodes: none" in ran.stdout
    assert json.loads((tmp_path / "nodes" / "n7.rack.json").read_text())["status"] == "ok"
    assert json.loads((tmp_path / "all.json").read_text())["good"]


# ------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("gpu", "pattern"),
    [
        ({}, ""),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, ""),
        ({"clocks_event_reasons.active": "0x0000000000000004"}, ""),  # a power cap
        ({"clocks_event_reasons.active": "0x0000000000000040"}, "slowed down by its heat"),
        ({"memory.used": "70000"}, "70000 MiB are in use"),
    ],
)
def test_a_bad_gpu_is_reported(
    gpu: dict[str, str], pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, [{}, gpu])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    faults = [check for check in check_gpus(2, 60.0) if check.status is Status.FAIL]
    assert len(faults) == bool(pattern)
    assert all(check.name == "GPU 1" and pattern in check.finding for check in faults)


@pytest.mark.parametrize(
    ("options", "seconds", "pattern"),
    [
        ({}, 60.0, "1 x NVIDIA H100"),
        ({"sleeps_seconds": 600.0}, 0.5, "no answer in 0.5 s"),
        ({"refuses": ("memory.used",)}, 60.0, "memory.used"),
    ],
)
def test_missing_gpus_and_an_nvidia_smi_that_hangs_or_fails_are_reported(
    options: dict[str, Any],
    seconds: float,
    pattern: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, [{}], **options)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    [check] = check_gpus(2, seconds)
    assert check.status is Status.FAIL and pattern in check.finding and check.remedy
