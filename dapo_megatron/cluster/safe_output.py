"""Output that a full disk cannot turn into an error: what cannot be written is lost, and the run
goes on. Any library may print; none expects that to fail."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any, TextIO


def safe_text(descriptor: int, *, closes: bool = False) -> TextIO:
    """A text file, written line by line, on a file descriptor; `closes`: the descriptor goes with
    it. Writing, flushing and closing raise no OSError."""
    raw = _Forgiving(descriptor, "w", closefd=closes)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True
    )


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
