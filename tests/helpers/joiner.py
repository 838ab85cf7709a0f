"""Run the program with an engine that is lost while it joins the others:
`python -m tests.helpers.joiner RANK MARKS train ...`.

A file in the folder MARKS says when rank RANK sends itself a signal, once: it is named like
`run-before-SIGKILL`: for the group that is made, or the channel to rank 0; whether this is before
or after; and the signal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dapo_megatron import __main__ as program
from dapo_megatron.cluster import groups, messages

if __name__ == "__main__":
    rank, marks = sys.argv[1], Path(sys.argv[2])
    make_group, connect = groups.make_group, messages.Member

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

    groups.make_group = failing
    messages.Member = failing_member  # type: ignore[assignment,misc]
    sys.argv = ["dapo_megatron", *sys.argv[3:]]
    program.main()
