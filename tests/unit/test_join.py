"""A task of srun gets the variables that torchrun would set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dapo_megatron.cluster.join import adopt_step, port_of, tasks_per_node
from dapo_megatron.types import ConfigError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "h1,h2",
}


def test_a_task_of_a_multi_task_step_is_a_rank() -> None:
    environ = dict(STEP)
    adopt_step(environ)
    assert environ["RANK"] == "9"
    assert environ["WORLD_SIZE"] == "12"
    assert environ["LOCAL_RANK"] == "1"
    assert environ["LOCAL_WORLD_SIZE"] == "4"
    assert environ["MASTER_ADDR"] == "h1"
    assert 20_000 <= int(environ["MASTER_PORT"]) < 30_000


def test_variables_exported_by_the_script_are_kept() -> None:
    environ = {**STEP, "MASTER_ADDR": "ib-h1", "MASTER_PORT": "29000"}
    adopt_step(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("ib-h1", "29000")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # The batch script and `srun --pty bash`: here `train` starts its own ranks.
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "MASTER_PORT": "1"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_shell_or_single_task_is_not_a_rank(environ: dict[str, str]) -> None:
    before = dict(environ)
    adopt_step(environ)
    assert environ == before


def test_variables_of_torchrun_inside_a_task_are_kept() -> None:
    environ = {**STEP, "RANK": "3", "WORLD_SIZE": "4"}
    adopt_step(environ)
    assert environ["WORLD_SIZE"] == "4"
    assert "MASTER_PORT" not in environ


def test_the_only_task_of_the_script_is_a_rank() -> None:
    environ = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "MASTER_PORT": "29000"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    adopt_step(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "1")


def test_a_compressed_node_list_is_expanded_by_scontrol(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        adopt_step({**STEP, "SLURM_STEP_NODELIST": "h[1-2]"})
    fake = tmp_path / "scontrol"
    fake.write_text('#!/bin/sh\n[ "$3" = "h[1-2]" ] && echo h1 && echo h2\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    environ = {**STEP, "SLURM_STEP_NODELIST": "h[1-2]"}
    adopt_step(environ)
    assert environ["MASTER_ADDR"] == "h1"


def test_tasks_per_node() -> None:
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("8(x3),4") == [8, 8, 8, 4]
    with pytest.raises(ConfigError):
        tasks_per_node("eight")


def test_attempts_and_steps_get_different_ports() -> None:
    ports = {
        port_of({"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": str(r), "SLURM_STEP_ID": str(s)})
        for r in range(3)
        for s in range(3)
    }
    assert len(ports) == 9
