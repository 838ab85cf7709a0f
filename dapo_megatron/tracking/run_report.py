"""report.html at the end of a run, written by a separate process, so that neither its errors nor
its memory use affect the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dapo_megatron.cluster.processes import helper_environment
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.mlflow_tracker import SHORT_WAIT_SECONDS

NAME = "report.html"
LOG = "logs/report.log"
WAIT_SECONDS = 120.0
"""Maximum wait for the report of a FINISHED run. All its ranks wait."""


class RunReport:
    """The report of the run in `folder`."""

    def __init__(
        self, folder: Path, console: RunConsole, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self.path = folder / NAME
        self.is_written = False
        self._folder, self._console = folder, console
        self._wait_seconds = wait_seconds

    def write(self, status: str) -> None:
        """Write the report of a run that ended as `status`. A run without metrics gets none.

        Waits at most `wait_seconds`, or SHORT_WAIT_SECONDS unless FINISHED, because a launcher may
        kill this rank at any moment. Then the process continues on its own, up to its own limit.
        """
        again = f"`python -m dapo_megatron report {self._folder}` writes it"
        seconds = self._wait_seconds
        if status != "FINISHED":
            seconds = min(seconds, SHORT_WAIT_SECONDS)
        try:
            if not (self._folder / "metrics.jsonl").exists():
                return
            code = self._start().wait(seconds)
        except OSError as error:
            self._console.warn(f"no {NAME}: {error}; {again}")
        except subprocess.TimeoutExpired:
            self._console.warn(f"{NAME} is not ready after {seconds:g} s; {again}")
        else:
            self.is_written = code == 0
            if code:
                self._console.warn(f"no {NAME}: see {self._folder / LOG}; then {again}")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process in its own session, so that signals to the ranks do not reach it."""
        log = self._folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.report.command", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=helper_environment(),
                start_new_session=True,
            )
