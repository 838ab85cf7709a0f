"""Ctrl-C ends a command with exit code 130, without a traceback or a core file.

`__main__` imports this module first, so that this also holds while it imports the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as of a shell."""
SAME_SECONDS = 1.0
"""Signals within this time count as one, because a launcher forwards signals that its ranks may
also receive directly."""


def leave(*_: Any) -> None:
    """Handle SIGINT by ending the process immediately."""
    os._exit(INTERRUPTED)


def listen() -> None:
    """Raise KeyboardInterrupt at the first Ctrl-C, and end the process at the second."""
    first = 0.0

    def interrupt(*_: Any) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > SAME_SECONDS:
            leave()

    if signal.getsignal(signal.SIGINT) is leave:  # not if Ctrl-C was ignored at the start
        signal.signal(signal.SIGINT, interrupt)


_spec = getattr(sys.modules["__main__"], "__spec__", None)
_is_command = _spec is not None and _spec.name == "dapo_megatron.__main__"
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
