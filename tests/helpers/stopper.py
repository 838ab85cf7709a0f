"""The program, asked to stop at a chosen point: `python -m tests.helpers.stopper N train ...`.

The N-th time that ranks agree on whether to stop (from 1; the exchanges of rollouts do not count),
they find that they were asked to. 0: never.
"""

from __future__ import annotations

import sys
from itertools import count

from dapo_megatron import __main__ as program
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.protocols import Exchange

if __name__ == "__main__":
    stop_at, calls = int(sys.argv[1]), count(1)
    check = Stop.check

    def counted(self: Stop, exchange: Exchange) -> None:
        if next(calls) == stop_at:
            self.signal = "SIGUSR1"
        check(self, exchange)

    Stop.check = counted  # type: ignore[method-assign]
    sys.argv = ["dapo_megatron", *sys.argv[2:]]
    program.main()
