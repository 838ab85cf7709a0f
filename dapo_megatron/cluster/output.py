"""Output streams that never end a run: what a full disk or a closed terminal rejects is lost.

Any library may print, and none expects printing to fail.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class _LossyFile(io.FileIO):
    """Raw file that drops data it cannot write. Being below the buffer, it reports the data as
    written, so that the buffer does not keep it and fail again."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # a full disk or quota, a terminal or a file system that is gone
            return memoryview(data).nbytes

    def close(self) -> None:
        with suppress(OSError):  # a network file system may report a write error on close
            super().close()


def lossy_text(descriptor: int, *, closes: bool = False) -> TextIO:
    """Return a line-buffered text file for a file descriptor, which never raises OSError. `closes`
    makes closing the file close the descriptor."""
    encoding = "locale" if os.isatty(descriptor) else "utf-8"
    buffer = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=closes))
    return io.TextIOWrapper(buffer, encoding, errors="replace", line_buffering=True)


def protect_streams() -> None:
    """Replace standard output and standard error by lossy files. Closed descriptors are opened, so
    that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
