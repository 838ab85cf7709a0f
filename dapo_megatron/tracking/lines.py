"""Appending to a file of lines on a disk that may be full: never half a line, never an error."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Lines:
    """Whole lines, in order, readable at once. What the disk does not take is kept in memory and
    written before the next line; `warn` hears of it once, and once when all is written again.

    Nothing is synced: a line survives the death of this process, not of the machine. One writer
    per file.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._waiting: deque[bytes] = deque()
        self._file: int | None = None
        self._end = 0
        """Where the last whole line ends."""
        self._is_full = False

    @property
    def num_waiting(self) -> int:
        """Lines that are only in memory."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write `line`, which has no newline, and all that waits before it."""
        self._waiting.append(line + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                self._warn(
                    f"{self._path}: {error.strerror}; what belongs there is kept in memory until "
                    "it can be written"
                )
            return
        if self._is_full:
            self._is_full = False
            self._warn(f"{self._path}: written again, nothing is missing")

    def close(self) -> None:
        """Try once more, then give up what waits."""
        with suppress(OSError):
            self._write()
        if self._waiting:
            self._warn(f"{self._path}: the last {len(self._waiting)} lines could not be written")
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._end = os.fstat(self._file).st_size
        while self._waiting:
            line = self._waiting[0]
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, self._end)  # the part that had room
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(line)
            self._waiting.popleft()
