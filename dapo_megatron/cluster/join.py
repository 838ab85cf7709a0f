"""Rank, world size and master address of a process, from torchrun, `launch` or a Slurm step.

This program and its libraries read torchrun's environment variables. A task of `srun` gets them
here, so it needs no launcher; start one task per GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping

from dapo_megatron.types import ConfigError

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of ports below the ephemeral ports that the kernel assigns."""


def adopt_step(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from Slurm's, if this process is a rank of a Slurm step.

    It is one if the step has several tasks, or one task and a MASTER_PORT from slurm/*.sbatch. A
    step of one task without MASTER_PORT (`srun --pty bash`) is treated as a machine without Slurm.
    Raises ConfigError if the first node of the step cannot be determined.
    """
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "0"))
    is_rank = num_tasks > 1 or (num_tasks == 1 and "MASTER_PORT" in environ)
    if "RANK" in environ or not is_rank:
        return
    node = int(environ.get("SLURM_NODEID", "0"))
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = str(num_tasks)
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    environ["LOCAL_WORLD_SIZE"] = str(tasks_per_node(_tasks(environ))[node])
    environ.setdefault("MASTER_PORT", str(port_of(environ)))
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _first_node(environ)


def port_of(environ: MutableMapping[str, str]) -> int:
    """Return a port that differs between jobs, requeues of a job, and its concurrent steps."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    job, restart, step = (int(environ.get(name) or "0") for name in names)
    return FIRST_PORT + (job + 101 * restart + 1009 * step) % NUM_PORTS


def is_one_machine(world_size: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this machine."""
    return world_size == int(environ.get("LOCAL_WORLD_SIZE", "1"))


def node_name() -> str:
    """Return Slurm's name of this node, or the host name without Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's format, such as "8(x3),4"."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE: {text!r} is not in Slurm's format, such as 8(x3),4"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks(environ: MutableMapping[str, str]) -> str:
    return environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_STEP_NUM_TASKS"]


def _first_node(environ: MutableMapping[str, str]) -> str:
    """Return the name of rank 0's node.

    There is no fallback to this machine, because each node would then wait for the others at its
    own address.
    """
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if "[" not in nodes:
        return nodes.partition(",")[0]
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise ConfigError(
            f"MASTER_ADDR: not set, and scontrol is not available to expand the node list {nodes}; "
            "export MASTER_ADDR with the name of the first node (slurm/train.sbatch does)"
        )
    hostnames = subprocess.run(
        [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return hostnames.stdout.split()[0]
