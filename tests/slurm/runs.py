"""Real training runs on an emulated cluster, and comparing two of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dapo_megatron.checkpoints.folder import newest
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
"""Short; every second step is saved, so that a fault can lose one, and every third is evaluated."""
START_SECONDS = 300.0
"""For a run to begin with its first step, on a machine that is busy with other things."""
IS_TRAINING = b"\0-m\0dapo_megatron\0train\0"
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
        """Submit it; without the check of the nodes, unless told."""
        run = cls(project, name, directory or project.folder / "runs")
        run.job = project.sbatch(
            f"-N{num_nodes}", *ON_CPU, "--time=30", f"--job-name={name}", *options,
            *TRAINING, f"run.name={name}", f"run.directory={run.directory}", *more,
            **{"DAPO_PREFLIGHT": "0", "DAPO_GRACE_SECONDS": "10", **env},
        )  # fmt: skip
        return run

    @property
    def folder(self) -> Path:
        """runs/<name>"""
        return self.directory / self.name

    # ------------------------------------------------------------------ while it runs

    def num_steps(self) -> int:
        """Steps whose metrics are written; there is a line of step 0 too, its evaluation."""
        path = self.folder / "metrics.jsonl"
        return max(0, path.read_text().count("\n") - 1) if path.exists() else 0

    def wait_for_step(self, step: int, seconds: float = START_SECONDS) -> None:
        """Until its metrics are written."""
        wait_until(lambda: self.num_steps() >= step, seconds, self.story)

    def wait_for_checkpoint(self, step: int) -> Path:
        """Until it is published; its folder."""
        path = self.folder / f"checkpoints/step_{step:06d}"
        wait_until(path.exists, START_SECONDS, self.story)
        return path

    def newest_checkpoint(self) -> Path:
        """The one that the next start would go on from; it may be of the middle of a step."""
        found = newest(self.folder / "checkpoints")
        assert found is not None, self.story()
        return found

    def pid_of_rank(self, rank: int) -> int:
        """The process, by its number out here."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            wanted = {f"SLURM_JOB_ID={self.job.number}", f"SLURM_PROCID={rank}"}
            is_ours = wanted <= {word.decode(errors="replace") for word in environment}
            if is_ours and command.split(b"\0")[0].endswith(b"/python") and IS_TRAINING in command:
                return int(entry.name)
        raise AssertionError(f"no process of rank {rank}\n{self.story()}")

    def wait_for_end(self, seconds: float = 2 * START_SECONDS) -> None:
        """Until it is trained; AssertionError if it ends otherwise."""
        facts = self.job.wait_for(seconds=seconds)
        assert facts["JobState"] == "COMPLETED", self.story()

    def story(self) -> str:
        """The job's, and the last lines of its ranks."""
        texts = [self.job.story()]
        for path in sorted(self.folder.glob("logs/rank_*.log")):
            lines = path.read_text(errors="replace").splitlines()[-12:]
            texts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(texts)

    # ------------------------------------------------------------------ what became of it

    def resumed_from(self) -> list[int]:
        """Steps of the checkpoints that later starts went on from; 0 for a start from none."""
        found = []
        attempts = self.project.folder.glob(f"slurm_logs/{self.name}/{self.job.number}.*/")
        for folder in sorted(attempts, key=lambda path: int(path.name.split(".")[1]))[1:]:
            logs = [path.read_text(errors="replace") for path in folder.glob("*-0.log")]
            text = "".join(logs)
            _, resumed, rest = text.partition("resumed from")
            found.append(int(rest.split("step_")[1][:6]) if resumed else 0)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what a clock says."""
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        clocks = ("time/", "memory/", "throughput/")
        return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]

    def weights(self, step: int = NUM_STEPS) -> dict[str, str]:
        """Sums of the tensors of a checkpoint: weights, optimizer, torch's random state."""
        folder = self.folder / f"checkpoints/step_{step:06d}"
        return dict(self._sums(folder))

    @staticmethod
    def _sums(folder: Path) -> Iterator[tuple[str, str]]:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    data = file.get_tensor(name).tobytes()
                    yield f"{path.name}/{name}", hashlib.sha256(data).hexdigest()


def assert_same(run: Run, undisturbed: Run) -> None:
    """Both have the same final weights, optimizer, random state and metrics, bit by bit."""
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


def recovered(run: Run, fault: str, do: Callable[[], object]) -> float:
    """`do` the fault, wait until the run has got further than it was, write both down; seconds."""
    before = run.num_steps()
    restarts = int(run.job.facts()["Restarts"])
    begun = time.monotonic()
    do()
    wait_until(lambda: int(run.job.facts()["Restarts"]) > restarts, START_SECONDS, run.story)
    # The metrics are cut back to the checkpoint first, so that their number alone says little.
    started = time.time()
    wait_until(
        lambda: (
            run.num_steps() > before and (run.folder / "metrics.jsonl").stat().st_mtime > started
        ),
        2 * START_SECONDS,
        run.story,
    )
    seconds = time.monotonic() - begun
    [*_, resumed] = run.resumed_from()
    lost = before - resumed
    note(fault, f"{lost} of {before} steps done again" if lost > 0 else "nothing", f"{seconds:.0f}")
    return seconds


def note(fault: str, lost: str, seconds: str) -> None:
    """A row of the table."""
    FAULTS.append((fault, lost, seconds))
