"""Run the job scripts on an emulated cluster with a fake program that ends in various ways.

Where the tests run as root, the jobs run as an ordinary user.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import NEEDS_ROOT, Cluster, wait_until
from tests.slurm.jobs import ON_CPU, SCRIPTS, Project

pytestmark = pytest.mark.slurm
TWO = ("-N2", *ON_CPU)


def files_with(text: str, folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if text.encode() in path.read_bytes()]


def test_a_completed_run_cancels_the_rest_of_its_chain(project: Project) -> None:
    chain = [project.sbatch(*TWO, "--dependency=singleton", "c.yaml", "a=1") for _ in range(3)]
    other = project.sbatch(*TWO, "--dependency=singleton", "--begin=now+1hour", "c.yaml", "a=2")
    assert chain[0].wait_for()["JobState"] == "COMPLETED", chain[0].story()
    states = [job.wait_for()["JobState"] for job in chain[1:]]
    assert states == ["CANCELLED", "CANCELLED"]
    assert other.state == "PENDING", "a job of the same name that does something else was cancelled"


def test_each_task_gets_its_rank_master_and_secret(project: Project) -> None:
    job = project.sbatch("-N2", "--ntasks-per-node=8", "c.yaml", "--overlay", "o.yaml", "a=1 2")
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    attempt = f"{job.number}.0"
    tasks = [project.record(attempt, f"train-{rank}") for rank in range(16)]
    assert [task["SLURM_PROCID"] for task in tasks] == [[str(rank)] for rank in range(16)]
    assert [task["SLURM_LOCALID"] for task in tasks] == [[str(rank % 8)] for rank in range(16)]
    hosts = [task["host"][0] for task in tasks]
    first, second = hosts[0], hosts[8]
    assert hosts == [first] * 8 + [second] * 8
    assert {task["arguments"][0] for task in tasks} == {
        "-m dapo_megatron train c.yaml --overlay o.yaml a=1 2 resume=auto"
    }
    assert {task["DAPO_MEGATRON_ATTEMPT"][0] for task in tasks} == {attempt}
    logs = project.folder / "slurm_logs/dapo" / attempt
    assert {task["DAPO_MEGATRON_VERDICT"][0] for task in tasks} == {str(logs / "verdict")}
    if project.cluster.has_networks:
        assert first != second
    assert {task["MASTER_ADDR"][0] for task in tasks} == {"node1"}
    ports = {int(task["MASTER_PORT"][0]) for task in tasks}
    checked = {int(project.record(attempt, "check-0")["MASTER_PORT"][0])}
    assert len(ports) == 1 and ports != checked and 20000 <= min(ports) < 30000
    check = project.record(attempt, "check-0")
    [secret] = {task["DAPO_MEGATRON_SECRET"][0] for task in [*tasks, check]}
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert not files_with(secret, logs) and secret not in job.log
    assert {task["OMP_NUM_THREADS"][0] for task in tasks} == {"16"}
    written = {path.name for path in logs.glob("node*.log")}
    assert written == {f"node{1 + rank // 8}-{rank}.log" for rank in range(16)}
    assert "output of rank 9" in (logs / "node2-9.log").read_text()
    assert (project.folder / "slurm_logs/dapo/latest").resolve() == logs


@pytest.mark.parametrize(("mask", "others"), [("", 0o077), ("027", 0o027)])
def test_files_of_tasks_have_the_permissions_of_dapo_umask(
    project: Project, mask: str, others: int
) -> None:
    job = project.sbatch(*TWO, "c.yaml", **({"DAPO_UMASK": mask} if mask else {}))
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    attempt = project.folder / "slurm_logs/dapo" / f"{job.number}.0"
    record = project.folder / "record" / f"{job.number}.0"
    for path in (attempt, *attempt.rglob("*"), record, *record.rglob("*")):
        mode = path.stat().st_mode & 0o777
        assert mode & others == 0, f"{path}: {mode:o}"
        if mask:
            assert mode & 0o040, f"{path}: {mode:o}"


def test_a_secret_from_outside_is_not_used(project: Project) -> None:
    """Slurm stores the environment of a submission, and env.txt is readable by all users."""
    outside = "ab" * 32
    job = project.sbatch(
        *TWO, "c.yaml", DAPO_MEGATRON_SECRET=outside, DAPO_MEGATRON_SECRET_FILE="/nowhere"
    )
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    task = project.record(f"{job.number}.0", "train-1")
    assert task["DAPO_MEGATRON_SECRET"] != [outside] and "DAPO_MEGATRON_SECRET_FILE" not in task
    assert not files_with(outside, project.folder / "slurm_logs")


def test_a_config_error_is_not_requeued_and_cancels_the_chain(project: Project) -> None:
    chain = [
        project.sbatch(*TWO, "--dependency=singleton", "c.yaml", FAKE="mistake") for _ in range(2)
    ]
    assert chain[0].wait_for()["ExitCode"] == "2:0", chain[0].story()
    assert "train.rollout_steps: 0" in chain[0].log
    assert chain[1].wait_for()["JobState"] == "CANCELLED"


def test_usr1_reaches_each_task_once_and_the_job_is_requeued(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="wait ok")
    project.wait_until_ready(f"{job.number}.0", 2)
    project.cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    facts = job.wait_for()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.story()
    for rank in range(2):
        assert project.record(f"{job.number}.0", f"train-{rank}")["signal"] == ["USR1"]
    ports = {project.record(f"{job.number}.{n}", "train-0")["MASTER_PORT"][0] for n in range(2)}
    assert len(ports) == 2, "a restart must not reuse the port, which may still be in use"
    starts = [project.record(f"{job.number}.{n}", "train-0") for n in range(2)]
    secrets = {start["DAPO_MEGATRON_SECRET"][0] for start in starts}
    assert len(secrets) == 2, "ranks left over from a start must not be able to join the next"


def test_after_usr1_the_next_job_of_the_chain_goes_on(project: Project) -> None:
    chain = [
        project.sbatch(*TWO, "--dependency=singleton", "c.yaml", FAKE="wait") for _ in range(2)
    ]
    project.wait_until_ready(f"{chain[0].number}.0", 2)
    project.cluster.run("scancel", "--batch", "--signal=USR1", str(chain[0].number))
    facts = chain[0].wait_for()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), chain[0].story()
    project.wait_until_ready(f"{chain[1].number}.0", 2)


def test_a_crash_is_requeued_and_its_reason_logged(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="crash ok")
    facts = job.wait_for()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.story()
    assert "exit code 1: rank 1: ValueError: seven\nTraceback of seven" in job.log
    assert "output of rank 1" in job.log


def test_a_hang_is_requeued_and_the_silent_rank_logged(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="hang ok")
    assert job.wait_for()["Restarts"] == "1", job.story()
    assert "exit code 1: hung: rank 1 on node2 gave no sign of life" in job.log


def test_three_immediate_crashes_end_the_job(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="dead")
    facts = job.wait_for(seconds=90)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "2"), job.story()
    assert "crashed 3 times in a row" in job.log
    assert "no rank wrote a reason" in job.log


def test_a_job_waits_for_a_rank_that_still_closes_the_run(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="slow_end ok")
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    assert "closed" in project.record(f"{job.number}.0", "train-0")


def test_requeue_can_be_turned_off(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="crash ok", DAPO_REQUEUE="0")
    assert job.wait_for()["JobState"] == "FAILED", job.story()


def test_a_job_that_resumes_a_named_checkpoint_is_not_requeued(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", "resume=runs/old/step_000003", FAKE="crash")
    facts = job.wait_for()
    assert (facts["JobState"], facts["Requeue"]) == ("FAILED", "0"), job.story()
    arguments = project.record(f"{job.number}.0", "train-0")["arguments"]
    assert arguments == ["-m dapo_megatron train c.yaml resume=runs/old/step_000003"]


def test_scancel_is_not_requeued(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE="wait ok")
    project.wait_until_ready(f"{job.number}.0", 2)
    project.cluster.run("scancel", str(job.number))
    job.wait_for("CANCELLED")
    wait_until(lambda: project.cluster.num_idle() == 4, 30, job.story)
    assert project.started(job) == [f"{job.number}.0"]
    assert "signal" in project.record(f"{job.number}.0", "train-0")


# ------------------------------------------------------------------ the node check


def test_a_bad_node_is_named_and_nothing_trains(project: Project) -> None:
    job = project.sbatch("-N3", *ON_CPU, "c.yaml", FAKE_BAD="node2")
    assert job.wait_for()["ExitCode"] == "69:0", job.story()
    assert "bad node node2" in job.log and "--exclude=node2" in job.log
    assert (project.folder / "slurm_logs/bad_nodes").read_text().split() == ["node2"]
    assert not project.started(job)


def test_a_bad_node_is_excluded_and_the_job_goes_on(project: Project) -> None:
    options = ("--exclude=node4", "--mem=3G", "--cpus-per-task=5", "--time=30")
    job = project.sbatch(
        *TWO, *options, "c.yaml", "a=1", FAKE_BAD="node2", DAPO_EXCLUDE_BAD="1"
    )  # fmt: skip
    submitted = job.facts()
    facts = job.wait_for()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.story()
    assert facts["ExcNodeList"] == "node4,node2"
    kept = ("MinMemoryNode", "MinCPUsNode", "TimeLimit", "TresPerNode")
    assert [facts[name] for name in kept] == [submitted[name] for name in kept]
    assert "requeued without node2" in job.log
    assert project.started(job) == [f"{job.number}.1"]
    arguments = project.record(f"{job.number}.1", "train-0")["arguments"]
    assert arguments == ["-m dapo_megatron train c.yaml a=1 resume=auto"]


def test_a_bad_node_is_excluded_from_the_rest_of_the_chain(project: Project) -> None:
    chain = [
        project.sbatch(
            *TWO,
            "--dependency=singleton",
            "--exclude=node4",
            "c.yaml",
            FAKE_MUTE="node1",
            DAPO_EXCLUDE_BAD="1",
        )
        for _ in range(2)
    ]
    assert chain[0].wait_for()["ExitCode"] == "69:0", chain[0].story()
    facts = chain[1].wait_for()
    assert (facts["JobState"], facts["ExcNodeList"]) == ("COMPLETED", "node4,node1"), chain[
        1
    ].story()


def test_a_node_that_hangs_in_the_check_is_reported_bad(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE_STUCK="node2", DAPO_GRACE_SECONDS="2")
    assert job.wait_for()["ExitCode"] == "69:0", job.story()
    assert "bad node node2: it did not report" in job.log


def test_a_check_in_which_all_nodes_hang_ends_without_a_bad_node(project: Project) -> None:
    job = project.sbatch(
        "-N2", *ON_CPU, "c.yaml",
        FAKE_STUCK="node1 node2", DAPO_PREFLIGHT_SECONDS="3", DAPO_REQUEUE="0",
    )  # fmt: skip
    job.wait_for()
    assert "so no node is recorded as bad" in job.log and not project.started(job), job.story()


def test_the_check_can_be_skipped(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", FAKE_BAD="node1 node2", DAPO_PREFLIGHT="0")
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()


# ------------------------------------------------------------------ refusals, containers


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ((*TWO,), {}, "usage: sbatch"),
        (
            ("-N1", "--ntasks-per-node=2", "--gpus-per-node=h100:8", "c.yaml"),
            {},
            "there is one task per GPU; use --ntasks-per-node=8",
        ),
        ((*TWO, "c.yaml"), {"DAPO_VENV": "nowhere"}, "DAPO_VENV: no "),
        ((*TWO, "c.yaml"), {"DAPO_APPTAINER": "no.sif"}, "DAPO_APPTAINER: no file no.sif"),
        ((*TWO, "c.yaml"), {"DAPO_INTERFACE": "ib7"}, "no address on ib7"),
        ((*TWO, "c.yaml"), {"DAPO_HOME": "/nowhere"}, "/nowhere is not a checkout"),
    ],
)
def test_a_wrong_submission_is_refused_with_its_cause(
    project: Project, words: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    job = project.sbatch(*words, **env)
    assert job.wait_for()["ExitCode"] == "2:0", job.story()
    assert message in job.log


def test_the_master_address_is_that_of_dapo_interface(project: Project) -> None:
    if not project.cluster.has_networks:
        pytest.skip(NEEDS_ROOT)
    job = project.sbatch(*TWO, "c.yaml", DAPO_INTERFACE="eth0")
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    task = project.record(f"{job.number}.0", "train-1")
    assert task["MASTER_ADDR"] == [f"{project.cluster.network}.1"]
    assert task["NCCL_SOCKET_IFNAME"] == ["=eth0"]


def test_container_options_reach_srun(project: Project) -> None:
    logs = project.folder.with_name(f"{project.folder.name}-logs")
    logs.mkdir()
    if project.user is not None:
        shutil.chown(logs, project.user)
    job = project.sbatch(
        *TWO, "c.yaml", DAPO_CONTAINER="/images/a.sqsh", DAPO_MOUNTS="/data:/data:ro",
        DAPO_PYTHON=f"{project.folder}/.venv/bin/python", DAPO_LOGS=str(logs),
    )  # fmt: skip
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    for name in ("check-1", "train-1"):
        task = project.record(f"{job.number}.0", name)
        assert task["STUB_CONTAINER_IMAGE"] == ["/images/a.sqsh"]
        assert task["STUB_CONTAINER_MOUNTS"] == [
            f"{project.folder}:{project.folder},{logs}:{logs},/data:/data:ro"
        ]
        assert task["STUB_CONTAINER_WORKDIR"] == [str(project.folder)]
        assert task["STUB_NO_CONTAINER_MOUNT_HOME"] == ["yes"]
        passed = task["STUB_CONTAINER_ENV"][0].split(",")
        names = {"NCCL_DEBUG", "MASTER_ADDR", "DAPO_MEGATRON_VERDICT", "DAPO_MEGATRON_SECRET"}
        assert names <= set(passed)
    shutil.rmtree(logs)


def test_apptainer_runs_the_program(project: Project) -> None:
    bin_folder = project.folder / "bin"
    bin_folder.mkdir()
    apptainer = bin_folder / "apptainer"
    apptainer.write_text('#!/bin/bash\nexport STUB_APPTAINER="$*"\nshift 6\nshift\nexec "$@"\n')
    apptainer.chmod(0o755)
    (project.folder / "a.sif").touch()
    job = project.sbatch(
        *TWO, "c.yaml", DAPO_APPTAINER="a.sif", DAPO_MOUNTS="/data", DAPO_PREFLIGHT="0",
        DAPO_PYTHON=f"{project.folder}/.venv/bin/python",
        PATH=f"{bin_folder}:/usr/sbin:/usr/bin:/bin",
    )  # fmt: skip
    assert job.wait_for()["JobState"] == "COMPLETED", job.story()
    [given] = project.record(f"{job.number}.0", "train-1")["STUB_APPTAINER"]
    home = project.folder
    assert given.startswith(f"exec --no-home --bind {home}:{home},/data --pwd {home} a.sif")


def test_evaluate_and_convert_sbatch_run_the_program(project: Project) -> None:
    evaluation = project.sbatch(*TWO, "c.yaml", "checkpoint=x", script="evaluate.sbatch")
    conversion = project.sbatch("megatron-to-hf", "a", "b", script="convert.sbatch")
    for job in (evaluation, conversion):
        assert job.wait_for()["JobState"] == "COMPLETED", job.story()
        assert "unbound" not in job.log
        assert "output of rank 0" in job.log
    tasks = [project.record(f"{evaluation.number}.0", f"evaluate-{rank}") for rank in range(2)]
    assert len({task["DAPO_MEGATRON_SECRET"][0] for task in tasks}) == 1
    [arguments] = tasks[1]["arguments"]
    assert arguments == "-m dapo_megatron evaluate c.yaml checkpoint=x"
    task = project.record(f"{conversion.number}.0", "convert_checkpoint-0")
    assert task["arguments"] == ["tools/convert_checkpoint.py megatron-to-hf a b"]
    assert task["SLURM_NTASKS"] == ["1"]


def test_evaluate_sbatch_returns_the_exit_code_of_the_program(project: Project) -> None:
    job = project.sbatch(*TWO, "c.yaml", script="evaluate.sbatch", FAKE="mistake")
    assert job.wait_for()["ExitCode"] == "2:0", job.story()


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sbatch")))
def test_slurm_accepts_the_header_of_every_script(cluster: Cluster, script: str) -> None:
    output = cluster.run("sbatch", "--test-only", SCRIPTS / script, "CONFIG")
    assert "to start at" in output
    lines = (SCRIPTS / script).read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)
