"""Run the program and end it at a chosen point: `python -m tests.helpers.stopper POINT train ...`.

stop:2    before step 2, counted from this start, the process acts as if it had received SIGUSR1
kill:3    the process is killed before its third optimizer step
none      the program runs undisturbed
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from typing import Any

from dapo_megatron import __main__ as program
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.policy.policy import MegatronPolicy


def stop_before(step: int) -> None:
    check, calls = Stop.check, count(1)

    def counted(self: Stop) -> None:
        if next(calls) == step:
            self.signal = "SIGUSR1"
        check(self)

    Stop.check = counted  # type: ignore[method-assign]


def kill_before(number: int) -> None:
    update, calls = MegatronPolicy.update, count(1)

    def counted(self: MegatronPolicy, *arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *arguments, **options)

    MegatronPolicy.update = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, _, number = sys.argv[1].partition(":")
    if kind != "none":
        {"stop": stop_before, "kill": kill_before}[kind](int(number))
    sys.argv = ["dapo_megatron", *sys.argv[2:]]
    program.main()
