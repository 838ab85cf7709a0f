"""`doctor nodes` between real ranks, each acting as a node: good nodes pass, bad ones are named."""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor import bandwidth, node, nodes
from dapo_megatron.doctor.bandwidth import Bandwidth, Pair
from dapo_megatron.doctor.check_result import Check, Status, worst
from dapo_megatron.doctor.node import (
    Port,
    check_infiniband,
    check_node,
    check_with_timeout,
    compare_facts,
)
from dapo_megatron.doctor.nodes import Findings, NodeFile, check_nodes
from tests.helpers.configs import tiny_config
from tests.helpers.nvidia_smi import install
from tests.helpers.ranks import RankFailed, run_ranks

NUM_NODES = 3
FACTS = {"torch": "2.13.0", "commit": "abc", "config": "0123"}
SLOW_GBPS = 0.002

# Fault -> (bad nodes, regular expression of a failed check).
CASES: dict[str, tuple[list[str], str]] = {
    "sound": ([], ""),
    "ecc": (["n0"], "2 uncorrected ECC errors"),
    "hung gpu": (["n1"], "nvidia-smi: no answer in"),
    "other driver": (["n2"], "driver 535.1 here"),
    "clock": (["n2"], r"-(2\d|30)\.\d"),  # less by the time that asking takes
    "first clock": (["n0"], r"\+(2\d|30)\.\d"),
    "version": (["n1"], "2.12.0 here, 2.13.0 on 2 of 3 nodes"),
    "other disk": (["n2"], "sees the files of n2"),
    "full disk": (["n0", "n1", "n2"], "GiB are required"),
    "no shared disk": ([], "shared by no nodes"),
    "slow": (["n1"], "GB/s per GPU with its neighbors"),
    "slow altogether": ([], "GB/s per GPU over all nodes"),
}


def slowly(swap: Any) -> Any:
    def run(tensor: Any, peer: int, group: Any) -> None:
        time.sleep(tensor.nbytes / SLOW_GBPS / 1e9)
        swap(tensor, peer, group)

    return run


def as_node(rank: int) -> None:
    """Make this process the only rank of node n<rank>, in the existing process group."""
    vars(nodes).update(join=lambda _: Ranks(rank, NUM_NODES, 0), leave=lambda: None)
    os.environ.update(
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=f"n{rank}", PATH="/nowhere"
    )


def run_case(rank: int, case: str, root: Path) -> bool:
    """Inject the fault of `case` on this rank if it is bad, then run the command."""
    folder = root / case
    keys: dict[str, Any] = {"run__directory": folder / "runs", "preflight__check_seconds": 60}
    if case == "hung gpu":
        keys["preflight__check_seconds"] = 10
    facts, clock, bad = dict(FACTS), time.time, f"n{rank}" in CASES[case][0]
    sound_gpu: dict[str, str] = {}
    if case == "ecc" and bad:
        sound_gpu = {"ecc.errors.uncorrected.volatile.total": "2"}
    if case == "other driver" and bad:
        sound_gpu = {"driver_version": "535.1"}
    hangs = 1000.0 if case == "hung gpu" and bad else 0.0
    os.environ["PATH"] = str(install(folder / f"bin{rank}", [sound_gpu], sleeps_seconds=hangs))
    if "clock" in case and bad:
        shift = 30.0 if rank == 0 else -30.0
        clock = lambda: time.time() + shift  # noqa: E731
    if case == "version" and bad:
        facts["torch"] = "2.12.0"
    if (case == "other disk" and bad) or case == "no shared disk":
        keys["run__directory"] = folder / f"runs{rank}"
    if case in ("other disk", "no shared disk"):
        keys["preflight__check_seconds"] = 8  # all nodes wait so long for files they cannot see
    if case == "full disk":
        keys["preflight__min_free_disk_gib"] = 1e9
    if case == "slow":
        keys["preflight__min_gbps_pair"] = 2 * SLOW_GBPS
    if case == "slow altogether":
        keys["preflight__min_gbps_all_reduce"] = 1e6
    swap = bandwidth.swap
    bandwidth.swap = slowly(swap) if case == "slow" and bad else swap
    try:
        return check_nodes(
            tiny_config(**keys),
            folder / "report",
            backend="gloo",
            claim=lambda _: None,
            facts=facts,
            json_file=folder / "all.json",
            clock=clock,
        )
    finally:
        bandwidth.swap = swap


def run_cases(rank: int, root: Path) -> dict[str, bool]:
    as_node(rank)
    return {case: run_case(rank, case, root) for case in CASES}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bool]]]:
    root = tmp_path_factory.mktemp("preflight")
    return root, run_ranks(run_cases, NUM_NODES, root)


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_bad_nodes_are_named(
    case: str, reports: tuple[Path, list[dict[str, bool]]]
) -> None:
    root, is_good = reports
    bad, words = CASES[case]
    everything = json.loads((root / case / "all.json").read_text())
    assert everything["bad"] == bad
    for rank in range(NUM_NODES):
        node_report = json.loads((root / case / "report" / f"n{rank}.json").read_text())
        assert (node_report["status"] == "fail") is (f"n{rank}" in bad)
        assert node_report["checks"] == everything["nodes"][f"n{rank}"]["checks"]
    failed = [
        check
        for checks in (
            everything["whole"],
            *(node["checks"] for node in everything["nodes"].values()),
        )
        for check in checks
        if check["status"] == "fail"
    ]
    assert (case == "sound") is (not failed)
    assert case == "sound" or any(re.search(words, check["finding"]) for check in failed)
    assert all(check["remedy"] for check in failed)
    assert {results[case] for results in is_good} == {case == "sound"}


def test_a_passed_check_leaves_no_files_in_the_run_directory(
    reports: tuple[Path, list[dict[str, bool]]],
) -> None:
    root, _ = reports
    assert not list((root / "sound" / "runs").iterdir())
    assert sorted(path.name for path in (root / "sound" / "report").iterdir()) == [
        f"n{rank}.json" for rank in range(NUM_NODES)
    ]


def test_the_table_names_the_bad_nodes(reports: tuple[Path, list[dict[str, bool]]]) -> None:
    findings = Findings(
        {
            "n0": [Check("clock", Status.OK, "fine")],
            "n1": [Check("GPU 3", Status.FAIL, "hot", "x")],
        },
        [Check("all-reduce", Status.FAIL, "slow", "y")],
        Bandwidth(all_reduce_gbps=3.25, pairs=(Pair(("n0", "n1"), 12.5),)),
    )
    console = Console(file=io.StringIO(), width=120)
    findings.render(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "GPU 3: hot" in text and "12.50" in text and "3.25" in text and "bad: n1" in text


# ------------------------------------------------------------------------------- hanging


def hang(rank: int, root: Path) -> None:
    as_node(rank)
    if rank == 1:
        NodeFile(root, "n1", is_leader=True)
        time.sleep(1000.0)
    config = tiny_config(run__directory=root / "runs", preflight__max_seconds=15)
    check_nodes(config, root, backend="gloo", claim=lambda _: None, facts=FACTS)


def test_a_hanging_node_is_bad_and_a_node_that_waits_for_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 died"):
        run_ranks(hang, 2, tmp_path)
    waits, hangs = (json.loads((tmp_path / f"n{rank}.json").read_text()) for rank in range(2))
    assert waits["status"] == "warn"
    assert "joining the other nodes" in waits["checks"][-1]["finding"]
    assert "15 s" in waits["checks"][-1]["finding"]
    assert hangs["status"] == "running"
    # slurm/train.sbatch reads this.
    assert any(check["status"] == "fail" for check in hangs["checks"])


def test_a_rank_stuck_in_a_pair_of_nodes_is_a_suspect(tmp_path: Path) -> None:
    first = NodeFile(tmp_path, "n0", is_leader=True)
    first.checks = [Check("GPUs", Status.WARN, "few", "more")]
    second = NodeFile(tmp_path, "n0", is_leader=False)
    first.note("waiting after pair n0 n1")
    second.note("pair n0 n1")
    first.expire(5.0)
    assert json.loads(first.path.read_text())["status"] == "warn"
    second.expire(5.0)
    expired = json.loads(first.path.read_text())
    assert expired["status"] == "fail"
    assert expired["checks"][0]["name"] == "GPUs"
    assert "pair n0 n1" in expired["checks"][-1]["finding"]


# ------------------------------------------------------------------------------- one node


def test_a_check_that_hangs_or_raises_fails() -> None:
    is_over = threading.Event()

    def hangs() -> list[Check]:
        is_over.wait()
        return []

    def broken() -> list[Check]:
        raise OSError("stale file handle")

    [hung] = check_with_timeout(0.2, "disk", hangs)
    is_over.set()
    [stale] = check_with_timeout(60.0, "disk", broken)
    assert hung.status is stale.status is Status.FAIL
    assert "no answer in 0.2 s" in hung.finding and "stale file handle" in stale.finding


def test_this_machine_passes_as_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    state = check_node(tiny_config(run__directory=tmp_path / "runs"), 2, is_used=False)
    assert worst(state.checks) is not Status.FAIL
    assert {"GPUs", "run.directory", "/dev/shm", "host name"} <= {
        check.name for check in state.checks
    }


def test_a_node_that_sees_no_shared_files_fails() -> None:
    checks: dict[str, list[Check]] = {"n0": []}
    assert not nodes._judge_views({"n0": ()}, checks)
    assert worst(checks["n0"]) is Status.FAIL


PORTS = [Port(f"mlx5_{number}:1", "ACTIVE", "400 Gb/sec (4X NDR)") for number in range(8)]


def test_slow_and_inactive_infiniband_ports_are_reported() -> None:
    facts: dict[str, str] = {}
    assert [check.name for check in check_infiniband([], facts)] == ["InfiniBand"]
    checks = list(check_infiniband(PORTS, facts))
    assert facts == {"InfiniBand": "8 x 400 Gb/sec (4X NDR)"}
    assert all(check.name == "pinned memory" for check in checks if check.status != "ok")
    narrow = Port("mlx5_3:1", "ACTIVE", "100 Gb/sec (1X NDR)")
    down = Port("mlx5_4:1", "DOWN", "400 Gb/sec (4X NDR)")
    by_name = {check.name: check for check in check_infiniband([*PORTS[:3], narrow, down], facts)}
    assert by_name["InfiniBand mlx5_3:1"].status is Status.FAIL
    assert by_name["InfiniBand mlx5_4:1"].status is Status.WARN


def test_infiniband_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert node.read_ports(tmp_path) == [Port("mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)")]


def test_a_fact_missing_on_one_node_is_reported() -> None:
    ports = {"InfiniBand": "8 x 400 Gb/sec (4X NDR)"}
    checks = compare_facts({"a": ports, "b": {}, "c": ports})
    assert not checks["a"] and not checks["c"]
    [check] = checks["b"]
    assert check.finding == "none here, 8 x 400 Gb/sec (4X NDR) on 2 of 3 nodes"
