"""Rank 0's side of MLflow: a process copies the run's folder there (mirror.py).

Rank 0 neither imports MLflow nor talks to a server. Its client would hold the interpreter for tens
of milliseconds at a time and cannot be interrupted in a retry, so a thread would not do. The
process learns from its standard input that rank 0 is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dapo_megatron.cluster.attempt import close_attempt
from dapo_megatron.cluster.processes import helper_environment
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.files import open_lock, try_lock
from dapo_megatron.tracking.mirror_state import (
    ATTEMPTS,
    CONFIG,
    FOLDER,
    FORWARDED,
    LOG,
    RUN_FILE,
    MirrorState,
    is_stopped,
    known,
    lock_holder,
    read_cursor,
)
from dapo_megatron.tracking.uri import without_password

STATUSES = ("FINISHED", "FAILED", "KILLED")
SHORT_WAIT_SECONDS = 3.0
"""For a run that is KILLED (it was told to end, and has a deadline) or FAILED (the user waits for
the error, and a launcher may kill this process before it is shown)."""


class MlflowTracker:
    """protocols.Tracker: MLflow, sooner or later. No method waits for a server or a full disk, or
    raises because of one. Started when config, provenance and start are in the run's folder.

    run   the run to go on with, if the folder does not know it: what `run` was
    warn  shows a line to the user
    """

    def __init__(self, config: Config, run: str | None, warn: Callable[[str], None]) -> None:
        self._folder, self._wait_seconds = config.folder, config.tracking.wait_seconds
        self._warn = warn
        self._said = False
        state = MirrorState(config.folder)
        self.run: str = state.cursor.run or run or uuid.uuid4().hex
        """Ours, a tag of the MLflow run, which may not exist yet."""
        self.uri = given_uri() or _local_uri(config.folder)
        self._number = state.number
        self._mirror = self._start()

    @property
    def ui(self) -> str:
        """Where to look at the run: the server's address, or a command where there is no server.
        Either is printed, and shows no password."""
        if self.uri.startswith("http"):
            server = without_password(self.uri).rstrip("/")
            run = known(self._folder / RUN_FILE)
            if run.get("server", "").rstrip("/") != server:
                return server
            return f"{server}/#/experiments/{run['experiment_id']}/runs/{run['run_id']}"
        beside = Path(sys.executable).parent / "mlflow"
        program = "mlflow" if shutil.which("mlflow") else str(beside)
        command = shlex.join([program, "ui", "--backend-store-uri"])
        if without_password(self.uri) != self.uri:
            return f'{command} "$MLFLOW_TRACKING_URI"'
        return f"{command} {shlex.quote(self.uri)}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """At the first step, warn if MLflow cannot be used: it is better known now."""
        if self._said:
            return
        self._said = True
        if error := read_cursor(self._folder).error:
            self._warn(
                f"MLflow at {without_password(self.uri)}: {error}; the run goes on, and MLflow "
                "gets everything as soon as it can be reached"
            )

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED; wait a while until MLflow has it all, and
        warn if it has not."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: must be one of {', '.join(STATUSES)}")
        close_attempt(self._folder / ATTEMPTS, status)
        if self._mirror is None or self._mirror.poll() is not None:  # it died, of whatever
            self._mirror = self._start()
        if status == "FINISHED":
            seconds, give_up = self._wait_seconds, True
        else:  # it may go on for a moment after this process has ended
            seconds, give_up = min(self._wait_seconds, SHORT_WAIT_SECONDS), False
        mirror = self._mirror
        is_done = mirror is not None and _drained(mirror, seconds, self._warn, give_up)
        if left_out := read_cursor(self._folder).left_out:
            self._warn(
                f"MLflow does not have {left_out} metric values or lines: see {self._folder / LOG}"
            )
        if not is_done:
            self._warn(
                f"MLflow at {without_password(self.uri)}: {why_waiting(self._folder, mirror)}. "
                f"What it lacks stays in {self._folder}; the next start sends it, or "
                f"`python -m dapo_megatron track {self._folder}`"
            )

    def _start(self) -> subprocess.Popen[bytes] | None:
        return _start_mirror(self._folder, self._number, self._warn, self.uri, self.run)


def deliver(run_folder: Path, wait_seconds: float) -> bool:
    """Send MLflow what it lacks of a run; return True if it has everything then.

    A run that is not running any more and did not note how it ended was killed. Raises nothing
    because of MLflow; see `why_waiting`, and logs/mlflow.log. ConfigError for a folder without a
    config that this version reads.
    """
    load_config(run_folder / CONFIG)
    path = run_folder / ".lock"
    with open_lock(path) as lock:
        is_over = try_lock(lock, path)  # else a run has it
        number = MirrorState(run_folder).number
        mirror = _start_mirror(run_folder, number, print, _known_uri(run_folder), is_over=is_over)
        return mirror is not None and _drained(mirror, wait_seconds, print)


def why_waiting(run_folder: Path, mirror: subprocess.Popen[bytes] | None = None) -> str:
    """Return why MLflow does not have all of a run: another process than `mirror` holds its lock,
    or the last error."""
    pid, holder = lock_holder(run_folder) or (0, "")
    if holder and (mirror is None or pid != mirror.pid):
        return f"{holder} has locked {run_folder / FOLDER} and sends nothing"
    return read_cursor(run_folder).error or "it is slow"


def deliver_rest(run_folder: Path) -> None:
    """Start a process that sends what MLflow lacks of a run that is over and was moved aside. Does
    not wait."""
    state = MirrorState(run_folder)
    if (run_folder / FOLDER).is_dir() and not state.is_complete():
        mirror = _start_mirror(run_folder, state.number, lambda _: None, _known_uri(run_folder))
        if mirror is not None and mirror.stdin is not None:
            mirror.stdin.close()


def given_uri() -> str:
    """MLFLOW_TRACKING_URI, or nothing. A file by absolute path: the mirror works elsewhere."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    path = given.removeprefix("sqlite:///")
    if path != given:
        return f"sqlite:///{Path(path).absolute()}"
    if not given or ":" in given or given == "databricks":
        return given
    return str(Path(given).absolute())


def _local_uri(run_folder: Path) -> str:
    """A SQLite file next to the run's folder."""
    return f"sqlite:///{run_folder.absolute().parent / 'mlflow.db'}"


def _known_uri(run_folder: Path) -> str:
    """MLFLOW_TRACKING_URI, else where the run's last start sent, else a SQLite file."""
    last = read_cursor(run_folder).uri or known(run_folder / RUN_FILE).get("server", "")
    return given_uri() or last or _local_uri(run_folder)


def _start_mirror(
    run_folder: Path,
    number: int,
    warn: Callable[[str], None],
    uri: str,
    run: str = "",
    *,
    is_over: bool = True,
) -> subprocess.Popen[bytes] | None:
    """Start the process. When its standard input closes, start `number` writes no more; `is_over`:
    because it ended. None if it cannot be started: `track` does it later."""
    # Blocked until it ignores them by itself: a signal may hit it while Python starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        with ExitStack() as stack:
            (run_folder / FOLDER).mkdir(parents=True, exist_ok=True)
            output: Any = subprocess.DEVNULL
            with suppress(OSError):
                (run_folder / LOG).parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context((run_folder / LOG).open("ab"))
            arguments = (run_folder, number, os.getpid(), run, int(is_over))
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.tracking.mirror", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=helper_environment() | {"MLFLOW_TRACKING_URI": uri},
                start_new_session=True,
            )
    except OSError as error:
        warn(f"MLflow: cannot start a process for it: {error}; what is for it stays in the folder")
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _drained(
    mirror: subprocess.Popen[bytes],
    seconds: float,
    warn: Callable[[str], None],
    give_up: bool = True,
) -> bool:
    """Return True if the mirror sends everything and ends within `seconds`. Killing it costs only
    time. A stopped one is killed in any case: it would never end, and keep the lock."""
    if mirror.stdin is not None:
        mirror.stdin.close()
    try:
        return mirror.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        if is_stopped(mirror.pid):
            warn(f"MLflow: its mirror, process {mirror.pid}, was stopped (SIGSTOP) and is killed")
            give_up = True
        if give_up:
            mirror.kill()
            mirror.wait()
        return False
