"""`doctor run RUN_FOLDER`: show where each rank of a run is, or was when the run ended.

Reads heartbeats and the exit reason. Times are from the clocks of the ranks' nodes, which may
differ slightly.
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

from dapo_megatron.cluster.attempt import ExitReason, read_reason
from dapo_megatron.cluster.heartbeat import (
    HEARTBEAT_SECONDS,
    NUM_NAMED,
    Heartbeat,
    RankState,
    Suspect,
    describe_suspects,
    find_suspects,
    latest,
    read_heartbeats,
)
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.types import ConfigError


@dataclass(frozen=True)
class Report:
    """State of a run's last attempt, from its folder."""

    folder: Path
    attempt: str
    time: float
    """time.time() of this report."""
    heartbeats: Sequence[Heartbeat | None]
    """Heartbeats by rank; None for a heartbeat that is missing or unreadable."""
    suspects: Sequence[Suspect]
    """Ranks that are missing or behind."""
    hang: str
    """Ranks that are missing or behind, as text; empty if the watchdog did not end this attempt."""
    exit_reason: ExitReason | None
    """Exit reason of the attempt, if its file was given and exists."""

    @property
    def is_alive(self) -> bool:
        """True if a running rank wrote a recent heartbeat."""
        return any(
            heartbeat.state is RankState.RUNNING
            and self.time - heartbeat.time < 3 * HEARTBEAT_SECONDS
            for heartbeat in self.heartbeats
            if heartbeat is not None
        )

    @property
    def stacks(self) -> Path:
        """Folder of the logs to which hung ranks write their stacks."""
        return self.folder / "logs"


def command(run_folder: Path, verdict_file: Path | None, json_file: Path | None) -> None:
    """Print the state of a run, and write it to `json_file`."""
    state = report(run_folder, verdict_file)
    render(state, LiteralConsole())
    write_result(json_file, to_json(state))


def report(folder: Path, verdict_file: Path | None = None) -> Report:
    """Read a run's folder. Raises ConfigError if it has no heartbeats."""
    heartbeats = read_heartbeats(folder)
    if not heartbeats:
        raise ConfigError(f"RUN_FOLDER: {folder} has no heartbeats; name the folder of a run")
    attempt = latest(heartbeats).attempt
    is_hung = any(
        heartbeat and heartbeat.state is RankState.HUNG and heartbeat.attempt == attempt
        for heartbeat in heartbeats
    )
    suspects, hang = find_suspects(heartbeats), describe_suspects(heartbeats) if is_hung else ""
    reason = read_reason(verdict_file) if verdict_file is not None else None
    return Report(folder, attempt, time.time(), heartbeats, suspects, hang, reason)


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    body = {
        "folder": str(report.folder),
        "attempt": report.attempt,
        "time": report.time,
        "is_alive": report.is_alive,
        "pulses": [heartbeat and asdict(heartbeat) for heartbeat in report.heartbeats],
        "suspects": [{"rank": suspect.rank, "why": suspect.why} for suspect in report.suspects],
        "hang": report.hang,
        "verdict": report.exit_reason and asdict(report.exit_reason),
        "stacks": str(report.stacks),
    }
    return json.dumps(body, indent=2) + "\n"


def render(report: Report, console: Console) -> None:
    """Print a table of the ranks, then the suspects and the folder with their stacks."""
    suspects = {suspect.rank: suspect.why for suspect in report.suspects}
    table = Table(
        "rank", "host", "where", "last activity", "ago", "attempt",
        title=Text(f"{report.folder}, attempt {report.attempt}"),
    )  # fmt: skip
    for heartbeat in filter(None, report.heartbeats):
        ended = "" if heartbeat.state is RankState.RUNNING else f"; {heartbeat.state}"
        ago = ago_text(report.time - heartbeat.time + heartbeat.silent_seconds)
        where = heartbeat.place + ended
        cells = (str(heartbeat.rank), heartbeat.host, where, heartbeat.sign, ago, heartbeat.attempt)
        table.add_row(*map(Text, cells), style="bold red" if heartbeat.rank in suspects else "")
    console.print(table)
    first = report.heartbeats[0]
    lines = [f"running: {'yes' if report.is_alive else 'no, there are no recent heartbeats'}"]
    lines += _few(first.engines if first is not None else ())
    lines += _few([f"rank {rank}: {why}" for rank, why in suspects.items()])
    if not suspects:
        lines.append("no rank is behind")
    if report.hang:
        lines += [f"the watchdog ended the run: {report.hang}", f"stacks: {report.stacks}"]
    if report.exit_reason is not None:
        lines.append(f"verdict: {report.exit_reason.code} {report.exit_reason.reason}")
    console.print(Text("\n".join(lines)))


def _few(lines: Sequence[str]) -> list[str]:
    num_more = len(lines) - NUM_NAMED
    return [*lines[:NUM_NAMED], *([f"and {num_more:,} more"] if num_more > 0 else [])]


def ago_text(seconds: float) -> str:
    """Format a duration: 12 s, 3 min, 5.0 h, 2.1 d. A negative duration, from clocks that differ,
    becomes 0 s."""
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
