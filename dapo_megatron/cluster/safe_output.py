"""Output streams that never end or block a run, and through which no text controls the terminal.

Output that a full disk rejects is lost. Output that a terminal, a pipe or a socket does not accept
waits in memory. Any library may print, and none expects printing to fail or to block.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import select
import stat
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

from dapo_megatron.text import visible

PANEL_ROWS = 8
"""Maximum height of rank 0's live panel (tracking/live.py), in rows. It wipes these rows when it is
redrawn."""
WAIT_SECONDS = 0.5
"""Maximum time that a write waits for a terminal."""
KEPT_BYTES = 1 << 20
"""Maximum output to keep for a terminal that is not read."""


def protect_streams(*, is_run: bool) -> None:
    """Replace standard output and standard error by safe streams. Only those of a run drop output
    that is not read: `samples | less` waits for its reader. Closed descriptors are opened, so that
    no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = (safe_text(number, blocks=not is_run) for number in (1, 2))


def safe_text(descriptor: int, *, closes: bool = False, blocks: bool = False) -> TextIO:
    """Return a line-buffered text file for a file descriptor. Hidden characters are made visible.

    `closes` makes closing the file close the descriptor. Writing, flushing and closing never raise
    OSError. Unless it `blocks`, they take at most about WAIT_SECONDS on a terminal, a pipe or a
    socket that is not read.
    """
    terminal = os.isatty(descriptor)
    mode = os.fstat(descriptor).st_mode
    may_block = terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    kind = _BackgroundRawIO if may_block and not blocks else _LossyRawIO
    raw = kind(descriptor, "w", closefd=closes)
    return VisibleText(
        io.BufferedWriter(raw),
        encoding="locale" if terminal else "utf-8",
        errors="replace",
        line_buffering=True,
    )


class VisibleText(io.TextIOWrapper):
    """Text file that makes hidden characters visible, except those that a rich console writes.
    LiteralConsole makes those of its texts visible. A carriage return, which could overwrite a
    line, becomes a newline."""

    def write(self, text: str, /) -> int:
        """Write text."""
        return super().write(visible(text.replace("\r\n", "\n").replace("\r", "\n")))

    @property
    def rich_proxied_file(self) -> _Unchanged:
        """File that rich consoles write to instead of this one."""
        return _Unchanged(self)


class _Unchanged:
    """Writes text unchanged to a VisibleText."""

    def __init__(self, file: VisibleText) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._file, text)


def above_panel(text: str) -> str:
    """Return `text` followed by PANEL_ROWS empty lines, for a terminal on which another process may
    draw its panel. The panel then wipes the empty lines and not the text."""
    return "\n" + text + "\n" * PANEL_ROWS


class _LossyRawIO(io.FileIO):
    """Raw file that drops data it cannot write. Being below the buffer, it reports the data as
    written, so that the buffer does not keep it and fail again."""

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view:
            try:
                return super().write(view)
            except OSError:  # a full disk or quota, a terminal or a file system that is gone
                return view.nbytes

    def close(self) -> None:
        with suppress(OSError):  # a network file system may report a write error on close
            super().close()


class _BackgroundRawIO(_LossyRawIO):
    """Raw file of a terminal, pipe or socket that a background thread writes to. Ctrl-S, a stalled
    connection or a pager can block a write for hours. Other threads wait for it at most
    WAIT_SECONDS, and only if nothing else is waiting."""

    def __init__(self, descriptor: int, mode: str, *, closefd: bool) -> None:
        super().__init__(descriptor, mode, closefd=closefd)
        self._chunks: SimpleQueue[tuple[bytes, threading.Event] | None] = SimpleQueue()
        # Each counter is changed by one thread only: the buffer above serializes writes.
        self._num_bytes_queued = self._num_bytes_written = 0
        self._is_full = False
        # A copy, because the thread may still write after the descriptor was closed and its number
        # reused for another file.
        copy = os.dup(descriptor)
        self._thread = threading.Thread(target=self._write_all, args=(copy,), daemon=True)
        self._thread.start()
        atexit.register(self.drain)

    @property
    def num_bytes_waiting(self) -> int:
        """Number of bytes that the reader has not accepted yet."""
        return self._num_bytes_queued - self._num_bytes_written

    def write(self, data: Any, /) -> int:
        chunk = bytes(data)
        behind = self.num_bytes_waiting
        if behind < KEPT_BYTES:
            self._is_full = False
            written = self._queue_chunk(chunk)
            if not behind:
                written.wait(WAIT_SECONDS)
        elif not self._is_full:
            self._is_full = True
            notice = "(lines are missing here because nobody read the output)"
            self._queue_chunk(above_panel(notice).encode())
        return len(chunk)

    def close(self) -> None:
        if not self.closed:
            self._chunks.put(None)
            if not sys.is_finalizing():  # otherwise the thread no longer runs
                self.drain()
        super().close()

    def drain(self) -> None:
        """Wait until everything is written, or until nothing was written for WAIT_SECONDS."""
        written, deadline = -1, math.inf
        while self.num_bytes_waiting and time.monotonic() < deadline:
            if written < self._num_bytes_written:
                written, deadline = self._num_bytes_written, time.monotonic() + WAIT_SECONDS
            time.sleep(0.001)

    def _queue_chunk(self, chunk: bytes) -> threading.Event:
        written = threading.Event()
        self._num_bytes_queued += len(chunk)
        self._chunks.put((chunk, written))
        return written

    def _write_all(self, descriptor: int) -> None:
        while (item := self._chunks.get()) is not None:
            chunk, written = item
            for start in range(0, len(chunk), select.PIPE_BUF):
                rest = memoryview(chunk)[start : start + select.PIPE_BUF]
                with suppress(OSError):  # the terminal was closed, or the reader has ended
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                self._num_bytes_written += min(select.PIPE_BUF, len(chunk) - start)
            written.set()
        os.close(descriptor)
