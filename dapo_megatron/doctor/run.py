"""`doctor run RUN_FOLDER`: where the ranks of a run are, or were when it ended.

It reads heartbeats, the report of a hang, and the exit reason. Times are from the clock of each
rank's node; clocks may differ by a little.
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
"""A rank whose last heartbeat is older than another's by more had stopped before."""


@dataclass(frozen=True)
class Report:
    """State of a run's last attempt, from its folder."""

    folder: Path
    attempt: str
    time: float
    """time.time() of this report."""
    pulses: Sequence[Pulse | None]
    """Heartbeats by rank; None if there is none that can be read."""
    suspects: Sequence[Suspect]
    """Ranks that are missing or behind."""
    hang: str
    """Finding of the watchdog, "" if it did not end this attempt."""
    verdict: Verdict | None
    """Exit reason of the attempt, if its file was given and written."""

    @property
    def is_alive(self) -> bool:
        """True if a rank wrote a heartbeat just now."""
        return any(
            pulse.state is State.RUNNING and self.time - pulse.time < LATE_SECONDS
            for pulse in self.pulses
            if pulse is not None
        )

    @property
    def stacks(self) -> Path:
        """Folder of the logs to which ranks that hang write their stacks."""
        return self.folder / "logs"


def command(run_folder: Path, verdict_file: Path | None, json_file: Path | None) -> None:
    """Print the state of a run, and write it to `json_file`."""
    state = report(run_folder, verdict_file)
    render(state, Console())
    if json_file is not None:
        json_file.write_text(to_json(state), encoding="utf-8")


def report(folder: Path, verdict_file: Path | None = None) -> Report:
    """Read a run's folder. Raises ConfigError if no rank has ever written a pulse there."""
    readable = [
        pulse
        for path in sorted(heartbeat.pulse_folder(folder).glob("rank_*.json"))
        if (pulse := heartbeat.read(path)) is not None
    ]
    if not readable:
        raise ConfigError(f"RUN_FOLDER: {folder} has no pulses; name the folder of a run")
    newest = max(readable, key=lambda pulse: pulse.time)
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
    """Find suspects as heartbeat.suspects does, for ranks that may still run."""
    if newest.state is State.HUNG:
        return heartbeat.suspects(pulses, newest.attempt)
    here = []
    suspects = []
    for rank, pulse in enumerate(pulses):
        if pulse is None:
            suspects.append(Suspect(rank, "missing: it never wrote a pulse"))
        elif pulse.attempt != newest.attempt:
            why = f"missing: its pulse is of attempt {pulse.attempt}"
            suspects.append(Suspect(rank, why, pulse))
        elif pulse.state is State.RUNNING and newest.time - pulse.time > LATE_SECONDS:
            seconds = newest.time - pulse.time
            suspects.append(Suspect(rank, f"missing: silent {seconds:.0f} s before others", pulse))
        elif pulse.state is State.RUNNING:
            here.append(pulse)
    # Running ranks write their heartbeats at different times: one exchange ahead means nothing.
    furthest = max((pulse.num_exchanges for pulse in here), default=0)
    far = [
        pulse for pulse in here if furthest - pulse.num_exchanges > 1 and pulse.silent_seconds > 1.0
    ]
    return suspects or [suspect for suspect in heartbeat.behind(here) if suspect.pulse in far]


def to_json(report: Report) -> str:
    """Return the report as JSON; suspects with rank and reason."""
    body = {
        "folder": str(report.folder),
        "attempt": report.attempt,
        "time": report.time,
        "is_alive": report.is_alive,
        "pulses": [pulse and asdict(pulse) for pulse in report.pulses],
        "suspects": [{"rank": suspect.rank, "why": suspect.why} for suspect in report.suspects],
        "hang": report.hang,
        "verdict": report.verdict and asdict(report.verdict),
        "stacks": str(report.stacks),
    }
    return json.dumps(body, indent=2) + "\n"


def render(report: Report, console: Console) -> None:
    """Print a table of the ranks, then which ranks are at fault and where to look."""
    blamed = {suspect.rank: suspect.why for suspect in report.suspects}
    table = Table(
        "rank", "host", "where", "last sign of life", "ago", "attempt",
        title=f"{report.folder}, attempt {report.attempt}",
    )  # fmt: skip
    for rank, pulse in enumerate(report.pulses):
        style = "bold red" if rank in blamed else ""
        if pulse is None:
            table.add_row(str(rank), "-", "no pulse", "-", "-", "-", style=style)
            continue
        ago = ago_text(report.time - pulse.time + pulse.silent_seconds)
        where = pulse.place if pulse.state is State.RUNNING else f"{pulse.place}; {pulse.state}"
        cells = (str(rank), pulse.host, where, pulse.sign, ago, pulse.attempt)
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
    """Format a duration: 12 s, 3 min, 5.0 h, 2.1 d; never negative, because clocks differ."""
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
