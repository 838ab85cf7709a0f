"""Emulate a terminal and what it shows."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from contextlib import suppress
from typing import TextIO

from dapo_megatron.cluster.output import lossy_text

CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """The lines that a terminal shows after receiving text.

    Colors are dropped and cursor movements are applied. Long lines are not wrapped, because no text
    under test may have lines longer than the terminal.
    """

    def __init__(self) -> None:
        self.lines = [""]
        self.frames: list[list[str]] = []
        """Copies of the lines, made each time before lines are erased."""
        self.shows_cursor = True
        self._row = self._column = 0
        self._is_erasing = False

    def feed(self, text: str) -> None:
        """Process text with control sequences."""
        position = 0
        while position < len(text):
            if control := CONTROL.match(text, position):
                self._control(control[1], control[2])
                position = control.end()
                continue
            self._put(text[position])
            position += 1

    def _control(self, argument: str, letter: str) -> None:
        if letter in "AK" and not self._is_erasing:
            self.frames.append(list(self.lines))
            self._is_erasing = True
        if letter == "A":
            self._row -= int(argument or 1)
        elif letter == "K":
            assert argument == "2"
            self.lines[self._row] = ""
        elif argument.startswith("?25"):
            self.shows_cursor = letter == "h"
        else:
            assert letter == "m", (argument, letter)
        assert self._row >= 0

    def _put(self, character: str) -> None:
        self._is_erasing = self._is_erasing and character == "\r"
        if character == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append("")
        elif character == "\r":
            self._column = 0
        else:
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1


class Terminal:
    """A pseudo-terminal. A run writes to `file` (lossy_text). `close` returns everything written.

    With `is_read=False`, writers block after some kilobytes, until `read` or `close`.
    """

    def __init__(self, columns: int = 80, rows: int = 40, *, is_read: bool = True) -> None:
        self._reader, writer = os.openpty()
        self.resize(columns, rows, writer)
        self.file: TextIO = lossy_text(writer, closes=True)
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        if is_read:
            self.read()

    def read(self) -> None:
        """Read everything that is written from now on, in a thread."""
        if self._thread.ident is None:
            self._thread.start()

    def resize(self, columns: int, rows: int, descriptor: int | None = None) -> None:
        """Change the terminal size, as dragging the window does."""
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._reader if descriptor is None else descriptor, termios.TIOCSWINSZ, size)

    def close(self) -> str:
        """Close the terminal and return everything that was written."""
        self.file.close()
        self.read()
        self._thread.join(10)
        os.close(self._reader)
        return b"".join(self._chunks).decode()

    def _read(self) -> None:
        with suppress(OSError):  # EIO: the writing end was closed
            while chunk := os.read(self._reader, 65536):
                self._chunks.append(chunk)
