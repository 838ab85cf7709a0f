"""Policy and engines on nodes of their own: two steps of one job. The step of the engines may lose
ranks and nodes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest

from tests.helpers.runs import FREE, check_ledger
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


def submit(project: Project, num_nodes: int, engines: str, *more: str, **env: str) -> Job:
    """Submit a job of the fake program with a step for the engines."""
    options = (f"-N{num_nodes}", *ON_CPU, "--no-kill", *more)
    return project.sbatch(*options, "c.yaml", DAPO_ENGINES=engines, **{**QUICK, **env})


def starts(project: Project, attempt: str, engine: int) -> int:
    """Return how often an engine has started in an attempt."""
    path = project.folder / f"record/{attempt}/engine-{engine}.starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_policy_and_engines_have_a_step_with_their_tasks(project: Project) -> None:
    """An engine of two GPUs is one task, which sees only these."""
    per_node = ("--ntasks-per-node=4", "--gpus-per-node=4")
    job = submit(project, 2, "2x2", *per_node, FAKE="busy", FAKE_STARTS="2")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    attempt = f"{job.number}.0"
    ranks = [project.record(attempt, f"train-{rank}") for rank in range(4)]
    engines = [project.record(attempt, f"engine-{number}") for number in range(2)]
    assert {task["SLURM_NTASKS"][0] for task in ranks} == {"4"}
    assert {task["SLURM_NTASKS"][0] for task in engines} == {"2"}
    assert {task["CUDA_VISIBLE_DEVICES"][0] for task in ranks} == {"0,1,2,3"}
    assert [task["CUDA_VISIBLE_DEVICES"][0] for task in engines] == ["0,1", "2,3"]
    for name in ("DAPO_MEGATRON_ENGINES", "DAPO_MEGATRON_SECRET", "DAPO_MEGATRON_ATTEMPT"):
        assert len({task[name][0] for task in (*ranks, *engines)}) == 1, name
    [port] = {task["MASTER_PORT"][0] for task in ranks}
    [address] = {task["MASTER_ADDR"][0] for task in ranks}
    assert ranks[0]["DAPO_MEGATRON_ENGINES"] == [f"{address}:{int(port) + 1}"]
    assert {task["arguments"][0] for task in ranks} == {"-m dapo_megatron train c.yaml resume=auto"}
    assert [task["arguments"][0] for task in engines] == [
        f"-m dapo_megatron engine --replica {number}" for number in range(2)
    ]
    logs = project.folder / "slurm_logs/dapo" / attempt
    assert len([*logs.glob("*-engine[01].log")]) == 2
    if project.cluster.has_networks:
        hosts = Counter(task["host"][0] for task in (*ranks, *engines))
        assert hosts == {"node1": 4, "node2": 2}


def test_a_dead_engine_is_started_again_and_the_policy_goes_on(project: Project) -> None:
    job = submit(project, 2, "1x1", FAKE="busy", FAKE_ENGINE="crash crash serve", FAKE_STARTS="3")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert starts(project, f"{job.number}.0", 0) == 3, job.story()
    assert int(job.facts()["Restarts"]) == 0


def test_an_engine_that_keeps_crashing_is_given_up_and_the_policy_goes_on(project: Project) -> None:
    job = submit(
        project, 2, "1x1", FAKE="busy", FAKE_ENGINE="mute", FAKE_STARTS="3",
        DAPO_ENGINE_STARTS="3", FAKE_SECONDS="5",
    )  # fmt: skip
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert starts(project, f"{job.number}.0", 0) == 3, job.story()


def test_the_end_of_the_policy_ends_the_engines_and_the_job_is_requeued(project: Project) -> None:
    job = submit(project, 2, "1x1", FAKE="dead busy", FAKE_ENGINE="serve")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    assert starts(project, f"{job.number}.0", 0) <= 1, job.story()


def test_usr1_stops_the_policy_and_the_engines_follow(project: Project) -> None:
    job = submit(project, 2, "1x1", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    project.cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert project.record(attempt, "train-0")["signal"] == ["USR1"]
    assert "exit code 75" in job.log


def test_the_job_goes_on_without_a_lost_node_of_engines(
    project: Project, needs_networks: None
) -> None:
    job = submit(project, 3, "2x1", FAKE="busy", FAKE_STARTS="2", FAKE_SECONDS="50")
    attempt = f"{job.number}.0"
    wait_until(lambda: starts(project, attempt, 1) == 1, 120, job.story)
    project.cluster.kill_node("node3")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 0
    assert starts(project, attempt, 0) == 1


def test_the_job_is_requeued_without_a_lost_node_of_the_policy(
    project: Project, needs_networks: None
) -> None:
    job = submit(project, 3, "1x1", FAKE="wait busy", FAKE_ENGINE="serve")
    project.wait_until_ready(f"{job.number}.0", 2)
    project.cluster.kill_node("node2")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    tasks = ("train-0", "train-1", "engine-0")
    hosts = [project.record(f"{job.number}.1", task)["host"][0] for task in tasks]
    assert len({*hosts}) == 3 and "node2" not in hosts


def test_the_job_is_requeued_without_the_lost_node_of_its_script(
    project: Project, needs_networks: None
) -> None:
    """Slurm keeps a job with --no-kill, although nothing of its policy is left."""
    job = submit(project, 2, "1x1", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    wait_until(lambda: starts(project, attempt, 0) == 1, 120, job.story)
    project.cluster.kill_node("node1")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "COMPLETED", job.story()
    assert int(job.facts()["Restarts"]) == 1
    assert project.record(f"{job.number}.1", "train-0")["host"] != ["node1"]


def test_a_job_that_may_not_be_requeued_is_cancelled_after_two_lost_nodes(
    project: Project, needs_networks: None
) -> None:
    """The first of the nodes of engines, then that of the script. Without one, the job would keep
    its last node until its time limit."""
    job = submit(project, 3, "2x1", "--no-requeue", FAKE="wait busy", FAKE_ENGINE="serve")
    attempt = f"{job.number}.0"
    project.wait_until_ready(attempt, 1)
    wait_until(lambda: starts(project, attempt, 1) == 1, 120, job.story)
    project.cluster.kill_node("node2")
    wait_until(lambda: job.facts()["NumNodes"] == "2", 120, job.story)
    project.cluster.kill_node("node1")
    assert job.wait_for(seconds=SECONDS)["JobState"] == "CANCELLED", job.story()


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ("1", "write engine.replicas, x and engine.tensor_parallel"),
        ("2x1", "takes 2 nodes, and the job has only 2"),
        ("1x2", "change engine.replicas or engine.tensor_parallel"),
    ],
)
def test_wrong_numbers_of_engines_are_refused(project: Project, engines: str, reason: str) -> None:
    job = submit(project, 2, engines)
    assert job.wait_for(seconds=SECONDS)["JobState"] == "FAILED", job.story()
    assert reason in job.log


# ---------------------------------------------------------------------------- real runs


SEPARATE = ("engine.colocated=false", "engine.tensor_parallel=1")
STEPS = 80
"""Enough for an engine to return, which takes half a minute, in the middle of the run."""


def start(training: Project, name: str, *more: str) -> Run:
    """Start a run with a rank of the policy and two engines, each on a node of its own. It goes on
    without an engine, because it is not deterministic."""
    return Run.start(
        training, name, "policy.tensor_parallel=1", *SEPARATE, "engine.replicas=2", *FREE, *more,
        num_nodes=3, options=("--no-kill",), DAPO_ENGINES="2x1", **QUICK,
    )  # fmt: skip


def test_a_run_with_engines_on_another_node_completes(training: Project) -> None:
    """The node check covers all three nodes, a number that does not fit the policy's layout."""
    run = Run.start(
        training, "separate", "policy.tensor_parallel=2", *SEPARATE, "engine.replicas=1",
        num_nodes=3, options=("--no-kill",), DAPO_ENGINES="1x1", DAPO_PREFLIGHT="1", **QUICK,
    )  # fmt: skip
    run.wait_for_end()
    assert run.num_steps() == NUM_STEPS
    assert int(run.job.facts()["Restarts"]) == 0


def test_a_run_goes_on_without_a_killed_engine_which_returns(training: Project) -> None:
    run = start(training, "separate_killed", f"train.rollout_steps={STEPS}")
    run.wait_for_step(2, 2 * START_SECONDS)
    os.kill(run.pid_of_engine(1), signal.SIGKILL)
    run.wait_for_end()
    assert int(run.job.facts()["Restarts"]) == 0
    check_ledger(run.folder, STEPS, samples_per_prompt=8)
    last = max((run.folder / "timeline").glob("step_*.json"))
    replicas = json.loads(last.read_text())["replicas"]
    assert len(replicas) == 2
    assert all(any(running for _, running in replica["running"]) for replica in replicas)
    logs = run.project.folder / f"slurm_logs/separate_killed/{run.job.number}.0"
    log = next(logs.glob("*-engine1.log")).read_text()
    assert "engine ended with exit code 137; starting it again" in log


def test_a_run_goes_on_without_a_lost_node_of_engines(
    training: Project, needs_networks: None
) -> None:
    run = start(training, "separate_lost")
    run.wait_for_step(2, 2 * START_SECONDS)
    training.cluster.kill_node("node3", is_silent=True)
    run.wait_for_step(run.num_steps() + 1, START_SECONDS)
    run.wait_for_end()
    assert int(run.job.facts()["Restarts"]) == 0
    check_ledger(run.folder, NUM_STEPS, samples_per_prompt=8)
