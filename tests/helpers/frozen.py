"""Run the program with an engine that stops itself (SIGSTOP) when it joins the others:
`python -m tests.helpers.frozen RANK MARKS train ...`.

The first process of rank RANK that finds a file in the folder MARKS removes it and stops.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dapo_megatron import __main__ as program
from dapo_megatron.cluster import ranks

if __name__ == "__main__":
    rank, marks = sys.argv[1], Path(sys.argv[2])
    make_group = ranks.make_group

    def stopped(store: Any, name: str, *more: Any) -> Any:
        is_chosen = name.startswith("run ") and os.environ["RANK"] == rank
        if is_chosen and (mark := next(marks.iterdir(), None)):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        return make_group(store, name, *more)

    ranks.make_group = stopped
    sys.argv = ["dapo_megatron", *sys.argv[3:]]
    program.main()
