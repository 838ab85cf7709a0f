"""The process that runs graders: `python -m dapo_megatron.rewards.worker SOCKET_FD MEMORY_MIB`.

Started by the pool alone. It answers each grading as soon as it is done and in the order asked,
so that the parent knows which one was running when the process had to be killed or died.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

from dapo_megatron.rewards.jail import adopt_orphans, die_with_parent
from dapo_megatron.rewards.process import Failure
from dapo_megatron.rewards.registry import GraderFn, resolve
from dapo_megatron.types import Grade

_TRACEBACK_CHARACTERS = 2000


def main() -> None:
    """Receive (grader names, time limit), say None or why not, then serve until the parent is
    gone."""
    # Ctrl-C, and what Slurm sends to every process of a job, are the parent's to handle: it ends
    # this process when it is done with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        die_with_parent()  # even in the middle of a hung grading
        adopt_orphans()
    connection = Connection(int(sys.argv[1]))
    memory_bytes = int(sys.argv[2]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        names, timeout_seconds = connection.recv()
        try:
            graders = {name: resolve(name, timeout_seconds) for name in names}
        except MemoryError:
            connection.send("its graders do not fit into rewards.memory_mib; raise it")
            return
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            connection.send(str(error) or repr(error))
            return
        connection.send(None)
        while True:
            for task in connection.recv():
                connection.send(_grade(graders, task))


def _grade(graders: Mapping[str, GraderFn], task: bytes) -> Grade | Failure:
    """The grade, or what the grader raised."""
    try:
        name, response, truth, extra = pickle.loads(task)
        return graders[name](response, truth, extra)
    except MemoryError:  # no traceback: there may be no memory for one
        return Failure("memory", "MemoryError: more than rewards.memory_mib")
    except Exception:  # noqa: BLE001 - the untrusted edge: counted by the pool as "error"
        return Failure("error", traceback.format_exc()[-_TRACEBACK_CHARACTERS:])


if __name__ == "__main__":
    main()
