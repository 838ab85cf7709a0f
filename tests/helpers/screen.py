"""A terminal to write to, and what is then to be seen on it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from contextlib import suppress
from typing import TextIO

from dapo_megatron.cluster.safe_output import safe_text

CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """The lines of a terminal that was sent some text: colors are dropped, the cursor moves. Lines
    longer than the terminal are not folded: nothing that is looked at here may have any."""

    def __init__(self) -> None:
        self.lines = [""]
        self.frames: list[list[str]] = []
        """The lines before each time that some are wiped: what was there to be seen."""
        self.shows_cursor = True
        self._row = self._column = 0
        self._wipes = False

    def feed(self, text: str) -> None:
        """Take text with control sequences."""
        position = 0
        while position < len(text):
            if found := CONTROL.match(text, position):
                self._control(found[1], found[2])
                position = found.end()
                continue
            self._put(text[position])
            position += 1

    def _control(self, argument: str, letter: str) -> None:
        if letter in "AK" and not self._wipes:
            self.frames.append(list(self.lines))
            self._wipes = True
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
        self._wipes = self._wipes and character == "\r"
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
    """A pseudo-terminal; `file` is where a run writes (safe_text), `close` gives all that was
    written. Without `is_read` it takes some kilobytes and then makes its writers wait, until
    `read` or `close`."""

    def __init__(self, columns: int = 80, rows: int = 40, *, is_read: bool = True) -> None:
        self._reader, writer = os.openpty()
        self.resize(columns, rows, writer)
        self.file: TextIO = safe_text(writer, closes=True)
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        if is_read:
            self.read()

    def read(self) -> None:
        """From now on, whatever is written."""
        if self._thread.ident is None:
            self._thread.start()

    def resize(self, columns: int, rows: int, descriptor: int | None = None) -> None:
        """As a person drags the window."""
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._reader if descriptor is None else descriptor, termios.TIOCSWINSZ, size)

    def close(self) -> str:
        """All that was written."""
        self.file.close()
        self.read()
        self._thread.join(10)
        os.close(self._reader)
        return b"".join(self._chunks).decode()

    def _read(self) -> None:
        with suppress(OSError):  # the end of a terminal that nobody writes to any more
            while chunk := os.read(self._reader, 65536):
                self._chunks.append(chunk)
