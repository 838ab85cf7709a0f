"""Check one node from one of its processes: GPUs, disks, limits, InfiniBand, compiler, host name.

Each check has a timeout, because nvidia-smi hangs with a broken GPU, and a disk with a lost file
server.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dapo_megatron.config import Config
from dapo_megatron.doctor.check_result import Check, Status
from dapo_megatron.doctor.compiler import NAME as COMPILER
from dapo_megatron.doctor.compiler import check_compiler
from dapo_megatron.doctor.gpus import GpuError, check_gpus, describe, read_gpus
from dapo_megatron.doctor.machine import GIB

INFINIBAND = Path("/sys/class/infiniband")
MIN_SHM_GIB = 1.0
"""Space in /dev/shm, through which NCCL and vLLM pass messages between the ranks of a node."""
MIN_TEMP_GIB = 1.0


class NodeState(NamedTuple):
    """Checks of a node, and facts that must be the same on all nodes."""

    checks: list[Check]
    facts: dict[str, str]


def check_node(config: Config, num_tasks: int, *, is_used: bool) -> NodeState:
    """Run the checks that need no other node. `num_tasks` ranks run on this node, on GPUs if
    `is_used`. Faults are returned as checks, not raised."""
    seconds = config.preflight.check_seconds
    least = config.preflight.min_free_disk_gib
    facts: dict[str, str] = {}
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) <= num_tasks
    checks_by_name: dict[str, Callable[[], Iterable[Check]]] = {
        # A query has a shorter timeout than the whole check, so that its error names what hangs.
        "GPUs": lambda: _gpus(num_tasks, facts, seconds / 2, is_used=is_used),
        "InfiniBand": lambda: check_infiniband(read_ports(), facts),
        "run.directory": lambda: [_disk("run.directory", Path(config.run.directory), least)],
        "temporary files": lambda: [
            _disk("temporary files", Path(tempfile.gettempdir()), MIN_TEMP_GIB)
        ],
        "/dev/shm": lambda: [_disk("/dev/shm", Path("/dev/shm"), MIN_SHM_GIB)],
        "host name": lambda: [_host_name(is_alone=is_alone)],
    }
    if is_used:
        checks_by_name[COMPILER] = lambda: [check_compiler(seconds / 2)]
    checks = [
        check
        for name, run_check in checks_by_name.items()
        for check in check_with_timeout(seconds, name, run_check)
    ]
    return NodeState(checks, facts)


def check_with_timeout(
    seconds: float, name: str, run_check: Callable[[], Iterable[Check]]
) -> list[Check]:
    """Return the results of `run_check`, or a failed check at the timeout. A thread that hangs in
    the kernel cannot be stopped, so it is left running."""

    results: list[list[Check]] = []

    def run() -> None:
        checks: list[Check] = []
        try:
            checks.extend(run_check())
        except OSError as error:
            checks.append(Check(name, Status.FAIL, f"cannot be checked: {error}", remedy))
        results.append(checks)

    remedy = "exclude the node; report it to the administrators"
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return (
        results[0] if results else [Check(name, Status.FAIL, f"no answer in {seconds:g} s", remedy)]
    )


def _gpus(
    num_tasks: int, facts: dict[str, str], seconds: float, *, is_used: bool
) -> Iterator[Check]:
    try:
        gpus = read_gpus(seconds)
    except GpuError as error:
        remedy = "exclude the node; a GPU that fell off the bus does this (Xid 79 in dmesg)"
        facts["GPUs"] = "no answer"
        yield Check("GPUs", Status.FAIL, str(error), remedy)
        return
    facts["GPUs"] = describe(gpus)
    yield from check_gpus(gpus, num_tasks, is_used=is_used)


def _disk(name: str, folder: Path, least_gib: float) -> Check:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free / GIB
    if free >= least_gib:
        return Check(name, Status.OK, f"{free:.1f} GiB free in {folder}")
    text = f"{free:.2f} GiB free in {folder}, {least_gib:g} GiB are required"
    remedy = {
        "run.directory": "free space, set another run.directory, or lower "
        "preflight.min_free_disk_gib",
        "temporary files": "free space, or point TMPDIR at another disk",
        "/dev/shm": "remove files that ended runs left there; docker run --shm-size=8g",
    }[name]
    status = Status.WARN if name == "/dev/shm" and free > MIN_SHM_GIB / 4 else Status.FAIL
    return Check(name, status, text, remedy)


def _host_name(*, is_alone: bool) -> Check:
    host = socket.gethostname()
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        remedy = "add it to /etc/hosts or DNS: ranks exchange their host names"
        return Check("host name", Status.FAIL, f"{host} does not resolve ({error})", remedy)
    is_local = all(address.startswith("127.") or address == "::1" for address in addresses)
    if is_local and not is_alone:
        # Gloo would send the other nodes a loopback address, which each resolves to itself.
        remedy = "across nodes, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (slurm/env.sh)"
        text = f"{host} is {', '.join(sorted(addresses))}, which other nodes cannot reach"
        return Check("host name", Status.WARN, text, remedy)
    return Check("host name", Status.OK, f"{host} is {', '.join(sorted(addresses))}")


# ------------------------------------------------------------------------------- InfiniBand


class Port(NamedTuple):
    """A port of a host channel adapter. `rate` is the kernel's text: "400 Gb/sec (4X NDR)"."""

    name: str
    state: str
    rate: str


def read_ports(root: Path = INFINIBAND) -> list[Port]:
    """Read all InfiniBand and RoCE ports of this node."""
    return [
        Port(
            f"{port.parent.parent.name}:{port.name}",
            (port / "state").read_text().partition(":")[2].strip(),
            (port / "rate").read_text().strip(),
        )
        for port in sorted(root.glob("*/ports/*"))
    ]


def check_infiniband(ports: list[Port], facts: dict[str, str]) -> Iterator[Check]:
    """Check that ports are active at full width, and that memory may be pinned for them. Store the
    number and rate of ports in `facts`, for the comparison with other nodes."""
    if not ports:
        yield Check("InfiniBand", Status.OK, "none")
        return
    active = [port for port in ports if port.state == "ACTIVE"]
    rates = Counter(port.rate for port in active)
    facts["InfiniBand"] = ", ".join(f"{rates[rate]} x {rate}" for rate in sorted(rates))
    yield Check("InfiniBand", Status.OK, f"active: {facts['InfiniBand'] or 'none'}")
    for port in ports:
        if port.state != "ACTIVE":
            remedy = "ignore this if no cable is plugged in; otherwise exclude the node"
            yield Check(f"InfiniBand {port.name}", Status.WARN, f"is {port.state}", remedy)
        elif re.search(r"\((1|2)X ", port.rate):
            remedy = "exclude the node; check the cable and port"
            text = f"runs at {port.rate}: some of its 4 lanes are down"
            yield Check(f"InfiniBand {port.name}", Status.FAIL, text, remedy)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield Check("pinned memory", Status.OK, "without a limit")
    else:
        remedy = "ulimit -l unlimited; under Slurm set LimitMEMLOCK=infinity in slurmd's unit"
        text = f"limited to {limit / GIB:.3g} GiB; InfiniBand pins its buffers"
        yield Check("pinned memory", Status.FAIL if limit < GIB else Status.WARN, text, remedy)


# ------------------------------------------------------------------------------- comparison


def compare_facts(facts: Mapping[str, Mapping[str, str]]) -> dict[str, list[Check]]:
    """Return, for each node in `facts`, a failed check for each fact in which it differs from most
    nodes. If two values are equally frequent, the first node's value counts as usual."""
    checks: dict[str, list[Check]] = {node: [] for node in facts}
    for key in sorted({key for node_facts in facts.values() for key in node_facts}):
        values = {node: node_facts.get(key, "none") for node, node_facts in facts.items()}
        counts = Counter(values.values())
        usual, count = counts.most_common(1)[0]
        for node, value in values.items():
            if value != usual:
                text = f"{value} here, {usual or 'none'} on {count} of {len(facts)} nodes"
                remedy = (
                    "use the same environment, checkout and config on every node; or exclude it"
                )
                checks[node].append(Check(key, Status.FAIL, text, remedy))
    return checks
