"""Inject cluster faults into training runs, which must end like the undisturbed run.

Runs have two nodes with one rank each, are on-policy and in float32. Final weights, optimizer
moments and all metrics except times are compared bitwise with one undisturbed run. The tests print
the table for docs/results.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.sockets import unused_port
from tests.slurm.cluster import NEEDS_ROOT, Cluster, wait_until
from tests.slurm.jobs import Project
from tests.slurm.runs import START_SECONDS, Run, assert_same, note, recovered

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]
AT_STEP = 3
"""Steps done when the fault strikes. Step 2 has a checkpoint, step 3 has none."""
WATCHDOG_SECONDS = 20
WATCHDOG = tuple(
    f"watchdog.{phase}={WATCHDOG_SECONDS}.0"
    for phase in ("generate", "evaluate", "logprobs", "update", "sync", "checkpoint", "other")
)


@pytest.fixture
def needs_networks(cluster: Cluster) -> None:
    if not cluster.has_networks:
        pytest.skip(NEEDS_ROOT)


def test_a_requeued_job_resumes_to_the_same_result(training: Project, undisturbed: Run) -> None:
    run = Run.start(training, "requeue", DAPO_PREFLIGHT="1")
    run.wait_for_step(AT_STEP, 2 * START_SECONDS)
    recovered(
        run,
        "`scontrol requeue` of the job",
        lambda: training.cluster.run("scontrol", "requeue", str(run.job.number)),
    )
    run.wait_for_end()
    assert_same(run, undisturbed)


def test_a_run_stopped_by_usr1_resumes_to_the_same_result(
    training: Project, undisturbed: Run
) -> None:
    """SIGUSR1, which Slurm sends before the time limit, arrives in the middle of a step."""
    run = Run.start(training, "usr1")
    run.wait_for_step(AT_STEP)
    recovered(
        run,
        "SIGUSR1 to the job script (time limit)",
        lambda: training.cluster.run("scancel", "--batch", "--signal=USR1", str(run.job.number)),
    )
    assert "exit code 75" in run.job.log
    assert run.resumed_from()[0] >= AT_STEP, "a requested stop must not lose a step"
    run.wait_for_end()
    assert_same(run, undisturbed)


def test_a_run_that_reaches_the_time_limit_resumes_to_the_same_result(
    training: Project, undisturbed: Run
) -> None:
    run = Run.start(training, "limit", options=("--signal=B:USR1@120",))
    run.wait_for_step(AT_STEP)
    job = str(run.job.number)

    def set_minutes(limit: int) -> None:
        training.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    def come_to_the_limit() -> None:
        # Slurm checks limits every 30 s. Stop a rank for that long, or the run would end before.
        rank = run.pid_of_rank(1)
        os.kill(rank, signal.SIGSTOP)
        try:
            hours, minutes, _ = map(int, run.job.facts()["RunTime"].split(":"))
            set_minutes(60 * hours + minutes + 3)
            run.job.wait_for_text("SIGUSR1: the time is nearly up", 120)
        finally:
            os.kill(rank, signal.SIGCONT)
        run.job.wait_for("PENDING", seconds=150)
        set_minutes(30)  # long enough for the rest of the run

    recovered(run, "the time limit", come_to_the_limit)
    assert "exit code 75" in run.job.log
    assert run.resumed_from()[0] >= AT_STEP, "a requested stop must not lose a step"
    run.wait_for_end()
    assert_same(run, undisturbed)


@pytest.mark.usefixtures("needs_networks")
def test_a_run_survives_a_power_cut_of_a_node(training: Project, undisturbed: Run) -> None:
    run = Run.start(training, "node")
    run.wait_for_step(AT_STEP)
    recovered(run, "power cut of a node", lambda: training.cluster.kill_node("node2"))
    run.wait_for_end()
    assert_same(run, undisturbed)


def test_a_run_survives_sigkill_of_a_rank(training: Project, undisturbed: Run) -> None:
    run = Run.start(training, "killed")
    run.wait_for_step(AT_STEP)
    start_time = time.monotonic()

    def kill() -> None:
        os.kill(run.pid_of_rank(1), signal.SIGKILL)
        run.job.wait_for_text("this start ended with exit code")
        note("... until all ranks have ended", "", f"{time.monotonic() - start_time:.0f}")

    recovered(run, "SIGKILL of a rank", kill)
    run.wait_for_end()
    assert_same(run, undisturbed)


def test_the_watchdog_names_a_hung_rank_and_the_run_resumes(
    training: Project, undisturbed: Run
) -> None:
    run = Run.start(training, "hung", *WATCHDOG)
    run.wait_for_step(AT_STEP)
    verdict = training.folder / f"slurm_logs/hung/{run.job.number}.0/verdict"

    def stop() -> None:
        start_time = time.monotonic()
        os.kill(run.pid_of_rank(1), signal.SIGSTOP)
        wait_until(verdict.exists, WATCHDOG_SECONDS + 30, run.story)
        seconds = time.monotonic() - start_time
        note(f"... until it is named, limit {WATCHDOG_SECONDS} s", "", f"{seconds:.1f}")
        text = verdict.read_text()
        # While it samples, the coordinator may notice it before the watchdog does.
        assert text.startswith("1 ") and "rank 1" in text.splitlines()[0], text
        assert seconds <= WATCHDOG_SECONDS + 10, f"the rank was named after {seconds:.1f} s"

    recovered(run, "SIGSTOP of a rank", stop)
    run.wait_for_end()
    assert_same(run, undisturbed)


def test_a_damaged_newest_checkpoint_is_set_aside_and_an_older_one_resumed(
    training: Project, undisturbed: Run
) -> None:
    run = Run.start(training, "damaged")
    run.wait_for_checkpoint(4)
    run.wait_for_step(5)

    def damage() -> None:
        training.cluster.run("scontrol", "requeue", str(run.job.number))
        run.job.wait_for("PENDING")
        file = run.newest_checkpoint() / "__0_0.distcp"
        with file.open("r+b") as weights:  # one bit, in the middle
            weights.seek(file.stat().st_size // 2)
            [byte] = weights.read(1)
            weights.seek(-1, os.SEEK_CUR)
            weights.write(bytes([byte ^ 1]))

    recovered(run, "a bit flipped in the newest checkpoint", damage)
    logs = [
        *run.folder.glob("logs/rank_0.log"),
        *training.folder.glob(f"slurm_logs/damaged/{run.job.number}.1/*.log"),
    ]
    log_text = "".join(path.read_text(errors="replace") for path in logs)
    assert "CHECKPOINT DAMAGED" in log_text, run.story()
    assert list(run.folder.glob("checkpoints/*.damaged*")), "the damaged checkpoint was not kept"
    run.wait_for_end()
    assert_same(run, undisturbed)


@pytest.mark.usefixtures("needs_networks")
def test_a_run_goes_on_after_a_save_to_a_full_disk(training: Project, undisturbed: Run) -> None:
    small = training.cluster.small_disk
    run = Run.start(training, "full", directory=small)
    run.wait_for_checkpoint(2)
    filler = small / "filler"
    # Leave 1 MiB: enough for a line of metrics, not for a checkpoint.
    filler.write_bytes(bytes(shutil.disk_usage(small).free - 2**20))
    console = training.folder / f"slurm_logs/full/{run.job.number}.0"
    wait_until(
        lambda: "CHECKPOINT FAILED" in next(console.glob("*-0.log")).read_text(),
        START_SECONDS,
        run.story,
    )
    assert (run.folder / "checkpoints/step_000002").exists()
    filler.unlink()
    note("disk full during a save", "that checkpoint; the run went on", "0")
    run.wait_for_end()
    assert run.job.facts()["Restarts"] == "0"
    assert_same(run, undisturbed)


@contextmanager
def mlflow_server(folder: Path, host: str, port: int) -> Iterator[None]:
    """Run an MLflow server inside the `with` block, and SIGKILL it at the end."""
    command = [
        sys.executable, "-m", "mlflow", "server", f"--host={host}", f"--port={port}",
        f"--backend-store-uri=sqlite:///{folder}/mlflow.db", "--workers=1",
        f"--artifacts-destination={folder}/artifacts",
    ]  # fmt: skip
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:

        def answers() -> bool:
            try:
                return bool(urllib.request.urlopen(f"http://{host}:{port}/health", timeout=2))
            except OSError:
                return False

        wait_until(answers, 180, lambda: (folder / "server.log").read_text()[-3000:])
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_metrics_reach_an_mlflow_server_that_was_killed_and_restarted(
    training: Project, undisturbed: Run, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    cluster = training.cluster
    host = f"{cluster.network}.254" if cluster.has_networks else "127.0.0.1"
    port = unused_port()
    uri = f"http://{host}:{port}"
    with mlflow_server(tmp_path, host, port):
        run = Run.start(training, "mlflow", "tracking.mlflow=true", MLFLOW_TRACKING_URI=uri)
        run.wait_for_step(AT_STEP)
    killed = time.monotonic()
    run.wait_for_step(AT_STEP + 2)  # the run goes on while no server answers
    with mlflow_server(tmp_path, host, port):
        run.wait_for_end()
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("dapo_megatron")
        [tracked] = client.search_runs([experiment.experiment_id])
        loss = client.get_metric_history(tracked.info.run_id, "policy/loss")
        note(
            "MLflow server killed and started again",
            "nothing: all steps' metrics are there",
            f"{time.monotonic() - killed:.0f}",
        )
    expected = [(row["step"], row["policy/loss"]) for row in undisturbed.metrics()[1:]]
    assert sorted((metric.step, metric.value) for metric in loss) == expected
    assert tracked.info.status == "FINISHED"
    assert_same(run, undisturbed)
