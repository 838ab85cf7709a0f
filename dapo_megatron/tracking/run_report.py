"""report.html at the end of a run, written by a separate process, so that neither its errors nor
its memory use affect the run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dapo_megatron.cluster.processes import helper_environment
from dapo_megatron.tracking.mlflow_tracker import SHORT_WAIT_SECONDS

NAME = "report.html"
LOG = "logs/report.log"
METRICS = "metrics.jsonl"
"""NAME, LOG and METRICS are paths in the run's folder."""
WAIT_SECONDS = 120.0
"""Maximum wait for the report of a FINISHED run. All its ranks wait."""
KILL_SECONDS = 1.0
"""Maximum wait for a killed process to exit. One that is blocked on a dead file system does not."""
POLL_SECONDS = 0.05
RANK_VARIABLES = re.compile(
    r"^(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|PMI|PMIX|OMPI)_.*)$"
)
"""Environment variables that make a program believe it is a rank. They are removed."""


class RunReport:
    """The report of the run in `run_folder`.

    warn       shows a line to the user if the report could not be written
    is_asked   returns True once a signal has asked the run to end
    """

    def __init__(
        self,
        run_folder: Path,
        warn: Callable[[str], None],
        wait_seconds: float = WAIT_SECONDS,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = run_folder / NAME
        self.is_written = False
        self._run_folder = run_folder
        self._wait_seconds = wait_seconds
        self._is_asked = is_asked
        self._warn = warn

    def write(self, status: str) -> bool:
        """Write the report of a run that ended as `status`; return True if it was written. A run
        without metrics gets none.

        If the run failed or was asked to stop, the wait is at most SHORT_WAIT_SECONDS, because the
        run may be killed at any moment or keep a user waiting. The process then continues on its
        own.
        """
        self.is_written = False
        again = f"`python -m dapo_megatron report {self._run_folder}` writes it"
        try:
            if not (self._run_folder / METRICS).exists():
                return False
            writer = self._start()
        except OSError as error:
            self._warn(f"no {NAME}: {error}; {again}")
            return False
        started = time.monotonic()
        while (code := writer.poll()) is None:
            is_short = status != "FINISHED" or self._is_asked()
            seconds = (
                min(self._wait_seconds, SHORT_WAIT_SECONDS) if is_short else self._wait_seconds
            )
            if time.monotonic() - started > seconds:
                self._stop_waiting(writer, is_short, seconds, again)
                return False
            time.sleep(POLL_SECONDS)
        if code != 0:
            self._warn(f"no {NAME}: see {self._run_folder / LOG}; then {again}")
        self.is_written = code == 0
        return self.is_written

    def _stop_waiting(
        self, writer: subprocess.Popen[bytes], is_short: bool, seconds: float, again: str
    ) -> None:
        state = "is not ready" if is_short else "was abandoned"
        if not is_short:
            writer.kill()
            with suppress(subprocess.TimeoutExpired):
                writer.wait(KILL_SECONDS)
        self._warn(f"{NAME} {state} after {seconds:g} s; {again}")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process in its own session, so that signals to the ranks do not reach it."""
        environment = {
            name: value
            for name, value in helper_environment().items()
            if not RANK_VARIABLES.match(name)
        }
        log = self._run_folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.report.command", str(self._run_folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
