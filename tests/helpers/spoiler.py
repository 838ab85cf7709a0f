"""Run the program and spoil the weights of one engine: `python -m tests.helpers.spoiler RANK MARKS
train ...`.

In each sync of rank RANK, before its check, if there is a file in the folder MARKS, it is removed.
Then one bit of the engine's weights is flipped, or, if the file is named `stop`, the rank stops
itself (SIGSTOP). Rank 0 kills no process, as if the engines were on other nodes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dapo_megatron import __main__ as program
from dapo_megatron.cluster import members
from dapo_megatron.engine.engine import VllmEngine
from tests.helpers.saboteur import flip_bit

NORM = "model.norm.weight"

if __name__ == "__main__":
    rank, marks = sys.argv[1], Path(sys.argv[2])
    receive = VllmEngine.receive

    def spoiled(self: VllmEngine, weights: Any, version: int) -> None:
        receive(self, weights, version)
        if os.environ["RANK"] == rank and (mark := next(marks.iterdir(), None)):
            mark.unlink()
            if mark.name == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                flip_bit(NORM)(self)

    VllmEngine.receive = spoiled  # type: ignore[method-assign]
    members.kill_here = lambda host, process_id: None
    sys.argv = ["dapo_megatron", *sys.argv[3:]]
    program.main()
