"""report.html at the end of a run, written by a process of its own: what goes wrong in it, or how
much memory it takes, is not the run's affair."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dapo_megatron.tracking.mlflow_spool import SHORT_WAIT_SECONDS, child_environment

NAME = "report.html"
LOG = "logs/report.log"
METRICS = "metrics.jsonl"
"""In the run's folder, all three."""
WAIT_SECONDS = 120.0
"""Of a run that is FINISHED. All ranks wait so long; the watchdog waits longer."""
OF_A_RANK = re.compile(
    r"^(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|PMI|PMIX|OMPI)_.*)$"
)
"""Variables by which a program takes itself for a rank."""


class RunReport:
    """The report of the run in `run_folder`; `warn` hears of one that could not be written."""

    def __init__(
        self, run_folder: Path, warn: Callable[[str], None], wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self.path = run_folder / NAME
        self.is_written = False
        self._run_folder = run_folder
        self._wait_seconds = wait_seconds
        self._warn = warn

    def write(self, status: str) -> bool:
        """Write it for a run that ended as `status`; whether it is there. Nothing for a run that
        came to nothing: without a metric there is nothing to show.

        A run that failed or was stopped may be killed any moment, or keep a user waiting: its
        report gets SHORT_WAIT_SECONDS, and goes on by itself after that as long as it is let.
        """
        self.is_written = False
        if not (self._run_folder / METRICS).exists():
            return False
        is_short = status != "FINISHED"
        again = f"`python -m dapo_megatron report {self._run_folder}` writes it"
        try:
            writer = self._start()
        except OSError as error:
            self._warn(f"no {NAME}: {error}; {again}")
            return False
        seconds = min(self._wait_seconds, SHORT_WAIT_SECONDS) if is_short else self._wait_seconds
        try:
            code = writer.wait(seconds)
        except subprocess.TimeoutExpired:
            if not is_short:
                writer.kill()
                writer.wait()
            said = "is not ready, and is not waited for" if is_short else "was given up"
            self._warn(f"{NAME} {said} after {seconds:g} s; {again}")
            return False
        if code != 0:
            self._warn(f"no {NAME}: see {self._run_folder / LOG}; then {again}")
        self.is_written = code == 0 and self.path.exists()
        return self.is_written

    def _start(self) -> subprocess.Popen[bytes]:
        """It is no part of the job: a signal to the ranks is not for it."""
        environment = {
            name: value for name, value in child_environment().items() if not OF_A_RANK.match(name)
        }
        log = self._run_folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron", "report", str(self._run_folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
