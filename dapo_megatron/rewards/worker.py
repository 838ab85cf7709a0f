"""Process that runs graders: `python -m dapo_megatron.rewards.worker FD MEMORY_MIB SECONDS NAME...`

Only the pool starts it. Each line from the pool is a grading, as JSON: [grader, response, truth,
extra]. Each line to the pool is an `Answer`. It runs untrusted code on text from a model, so
nothing that it sends is unpickled, and the pool checks every field.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from dapo_megatron.cluster.processes import limit_memory, obey_parent
from dapo_megatron.rewards.process import MAX_DETAIL, Answer
from dapo_megatron.rewards.registry import GraderFn, resolve


def main() -> None:
    """Report whether the graders load, then grade until the parent is gone."""
    obey_parent()  # even in the middle of a hung grading
    descriptor, memory_mib, seconds, *names = sys.argv[1:]
    limit_memory(int(memory_mib))
    with suppress(OSError), socket.socket(fileno=int(descriptor)) as pool:  # OSError: pool is gone
        try:
            graders = {name: resolve(name, float(seconds)) for name in names}
            start = Answer("started")
        except MemoryError:
            start = Answer("refused", None, "its graders do not fit into rewards.memory_mib")
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            start = Answer("refused", None, str(error) or repr(error))
        _send(pool, start)
        for line in pool.makefile("rb"):
            name, response, truth, extra = json.loads(line)
            _send(pool, _grade(graders[name], response, truth, extra))


def _grade(grader: GraderFn, response: str, truth: str, extra: Mapping[str, Any]) -> Answer:
    try:
        return Answer("graded", grader(response, truth, extra))
    except MemoryError:  # formatting a traceback might need memory that is not there
        return Answer("memory", None, "MemoryError: more than rewards.memory_mib")
    except Exception:  # noqa: BLE001 - untrusted code: the pool counts it as "error"
        return Answer("error", None, traceback.format_exc())


def _send(pool: socket.socket, answer: Answer) -> None:
    # Control characters and halves of characters must not reach logs and terminals.
    detail = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in answer.detail)
    answer = msgspec.structs.replace(answer, detail=detail[-MAX_DETAIL:])
    pool.sendall(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
