"""Output onto a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.cluster.safe_output import safe_text

REPOSITORY = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
"""Every write to it fails with ENOSPC."""


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.fixture(autouse=True)
def _has_full() -> None:
    if not FULL.exists():
        pytest.skip("no /dev/full here")


WAYS: dict[str, Callable[[TextIO], object]] = {
    "print": lambda file: print("x", file=file),
    "flush": lambda file: print("x", end="", file=file, flush=True),
    "more than the buffers": lambda file: print("x" * 100_000, file=file),
    "bytes": lambda file: file.buffer.write(b"x"),
    "lines": lambda file: file.writelines(["a\n", "b\n"]),
    "close": lambda file: file.write("x") and file.close(),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_raised_on_a_full_disk(way: str) -> None:
    with pytest.raises(OSError, match="No space"), FULL.open("w", encoding="utf-8") as plain:
        WAYS[way](plain)
    with safe_text(opened(FULL), closes=True) as file:
        WAYS[way](file)


@given(st.lists(st.text()))
def test_all_is_written_where_there_is_room(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    descriptor = opened(path)
    file = safe_text(descriptor)
    assert file.fileno() == descriptor
    assert not file.isatty()
    for text in texts:
        print(text, file=file)
    file.close()
    os.close(descriptor)  # not closed yet
    expected = "".join(f"{text}\n" for text in texts).encode("utf-8", "replace")
    assert path.read_bytes() == expected


def test_what_was_lost_does_not_come_again() -> None:
    reading, writing = os.pipe()
    descriptor = opened(FULL)
    file = safe_text(descriptor)
    print("lost", file=file)
    os.dup2(writing, descriptor)
    os.close(writing)
    print("kept", file=file)
    os.close(descriptor)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"kept\n"


PRINTS = """
import os, sys, warnings
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
def test_a_process_ends_well_whose_output_goes_nowhere(how: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PRINTS, how], cwd=REPOSITORY, check=False)
    assert (ran.returncode == 0) == (how == "safe")
