"""MLflow tracker of rank 0. A separate process copies the run's folder to MLflow (mirror.py).

Rank 0 neither imports MLflow nor connects to a server. A thread would not do: MLflow's client holds
the GIL for tens of milliseconds at a time, and its retries cannot be interrupted. The mirror's
standard input closes when rank 0 is done or dead.
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
from dapo_megatron.cluster.ownership import check_tree
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
    lock_holder,
    read_cursor,
    read_or_empty,
)
from dapo_megatron.tracking.uri import absolute_uri, sqlite_uri, without_password
from dapo_megatron.types import ConfigError

STATUSES = ("FINISHED", "FAILED", "KILLED")
SHORT_WAIT_SECONDS = 3.0
"""Wait for the mirror at the end of a KILLED or FAILED run. A killed run has a deadline; after a
failure the user waits for the error, and a launcher may kill this process before it is shown."""


class MlflowTracker:
    """protocols.Tracker that delivers to MLflow asynchronously. Only `finish` waits for the server,
    and no method raises because of a server or a full disk. Create it when the run's folder has its
    config, provenance and start record.

    run   attribute `run` of the tracker to continue, used if the folder does not have it
    warn  shows a line to the user
    """

    def __init__(self, config: Config, run: str | None, warn: Callable[[str], None]) -> None:
        self._folder, self._wait_seconds = config.folder, config.tracking.wait_seconds
        self._warn = warn
        self._is_checked = False
        state = MirrorState(config.folder)
        self.run: str = state.cursor.run or run or uuid.uuid4().hex
        """This project's id of the run: a tag of the MLflow run, which may not exist yet."""
        self.uri = given_uri() or _local_uri(config.folder)
        self._number = state.number
        self._mirror = self._start()

    @property
    def ui(self) -> str:
        """URL of the run, or the command that starts MLflow's UI if there is no server. Contains no
        password."""
        if self.uri.lower().startswith("http"):
            server = without_password(self.uri).rstrip("/")
            run = read_or_empty(self._folder / RUN_FILE)
            if run.get("server", "").rstrip("/") != server:
                return server
            return f"{server}/#/experiments/{run['experiment_id']}/runs/{run['run_id']}"
        script = Path(sys.executable).parent / "mlflow"
        program = "mlflow" if shutil.which("mlflow") else str(script)
        command = shlex.join([program, "ui", "--backend-store-uri"])
        if without_password(self.uri) != self.uri:
            return f'{command} "$MLFLOW_TRACKING_URI"'
        return f"{command} {shlex.quote(self.uri)}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn at the first step if MLflow cannot be reached. The mirror sends the metrics."""
        if self._is_checked:
            return
        self._is_checked = True
        if error := read_cursor(self._folder).error:
            self._warn(
                f"MLflow at {without_password(self.uri)}: {error}; the run continues, and MLflow "
                "gets everything as soon as it can be reached"
            )

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED. Wait up to `tracking.wait_seconds` (at most
        SHORT_WAIT_SECONDS unless FINISHED) until MLflow has everything, and warn if it does not."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: must be one of {', '.join(STATUSES)}")
        close_attempt(self._folder / ATTEMPTS, status)
        if self._mirror is None or self._mirror.poll() is not None:  # it exited early
            self._mirror = self._start()
        if status == "FINISHED":
            seconds, give_up = self._wait_seconds, True
        else:  # the mirror may outlive this process by LINGER_SECONDS
            seconds, give_up = min(self._wait_seconds, SHORT_WAIT_SECONDS), False
        mirror = self._mirror
        is_done = mirror is not None and _drained(mirror, seconds, self._warn, give_up)
        if left_out := read_cursor(self._folder).left_out:
            self._warn(
                f"{left_out} metric values or lines were not sent to MLflow: see "
                f"{self._folder / LOG}"
            )
        if not is_done:
            self._warn(
                f"MLflow at {without_password(self.uri)}: {why_waiting(self._folder, mirror)}. "
                f"The rest stays in {self._folder}; the next start sends it, or run "
                f"`python -m dapo_megatron track {self._folder}`"
            )

    def _start(self) -> subprocess.Popen[bytes] | None:
        return _start_mirror(self._folder, self._number, self._warn, self.uri, self.run)


def deliver(run_folder: Path, wait_seconds: float) -> bool:
    """Send MLflow what it lacks of a run; return True if it then has everything.

    A run that is over but has no recorded end is reported as killed. Errors of MLflow are not
    raised: see `why_waiting` and logs/mlflow.log. Raises ConfigError if the folder has no config
    that this version can read, if another user may have created an entry of it, or if only the
    folder names the server.
    """
    if run_folder.exists():
        check_tree(run_folder, "RUN_FOLDER")
    load_config(run_folder / CONFIG)
    uri = _known_uri(run_folder)
    path = run_folder / ".lock"
    with open_lock(path) as lock:
        is_over = try_lock(lock, path)  # a running run holds the lock
        number = MirrorState(run_folder).number
        mirror = _start_mirror(run_folder, number, print, uri, is_over=is_over)
        return mirror is not None and _drained(mirror, wait_seconds, print)


def why_waiting(run_folder: Path, mirror: subprocess.Popen[bytes] | None = None) -> str:
    """Return why MLflow does not have everything of a run: a process other than `mirror` holds the
    lock, or the last error."""
    pid, holder = lock_holder(run_folder) or (0, "")
    if holder and (mirror is None or pid != mirror.pid):
        return f"{holder} holds the lock of {run_folder / FOLDER}, but sends nothing"
    return read_cursor(run_folder).error or "it did not finish in time"


def deliver_rest(run_folder: Path) -> None:
    """Start a process that sends what MLflow lacks of a finished run that was moved aside. Does not
    wait for it."""
    state = MirrorState(run_folder)
    with suppress(ConfigError):  # of _known_uri: `track` reports it
        if not (run_folder / FOLDER).is_dir() or state.is_complete():
            return
        mirror = _start_mirror(run_folder, state.number, lambda _: None, _known_uri(run_folder))
        if mirror is not None and mirror.stdin is not None:
            mirror.stdin.close()


def given_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or "". Paths are made absolute, because the mirror has another
    working folder."""
    return absolute_uri(os.environ.get("MLFLOW_TRACKING_URI", "").strip(), Path.cwd())


def _local_uri(run_folder: Path) -> str:
    """Return the URI of a SQLite file next to the run's folder."""
    return sqlite_uri(run_folder.absolute().parent, "mlflow.db")


def _known_uri(run_folder: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else a SQLite file next to the run.

    Raises ConfigError if the last start of the run had another address. It is not used, because the
    user's MLflow password would be sent to a server that the folder names.
    """
    given, local = given_uri(), _local_uri(run_folder)
    last = read_cursor(run_folder).uri or read_or_empty(run_folder / RUN_FILE).get("server", local)
    if given or last in (local, without_password(local)):
        return given or local
    raise ConfigError(
        f"RUN_FOLDER: the data of {run_folder} went to another MLflow. If you trust this address, "
        f"set MLFLOW_TRACKING_URI={shlex.quote(without_password(str(last)))}"
    )


def _start_mirror(
    run_folder: Path,
    number: int,
    warn: Callable[[str], None],
    uri: str,
    run: str = "",
    *,
    is_over: bool = True,
) -> subprocess.Popen[bytes] | None:
    """Start the mirror process; return None, with a warning, if it cannot be started.

    The caller closes its standard input when start `number` writes no more. `is_over` means that
    the start has then ended.
    """
    # The mirror ignores these signals, but only once Python has started: block them until then.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
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
        warn(
            f"MLflow: cannot start the process that sends to it: {error}. Send the run later with "
            f"`python -m dapo_megatron track {run_folder}`"
        )
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _drained(
    mirror: subprocess.Popen[bytes],
    seconds: float,
    warn: Callable[[str], None],
    give_up: bool = True,
) -> bool:
    """Return True if the mirror sends everything and exits within `seconds`.

    After that it is killed if `give_up`; the next mirror resends what is missing. A stopped mirror
    (SIGSTOP) is always killed, because it would keep the lock forever.
    """
    if mirror.stdin is not None:
        mirror.stdin.close()
    try:
        return mirror.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        if is_stopped(mirror.pid):
            warn(f"MLflow: killed its mirror, process {mirror.pid}, which was stopped (SIGSTOP)")
            give_up = True
        if give_up:
            mirror.kill()
            mirror.wait()
        return False
