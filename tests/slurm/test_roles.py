"""Policy and engines on nodes of their own: two steps of one job. The step of the engines may lose
ranks and nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter

import psutil
import pytest
from dapo_megatron.cluster.members import ARRIVAL_SECONDS

from dapo_megatron.cluster.groups import LOST_NODE_SECONDS
from tests.learning.test_elastic import PHASES, check_both_sampled, check_ledger
from tests.slurm.cluster import NEEDS_ROOT, Cluster, wait_until
from tests.slurm.jobs import ON_CPU, Job, Project
from tests.slurm.runs import NUM_STEPS, START_SECONDS, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
QUICK = {"DAPO_ENGINE_PAUSE": "1", "DAPO_GUARD_SECONDS": "2", "DAPO_GRACE_SECONDS": "5"}
SECONDS = 240.0
"""Time allowed for a job of the fake program, on a busy machine. One takes 8 to 50 s."""


@pytest.fixture
def needs_networks(cluster: Cluster) -> None:
    if not cluster.has_networks:
        pytest.skip(NEEDS_ROOT)


def submit(project: Project, num_nodes: int, roles: str, *more: str, **env: str) -> Job:
    """Submit a job of the fake program with a step for each role."""
    options = (f"-N{num_nodes}", *ON_CPU, "--no-kill", *more)
    return project.sbatch(*options, "c.yaml", DAPO_ROLES=roles, **{**QUICK, **env})


def starts(project: Project, attempt: str, rank: int) -> int:
    """Return how often a rank with an engine has started in an attempt."""
    path = project.folder / f"record/{attempt}/train-{rank}.starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_each_role_has_a_step_with_its_ranks(project: Project) -> None:
    per_node = ("--ntasks-per-node=2", "--gpus-per-node=2")
    job = submit(project, 2, "2+2", *per_node, FAKE="busy", FAKE_STARTS="2")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    attempt = f"{job.number}.0"
    tasks = [project.record(attempt, f"train-{rank}") for rank in range(4)]
    assert [task["SLURM_PROCID"][0] for task in tasks] == ["0", "1", "0", "1"]
    assert [task["DAPO_FIRST_RANK"][0] for task in tasks] == ["0", "0", "2", "2"]
    assert {task["DAPO_WORLD_SIZE"][0] for task in tasks} == {"4"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "DAPO_MEGATRON_SECRET", "DAPO_MEGATRON_ATTEMPT"):
        assert len({task[name][0] for task in tasks}) == 1, name
    assert {task["arguments"][0] for task in tasks} == {"-m dapo_megatron train c.yaml resume=auto"}
    verdicts = [task["DAPO_MEGATRON_VERDICT"][0].rpartition("/")[2] for task in tasks]
    assert verdicts == ["verdict"] * 2 + ["verdict_of_engines"] * 2
    logs = project.folder / "slurm_logs/dapo" / attempt
    assert len([*logs.glob("*-engine[01].log")]) == 2
    if project.cluster.has_networks:
        assert Counter(task["host"][0] for task in tasks) == {"node1": 2, "node2": 2}


def test_a_dead_engine_is_started_again_and_the_policy_goes_on(project: Project) -> None:
    job = submit(project, 2, "1+1", FAKE="busy", FAKE_ENGINE="crash crash serve", FAKE_STARTS="3")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert starts(project, f"{job.number}.0", 1) == 3, job.story()
    assert int(job.facts()["Restarts"]) == 0


def test_an_engine_that_keeps_crashing_is_given_up_and_the_policy_goes_on(project: Project) -> None:
    job = submit(
        project, 2, "1+1", FAKE="busy", FAKE_ENGINE="mute", FAKE_STARTS="3",
        DAPO_ENGINE_STARTS="3", FAKE_SECONDS="5",
    )  # fmt: skip
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert starts(project, f"{job.number}.0", 1) == 3, job.story()


def test_the_end_of_the_policy_ends_the_engines_and_the_job_is_requeued(project: Project) -> None:
    job = submit(project, 2, "1+1", FAKE="dead busy", FAKE_ENGINE="serve")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    assert starts(project, f"{job.number}.0", 1) <= 1, job.story()


def test_usr1_stops_the_policy_and_the_engines_follow(project: Project) -> None:
    job = submit(project, 2, "1+1", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    project.cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert project.record(attempt, "train-0")["signal"] == ["USR1"]
    assert "exit code 75" in job.log


def test_the_job_goes_on_without_a_lost_node_of_engines(
    project: Project, needs_networks: None
) -> None:
    job = submit(project, 3, "1+2", FAKE="busy", FAKE_STARTS="2", FAKE_SECONDS="50")
    attempt = f"{job.number}.0"
    wait_until(lambda: starts(project, attempt, 2) == 1, 120, job.story)
    project.cluster.kill_node("node3")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 0
    assert starts(project, attempt, 1) == 1


def test_the_job_is_requeued_without_a_lost_node_of_the_policy(
    project: Project, needs_networks: None
) -> None:
    job = submit(project, 3, "2+1", FAKE="wait busy", FAKE_ENGINE="serve")
    project.wait_until_ready(f"{job.number}.0", 2)
    project.cluster.kill_node("node2")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    hosts = [project.record(f"{job.number}.1", f"train-{rank}")["host"][0] for rank in range(3)]
    assert len({*hosts}) == 3 and "node2" not in hosts


def test_the_job_is_requeued_without_the_lost_node_of_its_script(
    project: Project, needs_networks: None
) -> None:
    """Slurm keeps a job with --no-kill, although nothing of its policy is left."""
    job = submit(project, 2, "1+1", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    wait_until(lambda: starts(project, attempt, 1) == 1, 120, job.story)
    project.cluster.kill_node("node1")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    assert project.record(f"{job.number}.1", "train-0")["host"] != ["node1"]


def test_a_job_that_may_not_be_requeued_is_cancelled_after_two_lost_nodes(
    project: Project, needs_networks: None
) -> None:
    """The first of the nodes of engines, then that of the script. Without one, the job would keep
    its last node until its time limit."""
    job = submit(project, 3, "1+2", "--no-requeue", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    wait_until(lambda: starts(project, attempt, 2) == 1, 120, job.story)
    project.cluster.kill_node("node2")
    wait_until(lambda: job.facts()["NumNodes"] == "2", 120, job.story)
    project.cluster.kill_node("node1")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "CANCELLED", job.story()


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ("1", "write roles.policy+roles.engine"),
        ("1+2", "the job has 2 tasks"),
        ("2+0", "a node has one role"),
    ],
)
def test_wrong_roles_are_refused(project: Project, roles: str, reason: str) -> None:
    job = submit(project, 2, roles)
    assert job.wait_for(seconds=SECONDS)["JobState"] == "FAILED", job.story()
    assert reason in job.log


# ---------------------------------------------------------------------------- real runs


def run_with_roles(training: Project, name: str, number: int, *more: str, **env: str) -> Run:
    """Start a run with `number` ranks of each role, each role on a node of its own."""
    return Run.start(
        training, name, f"roles.policy={number}", f"roles.engine={number}", *more,
        options=(f"--ntasks-per-node={number}", "--no-kill"),
        DAPO_ROLES=f"{number}+{number}", **{**QUICK, **env},
    )  # fmt: skip


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_with_a_node_for_each_role_completes(training: Project, number: int) -> None:
    run = run_with_roles(training, f"roles_{number}", number, DAPO_PREFLIGHT="1")
    run.wait_for_end()
    assert run.num_steps() == NUM_STEPS
    assert int(run.job.facts()["Restarts"]) == 0
    logs = run.folder / "logs"
    assert len([*logs.glob("rank_*.log")]) == 2 * number
    pulses = [json.loads(path.read_text()) for path in sorted(run.folder.glob(".pulse/*.json"))]
    assert [pulse["role"] for pulse in pulses] == ["policy"] * number + ["engine"] * number


def test_a_run_goes_on_without_a_lost_node_of_engines(
    training: Project, needs_networks: None
) -> None:
    run = Run.start(
        training, "roles_lost", "roles.policy=1", "roles.engine=2", "engine.tensor_parallel=1",
        num_nodes=3, options=("--no-kill",), DAPO_ROLES="1+2", **QUICK,
    )  # fmt: skip
    run.wait_for_step(2, 2 * START_SECONDS)
    training.cluster.kill_node("node3", is_silent=True)
    lost = time.monotonic()
    run.wait_for_step(run.num_steps() + 1, START_SECONDS)
    seconds = time.monotonic() - lost
    run.wait_for_end()
    assert int(run.job.facts()["Restarts"]) == 0
    check_ledger(run.folder, NUM_STEPS, samples_per_prompt=8)
    print(f"{seconds:.1f} s to the next step")
    assert seconds < LOST_NODE_SECONDS + ARRIVAL_SECONDS + 20.0


@pytest.mark.parametrize("moment", ["generation", "sync"])
def test_an_engine_that_is_stopped_on_another_node_is_killed_and_returns(
    moment: str, training: Project, needs_networks: None
) -> None:
    limit, name = 20.0, f"stopped_in_{moment}"
    marks, python = training.folder / name / "marks", training.folder / name / "bin/python"
    python.parent.mkdir(parents=True)
    spoiler = f"{sys.executable} -m tests.helpers.spoiler 2 {marks}"
    python.write_text(f'#!/bin/bash\nexec {spoiler} "${{@:3}}"\n')  # without -m dapo_megatron
    python.chmod(0o755)
    marks.mkdir()
    run = Run.start(
        training, name, "roles.policy=1", "roles.engine=2", "engine.tensor_parallel=1",
        *(f"watchdog.{phase}={limit}" for phase in PHASES), "train.rollout_steps=40",
        num_nodes=3, options=("--no-kill",),
        DAPO_ROLES="1+2", DAPO_VENV=str(python.parents[1]), **QUICK,
    )  # fmt: skip
    run.wait_for_step(2, 2 * START_SECONDS)
    engine = run.pid_of_rank(2)
    if moment == "sync":
        (marks / "stop").touch()
        wait_until(lambda: psutil.Process(engine).status() == "stopped", START_SECONDS, run.story)
    else:
        os.kill(engine, signal.SIGSTOP)
    stopped, num_steps = time.monotonic(), run.num_steps()
    run.wait_for_step(num_steps + 2, START_SECONDS)
    seconds = time.monotonic() - stopped
    run.wait_for_end()
    assert int(run.job.facts()["Restarts"]) == 0
    check_ledger(run.folder, 40, samples_per_prompt=8)
    print(f"{moment}: {seconds:.1f} s to the next step but one")
    assert seconds < limit + ARRIVAL_SECONDS + 20.0
    if moment == "sync":
        # Its last heartbeat may be older than the sync.
        log = (run.folder / "logs/rank_0.log").read_text()
        assert re.search("watchdog: rank 2 hangs in phase (generate|sync)", log)
    logs = run.project.folder / f"slurm_logs/{name}/{run.job.number}.0"
    assert "engine rank ended with exit code 137" in (logs / "node3-engine1.log").read_text()
    check_both_sampled(run.folder, 40)
