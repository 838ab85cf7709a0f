"""The process that hands a run's spool to MLflow: python -m dapo_megatron.tracking.sender.

It reads what rank 0 appends, delivers it in order, and notes how far it is. A server that is down,
slow, full or talks nonsense is tried again, after 1 s, 2 s, ... 30 s. When its standard input
closes, rank 0 will write no more: it delivers the rest and ends, at the latest LINGER_SECONDS after
the process that started it is gone. An attempt that is over by then, and never said how it ended,
was killed. What it prints is logs/mlflow.log.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_megatron.files import open_lock, try_lock
from dapo_megatron.tracking import spool
from dapo_megatron.tracking.mlflow_spool import FORWARDED
from dapo_megatron.tracking.spool import LANES, Cursor, Event, Place
from dapo_megatron.tracking.uri import hide_password
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from dapo_megatron.tracking.mlflow_run import MlflowRun

POLL_SECONDS = 0.5
"""Between two looks at the spool."""
MAX_DELAY_SECONDS = 30.0
LINGER_SECONDS = 25.0
"""After the death of the process that started it. Slurm and Ctrl-C do not end it earlier."""
MAX_METRICS = 1000
"""Of one call: MLflow's own limit."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # it has its own way of trying again
    "MLFLOW_DISABLE_TELEMETRY": "true",  # which may hang behind a firewall
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Of this process alone."""


class Lane:
    """Delivers the events of some kinds, in order, until all are delivered."""

    def __init__(self, folder: Path, name: str, run: MlflowRun, closing: threading.Event) -> None:
        self.cursor = spool.read_cursor(folder, name)
        self._folder, self._name, self._run, self._closing = folder, name, run, closing
        self._kinds = LANES[name]

    def work(self) -> None:
        """Returns when rank 0 is gone and MLflow has everything."""
        delay = 1.0
        while True:
            is_last = self._closing.is_set()  # before looking: nothing is written after it
            try:
                moved = self._deliver_next()
            except Exception as error:  # noqa: BLE001 - whatever it is, the run must not end by it
                self._run.forget()
                self._failed(error)
                if is_last:
                    time.sleep(min(delay, 2.0))
                else:
                    self._closing.wait(delay)
                delay = min(2 * delay, MAX_DELAY_SECONDS)
                continue
            delay = 1.0
            if not moved and is_last:
                return
            if not moved:
                self._closing.wait(POLL_SECONDS)

    def _deliver_next(self) -> bool:
        """Deliver one event, or some steps' metrics; False if there is none."""
        if next(spool.events(self._folder), None) is None:
            return False
        target = self._run.target()
        if target != (self.cursor.server, self.cursor.run_id):
            self.cursor = Cursor(*target)
        chunk, place = self._next_chunk()
        if chunk:
            self._run.deliver(chunk, place.number, self.cursor)
            self.cursor.time = chunk[-1]["time"]
        self.cursor.number, self.cursor.offset = place
        if not chunk:
            return False
        self._recovered()
        self.write()
        return True

    def _next_chunk(self) -> tuple[list[Event], Place]:
        chunk: list[Event] = []
        end, size = self.cursor.place, 0
        for event, place in spool.events(self._folder, self.cursor.place):
            if event["kind"] not in self._kinds:
                end = place
                continue
            size += len(event.get("values", ()))
            if chunk and (event["kind"] != "metrics" or size > MAX_METRICS):
                break
            chunk.append(event)
            end = place
            if event["kind"] != "metrics":
                break
        return chunk, end

    def write(self) -> None:
        """Note how far it is; on a full disk the next time will do."""
        with suppress(OSError):
            spool.write_cursor(self._folder, self._name, self.cursor)

    def _failed(self, error: Exception) -> None:
        text = why(error)
        if text != self.cursor.error:
            say(f"{self._name}: {text}; tried again until it goes", error)
            self.cursor.error = text
            self.write()

    def _recovered(self) -> None:
        if self.cursor.error is not None:
            say(f"{self._name}: MLflow takes it again")
            self.cursor.error = None


def why(error: BaseException) -> str:
    """One line, the same for the same trouble. What the system said, if it said something, is at
    the bottom of what the libraries made of it."""
    said, inner = f"{type(error).__name__}: {error}", error
    while cause := inner.__cause__ or inner.__context__:
        inner = cause
        if isinstance(inner, OSError) and inner.strerror:
            said = f"{type(inner).__name__}: {inner.strerror}"
    line = hide_password(said.splitlines()[0], _uri())
    return re.sub(r"0x[0-9a-f]+", "0x", line)[:300]


def say(text: str, error: Exception | None = None) -> None:
    """A line in the log, and the traceback."""
    if error is not None:
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), hide_password(text, _uri()), flush=True)


def _uri() -> str:
    """The server's address as MLflow is given it; libraries quote it in their errors."""
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def serve(number: int, parent: int) -> None:
    """Deliver the spool in the working folder for process `parent`; with the standard input closed,
    attempt `number` is over."""
    from dapo_megatron.tracking.mlflow_run import MlflowRun

    closing = threading.Event()
    threading.Thread(target=_watch, args=(closing, parent), daemon=True).start()
    here = Path()
    path = Path(spool.LOCK)
    with open_lock(path) as lock:
        with suppress(OSError, ConfigError):  # a full disk, a file system without locks
            if not try_lock(lock, path):
                # That of the attempt before, which ends soon unless something stopped it.
                say(f"waits for {spool.lock_holder(here)}, which delivers these events")
                fcntl.flock(lock, fcntl.LOCK_EX)
            spool.write_holder(lock)
        run = MlflowRun(here, say)
        facts = Lane(here, "facts", run, closing)
        files = Lane(here, "files", run, closing)

        def deliver_files() -> None:
            run.is_open.wait()
            files.work()

        behind = threading.Thread(target=deliver_files, daemon=True)
        behind.start()
        facts.work()
        if facts.cursor.begun == number and number:
            _kill(facts, run)
        run.is_open.set()  # even if nothing ever began: nothing will
        behind.join()


def _kill(facts: Lane, run: MlflowRun) -> None:
    """Rank 0 is gone without a word."""
    end = {"kind": "end", "time": facts.cursor.time, "status": "KILLED"}
    while True:
        try:
            run.deliver([end], facts.cursor.begun, facts.cursor)
        except Exception as error:  # noqa: BLE001 - as in Lane.work
            facts._failed(error)
            time.sleep(2.0)
        else:
            facts.write()
            return


def _watch(closing: threading.Event, parent: int) -> None:
    """Learn that rank 0 is gone: its end of the pipe closes. (Children that it forked may hold the
    pipe open: it is gone as well if this process has another parent.)"""
    while os.getppid() == parent and not select.select([0], [], [], 1.0)[0]:
        pass
    closing.set()
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(LINGER_SECONDS)
    say(f"gives up {LINGER_SECONDS:g} s after rank 0; the next start goes on here")
    os._exit(1)


def main() -> None:
    """Arguments: the spool's folder, the number of the attempt, the process it is started by."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    with suppress(OSError):
        os.nice(10)
    os.environ.update(ENVIRONMENT)
    # It works in the folder, not by its name: it may be moved aside, and another take the name.
    os.chdir(sys.argv[1])
    serve(int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
