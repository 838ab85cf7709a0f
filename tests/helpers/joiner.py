"""Run the program with an engine that is lost while it joins the others, or sends them tokens:
`python -m tests.helpers.joiner RANK MARKS train ...`.

A file in the folder MARKS says when rank RANK sends itself a signal, once: it is named like
`run-before-SIGKILL`: for the group that is made, the channel to rank 0, or the exchange of tokens;
whether this is before or after; and the signal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dapo_megatron import __main__ as program
from dapo_megatron.cluster import collectives, groups, messages

if __name__ == "__main__":
    rank, marks = sys.argv[1], Path(sys.argv[2])
    make_group, connect, shared = groups.make_group, messages.Member, collectives._shared

    def fail(group: str, when: str) -> None:
        for mark in marks.glob(f"{group.split()[0]}-{when}-*"):
            if os.environ["RANK"] == rank:
                mark.unlink()
                os.kill(os.getpid(), signal.Signals[mark.name.split("-")[2]])

    def failing(store: Any, name: str, *more: Any) -> Any:
        fail(name, "before")
        group = make_group(store, name, *more)
        fail(name, "after")
        return group

    def failing_member(*more: Any) -> messages.Member:
        fail("channel", "before")
        return connect(*more)

    def failing_exchange(view: memoryview) -> Any:
        fail("exchange", "before")  # when the others have learned how much this rank will send
        return shared(view)

    collectives._shared = failing_exchange
    groups.make_group = failing
    messages.Member = failing_member  # type: ignore[assignment,misc]
    sys.argv = ["dapo_megatron", *sys.argv[3:]]
    program.main()
