"""Start real training runs on an emulated cluster, and compare two of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dapo_megatron.checkpoints.folder import newest
from tests.helpers.training_state import stored_tensors
from tests.slurm.cluster import wait_until
from tests.slurm.jobs import ON_CPU, Job, Project

NUM_STEPS = 8
TRAINING = (
    "model_configs/tiny_cpu.yaml",
    "policy.tensor_parallel=1",
    "engine.kv_cache_gib=0.1",
    "rollout.on_policy=true",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    f"train.rollout_steps={NUM_STEPS}",
    "train.updates_per_step=2",
    "evaluation.every=3",
    "evaluation.sets.0.size=8",
    "evaluation.samples=2",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "tracking.mlflow=false",
)
"""A short run. Every second step is saved, so that a fault can lose a step. Every third is
evaluated."""
START_SECONDS = 300.0
"""Time allowed until the first step of a run, on a busy machine."""
IS_TRAINING, IS_ENGINE = b"\0train\0", b"\0engine\0"
FAULTS: list[tuple[str, ...]] = []
"""Rows of a table for docs/results.md, printed at the end of the tests."""


@dataclass
class Run:
    """A run of the tiny model, as a job."""

    project: Project
    name: str
    directory: Path
    job: Job = field(init=False)

    @classmethod
    def start(
        cls, project: Project, name: str, *more: str, num_nodes: int = 2,
        directory: Path | None = None, options: tuple[str, ...] = (), **env: str,
    ) -> Run:  # fmt: skip
        """Submit a run. The node check is off unless `env` sets DAPO_PREFLIGHT."""
        run = cls(project, name, directory or project.folder / "runs")
        run.job = project.sbatch(
            f"-N{num_nodes}", *ON_CPU, "--time=30", f"--job-name={name}", *options,
            *TRAINING, f"run.name={name}", f"run.directory={run.directory}", *more,
            **{"DAPO_PREFLIGHT": "0", "DAPO_GRACE_SECONDS": "10", **env},
        )  # fmt: skip
        return run

    @property
    def folder(self) -> Path:
        """Run folder: <directory>/<name>."""
        return self.directory / self.name

    # ------------------------------------------------------------------ while it runs

    def num_steps(self) -> int:
        """Return the number of steps with metrics, without the evaluation of step 0."""
        path = self.folder / "metrics.jsonl"
        return max(0, path.read_text().count("\n") - 1) if path.exists() else 0

    def wait_for_step(self, step: int, seconds: float = START_SECONDS) -> None:
        """Wait until the metrics of a step are written."""
        wait_until(lambda: self.num_steps() >= step, seconds, self.story)

    def wait_for_checkpoint(self, step: int) -> Path:
        """Wait until a checkpoint is published, and return its folder."""
        path = self.folder / f"checkpoints/step_{step:06d}"
        wait_until(path.exists, START_SECONDS, self.story)
        return path

    def newest_checkpoint(self) -> Path:
        """Return the checkpoint that the next start would resume. It may be of a partial step."""
        checkpoint = newest(self.folder / "checkpoints")
        assert checkpoint is not None, self.story()
        return checkpoint

    def pid_of_rank(self, rank: int) -> int:
        """Return the process id of a rank, as seen outside of the node's namespace."""
        return self._pid(rank, IS_TRAINING)

    def pid_of_engine(self, engine: int) -> int:
        """Return the process id of the server of an engine that has a node of its own."""
        return self._pid(engine, IS_ENGINE)

    def _pid(self, task: int, name: bytes) -> int:
        """Return the process id of a task whose command contains `name`."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                words = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:  # it has ended, or belongs to another user
                continue
            environment = dict(word.split("=", 1) for word in words if "=" in word)
            if environment.get("SLURM_JOB_ID") != str(self.job.number):
                continue
            is_task = int(environment.get("SLURM_PROCID", -1)) == task
            if is_task and command.split(b"\0")[0].endswith(b"/python") and name in command:
                return int(entry.name)
        raise AssertionError(f"no process of task {task}\n{self.story()}")

    def wait_for_end(self, seconds: float = 2 * START_SECONDS) -> None:
        """Wait until the run completes. Raise AssertionError if it ends otherwise."""
        facts = self.job.wait_for(seconds=seconds)
        assert facts["JobState"] == "COMPLETED", self.story()

    def story(self) -> str:
        """Return the story of the job, and the last log lines of its ranks."""
        texts = [self.job.story()]
        for path in sorted(self.folder.glob("logs/rank_*.log")):
            lines = path.read_text(errors="replace").splitlines()[-12:]
            texts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(texts)

    # ------------------------------------------------------------------ results

    def resumed_from(self) -> list[int]:
        """Return the checkpoint step that each later start resumed, 0 if it found none."""
        steps = []
        attempts = self.project.folder.glob(f"slurm_logs/{self.name}/{self.job.number}.*/")
        for folder in sorted(attempts, key=lambda path: int(path.name.split(".")[1]))[1:]:
            logs = [path.read_text(errors="replace") for path in folder.glob("*-0.log")]
            text = "".join(logs)
            _, resumed, rest = text.partition("resumed from")
            steps.append(int(rest.split("step_")[1][:6]) if resumed else 0)
        return steps

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl without times, memory and throughput."""
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        clocks = ("time/", "memory/", "throughput/")
        return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]

    def weights(self, step: int = NUM_STEPS) -> dict[str, str]:
        """Return checksums of a checkpoint's tensors: weights, optimizer, torch's random state."""
        folder = self.folder / f"checkpoints/step_{step:06d}"
        return dict(self._checksums(folder))

    @staticmethod
    def _checksums(folder: Path) -> Iterator[tuple[str, str]]:
        for key, tensor in stored_tensors(folder).items():
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            yield key, hashlib.sha256(data).hexdigest()


def assert_same(run: Run, undisturbed: Run) -> None:
    """Assert that final weights, optimizer, random state and metrics are bitwise the same."""
    assert run.weights(), "no checkpoint to compare"
    different = [*_different_metrics(run, undisturbed), *_different_weights(run, undisturbed)]
    assert not different, "\n".join([run.story(), "DIFFERENT:", *different[:20]])


def _different_metrics(run: Run, other: Run) -> Iterator[str]:
    rows, others = run.metrics(), other.metrics()
    if len(rows) != len(others):
        yield f"{len(rows)} rows of metrics, not {len(others)}"
    for row, expected in zip(rows, others):
        for name in sorted(row.keys() | expected.keys()):
            if row.get(name) != expected.get(name):
                yield f"step {row['step']} {name}: {row.get(name)}, not {expected.get(name)}"


def _different_weights(run: Run, other: Run) -> Iterator[str]:
    weights, others = run.weights(), other.weights()
    for name in sorted(weights.keys() | others.keys()):
        if weights.get(name) != others.get(name):
            yield f"{name} of the last checkpoint"


def recovered(run: Run, fault: str, inject: Callable[[], object]) -> float:
    """Inject a fault and wait until the run is past the step at which it struck.

    Add lost steps and seconds to FAULTS. Return the seconds.
    """
    before, starts = run.num_steps(), len(run.resumed_from())
    restarts = int(run.job.facts()["Restarts"])
    fault_time = time.monotonic()
    inject()
    wait_until(lambda: int(run.job.facts()["Restarts"]) > restarts, START_SECONDS, run.story)
    # A restart first cuts the metrics back to the checkpoint, so their number alone is not enough.
    started = time.time()
    wait_until(
        lambda: (
            len(run.resumed_from()) > starts  # the stopped start finishes its step first
            and run.num_steps() > before
            and (run.folder / "metrics.jsonl").stat().st_mtime > started
        ),
        2 * START_SECONDS,
        run.story,
    )
    seconds = time.monotonic() - fault_time
    [*_, resumed] = run.resumed_from()
    lost = before - resumed
    note(fault, f"{lost} of {before} steps repeated" if lost > 0 else "nothing", f"{seconds:.0f}")
    return seconds


def note(fault: str, lost: str, seconds: str) -> None:
    """Add a row to FAULTS."""
    FAULTS.append((fault, lost, seconds))
