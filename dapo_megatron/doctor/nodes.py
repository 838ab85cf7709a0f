"""`doctor nodes`: each node checks itself, then all ranks exchange data; bad nodes are named.

Before each check, a node writes into its file that it did not get beyond it. A node that hangs or
dies in its own check therefore counts as bad, and one that waits for others does not. Which
node slows down an exchange of all ranks, only the cluster's tool can tell (`preflight.command`).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.cluster.versions import versions
from dapo_megatron.config import Config, PreflightConfig
from dapo_megatron.config.file import dump_config
from dapo_megatron.doctor import machine
from dapo_megatron.doctor.check_result import Check, Status, table, to_dict, worst
from dapo_megatron.doctor.machine import EXCLUDE
from dapo_megatron.files import write_result, write_text
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.policy import device
from dapo_megatron.tracking.provenance import commit
from dapo_megatron.types import RankError

NUM_BYTES = {"nccl": 256 * 2**20, "gloo": 4 * 2**20}
"""Size of the tensor that each rank exchanges."""
WARM_UPS, REPEATS = 2, 5
"""Exchanges before those that are timed, which establish the connections, and timed ones."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of all ranks. `whole` has the checks that belong to no single node, `gbps` the bus
    bandwidths by name."""

    nodes: dict[str, list[Check]]
    whole: list[Check]
    gbps: dict[str, float]

    @property
    def bad(self) -> list[str]:
        """Nodes to exclude."""
        return [node for node, checks in self.nodes.items() if worst(checks) is Status.FAIL]

    @property
    def is_good(self) -> bool:
        """True if nothing failed, so that a run may start."""
        return not self.bad and worst(self.whole) is not Status.FAIL

    def to_json(self) -> str:
        """Return the findings as JSON."""
        body = {
            "good": self.is_good,
            "bad": self.bad,
            "nodes": {node: to_dict(checks) for node, checks in self.nodes.items()},
            "whole": to_dict(self.whole),
            "gbps": self.gbps,
        }
        return json.dumps(body, indent=2) + "\n"


def command(config: Config, report: Path, json_file: Path | None) -> bool:
    """Check all nodes, on this rank of a launched job, one per GPU. Return True if a run may start.
    Each node writes its file into the folder `report`; rank 0 prints all findings."""
    node, file = node_name(), report / f"{node_name()}.json"
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    checks = check_node(config, file) if is_first else []
    try:
        ranks = join("gloo")
        findings = check_together(config, ranks, node, checks)
    except (RuntimeError, RankError) as error:  # torch.distributed raises only RuntimeErrors
        print(f"{node} lost the other nodes, see their files in {report}: {error}", flush=True)
        return False
    if is_first:
        _write(file, findings.nodes[node])
    if ranks.rank == 0:
        console = LiteralConsole()
        console.print(table("doctor nodes", {**findings.nodes, "all together": findings.whole}))
        for name, gbps in findings.gbps.items():
            console.print(f"{name}: {gbps:.2f} GB/s per GPU")
        console.print(f"bad nodes: {', '.join(findings.bad) or 'none'}")
        write_result(json_file, findings.to_json())
    dist.destroy_process_group()
    return findings.is_good


# ------------------------------------------------------------------------------- one node


def check_node(config: Config, file: Path) -> list[Check]:
    """Run the checks that need no other node, on the node's first rank, and write them to a file.
    slurm/train.sbatch reads its status."""
    settings, checks = config.preflight, list[Check]()
    folders = {
        "run.directory": (config.run.directory, settings.min_free_disk_gib),
        "temporary files": (tempfile.gettempdir(), 1.0),
        "/dev/shm": ("/dev/shm", 1.0),  # NCCL and vLLM pass messages between ranks through it
    }
    for name, (folder, least_gib) in folders.items():
        _begin(file, name, checks)
        checks.append(machine.check_space(Path(folder), least_gib, name))
    _begin(file, "GPUs", checks)
    num_tasks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.has_cuda() else 0
    checks += machine.check_gpus(num_tasks, settings.check_seconds)
    if settings.command is not None:
        _begin(file, "preflight.command", checks)
        code, output = machine.run_command(["bash", "-c", settings.command], settings.check_seconds)
        text = f"exit code {code}: {output[-300:]}"
        verdict = (Status.FAIL, text, EXCLUDE) if code else (Status.OK, text)
        checks.append(Check("preflight.command", *verdict))
    _begin(file, "C compiler", checks)
    if device.has_cuda():
        checks.append(machine.check_compiler())
    _write(file, checks)
    return checks


def _begin(file: Path, name: str, checks: Sequence[Check]) -> None:
    """Write that the node, after `checks`, did not get beyond the check `name`."""
    _write(file, [*checks, Check(name, Status.FAIL, "the node did not get beyond this", EXCLUDE)])


def _write(file: Path, checks: Sequence[Check]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(to_dict(checks), indent=2) + "\n", durable=False)


# ------------------------------------------------------------------------------- all nodes


def check_together(config: Config, ranks: Ranks, node: str, checks: list[Check]) -> Findings:
    """Compare all nodes, and exchange data. `checks` are those of `node`, on its first rank.
    Collective; returns the same findings on every rank."""
    facts = {**versions(), "commit": commit() or "none", "backend": device.backend()}
    facts["config"] = sha256(dump_config(config).encode()).hexdigest()[:16]
    facts |= {check.name: check.finding for check in checks if check.name == "GPUs"}
    ranks.barrier()
    state = (node, ranks.local_rank == 0, checks, facts, time.time())
    states = ranks.all_gather(state, tuple[str, bool, list[Check], dict[str, str], float])
    firsts = [state for state in states if state[1]]
    findings = Findings({name: own for name, _, own, _, _ in firsts}, [], {})
    _compare_facts({name: facts for name, _, _, facts, _ in firsts}, findings)
    clocks = {name: seconds for name, _, _, _, seconds in firsts}
    _compare_clocks(clocks, config.preflight.max_clock_skew_seconds, findings)
    nodes = [name for name, *_ in states]
    _compare_views(Path(config.run.directory), ranks, nodes, findings)
    if findings.is_good:
        device.claim(ranks.local_rank)  # only now, because each node has checked its GPUs
        findings.gbps.update(measure(ranks, device.backend()))
        _judge_bandwidth(config.preflight, findings)
    return findings


def _compare_facts(facts: Mapping[str, Mapping[str, str]], findings: Findings) -> None:
    """Fail each node that differs from most."""
    for key in sorted({key for of_node in facts.values() for key in of_node}):
        values = {node: of_node.get(key, "none") for node, of_node in facts.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        for node, value in values.items():
            if value != usual:
                text = f"{value} here, {usual} on {count} of {len(facts)} nodes"
                remedy = "use the same environment and config on every node; or exclude it"
                findings.nodes[node].append(Check(key, Status.FAIL, text, remedy))


def _compare_clocks(clocks: Mapping[str, float], most: float, findings: Findings) -> None:
    """Fail each node whose clock, read after a barrier, is too far from the others'."""
    for node, seconds in clocks.items():
        skew = seconds - median_low(clocks.values())
        if abs(skew) > most:
            remedy = "exclude the node; check its time service (chrony, ntpd)"
            text = f"{skew:+.1f} s from the other nodes"
            findings.nodes[node].append(Check("clock", Status.FAIL, text, remedy))


def _compare_views(folder: Path, ranks: Ranks, nodes: Sequence[str], findings: Findings) -> None:
    """Fail each node that does not see a new file of rank 0; `nodes` has the node of each rank. Its
    name is new, so that no client of a network disk remembers that there is none. Collective."""
    path = folder / ranks.broadcast(f".preflight-{uuid.uuid4().hex}", str)
    with suppress(OSError):  # then no node sees it
        if ranks.rank == 0:
            path.touch()
    ranks.barrier()
    seen = ranks.all_gather(os.path.exists(path), bool)
    with suppress(OSError):
        if ranks.rank == 0:
            path.unlink()
    blind = dict.fromkeys(node for node, sees in zip(nodes, seen, strict=True) if not sees)
    remedy = "set run.directory to a file system that all nodes mount, or exclude the node"
    text = f"sees no file of {nodes[0]} in run.directory"
    if blind and blind.keys() >= findings.nodes.keys() - {nodes[0]}:
        findings.whole.append(Check("shared files", Status.FAIL, f"no node {text}", remedy))
        return
    for node in blind:
        findings.nodes[node].append(Check("shared files", Status.FAIL, text, remedy))


def measure(ranks: Ranks, backend: str) -> dict[str, float]:
    """Return the bus bandwidths of all_reduce and all_to_all over all ranks, in GB/s per rank (1e9
    bytes), as defined by nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): comparable
    with the rate of a link. Empty with one rank. Collective."""
    number, gbps = ranks.world_size, dict[str, float]()
    if number == 1:
        return gbps
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    where = device.device()
    tensor = torch.zeros(NUM_BYTES[backend] // 4 // number * number, device=where)
    received = torch.empty_like(tensor)
    for name, sent in (("all_reduce", 2 * (number - 1)), ("all_to_all", number - 1)):
        seconds = 0.0
        for repeats in (WARM_UPS, REPEATS):
            ranks.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                if name == "all_reduce":
                    dist.all_reduce(tensor, group=group)
                else:
                    dist.all_to_all_single(received, tensor, group=group)
            if where.type == "cuda":
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / repeats
        gbps[name] = tensor.nbytes * sent / number / max(ranks.all_gather(seconds, float)) / 1e9
    return gbps


def _judge_bandwidth(settings: PreflightConfig, findings: Findings) -> None:
    for name, gbps in findings.gbps.items():
        floor = getattr(settings, f"min_gbps_{name}") or 0.0
        if gbps < floor:
            text = f"{gbps:.2f} GB/s per GPU over all nodes; {floor:g} are required"
            remedy = f"test the links with the cluster's tool, or lower preflight.min_gbps_{name}"
            findings.whole.append(Check(name, Status.FAIL, text, remedy))
