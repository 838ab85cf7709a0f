"""Process that copies a run's folder to MLflow: python -m dapo_megatron.tracking.mirror.

The mirror polls the run's files, sends what MLflow lacks, and records its position
(mirror_state.py). If a server is down, slow, full or answers nonsense, it retries after 1 s, 2 s,
... 30 s. Its standard input closes when rank 0 writes no more. The mirror then sends the rest and
exits, at the latest LINGER_SECONDS after its parent process is gone. It logs to logs/mlflow.log.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from dapo_megatron.config.file import load_config
from dapo_megatron.files import open_lock, sha256, try_lock
from dapo_megatron.tracking.mirror_state import (
    CONFIG,
    FOLDER,
    FORWARDED,
    LOCK,
    MISSING,
    MirrorState,
    Superseded,
    data_files,
    lock_holder,
    parameters,
    stamp_of,
    write_holder,
)
from dapo_megatron.tracking.mlflow_run import MlflowRun
from dapo_megatron.tracking.uri import hide_password, without_password
from dapo_megatron.types import ConfigError

METRICS_SECONDS = 0.5
"""Interval between two polls of metrics.jsonl."""
FILES_SECONDS = 5.0
"""Interval between two polls of the other files."""
MAX_DELAY_SECONDS = 30.0
LINGER_SECONDS = 25.0
"""Time to keep sending after the parent process is gone. The mirror ignores the signals that Slurm
and Ctrl-C send."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # Mirror.work retries
    "MLFLOW_DISABLE_TELEMETRY": "true",  # telemetry may hang behind a firewall
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Mirror:
    """Sends a run's folder to MLflow until start `state.number` is over and MLflow has everything.

    is_over   send the status of the start after its last metrics
    data      MLflow tag -> data file; the tag's value is the SHA-256 of the file
    """

    def __init__(
        self,
        state: MirrorState,
        run: MlflowRun,
        *,
        is_over: bool = True,
        data: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._state, self._run, self._is_over, self._data = state, run, is_over, data
        self._looked_at = -math.inf

    def work(self, closing: threading.Event) -> None:
        """Send until `closing` is set and nothing is left. Retry after any error but a ConfigError,
        which the user has to fix: the process then ends, and the run's end starts it once more."""
        delay = 1.0
        while True:
            is_last = closing.is_set()  # read it first: the run writes nothing after it is set
            try:
                self.send(is_last)
            except Superseded as error:
                log(str(error))
                return
            except Exception as error:  # noqa: BLE001 - no error of MLflow may stop the mirror
                self._run.forget()
                is_final = isinstance(error, ConfigError)
                if (text := describe(error)) != self._state.cursor.error:
                    log(text if is_final else f"{text}; retrying until it works", error)
                    self._state.save(error=text)
                if is_final:
                    raise SystemExit(1) from None
                time.sleep(min(delay, 2.0)) if is_last else closing.wait(delay)
                delay = min(2 * delay, MAX_DELAY_SECONDS)
                continue
            delay = 1.0
            if self._state.cursor.error:
                log("MLflow works again")
                self._state.save(error="")
            if is_last:
                return
            closing.wait(METRICS_SECONDS)

    def send(self, is_last: bool) -> None:
        """Send everything that MLflow lacks. Metrics go first, because files are slower and fail
        more often."""
        is_due = is_last or time.monotonic() - self._looked_at > FILES_SECONDS
        if is_due:
            self._state.list_checkpoints()  # before they are deleted
        self._run.open()
        self.send_metrics()
        if is_last and self._is_over and self._state.cursor.closed < self._state.number:
            self._run.end()
        if is_due:
            self._send_files(known=is_last or self._looked_at < 0)
            self._looked_at = time.monotonic()

    def send_metrics(self) -> None:
        """Send the metrics of all new steps."""
        while True:
            rows, changes = self._state.rows()
            self._state.check_newest()  # after reading: a later start may have written the rows
            if rows:
                self._run.metrics(rows)
            elif changes == {name: getattr(self._state.cursor, name) for name in changes}:
                return
            self._state.save(**changes)

    def _send_files(self, *, known: bool) -> None:
        files = self._state.cursor.files
        try:
            for name, folder, stamp in self._state.files(known=known):
                self.send_metrics()
                try:
                    self._run.file(name, folder)
                except FileNotFoundError:
                    if stamp_of(self._state.folder / name) != MISSING:
                        raise
                else:
                    files[name] = stamp
            for tag, path in self._data.items():
                if (stamp := stamp_of(path)) not in (MISSING, files.get(tag)):
                    self._run.tag(tag, sha256(path))
                    files[tag] = stamp
        finally:
            self._state.save()


def describe(error: BaseException) -> str:
    """Return an error as one line, without passwords and memory addresses, so that repeated errors
    compare equal. The innermost OSError of the chain, if any, replaces the library's message."""
    if isinstance(error, ConfigError):
        return hide_password(str(error), _uri())
    text, inner = f"{type(error).__name__}: {error}", error
    while cause := inner.__cause__ or inner.__context__:
        inner = cause
        if isinstance(inner, OSError) and inner.strerror:
            text = f"{type(inner).__name__}: {inner.strerror}"
    line = hide_password(text.splitlines()[0], _uri())
    return re.sub(r"0x[0-9a-f]+", "0x", line)[:300]


def log(text: str, error: Exception | None = None) -> None:
    """Print a line with the time, and the traceback of `error`, to standard output: the log."""
    if error is not None:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), hide_password(text, _uri()), flush=True)


def _uri() -> str:
    """Return the tracking URI as passed to MLflow. Libraries quote it in their errors."""
    return os.environ["MLFLOW_TRACKING_URI"]


def serve(home: Path, number: int, parent: int, run: str, *, is_over: bool) -> None:
    """Send the run in folder `home` on behalf of process `parent`. Start `number` writes no more
    once the standard input closes."""
    closing = threading.Event()
    threading.Thread(target=_watch, args=(closing, parent), daemon=True).start()
    cwd, run_folder = Path.cwd(), Path("..")
    # Use relative paths: the folder may be moved aside, and another folder may take its name.
    os.chdir(home / FOLDER)
    path = run_folder / LOCK
    with open_lock(path) as lock:
        with suppress(OSError, ConfigError):  # full disk, or file system without locks
            if not try_lock(lock, path):
                # The mirror of the previous start exits soon, unless it was stopped (SIGSTOP).
                _, holder = lock_holder(run_folder) or (0, "another process")
                log(f"waiting for {holder}, which is sending this run")
                fcntl.flock(lock, fcntl.LOCK_EX)
            write_holder(lock)
        state = MirrorState(run_folder, number, log)
        with suppress(Superseded):
            state.check_newest()
            config = load_config(run_folder / CONFIG)
            state.prepare(run, without_password(_uri()), parameters(config))
            target = MlflowRun(state, home, config)
            data = data_files(config, cwd)
            Mirror(state, target, is_over=is_over, data=data).work(closing)


def _watch(closing: threading.Event, parent: int) -> None:
    """Set `closing` when rank 0 is done, and exit LINGER_SECONDS after it is gone.

    Rank 0 is done when the pipe to standard input closes. Children that it forked may hold the pipe
    open, so a change of this process's parent counts too.
    """
    while os.getppid() == parent and not select.select([0], [], [], 1.0)[0]:
        pass
    closing.set()
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(LINGER_SECONDS)
    log(f"giving up {LINGER_SECONDS:g} s after rank 0 ended; the next start sends the rest")
    os._exit(1)


def main() -> None:
    """Run the mirror. Command-line arguments: the run's folder, the number of the start, the id of
    the parent process, the name of the run, and 1 if the start is over when the standard input
    closes."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    with suppress(OSError):
        os.nice(10)
    os.environ.update(ENVIRONMENT)
    home, start, parent, run, is_over = sys.argv[1:]
    serve(Path(home).absolute(), int(start), int(parent), run, is_over=is_over == "1")


if __name__ == "__main__":
    main()
