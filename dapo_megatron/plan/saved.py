"""The plan of a run's GPU memory in its folder, to lay beside what is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dapo_megatron.config import Config
from dapo_megatron.files import write_json
from dapo_megatron.plan.estimate import make_plan
from dapo_megatron.plan.parts import GIB
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.types import STEP_PHASES, DapoError

_ODD = (DapoError, OSError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a model's config.json with which policy and engine can do may raise here."""


def keep_plan(
    config: Config, path: Path, note: Callable[[str], None], num_processes: int, gpu_bytes: int
) -> None:
    """Write what each phase takes of a GPU of `gpu_bytes`, in GiB, to `path`; `note` hears why if
    that cannot be done. Without GPUs there is nothing to lay it beside: the memory of a process is
    mostly that of libraries, which no plan counts."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    try:
        plan = make_plan(
            config, num_processes, gpu_memory_gib=gpu_bytes / GIB, gpus_per_node=per_node
        )
        phases = {phase: plan.num_bytes(phase) / GIB for phase in PHASES if phase in STEP_PHASES}
        said = "of the rank that takes most, CUDA and NCCL included, which are assumed"
        write_json(path, {"device": "gpu", "phases": phases, "note": said})
    except _ODD as error:  # the file is for the report alone: no run ends for it
        note(f"  no {path.name}: {type(error).__name__}: {error}")
