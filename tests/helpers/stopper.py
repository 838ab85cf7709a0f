"""Run the program and stop it at a chosen point: `python -m tests.helpers.stopper N train ...`.

At the N-th call of `Stop.check` (counted from 1) the process acts as if it had received SIGUSR1.
Exchanges during rollouts are not counted. With N = 0 it never stops. Every micro-batch has a check,
whatever its time.
"""

from __future__ import annotations

import sys
from itertools import count

from dapo_megatron import __main__ as program
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.protocols import Exchange
from dapo_megatron.run import loss

if __name__ == "__main__":
    stop_at, calls = int(sys.argv[1]), count(1)
    check = Stop.check
    loss.STOP_CHECK_SECONDS = 0.0

    def counted(self: Stop, exchange: Exchange) -> float:
        if next(calls) == stop_at:
            self.signal = "SIGUSR1"
        return check(self, exchange)

    Stop.check = counted  # type: ignore[method-assign]
    sys.argv = ["dapo_megatron", *sys.argv[2:]]
    program.main()
