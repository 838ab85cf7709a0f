"""Process that runs graders: `python -m dapo_megatron.rewards.worker SOCKET_FD MEMORY_MIB`.

Only the pool starts it. It answers gradings one by one, in the order received, so that the parent
knows which grading was running if the process dies or must be killed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dapo_megatron.cluster.processes import adopt_orphans, die_with_parent
from dapo_megatron.rewards.registry import GraderFn, resolve
from dapo_megatron.rewards.worker_messages import Failure, decode_batch, encode, encode_answer
from dapo_megatron.types import Grade

_TRACEBACK_CHARACTERS = 2000


def main() -> None:
    """Receive the graders' names and the time limit, report whether the graders load, then serve
    until the parent is gone."""
    # Ignore Ctrl-C and the signals that Slurm sends to every process of a job: the parent handles
    # them, and ends this process when it no longer needs it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # even in the middle of a hung grading
    adopt_orphans()
    with contextlib.suppress(OSError):  # the OOM killer takes graders before the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    memory_bytes = int(sys.argv[2]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with (
        contextlib.suppress(OSError),  # the parent is gone
        socket.socket(fileno=int(sys.argv[1])) as connection,
        connection.makefile("rb") as orders,
        connection.makefile("wb", buffering=0) as answers,
    ):
        order = json.loads(orders.readline())
        try:
            graders = {name: resolve(name, order["timeout_seconds"]) for name in order["graders"]}
            refusal = None
        except MemoryError:
            refusal = "its graders do not fit into rewards.memory_mib; raise that limit"
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            refusal = str(error) or repr(error)
        answers.write(encode({"refusal": refusal}))
        if refusal is None:
            _serve(graders, orders, answers)


def _serve(graders: Mapping[str, GraderFn], orders: BinaryIO, answers: Any) -> None:
    for message in orders:
        for name, response, truth, extra in decode_batch(message):
            answers.write(encode_answer(_grade(graders[name], response, truth, extra)))


def _grade(
    grader: GraderFn, response: str, truth: str, extra: Mapping[str, Any]
) -> Grade | Failure:
    """Return the grade, or what the grader raised."""
    try:
        return grader(response, truth, extra)
    except MemoryError:  # formatting a traceback might need memory that is not there
        return Failure("memory", "MemoryError: more than rewards.memory_mib")
    except Exception:  # noqa: BLE001 - untrusted code: the pool counts it as "error"
        return Failure("error", traceback.format_exc()[-_TRACEBACK_CHARACTERS:])


if __name__ == "__main__":
    main()
