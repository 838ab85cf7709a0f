"""Rank 0's side of MLflow: every event goes to the spool (spool.py), a process delivers it.

Rank 0 neither imports MLflow nor talks to a server. Its client would hold the interpreter for tens
of milliseconds at a time and cannot be interrupted in a retry, so a thread would not do: the sender
(sender.py) is a process, which learns from its standard input that rank 0 is gone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dapo_megatron.cluster.processes import helper_environment
from dapo_megatron.config import Config, FileSource
from dapo_megatron.files import open_lock, try_lock
from dapo_megatron.tracking import spool
from dapo_megatron.tracking.provenance import flatten, run_tags
from dapo_megatron.tracking.trackers import Lines
from dapo_megatron.tracking.uri import without_password
from dapo_megatron.types import ConfigError

STATUSES = ("FINISHED", "FAILED", "KILLED")
SHORT_WAIT_SECONDS = 3.0
"""Of a run that is KILLED (it was told to end, and has a deadline) or FAILED (the user waits for
the error, and a launcher may kill this process before it is shown)."""
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals to a whole job step; the sender ignores them."""


class MlflowSpool:
    """protocols.Tracker: MLflow, sooner or later. No method waits for a server or a full disk, or
    raises because of one.

    attempt  name of this start (cluster/attempt.py)
    run      the run to go on with, if the folder's own spool does not know it: what `run` was, or
             an MLflow run id
    warn     shows a line to the user
    tags     for the MLflow run; None: those of `run_tags`
    """

    def __init__(
        self,
        config: Config,
        attempt: str,
        run: str | None,
        warn: Callable[[str], None],
        *,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._run_folder = config.folder
        self._folder = config.folder / spool.FOLDER
        self._wait_seconds = config.tracking.wait_seconds
        self._warn = warn
        earlier = spool.beginning(self._folder)
        self.run: str = earlier["run"] if earlier else run or uuid.uuid4().hex
        """Ours, a tag of the MLflow run, which may not exist yet."""
        self.uri = tracking_uri(config)
        self._number = max(spool.attempts(self._folder), default=0) + 1
        self._lines = Lines(spool.spool_path(self._folder, self._number), warn)
        self._sender: subprocess.Popen[bytes] | None = None
        self._said = False
        self._one_at_a_time = threading.Lock()  # checkpoints are published by another thread
        self._put(
            "begin",
            run=self.run,
            attempt=attempt,
            uri=without_password(self.uri),
            directory=str(_directory(config)),
            experiment=config.tracking.experiment,
            name=config.run.name,
            params=dict(flatten(config.model_dump(mode="json"))),
            tags=dict(run_tags(config, attempt) if tags is None else tags),
        )
        for source in (*config.data.train, *config.evaluation.sets):
            if isinstance(source, FileSource):
                self._put("data", name=source.name, path=str(Path(source.path).absolute()))

    @property
    def ui(self) -> str:
        """Where to look at the run: the server's address, or a command where there is no server.
        Either is printed, and shows no password."""
        if self.uri.startswith("http"):
            server = without_password(self.uri).rstrip("/")
            known = spool.known(self._run_folder / spool.RUN_FILE)
            if known.get("server", "").rstrip("/") != server:
                return server
            return f"{server}/#/experiments/{known['experiment_id']}/runs/{known['run_id']}"
        beside = Path(sys.executable).parent / "mlflow"
        program = "mlflow" if shutil.which("mlflow") else str(beside)
        command = shlex.join([program, "ui", "--backend-store-uri"])
        if without_password(self.uri) != self.uri:
            return f'{command} "$MLFLOW_TRACKING_URI"'
        return f"{command} {shlex.quote(self.uri)}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a rollout step."""
        self._put("metrics", step=step, values=dict(metrics))
        self._early_word()

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file of the run's folder with the run, under `folder`. It must stay."""
        self._put("artifact", path=self._relative(path), folder=folder)

    def checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint was published."""
        self._put("checkpoint", path=self._relative(path), step=step)

    def describe(self, text: str) -> None:
        """Give the run a description, unless it has one of a person's."""
        self._put("describe", text=text)

    def finish(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED; wait a while until MLflow has it all, and
        say so if it has not."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: must be one of {', '.join(STATUSES)}")
        self._put("end", status=status)
        self._lines.close()
        if self._sender is None or self._sender.poll() is not None:  # it died, of whatever
            self._sender = start_sender(self._run_folder, self._number, self._warn)
        if status == "FINISHED":
            seconds, give_up = self._wait_seconds, True
        else:  # it may go on for a moment after this process has ended
            seconds, give_up = min(self._wait_seconds, SHORT_WAIT_SECONDS), False
        sender = self._sender
        self._last_word(sender is not None and _drained(sender, seconds, self._warn, give_up))

    def _put(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "time": time.time_ns() // 1_000_000, **values}
        with self._one_at_a_time:
            self._lines.append(json.dumps(event).encode())
            if self._sender is None and not self._lines.num_waiting:
                self._sender = start_sender(self._run_folder, self._number, self._warn)

    def _relative(self, path: Path) -> str:
        inside, path = self._run_folder.absolute(), path.absolute()
        return str(path.relative_to(inside) if path.is_relative_to(inside) else path)

    def _early_word(self) -> None:
        """Once, at the first step: that MLflow cannot be used is better known now."""
        if self._said:
            return
        self._said = True
        if error := spool.read_cursor(self._folder, "facts").error:
            self._warn(
                f"MLflow at {without_password(self.uri)}: {error}; the run goes on, and MLflow "
                "gets everything as soon as it can be reached"
            )

    def _last_word(self, is_done: bool) -> None:
        cursors = [spool.read_cursor(self._folder, lane) for lane in spool.LANES]
        if left_out := sum(cursor.left_out for cursor in cursors):
            log = self._run_folder / spool.LOG
            self._warn(f"MLflow does not have {left_out} metric values or files: see {log}")
        if is_done:
            return
        why = why_waiting(self._folder, self._sender)
        self._warn(
            f"MLflow at {without_password(self.uri)}: {why}. {spool.num_waiting(self._folder)} "
            f"events wait in {self._folder}; the next start delivers them, or "
            f"`python -m dapo_megatron track {self._run_folder}`"
        )


def deliver(run_folder: Path, wait_seconds: float) -> int:
    """Hand MLflow what waits in a run's folder; the number of events that still wait then.

    A run that is not running any more and did not say how it ended was KILLED. Raises nothing
    because of MLflow; see `why_waiting`, and logs/mlflow.log. ConfigError for a folder that has
    nothing for MLflow.
    """
    folder = run_folder / spool.FOLDER
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; a run with tracking.mlflow=true has one")
    with _run_lock(run_folder) as is_over:
        number = max(spool.attempts(folder), default=0)
        if number == 0:
            return 0
        sender = start_sender(run_folder, number if is_over else 0, print)
        if sender is not None and _drained(sender, wait_seconds, print):
            return 0
    return max(1, spool.num_waiting(folder))


def why_waiting(folder: Path, sender: subprocess.Popen[bytes] | None = None) -> str:
    """Return why MLflow does not have the whole spool in `folder`: another process than `sender`
    has locked it, or the last error of the sender."""
    holder = spool.lock_holder(folder)
    if holder is not None and (sender is None or holder.pid != sender.pid):
        return f"{holder} has locked the events and delivers none"
    errors = (spool.read_cursor(folder, lane).error for lane in spool.LANES)
    return next(filter(None, errors), "it is slow")


def deliver_rest(run_folder: Path) -> None:
    """Start a process that delivers what MLflow lacks of a run that is over and was moved aside. A
    run without an end is KILLED. Does not wait."""
    folder = run_folder / spool.FOLDER
    number = max(spool.attempts(folder), default=0)
    if spool.read_cursor(folder, "facts").begun or spool.num_waiting(folder):
        sender = start_sender(run_folder, number, lambda _: None)
        if sender is not None and sender.stdin is not None:
            sender.stdin.close()


def start_sender(
    run_folder: Path, number: int, warn: Callable[[str], None]
) -> subprocess.Popen[bytes] | None:
    """A sender for a run's folder; when its standard input closes, attempt `number` is over.
    None if it cannot be started: the events wait."""
    # Blocked until it ignores them by itself: a signal may hit it while Python starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        with ExitStack() as stack:
            output: Any = subprocess.DEVNULL
            with suppress(OSError):
                (run_folder / spool.LOG).parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context((run_folder / spool.LOG).open("ab"))
            arguments = (run_folder / spool.FOLDER, number, os.getpid())
            return subprocess.Popen(
                [sys.executable, "-m", "dapo_megatron.tracking.sender", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=helper_environment() | {"MLFLOW_TRACKING_URI": given_uri()},
                start_new_session=True,
            )
    except OSError as error:
        warn(f"MLflow: cannot start a process for it: {error}; what is for it waits in the folder")
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tracking_uri(config: Config) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in run.directory; files by absolute path."""
    return given_uri() or f"sqlite:///{_directory(config) / 'mlflow.db'}"


def given_uri() -> str:
    """MLFLOW_TRACKING_URI, or nothing. A file by absolute path: the sender works elsewhere."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    path = given.removeprefix("sqlite:///")
    if path != given:
        return f"sqlite:///{Path(path).absolute()}"
    if not given or ":" in given or given == "databricks":
        return given
    return str(Path(given).absolute())


def _drained(
    sender: subprocess.Popen[bytes],
    seconds: float,
    warn: Callable[[str], None],
    give_up: bool = True,
) -> bool:
    """Return True if the sender delivers everything and ends within `seconds`. Killing it costs
    only time. A stopped one is killed in any case: it would never end, and keep the spool locked.
    """
    if sender.stdin is not None:
        sender.stdin.close()
    try:
        return sender.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        if is_stopped := spool.is_stopped(sender.pid):
            warn(f"MLflow: its sender, process {sender.pid}, was stopped (SIGSTOP) and is killed")
        if give_up or is_stopped:
            sender.kill()
            sender.wait()
        return False


@contextmanager
def _run_lock(run_folder: Path) -> Iterator[bool]:
    """Keep the run's folder as a run does (run/folder.py); False if a run has it."""
    path = run_folder / ".lock"
    with open_lock(path) as lock:
        yield try_lock(lock, path)


def _directory(config: Config) -> Path:
    return Path(config.run.directory).absolute()
