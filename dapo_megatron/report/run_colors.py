"""How several runs are told apart where one chart shows them all: a colour for each run, or for
each set of repeats, which are runs that differ in their seed alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.report.folder import RunData

COLORS = 8
"""--series-0 to --series-7 of page/style.css."""
WIDTHS = (1.8, 3.4, 1.0)
"""Pixels of the lines of the first eight, the next eight, ...: a line's dash tells its metric."""
WIDTH_OF_REPEATS = 0.7
"""Of the width of one run."""

_NUMBER = re.compile(r"[-_. ]*(?:seed|[-_. ])[-_. ]*\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Look:
    """Runs drawn alike."""

    label: str
    color: int
    width: float
    runs: list[int]
    """Positions of the runs."""


def looks(runs: Sequence[RunData]) -> list[Look]:
    """Each run is in one. Repeats go by one name but for a number at its end (_seed0, .1), and
    their configurations differ in `seed` and `run` alone; if all runs are repeats of each other,
    or none is, there is a look for each run."""
    sets: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        rest = [item for item in run.config.items() if item[0] not in ("run", "seed")]
        sets.setdefault((_NUMBER.sub("", run.name), str(sorted(rest, key=str))), []).append(number)
    members = list(sets.values()) if len(sets) > 1 else [[number] for number in range(len(runs))]
    found = []
    for place, numbers in enumerate(members):
        width = WIDTHS[place // COLORS % len(WIDTHS)]
        name = runs[numbers[0]].name
        if len(numbers) > 1:
            name, width = f"{_NUMBER.sub('', name)}, {len(numbers)} runs", width * WIDTH_OF_REPEATS
        found.append(Look(name, place % COLORS, round(width, 2), numbers))
    return found
