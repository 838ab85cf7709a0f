"""`doctor run RUN_FOLDER`: where the ranks of a run are, or were when it ended.

It reads what the run left: pulses, the report of a hang, the verdict. Times are those that each
rank's node wrote; clocks of nodes may differ by a little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_megatron.cluster import exit_reason, heartbeat
from dapo_megatron.cluster.exit_reason import Verdict
from dapo_megatron.cluster.heartbeat import PULSE_SECONDS, Pulse, State, Suspect
from dapo_megatron.cluster.watchdog import hang_file
from dapo_megatron.files import read_json
from dapo_megatron.types import CheckpointError, ConfigError

LATE_SECONDS = 3 * PULSE_SECONDS
"""A rank whose last pulse is older than another's by more had stopped before."""


@dataclass(frozen=True)
class Report:
    """What a run's folder tells of its last attempt."""

    folder: Path
    attempt: str
    time: float
    """time.time() of this report."""
    pulses: Sequence[Pulse | None]
    """By rank; None: it wrote none that can be read."""
    suspects: Sequence[Suspect]
    """Ranks that are missing or behind."""
    hang: str
    """What the watchdog found out, "" if it did not end this attempt."""
    verdict: Verdict | None
    """How the attempt ended, if its file was given and written."""

    @property
    def is_alive(self) -> bool:
        """Whether a rank wrote a pulse just now."""
        return any(
            one.state is State.RUNNING and self.time - one.time < LATE_SECONDS
            for one in self.pulses
            if one is not None
        )

    @property
    def stacks(self) -> Path:
        """Logs of the ranks, where they wrote their stacks when they hung."""
        return self.folder / "logs"


def report(folder: Path, verdict_file: Path | None = None) -> Report:
    """Read a run's folder. Raises ConfigError if no rank has ever written a pulse there."""
    found = [
        one
        for path in sorted(heartbeat.pulse_folder(folder).glob("rank_*.json"))
        if (one := heartbeat.read(path)) is not None
    ]
    if not found:
        raise ConfigError(f"RUN_FOLDER: {folder} has no pulses; name the folder of a run")
    newest = max(found, key=lambda one: one.time)
    pulses = heartbeat.read_all(folder, newest.world_size)
    return Report(
        folder=folder,
        attempt=newest.attempt,
        time=time.time(),
        pulses=pulses,
        suspects=_suspects(pulses, newest),
        hang=_hang(folder, newest.attempt),
        verdict=exit_reason.read(verdict_file) if verdict_file is not None else None,
    )


def _hang(folder: Path, attempt: str) -> str:
    try:
        return str(read_json(hang_file(folder, attempt))["text"])
    except (CheckpointError, KeyError):
        return ""


def _suspects(pulses: Sequence[Pulse | None], newest: Pulse) -> list[Suspect]:
    """As heartbeat.suspects, but for ranks that nobody has asked."""
    if newest.state is State.HUNG:
        return heartbeat.suspects(pulses, newest.attempt)
    here = []
    suspects = []
    for rank, one in enumerate(pulses):
        if one is None:
            suspects.append(Suspect(rank, "missing: it never wrote a pulse"))
        elif one.attempt != newest.attempt:
            suspects.append(Suspect(rank, f"missing: its pulse is of attempt {one.attempt}", one))
        elif one.state is State.RUNNING and newest.time - one.time > LATE_SECONDS:
            seconds = newest.time - one.time
            suspects.append(Suspect(rank, f"missing: silent {seconds:.0f} s before others", one))
        elif one.state is State.RUNNING:
            here.append(one)
    # Running ranks write their pulses at different times: one exchange ahead means nothing.
    furthest = max((one.num_exchanges for one in here), default=0)
    far = [one for one in here if furthest - one.num_exchanges > 1 and one.silent_seconds > 1.0]
    return suspects or [one for one in heartbeat.behind(here) if one.pulse in far]


def to_json(report: Report) -> str:
    """The report as an object; suspects with rank and why."""
    body = {
        "folder": str(report.folder),
        "attempt": report.attempt,
        "time": report.time,
        "is_alive": report.is_alive,
        "pulses": [one and asdict(one) for one in report.pulses],
        "suspects": [{"rank": one.rank, "why": one.why} for one in report.suspects],
        "hang": report.hang,
        "verdict": report.verdict and asdict(report.verdict),
        "stacks": str(report.stacks),
    }
    return json.dumps(body, indent=2) + "\n"


def render(report: Report, console: Console) -> None:
    """Print a table of the ranks, and under it who is to blame and where to look."""
    blamed = {suspect.rank: suspect.why for suspect in report.suspects}
    table = Table(
        "rank", "host", "where", "last sign of life", "ago", "attempt",
        title=f"{report.folder}, attempt {report.attempt}",
    )  # fmt: skip
    for rank, one in enumerate(report.pulses):
        style = "bold red" if rank in blamed else ""
        if one is None:
            table.add_row(str(rank), "-", "no pulse", "-", "-", "-", style=style)
            continue
        ago = ago_text(report.time - one.time + one.silent_seconds)
        where = one.place if one.state is State.RUNNING else f"{one.place}; {one.state}"
        cells = (str(rank), one.host, where, one.sign, ago, one.attempt)
        table.add_row(*map(Text, cells), style=style)
    console.print(table)
    lines = [f"running: {'yes' if report.is_alive else 'no rank has written lately'}"]
    lines += [f"rank {rank}: {why}" for rank, why in blamed.items()] or ["nobody is behind"]
    if report.hang:
        lines += [f"the watchdog ended it: {report.hang}", f"stacks: {report.stacks}"]
    if report.verdict is not None:
        lines.append(f"verdict: {report.verdict.code} {report.verdict.reason}")
    console.print(Text("\n".join(lines)))


def ago_text(seconds: float) -> str:
    """A span of time: 12 s, 3 min, 5.0 h, 2.1 d; never negative, clocks differ."""
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
