"""Graders that tests name as module:function, and a search for the processes they leave."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def moody(response: str, truth: str, extra: Mapping[str, Any]) -> bool:
    """Hang on "hang", exit on "die", raise on "raise", otherwise compare with the truth."""
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise ValueError(response)
    return response == truth


def broken(response: str, truth: str, extra: object) -> bool:
    """Raise on every call but the trial at the start, whose response is the truth."""
    if response == truth:
        return True
    raise LookupError("no such table")


def near(response: str, truth: str, extra: object) -> bool:
    """Grade by the parity of the sum of the character codes, so that groups of any model are
    mixed."""
    return sum(map(ord, response)) % 2 == 0


def patient(response: str, truth: str, extra: object) -> bool:
    """Like `near`, but first wait while the file `truth` exists."""
    while Path(truth).exists():
        time.sleep(0.05)
    return near(response, truth, extra)
