"""Submit jobs to an emulated cluster, and read their state, logs and records."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import Cluster, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "slurm"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
ON_CPU = ("--ntasks-per-node=1", "--gpus-per-node=0")
"""Options for one rank per node and no GPU."""


@dataclass(frozen=True)
class Job:
    """A job of a project; `number` is Slurm's id."""

    cluster: Cluster
    number: int
    folder: Path
    """Working directory of sbatch."""

    def facts(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        shown = self.cluster.run("scontrol", "show", "job", str(self.number), "-o")
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def log(self) -> str:
        """Output of the job script."""
        [path] = self.folder.glob(f"*-{self.number}.out")
        return path.read_text(encoding="utf-8")

    def wait_for(self, *states: str, seconds: float = 60) -> dict[str, str]:
        """Wait until the job is in one of the states, by default until it has ended."""
        wanted = set(states) or ENDED
        wait_until(lambda: self.state in wanted, seconds, self.story)
        return self.facts()

    def wait_for_text(self, text: str, seconds: float = 60) -> None:
        """Wait until the script has printed `text`."""
        wait_until(
            lambda: any(self.folder.glob(f"*-{self.number}.out")) and text in self.log,
            seconds,
            lambda: f"no {text!r} in:\n{self.story()}",
        )

    def story(self) -> str:
        """Return logs and job state for the message of a failed test."""
        output = "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.out"))
        facts = self.facts()
        kept = {key: facts.get(key) for key in ("JobState", "Reason", "Restarts", "ExitCode")}
        steps = self.cluster.run("squeue", "-s", check=False)
        return f"{self.cluster.logs()}\n{steps}\njob {self.number}: {kept}\n{output}"


@dataclass(frozen=True)
class Project:
    """A folder with slurm/ in which `user` submits jobs."""

    cluster: Cluster
    folder: Path
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for sbatch, in addition to those of the cluster."""

    @classmethod
    def of_this_checkout(cls, cluster: Cluster) -> Project:
        """Use this checkout and Python. Jobs and logs are in a temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="project-", dir="/tmp"))
        env = {
            "DAPO_HOME": str(REPOSITORY),
            "DAPO_LOGS": str(folder / "slurm_logs"),
            "DAPO_VENV": sys.prefix,
            "OMP_NUM_THREADS": "1",
        }
        if not cluster.has_networks:
            env["DAPO_INTERFACE"] = "lo"  # the nodes' names cannot be resolved
        return cls(cluster, folder, env=env)

    @classmethod
    def make(cls, cluster: Cluster, user: str | None) -> Project:
        """Make a project with the scripts of this checkout and a fake Python in .venv."""
        folder = Path(tempfile.mkdtemp(prefix="project-", dir="/tmp"))
        shutil.copytree(SCRIPTS, folder / "slurm")
        (folder / ".venv/bin").mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("fake_python"), folder / ".venv/bin/python")
        folder.chmod(0o755)
        if user is not None:
            shutil.chown(folder, user)
        return cls(cluster, folder, user)

    def sbatch(self, *words: str, script: str = "train.sbatch", **env: str) -> Job:
        """Submit a script. `words` are options of sbatch, then arguments of the script, which
        start at the first word without a dash."""
        num_options = next(
            (i for i, word in enumerate(words) if not word.startswith("-")), len(words)
        )
        options, arguments = words[:num_options], words[num_options:]
        home = self.env.get("DAPO_HOME", self.folder)
        job_id = self.cluster.run(
            "sbatch", "--parsable", *options, f"{home}/slurm/{script}", *arguments,
            user=self.user, env={**self.env, **env}, cwd=self.folder,
        )  # fmt: skip
        return Job(self.cluster, int(job_id.split(";")[0]), self.folder)

    def record(self, attempt: str, task: str) -> dict[str, list[str]]:
        """Return the record of a task of the fake program: first word of a line -> rests of the
        lines."""
        lines: dict[str, list[str]] = {}
        for line in (self.folder / "record" / attempt / task).read_text().splitlines():
            name, _, rest = line.partition(" ")
            lines.setdefault(name, []).append(rest)
        return lines

    def started(self, job: Job) -> list[str]:
        """Return the attempts of the job in which training started."""
        return sorted(
            path.parent.name for path in self.folder.glob(f"record/{job.number}.*/train-0")
        )

    def wait_until_ready(self, attempt: str, num_tasks: int) -> None:
        """Wait until all tasks of an attempt wait for a signal."""

        def are_ready() -> bool:
            files = list(self.folder.glob(f"record/{attempt}/train-*"))
            ready = [path for path in files if "ready" in path.read_text().split()]
            return len(ready) == num_tasks

        wait_until(
            are_ready, 60, lambda: f"attempt {attempt} does not start\n{self.cluster.logs()}"
        )
