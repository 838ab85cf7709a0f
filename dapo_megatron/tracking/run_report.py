"""report.html at the end of a run, written by a process of its own: what goes wrong in it, or how
much memory it takes, is not the run's affair."""

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
"""In the run's folder, all three."""
WAIT_SECONDS = 120.0
"""Of a run that is FINISHED, at most; all its ranks wait so long."""
KILL_SECONDS = 1.0
"""For a process that was killed to go: one that waits for a dead file system does not."""
LOOK_SECONDS = 0.05
OF_A_RANK = re.compile(
    r"^(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|PMI|PMIX|OMPI)_.*)$"
)
"""Variables by which a program takes itself for a rank."""


class RunReport:
    """The report of the run in `run_folder`; `warn` hears of one that could not be written.

    `attempt`: this start; once the folder is another's, no report of it is written ("": whoever's).
    `is_asked`: whether a signal has asked the run to end.
    """

    def __init__(
        self,
        run_folder: Path,
        warn: Callable[[str], None],
        wait_seconds: float = WAIT_SECONDS,
        attempt: str = "",
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = run_folder / NAME
        self.is_written = False
        self._run_folder = run_folder
        self._wait_seconds = wait_seconds
        self._attempt = attempt
        self._is_asked = is_asked
        self._warn = warn

    def write(self, status: str) -> bool:
        """Write it for a run that ended as `status`; whether it is there. Nothing for a run that
        came to nothing: without a metric there is nothing to show.

        A run that failed or was asked to stop may be killed any moment, or keep a user waiting: its
        report gets SHORT_WAIT_SECONDS, and goes on by itself after that as long as it is let.
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
        began = time.monotonic()
        while (code := writer.poll()) is None:
            is_short = status != "FINISHED" or self._is_asked()
            seconds = (
                min(self._wait_seconds, SHORT_WAIT_SECONDS) if is_short else self._wait_seconds
            )
            if time.monotonic() - began > seconds:
                self._leave(writer, is_short, seconds, again)
                return False
            time.sleep(LOOK_SECONDS)
        if code != 0:
            self._warn(f"no {NAME}: see {self._run_folder / LOG}; then {again}")
        self.is_written = code == 0
        return self.is_written

    def _leave(
        self, writer: subprocess.Popen[bytes], is_short: bool, seconds: float, again: str
    ) -> None:
        said = "is not ready, and is not waited for" if is_short else "was given up"
        if not is_short:
            writer.kill()
            with suppress(subprocess.TimeoutExpired):
                writer.wait(KILL_SECONDS)
        self._warn(f"{NAME} {said} after {seconds:g} s; {again}")

    def _start(self) -> subprocess.Popen[bytes]:
        """It is no part of the job: a signal to the ranks is not for it."""
        environment = {
            name: value for name, value in helper_environment().items() if not OF_A_RANK.match(name)
        }
        log = self._run_folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = (str(self._run_folder), self._attempt)
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.report.command", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
