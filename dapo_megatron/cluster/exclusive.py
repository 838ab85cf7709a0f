"""Guard of an object that one thread of one process may use at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Exclusive:
    """Raises RuntimeError if two threads use a socket at once, or a forked process does."""

    _process: int = field(default_factory=os.getpid)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_forked(self) -> bool:
        """Return whether this is a fork of the process that opened the socket."""
        return os.getpid() != self._process

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.is_forked():
            raise RuntimeError("a forked process cannot use the control channel of its parent")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads use the same end of the control channel")
        try:
            yield
        finally:
            self._lock.release()
