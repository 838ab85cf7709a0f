"""`doctor nodes`: every node looks at itself, all compare, exchange data, and name the bad ones.

A node's file says "running", and fails, until the node has proved itself: one that hangs or dies is
bad without anyone having to say so. A node that only waited in vain for others is not.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config import Config, PreflightConfig
from dapo_megatron.doctor.check import Check, Status, worst
from dapo_megatron.doctor.node import Look, look_at_node, odd_ones, within
from dapo_megatron.doctor.nodes_report import Findings, as_json, render
from dapo_megatron.files import read_json, write_text
from dapo_megatron.types import CheckpointError, RankError

PINGS = 5
POLL_SECONDS = 0.1
_NOT_ALL = "did not end in {:g} s, while at: {}"


class NodeFile:
    """DIR/<node>.json: status (running, then ok, warn or fail), phase, checks."""

    def __init__(self, folder: Path, node: str, *, is_leader: bool) -> None:
        self.path = folder / f"{node}.json"
        self.node = node
        self.is_leader = is_leader
        self.phase = "looking at the node"
        self.checks: list[Check] = []
        if is_leader:
            folder.mkdir(parents=True, exist_ok=True)
        self.tell(self.phase)

    def tell(self, phase: str) -> None:
        """What is done now. Only the node's first rank writes it."""
        self.phase = phase
        if self.is_leader:
            unfinished = Check("preflight", Status.FAIL, f"did not get beyond: {phase}", "exclude")
            self._write("running", [*self.checks, unfinished])

    def note(self, phase: str) -> None:
        """As `tell`, for the deadline alone: quick enough to be called while time is taken."""
        self.phase = phase

    def finish(self, checks: Sequence[Check]) -> None:
        """The node's last word."""
        if self.is_leader:
            self._write(worst(checks), checks)

    def expire(self, seconds: float) -> None:
        """The time is up. Only who hangs in an exchange with one other node is a suspect, and so
        is that node; any rank of it may say so, after its first."""
        is_suspect = self.phase.startswith("pair ")
        text = _NOT_ALL.format(seconds, self.phase)
        if is_suspect:
            found = Check("network", Status.FAIL, text, "exclude the node, or its partner")
        else:
            found = Check("network", Status.WARN, text, "see the nodes without a verdict")
        if not self.is_leader and is_suspect:
            with suppress(CheckpointError, ValueError, KeyError, TypeError):
                said = read_json(self.path)["checks"]
                self.checks = [Check(**{**one, "status": Status(one["status"])}) for one in said]
        if self.is_leader or is_suspect:
            checks = [*self.checks, found]
            self._write(worst(checks), checks)

    def _write(self, status: str, checks: Sequence[Check]) -> None:
        body = {
            "node": self.node,
            "status": status,
            "phase": self.phase,
            "checks": [asdict(check) for check in checks],
        }
        write_text(self.path, json.dumps(body, indent=2) + "\n", durable=False)


def check_nodes(
    config: Config,
    report: Path,
    *,
    backend: str,
    claim: Callable[[int], None],
    facts: Mapping[str, str],
    json_file: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> bool:
    """One rank's part of the check; whether a run may start. Collective: a rank per GPU.

    `backend` is what the ranks will exchange weights with (nccl or gloo) and `claim` takes the GPU
    of a local rank; `facts` must be the same on all ranks. Rank 0 prints the findings. If others
    do not answer within `preflight.max_seconds`, the process ends with exit code 1.
    """
    settings, local_rank = config.preflight, int(os.environ.get("LOCAL_RANK", "0"))
    file = NodeFile(report, node_name(), is_leader=local_rank == 0)
    deadline = threading.Timer(settings.max_seconds + local_rank / 8, _expire, (file, settings))
    deadline.daemon = True
    deadline.start()
    look = Look([], {})
    if file.is_leader:
        num_tasks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        look = look_at_node(config, num_tasks, is_used=backend == "nccl")
        file.checks = look.checks
    file.tell("joining the other nodes")
    try:
        # GPUs are claimed once all nodes have seen that no one else is on them.
        ranks = join("gloo")
        findings = _together(
            config, ranks, file, Look(look.checks, {**look.facts, **facts}), backend, claim, clock
        )
    except (RuntimeError, RankError) as error:  # the first is all that torch.distributed raises
        lost = f"lost the other nodes while at: {file.phase} ({str(error).splitlines()[0][:200]})"
        remedy = "see the nodes without a verdict"
        file.finish([*file.checks, Check("network", Status.WARN, lost, remedy)])
        return False
    file.finish(findings.checks[file.node])
    deadline.cancel()
    if ranks.rank == 0:
        render(findings, Console())
        if json_file is not None:
            json_file.write_text(as_json(findings), encoding="utf-8")
    leave()
    return findings.is_good


def leave() -> None:
    """Let go of the other ranks."""
    import torch.distributed as dist

    dist.destroy_process_group()


def _expire(file: NodeFile, settings: PreflightConfig) -> None:
    file.expire(settings.max_seconds)
    os._exit(1)  # the main thread waits for others, perhaps for ever


# ------------------------------------------------------------------------------- together


def _together(
    config: Config,
    ranks: Ranks,
    file: NodeFile,
    look: Look,
    backend: str,
    claim: Callable[[int], None],
    clock: Callable[[], float],
) -> Findings:
    """What it takes all ranks to find out; the same on every rank."""
    import torch
    import torch.distributed as dist

    from dapo_megatron.doctor.bandwidth import BUDGETS, Wire, measure

    everyone = ranks.all_gather((file.node, file.is_leader, look), tuple[str, bool, Look])
    ranks_of: dict[str, list[int]] = {}
    for rank, (node, _, _) in enumerate(everyone):
        ranks_of.setdefault(node, []).append(rank)
    checks: dict[str, list[Check]] = {node: [] for node in ranks_of} | {
        node: list(its.checks) for node, is_leader, its in everyone if is_leader
    }
    looks = [(node, its.facts) for node, _, its in everyone]
    _add(checks, odd_ones(_facts_of_nodes(looks), "nodes"))
    whole: list[Check] = []

    file.tell("sharing files")
    views = _share_files(config, ranks, file)
    whole += _judge_views(views, checks)

    file.tell("comparing clocks")
    offsets = ranks.broadcast(
        _compare_clocks(ranks, ranks_of, clock), dict[str, tuple[float, float]]
    )
    _add(checks, _judge_clocks(offsets, config.preflight.max_clock_skew_seconds))

    file.tell("claiming GPUs")
    claim(ranks.local_rank)
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    device = torch.device("cuda", ranks.local_rank) if backend == "nccl" else torch.device("cpu")
    file.tell("measuring bandwidth")
    wire = Wire(ranks, group, device, BUDGETS[backend], file.note)
    found = measure(wire, ranks_of)
    whole += _judge_bandwidth(asdict(found), config.preflight, checks)
    return Findings(checks, whole, asdict(found))


def _add(checks: dict[str, list[Check]], more: Mapping[str, Sequence[Check]]) -> None:
    for node, found in more.items():
        checks[node] += found


def _facts_of_nodes(looks: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """Ranks of one node should agree; if not, its value names all of theirs."""
    values: dict[str, dict[str, set[str]]] = {}
    for node, facts in looks:
        for key, value in facts.items():
            values.setdefault(node, {}).setdefault(key, set()).add(value)
    return {
        node: {key: " / ".join(sorted(found)) for key, found in of_node.items()}
        for node, of_node in values.items()
    }


def _share_files(config: Config, ranks: Ranks, file: NodeFile) -> dict[str, tuple[str, ...]]:
    """Every node writes a file into run.directory; of which nodes each then saw it in time."""
    folder = Path(config.run.directory) / f".preflight-{ranks.broadcast(uuid.uuid4().hex, str)}"
    members = ranks.all_gather((file.node, file.is_leader), tuple[str, bool])
    nodes = {node for node, is_leader in members if is_leader}
    seconds = config.preflight.check_seconds
    seen: set[str] = set()

    def look() -> list[Check]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.node).write_text(file.node, encoding="utf-8")
        while seen < nodes:
            # Listing the folder makes NFS ask its server again.
            seen.update(
                name
                for name in os.listdir(folder)
                if name in nodes and (folder / name).read_text(encoding="utf-8") == name
            )
            time.sleep(POLL_SECONDS)
        return []

    if file.is_leader:
        within(seconds, "shared files", look)
    view = (file.node, file.is_leader, tuple(sorted(seen)))
    views = ranks.all_gather(view, tuple[str, bool, tuple[str, ...]])
    if file.is_leader:
        with suppress(OSError):
            (folder / file.node).unlink()
            folder.rmdir()  # the last one out
    return {node: view for node, is_leader, view in views if is_leader}


def _judge_views(
    views: Mapping[str, tuple[str, ...]], checks: dict[str, list[Check]]
) -> list[Check]:
    """Nodes of one file system see the same files; the odd ones are on another."""
    remedy = "run.directory must be on a file system that all nodes mount; or exclude the node"
    if len(views) > 1 and all(len(view) < 2 for view in views.values()):
        return [Check("shared files", Status.FAIL, "run.directory is shared by no nodes", remedy)]
    usual = Counter(views.values()).most_common(1)[0][0]
    for node, view in views.items():
        if view == usual and node in view:
            checks[node].append(Check("shared files", Status.OK, f"of {len(view)} nodes"))
        else:
            text = f"sees the files of {', '.join(view) or 'no node'} in run.directory; "
            text += f"most see those of {', '.join(usual)}"
            checks[node].append(Check("shared files", Status.FAIL, text, remedy))
    return []


def _compare_clocks(
    ranks: Ranks, ranks_of: Mapping[str, Sequence[int]], clock: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """By node: seconds its clock is ahead of rank 0's, and how far that may be wrong: half of the
    quickest round trip. Of use on rank 0 alone."""
    import torch
    import torch.distributed as dist

    value = torch.zeros(1, dtype=torch.float64)
    found: dict[str, tuple[float, float]] = {}
    for node, members in ranks_of.items():
        peer, trips = members[0], []
        for _ in range(PINGS if peer else 0):
            if ranks.rank == 0:
                start = clock()
                dist.send(value, peer, group=ranks.group)
                dist.recv(value, peer, group=ranks.group)
                half = (clock() - start) / 2
                trips.append((half, float(value) - start - half))
            elif ranks.rank == peer:
                dist.recv(value, 0, group=ranks.group)
                value.fill_(clock())
                dist.send(value, 0, group=ranks.group)
        half, offset = min(trips, default=(0.0, 0.0))
        found[node] = (offset, half)
    return found


def _judge_clocks(
    offsets: Mapping[str, tuple[float, float]], most_seconds: float
) -> dict[str, list[Check]]:
    """Against the middle of all clocks; of two, against the first."""
    values = [offset for offset, _ in offsets.values()]
    middle = median(values) if len(values) > 2 else 0.0
    found = {}
    for node, (offset, error) in offsets.items():
        skew = offset - middle
        text = f"{skew:+.3f} s from the others', to within {error:.3f} s"
        if abs(skew) - error > most_seconds:
            remedy = "exclude the node; its time service (chrony, ntpd) wants looking at"
            found[node] = [Check("clock", Status.FAIL, text, remedy)]
        else:
            found[node] = [Check("clock", Status.OK, text)]
    return found


def _judge_bandwidth(
    figures: Mapping[str, Any], settings: PreflightConfig, checks: dict[str, list[Check]]
) -> list[Check]:
    from dapo_megatron.doctor.bandwidth import Pair, slow_nodes

    whole = []
    floor = settings.min_gbps_pair
    if floor is not None:
        slow, unexplained = slow_nodes([Pair(**pair) for pair in figures["pairs"]], floor)
        remedy = "exclude the node; its network adapters want looking at"
        for node in slow:
            own = [f"{pair['gbps']:.2f}" for pair in figures["pairs"] if node in pair["nodes"]]
            text = f"{', '.join(own)} GB/s per GPU with its neighbours, at least {floor:g} wanted"
            checks[node].append(Check("bandwidth", Status.FAIL, text, remedy))
        for pair in unexplained:
            text = f"{' and '.join(pair.nodes)} exchange {pair.gbps:.2f} GB/s per GPU, "
            remedy = "one of them, or what is between; with a third node it could be named"
            text += f"at least {floor:g} wanted"
            whole.append(Check("bandwidth of a pair", Status.FAIL, text, remedy))
    for key, name in (("all_reduce", "all-reduce"), ("all_to_all", "all-to-all")):
        floor, gbps = getattr(settings, f"min_gbps_{key}"), figures[f"{key}_gbps"]
        if floor is not None and gbps is not None and gbps < floor:
            text = f"{gbps:.2f} GB/s per GPU over all nodes, at least {floor:g} wanted"
            remedy = f"see the pairs; or lower preflight.min_gbps_{key}"
            whole.append(Check(name, Status.FAIL, text, remedy))
    return whole
