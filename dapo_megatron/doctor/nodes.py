"""`doctor nodes`: each node checks itself, all nodes compare and exchange data, bad ones are named.

A node's file has status "running" and a failed check until all its checks are done. A node that
hangs or dies therefore counts as bad. A node that only waited for others does not.
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
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.versions import versions
from dapo_megatron.config import Config, PreflightConfig
from dapo_megatron.config.file import dump_config
from dapo_megatron.doctor.bandwidth import BUDGETS, Bandwidth, Wire, judge, measure
from dapo_megatron.doctor.check_result import Check, Status, to_dict, worst
from dapo_megatron.doctor.node import NodeState, check_node, check_with_timeout, compare_facts
from dapo_megatron.files import read_json, write_result, write_text
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.policy import device
from dapo_megatron.tracking.provenance import commit
from dapo_megatron.types import CheckpointError, RankError

PINGS = 5
POLL_SECONDS = 0.1
_TIMED_OUT = "did not end in {:g} s; the current phase was: {}"
_SEE_OTHERS = "see the nodes that did not finish their checks"


def command(config: Config, report: Path, json_file: Path | None) -> bool:
    """Check all nodes, on this rank of a launched job. Return True if a run may start."""
    digest = sha256(dump_config(config).encode()).hexdigest()[:16]
    return check_nodes(
        config,
        report,
        backend=device.backend(),
        claim=device.claim,
        facts={**versions(), "commit": commit() or "none", "config": digest},
        json_file=json_file,
    )


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of all ranks. `overall` has the checks that belong to no single node."""

    checks: dict[str, list[Check]]
    overall: list[Check]
    bandwidth: Bandwidth

    @property
    def bad(self) -> list[str]:
        """Nodes to exclude."""
        return [node for node, checks in self.checks.items() if worst(checks) is Status.FAIL]

    @property
    def is_good(self) -> bool:
        """True if there are no bad nodes and no failed checks, so that a run may start."""
        return not self.bad and worst(self.overall) is not Status.FAIL

    def to_json(self) -> str:
        """Return the findings as JSON: good, bad (names of nodes), nodes (checks of each), whole
        (`overall`) and bandwidth."""
        body = {
            "good": self.is_good,
            "bad": self.bad,
            "nodes": {node: to_dict(checks) for node, checks in self.checks.items()},
            "whole": [asdict(check) for check in self.overall],
            "bandwidth": asdict(self.bandwidth),
        }
        return json.dumps(body, indent=2) + "\n"

    def render(self, console: Console) -> None:
        """Print a row for each node, the bandwidths, and the bad nodes."""
        table = Table("node", "status", "findings and remedies", title="doctor nodes")
        for node, checks in {**self.checks, "all together": self.overall}.items():
            text = Text()
            for check in checks:
                if check.status is not Status.OK or check.name in ("GPUs", "clock"):
                    text.append(f"{check.name}: {check.finding}\n")
                if check.remedy:
                    text.append(f"-> {check.remedy}\n", style="bold")
            text.rstrip()
            table.add_row(node, worst(checks).text, text)
        console.print(table)
        rows = [(" - ".join(pair.nodes), pair.gbps) for pair in self.bandwidth.pairs]
        for name in ("all_reduce", "all_to_all"):
            if (gbps := getattr(self.bandwidth, f"{name}_gbps")) is not None:
                rows.append((f"{name.replace('_', '-')}, all ranks", gbps))
        if rows:
            speeds = Table("bandwidth", "GB/s per rank")
            for name, gbps in rows:
                speeds.add_row(name, f"{gbps:.2f}")
            console.print(speeds)
        if self.bad:
            console.print(f"bad: {', '.join(self.bad)}", style="bold red", highlight=False)


class NodeFile:
    """DIR/<node>.json: status (running, then ok, warn or fail), phase, checks."""

    def __init__(self, folder: Path, node: str, *, is_leader: bool) -> None:
        self.path = folder / f"{node}.json"
        self.node = node
        self.is_leader = is_leader
        self.phase = "checking the node"
        self.checks: list[Check] = []
        if is_leader:
            folder.mkdir(parents=True, exist_ok=True)
        self.write_phase(self.phase)

    def write_phase(self, phase: str) -> None:
        """Record the start of a phase, and write it to the file on the node's first rank."""
        self.phase = phase
        if self.is_leader:
            unfinished = Check("preflight", Status.FAIL, f"did not get beyond: {phase}", "exclude")
            self._write("running", [*self.checks, unfinished])

    def note(self, phase: str) -> None:
        """Record the start of a phase without writing it, which is fast enough to call during a
        measurement. `expire` uses it."""
        self.phase = phase

    def finish(self, checks: Sequence[Check]) -> None:
        """Write the final checks of the node."""
        if self.is_leader:
            self._write(worst(checks), checks)

    def expire(self, seconds: float) -> None:
        """Write that the command timed out.

        The check fails only if this rank hangs in an exchange between two nodes, of which either
        may be bad. Any rank of the node may then write the file; it keeps the checks that the first
        rank wrote.
        """
        is_suspect = self.phase.startswith("pair ")
        text = _TIMED_OUT.format(seconds, self.phase)
        if is_suspect:
            check = Check("network", Status.FAIL, text, "exclude the node, or its partner")
        else:
            check = Check("network", Status.WARN, text, _SEE_OTHERS)
        if not self.is_leader and is_suspect:
            with suppress(CheckpointError, ValueError, KeyError, TypeError):
                rows = read_json(self.path)["checks"]
                self.checks = [Check(**{**row, "status": Status(row["status"])}) for row in rows]
        if self.is_leader or is_suspect:
            checks = [*self.checks, check]
            self._write(worst(checks), checks)

    def _write(self, status: str, checks: Sequence[Check]) -> None:
        body = {"node": self.node, "phase": self.phase, **to_dict(checks), "status": status}
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
    """Run the checks on this rank. Return True if a run may start. Collective; one rank per GPU.

    `backend` is the one that transfers weights (nccl or gloo). `claim` selects the GPU of a local
    rank. `facts` must be the same on all ranks. Rank 0 prints the findings. If other ranks do not
    answer within `preflight.max_seconds`, the process ends with exit code 1.
    """
    settings, local_rank = config.preflight, int(os.environ.get("LOCAL_RANK", "0"))
    file = NodeFile(report, node_name(), is_leader=local_rank == 0)
    deadline = threading.Timer(settings.max_seconds + local_rank / 8, _expire, (file, settings))
    deadline.daemon = True
    deadline.start()
    state = NodeState([], {})
    if file.is_leader:
        num_tasks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        state = check_node(config, num_tasks, is_used=backend == "nccl")
        file.checks = state.checks
    file.write_phase("joining the other nodes")
    try:
        ranks = join("gloo")
        state = NodeState(state.checks, {**state.facts, **facts})
        findings = _compare_nodes(config, ranks, file, state, backend, claim, clock)
    except (RuntimeError, RankError) as error:  # torch.distributed raises only RuntimeErrors
        reason = str(error).splitlines()[0][:200]
        text = f"lost the other nodes in the phase: {file.phase} ({reason})"
        file.finish([*file.checks, Check("network", Status.WARN, text, _SEE_OTHERS)])
        return False
    file.finish(findings.checks[file.node])
    deadline.cancel()
    if ranks.rank == 0:
        findings.render(LiteralConsole())
        write_result(json_file, findings.to_json())
    leave()
    return findings.is_good


def leave() -> None:
    """Destroy the process group. Tests replace this function."""
    dist.destroy_process_group()


def _expire(file: NodeFile, settings: PreflightConfig) -> None:
    file.expire(settings.max_seconds)
    os._exit(1)  # the main thread may wait for other ranks forever


# ------------------------------------------------------------------------------- comparison


def _compare_nodes(
    config: Config,
    ranks: Ranks,
    file: NodeFile,
    state: NodeState,
    backend: str,
    claim: Callable[[int], None],
    clock: Callable[[], float],
) -> Findings:
    """Run the checks that need all ranks. Return the same findings on every rank."""
    states = ranks.all_gather((file.node, file.is_leader, state), tuple[str, bool, NodeState])
    ranks_of: dict[str, list[int]] = {}
    for rank, (node, _, _) in enumerate(states):
        ranks_of.setdefault(node, []).append(rank)
    checks: dict[str, list[Check]] = {node: [] for node in ranks_of} | {
        node: list(of_node.checks) for node, is_leader, of_node in states if is_leader
    }
    _add(checks, compare_facts(_facts_of_nodes([(node, s.facts) for node, _, s in states])))

    file.write_phase("sharing files")
    overall = _judge_views(_share_files(config, ranks, file), checks)

    file.write_phase("comparing clocks")
    offsets = ranks.broadcast(
        _compare_clocks(ranks, ranks_of, clock), dict[str, tuple[float, float]]
    )
    _add(checks, _judge_clocks(offsets, config.preflight.max_clock_skew_seconds))

    # Only now, because each node has checked before that its GPUs are free.
    file.write_phase("claiming GPUs")
    claim(ranks.local_rank)
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    own_device = torch.device(f"cuda:{ranks.local_rank}" if backend == "nccl" else "cpu")
    file.write_phase("measuring bandwidth")
    bandwidth = measure(Wire(ranks, group, own_device, BUDGETS[backend], file.note), ranks_of)
    overall += judge(bandwidth, config.preflight, checks)
    return Findings(checks, overall, bandwidth)


def _add(checks: dict[str, list[Check]], more: Mapping[str, Sequence[Check]]) -> None:
    for node, added in more.items():
        checks[node] += added


def _facts_of_nodes(facts: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """Merge the facts of each node's ranks. If they differ, the value lists all of them."""
    values: dict[str, dict[str, set[str]]] = {}
    for node, of_rank in facts:
        for key, value in of_rank.items():
            values.setdefault(node, {}).setdefault(key, set()).add(value)
    return {
        node: {key: " / ".join(sorted(texts)) for key, texts in of_node.items()}
        for node, of_node in values.items()
    }


def _share_files(config: Config, ranks: Ranks, file: NodeFile) -> dict[str, tuple[str, ...]]:
    """Write one file per node to run.directory. Return, for each node, the nodes whose files it
    saw before the timeout."""
    folder = Path(config.run.directory) / f".preflight-{ranks.broadcast(uuid.uuid4().hex, str)}"
    members = ranks.all_gather((file.node, file.is_leader), tuple[str, bool])
    nodes = {node for node, is_leader in members if is_leader}
    seconds = config.preflight.check_seconds
    visible: set[str] = set()

    def wait_for_files() -> list[Check]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.node).write_text(file.node, encoding="utf-8")
        while visible < nodes:
            # Listing the folder makes an NFS client query its server again.
            visible.update(
                name
                for name in os.listdir(folder)
                if name in nodes and (folder / name).read_text(encoding="utf-8") == name
            )
            time.sleep(POLL_SECONDS)
        return []

    if file.is_leader:
        check_with_timeout(seconds, "shared files", wait_for_files)
    view = (file.node, file.is_leader, tuple(sorted(visible)))
    views = ranks.all_gather(view, tuple[str, bool, tuple[str, ...]])
    if file.is_leader:
        with suppress(OSError):
            (folder / file.node).unlink()
            folder.rmdir()  # succeeds for the last node
    return {node: view for node, is_leader, view in views if is_leader}


def _judge_views(
    views: Mapping[str, tuple[str, ...]], checks: dict[str, list[Check]]
) -> list[Check]:
    """Add a check of shared files to each node. Return the failed checks that belong to no single
    node."""
    remedy = "set run.directory to a file system that all nodes mount, or exclude the node"
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
    """Return, for each node, the seconds by which its clock is ahead of rank 0's, and the error of
    this value (half of the fastest round trip). Valid on rank 0 only."""
    value = torch.zeros(1, dtype=torch.float64)
    offsets: dict[str, tuple[float, float]] = {}
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
        offsets[node] = (offset, half)
    return offsets


def _judge_clocks(
    offsets: Mapping[str, tuple[float, float]], most_seconds: float
) -> dict[str, list[Check]]:
    """Check each clock against the median of all clocks; with two nodes, against the first."""
    values = [offset for offset, _ in offsets.values()]
    middle = median(values) if len(values) > 2 else 0.0
    checks = {}
    for node, (offset, error) in offsets.items():
        skew = offset - middle
        text = f"{skew:+.3f} s from the other clocks, accurate to {error:.3f} s"
        if abs(skew) - error > most_seconds:
            remedy = "exclude the node; check its time service (chrony, ntpd)"
            checks[node] = [Check("clock", Status.FAIL, text, remedy)]
        else:
            checks[node] = [Check("clock", Status.OK, text)]
    return checks
