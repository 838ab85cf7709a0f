"""Output onto a disk that is full, or to a terminal that nobody reads."""

from __future__ import annotations

import locale
import logging
import os
import re
import socket
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from dapo_megatron.cluster import safe_output
from dapo_megatron.cluster.safe_output import KEPT_BYTES, safe_text
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.text import visible
from tests.helpers.screen import Terminal

REPOSITORY = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
"""Every write to it fails with ENOSPC."""


def open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def shown(texts: list[str]) -> str:
    """Return lines as a safe stream writes them."""
    lines = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    return visible("".join(f"{line}\n" for line in lines))


@pytest.fixture(autouse=True)
def _has_full() -> None:
    if not FULL.exists():
        pytest.skip("no /dev/full here")


WRITES: dict[str, Callable[[TextIO], object]] = {
    "print": lambda file: print("x", file=file),
    "flush": lambda file: print("x", end="", file=file, flush=True),
    "more than the buffers": lambda file: print("x" * 100_000, file=file),
    "bytes": lambda file: file.buffer.write(b"x"),
    "lines": lambda file: file.writelines(["a\n", "b\n"]),
    "close": lambda file: file.write("x") and file.close(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_full_disk_raises_nothing(write: str) -> None:
    with pytest.raises(OSError, match="No space"), FULL.open("w", encoding="utf-8") as plain:
        WRITES[write](plain)
    with safe_text(open_for_append(FULL), closes=True) as file:
        WRITES[write](file)


@given(st.lists(st.text()))
def test_everything_is_written_if_there_is_room(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    descriptor = open_for_append(path)
    file = safe_text(descriptor)
    assert file.fileno() == descriptor
    assert not file.isatty()
    for text in texts:
        print(text, file=file)
    file.close()
    os.close(descriptor)  # `file.close` does not close it
    assert path.read_bytes() == shown(texts).encode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_output_that_nobody_reads_does_not_stop_a_run(kind: str) -> None:
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (end.detach() for end in socket.socketpair())
    file = safe_text(writing)
    started = time.monotonic()
    for number in range(100):
        print(f"{number} " + "x" * 10_000, file=file)
    assert time.monotonic() - started < 5.0
    file.close()
    os.close(writing)
    with open(reading, encoding="utf-8") as reader:
        lines = [reader.readline() for _ in range(50)]
    assert lines == [f"{number} " + "x" * 10_000 + "\n" for number in range(50)]


def test_a_slow_reader_gets_everything() -> None:
    script = """
import atexit
from dapo_megatron.cluster.safe_output import protect_streams
protect_streams(is_run=True)
for number in range(100_000):
    print(number)
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    assert writer.stdout is not None
    time.sleep(1.0)
    text = b""
    while part := os.read(writer.stdout.fileno(), 1 << 14):
        text += part
        time.sleep(0.005)
    writer.stdout.close()
    assert writer.wait() == 0
    assert text.split() == [str(number).encode() for number in range(100_000)]


def test_lost_output_is_not_written_later() -> None:
    reading, writing = os.pipe()
    descriptor = open_for_append(FULL)
    file = safe_text(descriptor)
    print("lost", file=file)
    os.dup2(writing, descriptor)
    os.close(writing)
    print("kept", file=file)
    os.close(descriptor)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"kept\n"


@pytest.fixture
def _utf8() -> Iterator[None]:
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


@pytest.fixture
def _waits_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for a terminal that is read, because its reader may be slow under load."""
    monkeypatch.setattr(safe_output, "WAIT_SECONDS", 60.0)


@pytest.mark.usefixtures("_utf8", "_waits_for_terminals")
@given(st.lists(st.text(max_size=5_000)))
@example(["x" * 100_000, "y"])
@settings(max_examples=30, deadline=None)
def test_a_terminal_that_is_read_gets_all_output(texts: list[str]) -> None:
    terminal = Terminal()
    tty.setraw(terminal.file.fileno())
    for text in texts:
        print(text, file=terminal.file)
    assert terminal.close() == shown(texts).encode(errors="replace").decode()


def test_unread_terminal_output_is_dropped_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_read=False)
    started = time.monotonic()
    for number in range(3_000):
        print(f"{number:>999}", file=terminal.file)
    assert time.monotonic() - started < 60.0
    monkeypatch.setattr(safe_output, "WAIT_SECONDS", 60.0)  # from here on it is read
    terminal.read()
    deadline = time.monotonic() + 60.0
    while terminal.file.buffer.raw.num_bytes_waiting:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("read again", file=terminal.file)
    *kept, missing, again = filter(None, terminal.close().splitlines())
    assert kept == [f"{number:>999}" for number in range(len(kept))]
    assert KEPT_BYTES < 1000 * len(kept) < KEPT_BYTES + 100_000
    assert "missing" in missing
    assert again == "read again"


def test_print_returns_after_a_terminal_that_is_read_accepted_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the process ends after `print`, its background thread has nothing left to write."""
    monkeypatch.setattr(safe_output, "WAIT_SECONDS", 60.0)
    reading, writing = os.openpty()
    file = safe_text(writing, closes=True)
    for _ in range(100):
        print("here", file=file)
        assert file.buffer.raw.num_bytes_waiting == 0  # type: ignore[attr-defined]
    text = b""
    while text.count(b"\n") < 100:
        text += os.read(reading, 1000)
    file.close()
    os.close(reading)
    assert text == 100 * b"here\r\n"


PRINTS = """
import os, sys, warnings
from dapo_megatron.cluster import safe_output
from dapo_megatron.cluster.safe_output import safe_text
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
os.dup2(full, 2)
if sys.argv[1] == "safe":
    sys.stdout, sys.stderr = safe_text(1), safe_text(2)
print("of a library", flush=True)
print("of another", file=sys.stderr)
warnings.warn("of a third")
"""


@pytest.mark.parametrize("how", ["safe", "plain"])
def test_a_process_whose_output_cannot_be_written_exits_with_0(how: str) -> None:
    result = subprocess.run([sys.executable, "-c", PRINTS, how], cwd=REPOSITORY, check=False)
    assert (result.returncode == 0) == (how == "safe")


# ---------------------------------------------------------------------------- hidden characters

HOSTILE = {
    "title of the terminal": "\x1b]0;pwned\x07",
    "clear": "\x1b[2J",
    "move": "\x1b[1;1Hall is well",
    "concealed": "\x1b[8msecret",
    "one-byte CSI": "\x9b2J",
    "clipboard": "\x1b]52;c;cHduZWQ=\x1b\\",
    "overwritten": "error: bad\rall is well",
    "backspaces": "bad\b\b\bok",
    "bell": "\x07",
    "null": "a\0b",
    "right to left": "\u202egnp.exe",
    "zero width": "pass\u200bword",
    "line separator": "a\u2028b",
    "markup": "x[/nope] [bold]y[/bold] :smile: [link=http://x]z[/link]",
    "delete": "a\x7fb",
}
SHOWS: dict[str, Callable[[str, TextIO, LiteralConsole], object]] = {
    "print": lambda text, file, _: print(f"error: {text}", file=file),
    "writelines": lambda text, file, _: file.writelines([text, "\n"]),
    "logging": lambda text, file, _: logging.StreamHandler(file).handle(
        logging.makeLogRecord({"msg": text})
    ),
    "console": lambda text, _, console: console.print(text, style="bold red"),
    "Text": lambda text, _, console: console.print(Text(text, style="bold")),
    "rule": lambda text, _, console: console.rule(text),
    "cell": lambda text, _, console: console.print(_table(text)),
}


def _table(text: str) -> Table:
    table = Table(f"column {text}", title=f"title {text}", caption=text)
    table.add_row(text)
    table.add_row(Text(text))
    return table


def written(show: str, text: str, tmp_path: Path, *, colors: bool) -> str:
    path = tmp_path / "out"
    with safe_text(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), closes=True) as file:
        system = "standard" if colors else None
        console = LiteralConsole(
            file=file, width=200, force_terminal=colors, color_system=system, highlight=False
        )
        SHOWS[show](text, file, console)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("colors", [False, True])
@pytest.mark.parametrize("show", SHOWS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_text_controls_the_terminal(kind: str, show: str, colors: bool, tmp_path: Path) -> None:
    styles = set(re.findall("\x1b[^m]*m", written(show, "x", tmp_path, colors=colors)))
    text = written(show, HOSTILE[kind], tmp_path, colors=colors)
    for style in styles:  # those of rich itself
        text = text.replace(style, "")
    assert text == visible(text)
    assert "\r" not in text
    if kind == "markup":
        assert "x[/nope] [bold]y[/bold] :smile:" in text


@given(st.text(), st.sampled_from(sorted(SHOWS)))
@settings(max_examples=200, deadline=None)
def test_any_text_is_shown_without_control_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, show: str
) -> None:
    text = written(show, text, tmp_path_factory.mktemp("out"), colors=False)
    assert text == visible(text)


def test_all_consoles_print_literally() -> None:
    sources = [*(REPOSITORY / "dapo_megatron").rglob("*.py"), *(REPOSITORY / "tools").glob("*.py")]
    users = [path.name for path in sources if re.search(r"\bConsole\(", path.read_text("utf-8"))]
    assert users == ["gpu_check.py"]  # a table of its own figures
