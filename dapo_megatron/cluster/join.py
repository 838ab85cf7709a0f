"""How a rank learns who it is: from torchrun, from `launch`, or from a Slurm step.

Everything in and under this program reads torchrun's variables; a task of `srun` is given them
here, so that one task per GPU joins without a launcher in between.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import MutableMapping

from dapo_megatron.types import ConfigError

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the ports that kernels give away by themselves."""


def adopt_step(environ: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, with several tasks or the MASTER_PORT that slurm/*.sbatch set: torchrun's
    variables from Slurm's. A step of one task and no MASTER_PORT (`srun --pty bash`) is a machine.

    Raises ConfigError if the first node of the step cannot be named.
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
    """A port that jobs, requeues of a job and steps running side by side do not share."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    job, restart, step = (int(environ.get(name) or "0") for name in names)
    return FIRST_PORT + (job + 101 * restart + 1009 * step) % NUM_PORTS


def node_name() -> str:
    """Return Slurm's name of this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "8(x3),4": tasks of each node."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE: {text!r} is not as Slurm writes it")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks(environ: MutableMapping[str, str]) -> str:
    return environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_STEP_NUM_TASKS"]


def _first_node(environ: MutableMapping[str, str]) -> str:
    """The node of rank 0. No falling back to this machine: each node would then wait for the others
    in a world of its own."""
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if "[" not in nodes:
        return nodes.partition(",")[0]
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise ConfigError(
            f"MASTER_ADDR: not set, and no scontrol here to read the node list {nodes}; "
            "export MASTER_ADDR with the name of the first node (slurm/train.sbatch does)"
        )
    listed = subprocess.run(
        [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]
