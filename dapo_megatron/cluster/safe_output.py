"""Output that cannot end or hold up a run: what a full disk does not take is lost, what a terminal
does not take waits in memory. Any library may print; none expects that to fail, or to take long."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

PANEL_ROWS = 8
"""That rank 0's panel (tracking/live.py) has at most, and wipes when it is drawn again."""
WAIT_SECONDS = 0.5
"""For a terminal to take what was written, before the run goes on without it."""
KEPT_BYTES = 1 << 20
"""Of what a terminal has not taken yet."""


def safe_text(descriptor: int, *, closes: bool = False) -> TextIO:
    """A text file, written line by line, on a file descriptor; `closes`: the descriptor goes with
    it. Writing, flushing and closing raise no OSError, and take about WAIT_SECONDS at most on a
    terminal that nobody reads."""
    terminal = os.isatty(descriptor)
    raw = (_Patient if terminal else _Forgiving)(descriptor, "w", closefd=closes)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="locale" if terminal else "utf-8",
        errors="replace",
        line_buffering=True,
    )


def above_panel(text: str) -> str:
    """The text, to be written to a terminal on which another process may draw its panel: the panel
    then wipes empty lines, and not the text."""
    return "\n" + text + "\n" * PANEL_ROWS


class _Forgiving(io.FileIO):
    """Below the buffers, so that none keeps what was not written, to fail with it again."""

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view:
            try:
                return super().write(view)
            except OSError:  # a full disk or quota, a terminal or a file system that is gone
                return view.nbytes

    def close(self) -> None:
        with suppress(OSError):  # a network file system may say so only now
            super().close()


class _Patient(_Forgiving):
    """A terminal: Ctrl-S or a stalled connection makes whoever writes to it wait, for hours. So
    that is a thread, and all others wait for it once, and not long."""

    def __init__(self, descriptor: int, mode: str, *, closefd: bool) -> None:
        super().__init__(descriptor, mode, closefd=closefd)
        self._chunks: SimpleQueue[tuple[bytes, threading.Event] | None] = SimpleQueue()
        # Each has one thread that changes it: the buffer above lets one write at a time.
        self._num_bytes_given = self._num_bytes_written = 0
        self._is_full = False
        # The thread may still be writing when the number is another file's already.
        own = os.dup(descriptor)
        self._thread = threading.Thread(target=self._write_all, args=(own,), daemon=True)
        self._thread.start()

    @property
    def num_bytes_waiting(self) -> int:
        """That the terminal has not taken yet."""
        return self._num_bytes_given - self._num_bytes_written

    def write(self, data: Any, /) -> int:
        chunk = bytes(data)
        behind = self.num_bytes_waiting
        if behind < KEPT_BYTES:
            self._is_full = False
            written = self._give(chunk)
            if not behind:
                written.wait(WAIT_SECONDS)
        elif not self._is_full:
            self._is_full = True
            self._give(above_panel("(lines are missing here: the terminal was not read)").encode())
        return len(chunk)

    def close(self) -> None:
        if not self.closed:
            self._chunks.put(None)
            if not sys.is_finalizing():  # else the thread does not run any more
                self._thread.join(WAIT_SECONDS)
        super().close()

    def _give(self, chunk: bytes) -> threading.Event:
        written = threading.Event()
        self._num_bytes_given += len(chunk)
        self._chunks.put((chunk, written))
        return written

    def _write_all(self, descriptor: int) -> None:
        while (given := self._chunks.get()) is not None:
            chunk, written = given
            rest = memoryview(chunk)
            with suppress(OSError):  # a terminal that is gone
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            self._num_bytes_written += len(chunk)
            written.set()
        os.close(descriptor)
