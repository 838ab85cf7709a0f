"""Start a Slurm cluster of emulated nodes on this machine, which ends with its process.

As root each node has its own network (an address on a bridge), host name, processes and /dev/shm,
and `kill_node` is a power cut. Otherwise a node is only a slurmd on its own port. A node claims 224
CPUs, 2 TB and 8 H100s. Slurm does not check that, so real job headers run unchanged.

    python -m tests.slurm.cluster      # runs a cluster until Ctrl-C, and prints what to export

The daemons run in the foreground, as children that the kernel kills with their parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

NUM_GPUS = 8
NODE_HARDWARE = (
    f"Sockets=2 CoresPerSocket=56 ThreadsPerCore=2 RealMemory=2000000 Gres=gpu:h100:{NUM_GPUS}"
)
REQUEUE_SECONDS = 5
"""Lifetime of a credential. Slurm holds a requeued job back for as long: 120 s by default."""
NEEDS_ROOT = "needs nodes with networks and mounts of their own: sudo make test-slurm"
"""Reason why a test is skipped."""
STUB = Path(__file__).with_name("container_stub.c")

INSIDE_A_NODE = """
mount --bind "$0/etc/hosts" /etc/hosts
[[ -e /etc/nsswitch.conf ]] && mount --bind "$0/etc/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o size=2g tmpfs /dev/shm
hostname "$1"
slurmd -D -f "$0/etc/slurm.conf" -N "$1" & wait $!
"""
"""$0: the cluster's folder, $1: the node's name. bash is process 1 and reaps orphans."""


class Cluster:
    """`with Cluster(4) as cluster:` ... `cluster.run("sbatch", ...)`."""

    def __init__(self, num_nodes: int = 4) -> None:
        self.num_nodes = num_nodes
        self.has_networks = os.geteuid() == 0
        self.tag = f"dm{os.getpid()}"
        self.network = f"10.77.{os.getpid() % 250}"
        # All users must reach munge's socket, and socket paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.small_disk = self.folder / "small"
        """A disk of 64 MiB that all nodes share, for tests that fill it. Only as root."""
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "DAPO_", "OMP_"))
        } | {"SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def node_names(self) -> list[str]:
        """Names of the nodes: node1, node2, ..."""
        return [f"node{number}" for number in range(1, self.num_nodes + 1)]

    # ------------------------------------------------------------------ start and stop

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        for name in ("etc", "run", "log", "spool", "state", "dev"):
            (self.folder / name).mkdir()
        self._write_files()
        key, run = self.folder / "etc/munge.key", self.folder / "run"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        self._daemon(
            "munged", "munged", "--foreground", f"--key-file={key}",
            f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munge.seed",
        )  # fmt: skip
        wait_until((run / "munge.socket").exists, 10, "munged does not start")
        if self.has_networks:
            self._make_networks()
            # Mount before the nodes start. They do not see later mounts.
            self.small_disk.mkdir()
            small = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.small_disk)]
            subprocess.run(small, check=True)
        self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
        for name in self.node_names:
            self.start_node(name)
        wait_until(lambda: self.num_idle() == self.num_nodes, 30, lambda: self.logs())

    def stop(self) -> None:
        """Cancel all jobs, then end the daemons."""
        if "slurmctld" in self._daemons:
            self.cancel_all()
        for name in [*self.node_names, "slurmctld", "munged"]:
            if (daemon := self._daemons.pop(name, None)) is not None:
                is_whole_node = self.has_networks and name in self.node_names
                daemon.send_signal(signal.SIGKILL if is_whole_node else signal.SIGTERM)
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        if self.has_networks:
            for name in self.node_names:
                self._ip("netns", "del", self._namespace(name), check=False)
            self._ip("link", "del", f"br{self.tag}", check=False)
            subprocess.run(["umount", "--lazy", str(self.small_disk)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_node(self, name: str) -> None:
        """Start a node, or restart a killed one."""
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        if self.has_networks:
            self._ip("link", "set", self._link(name), "up")
        if not self.has_networks:
            self._daemon(name, "slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", name)
            return
        self._daemon(
            name, "nsenter", f"--net=/run/netns/{self._namespace(name)}",
            "unshare", "--uts", "--mount", "--propagation", "private", "--pid", "--fork",
            "--kill-child=KILL", "--mount-proc",
            "bash", "-c", INSIDE_A_NODE, str(self.folder), name,
        )  # fmt: skip

    def kill_node(self, name: str, *, is_silent: bool = False) -> None:
        """Cut the power of a node. As an ordinary user, kill only its slurmd; its tasks live on.

        The kernel of this machine closes the connections of what it kills, unless `is_silent`.
        """
        if is_silent:
            self._ip("link", "set", self._link(name), "down")
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def repair(self) -> None:
        """Restart killed nodes and wait until all are idle."""
        for name in self.node_names:
            if name not in self._daemons:
                self.start_node(name)

        def is_idle() -> bool:
            for name in self.run("sinfo", "-h", "-N", "-t", "down,drain,fail", "-o", "%N").split():
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
            return self.num_idle() == self.num_nodes

        wait_until(is_idle, 90, lambda: self.logs())

    # ------------------------------------------------------------------ commands

    def run(
        self,
        *command: str | Path,
        check: bool = True,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Run a command and return its output, stderr included. Another `user` needs root."""
        words = [str(word) for word in command]
        if user is not None:
            words = ["runuser", "-u", user, "--", *words]
        ran = subprocess.run(
            words, env={**self.env, **(env or {})}, cwd=cwd, text=True, timeout=60, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if check and ran.returncode:
            raise AssertionError(f"{' '.join(words)}: exit code {ran.returncode}\n{ran.stdout}")
        return ran.stdout.strip()

    def num_idle(self) -> int:
        """Return the number of idle nodes."""
        counts = self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).split()
        return sum(int(count) for count in counts if count.isdigit())

    def cancel_all(self) -> None:
        """Cancel the jobs of all users, and wait up to 20 s until they are gone."""
        live = ("squeue", "-h", "-t", "PD,R,CG", "-o", "%A")
        if jobs := self.run(*live, check=False).split():
            self.run("scancel", *jobs, check=False)
            deadline = time.monotonic() + 20
            while self.run(*live, check=False) and time.monotonic() < deadline:
                time.sleep(0.2)

    def logs(self, num_lines: int = 12) -> str:
        """Return the last log lines of every daemon, for the message of a failed test."""
        parts = [self.run("sinfo", "-N", "-l", check=False)]
        for path in sorted((self.folder / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()
            # Harmless warnings of every start.
            lines = [line for line in lines if not re.search("pmix|PMIx|MPI: ", line)][-num_lines:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    # ------------------------------------------------------------------ set-up

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"log/{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=_die_with_parent, start_new_session=True,
            )  # fmt: skip

    def _namespace(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def _ip(self, *words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    def _link(self, name: str) -> str:
        """Return the name of the outer end of a node's network link."""
        return f"v{self.tag}n{1 + self.node_names.index(name)}"

    def _make_networks(self) -> None:
        self._sweep()
        bridge = f"br{self.tag}"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.network}.254/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number, name in enumerate(self.node_names, start=1):
            inside, outside = self._namespace(name), self._link(name)
            self._ip("netns", "add", inside)
            self._ip(
                "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", inside
            )
            self._ip("link", "set", outside, "master", bridge, "up")
            self._ip("-n", inside, "addr", "add", f"{self.network}.{number}/24", "dev", "eth0")
            self._ip("-n", inside, "link", "set", "eth0", "up")
            self._ip("-n", inside, "link", "set", "lo", "up")

    def _sweep(self) -> None:
        """Delete the networks of clusters whose process was killed."""
        listed = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
        namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        for match in re.finditer(r"^brdm(\d+) ", listed, re.MULTILINE):
            if not Path(f"/proc/{match[1]}").exists():
                self._ip("link", "del", f"brdm{match[1]}", check=False)
        for match in re.finditer(r"^dm(\d+)-\S+", namespaces, re.MULTILINE):
            if not Path(f"/proc/{match[1]}").exists():
                self._ip("netns", "del", match[0], check=False)

    def _write_files(self) -> None:
        etc, dev = self.folder / "etc", self.folder / "dev"
        for number in range(NUM_GPUS):
            # A GPU must be a character device whose name ends in its number.
            (dev / f"nvidia{number}").symlink_to("/dev/null")
        names = ",".join(self.node_names)
        (etc / "gres.conf").write_text(
            f"NodeName={names} Name=gpu Type=h100 File={dev}/nvidia[0-{NUM_GPUS - 1}]\n"
        )
        # slurmd looks for a cgroup system even where nothing uses it.
        version = subprocess.run(
            ["slurmd", "-V"], capture_output=True, text=True, check=True
        ).stdout
        year, month = (int(part) for part in version.split()[-1].split(".")[:2])
        plugin = "disabled" if (year, month) >= (24, 5) else "cgroup/v1"
        (etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (etc / "plugstack.conf").write_text(self._container_stub())
        addresses = {
            name: f"{self.network}.{number}" if self.has_networks else "127.0.0.1"
            for number, name in enumerate(self.node_names, start=1)
        }
        hosts = [f"{address} {name}" for name, address in addresses.items()]
        if self.has_networks:
            hosts.append(f"{self.network}.254 outside")
        (etc / "hosts").write_text("\n".join([Path("/etc/hosts").read_text(), *hosts, ""]))
        # A node reaches no name server. A lookup would block until it times out.
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (etc / "slurm.conf").write_text(self._slurm_conf(addresses))

    def _container_stub(self) -> str:
        library = self.folder / "container_stub.so"
        build = ["gcc", "-shared", "-fPIC", "-Wall", "-o", str(library), str(STUB)]
        subprocess.run(build, check=True)
        return f"required {library}\n"

    def _slurm_conf(self, addresses: Mapping[str, str]) -> str:
        host = socket.gethostname().split(".")[0]
        user = "root" if self.has_networks else subprocess.getoutput("id -un")
        at = f"{self.network}.254" if self.has_networks else "127.0.0.1"
        ports = _free_ports(1 + self.num_nodes)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} "
            f"{NODE_HARDWARE} State=UNKNOWN"
            for (name, address), port in zip(addresses.items(), ports[1:], strict=True)
        )
        # Job ids must not repeat, or a job would find files of an earlier cluster's job.
        first_job = int(time.time()) % 10_000_000 + 1000
        folder = self.folder
        return f"""\
ClusterName=emulated
SlurmctldHost={host}({at})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire={REQUEUE_SECONDS}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldDebug=verbose
SlurmdDebug=info
PlugStackConfig={folder}/etc/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=3600
JobRequeue=1
FirstJobId={first_job}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def wait_until(
    is_true: Callable[[], object], seconds: float, message: str | Callable[[], str]
) -> None:
    """Wait until `is_true()`, checked every 0.1 s. Raise AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(message if isinstance(message, str) else message())
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    with Cluster() as cluster:
        conf = cluster.env["SLURM_CONF"]
        print(f"export SLURM_CONF={conf}\n{cluster.run('sinfo')}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
