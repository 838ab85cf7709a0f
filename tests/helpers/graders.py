"""Graders for tests, named as module:function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any


def moody(response: str, truth: str, extra: Mapping[str, Any]) -> bool:
    """Hangs on "hang", dies on "die", raises on "raise"; else compares."""
    if response == "hang":
        time.sleep(3600)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise ValueError(response)
    return response == truth
