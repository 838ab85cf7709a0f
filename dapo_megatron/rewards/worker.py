"""The process that runs graders: `python -m dapo_megatron.rewards.worker SOCKET_FD`.

Started by the pool alone. It answers each grading as soon as it is done and in the order asked,
so that the parent knows which one was running when the process had to be killed or died.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

from dapo_megatron.rewards.registry import GraderFn, resolve
from dapo_megatron.types import Grade

_TRACEBACK_CHARACTERS = 2000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Receive {source: grader name}, say None or why not, then serve until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _die_with_parent()
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        names: dict[str, str] = connection.recv()
        try:
            graders = {source: resolve(name) for source, name in names.items()}
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            connection.send(str(error) or repr(error))
            return
        connection.send(None)
        while True:
            for task in connection.recv():
                connection.send(_grade(graders, task))


def _grade(graders: Mapping[str, GraderFn], task: bytes) -> Grade | str:
    """The grade, or the traceback of what the grader raised."""
    try:
        source, response, truth, extra = pickle.loads(task)
        return graders[source](response, truth, extra)
    except Exception:  # noqa: BLE001 - the untrusted edge: counted by the pool as "error"
        return traceback.format_exc()[-_TRACEBACK_CHARACTERS:]


def _die_with_parent() -> None:
    """Let the kernel kill this process if the parent dies in the middle of a hung grading."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
