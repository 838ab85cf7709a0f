"""What a rank says before it ends by itself, wherever it hangs.

Its log or its disk may be what hangs, so nothing is written but in a thread that is waited for no
longer than a given time, and never by a thread that holds the interpreter while it writes (as
faulthandler does): none other could then end the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What `work` gives; None if it takes longer or fails (Python then prints its traceback)."""
    got: list[Result] = []
    thread = threading.Thread(target=lambda: got.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got else None


def say(file: int, text: str) -> None:
    """Past Python's buffers: the thread that hangs may hold their locks. May block."""
    with contextlib.suppress(OSError):
        os.write(file, f"{text}\n".encode(errors="replace"))


def stacks() -> str:
    """Of all threads, as faulthandler writes them: here into memory."""
    try:
        with open(os.memfd_create("stacks"), "w+", errors="replace") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # too many open files
        return f"no stacks: {error}"
