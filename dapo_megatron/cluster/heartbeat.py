"""Heartbeats: a small file per rank in the run's folder with the rank's phase, last sign of life
and number of its last collective. They show which rank is missing or behind.

`RUN/.pulse/rank_00003.json` is replaced atomically and outlives the rank. A rank that hangs reads
the files of all ranks (watchdog.py), and so does `doctor run`. Times are of each node's clock.

The folder is hidden because heartbeats are written before the run's folder is locked, and must stay
when an older run is moved aside.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dapo_megatron.files import read_json, write_json
from dapo_megatron.types import CheckpointError

HEARTBEATS = ".pulse"
"""Folder of the heartbeats in a run's folder."""
HEARTBEAT_SECONDS = 5.0
"""Heartbeat interval of a rank that stays in the same phase and step. A rank that is three of them
late has stopped."""
NUM_NAMED = 16
"""Maximum number of suspects that a report describes in full."""
MAX_RANKS = 1024
"""Maximum number of further suspects that a report names."""

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class RankState(StrEnum):
    RUNNING = "running"
    HUNG = "hung"
    """The rank has noticed that it hangs, and is about to exit."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of one rank."""

    rank: Natural
    world_size: WorldSize
    attempt: str
    host: str
    pid: Natural
    state: RankState
    time: Seconds
    """time.time() on the rank's node when it wrote this."""
    phase: str
    step: Integer
    limit_seconds: Seconds
    """Timeout of the phase: maximum time between signs of life."""
    silent_seconds: Seconds
    """Time from the last sign of life to this heartbeat."""
    sign: str
    """Description of the last sign of life."""
    collectives: Mapping[str, Natural] = field(default_factory=dict)
    """Number of collectives that the rank has entered, by process group; "exchanges" send
    plain values between all ranks (cluster/ranks.py)."""
    engines: tuple[str, ...] = ()
    """Lines about the engines that are connected, from rank 0."""

    @property
    def place(self) -> str:
        where = f"phase {self.phase}" if self.phase else "outside of phases"
        return f"{where}, step {self.step}"

    @property
    def is_stuck(self) -> bool:
        """Whether the rank has given no sign of life for longer than heartbeats may be late. Ranks
        that make progress differ because they write at different times."""
        return self.state is RankState.HUNG or self.silent_seconds > 3 * HEARTBEAT_SECONDS


def heartbeat_file(run: Path, rank: int) -> Path:
    return run / HEARTBEATS / f"rank_{rank:05d}.json"


def write_heartbeat(run: Path, heartbeat: Heartbeat) -> None:
    """Replace the rank's heartbeat file atomically. Raises OSError."""
    path = heartbeat_file(run, heartbeat.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(heartbeat), durable=False)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return a heartbeat, or None if the file is missing, damaged or of another version."""
    try:
        values = read_json(path)
        heartbeat = msgspec.convert(values, Heartbeat)
    except (CheckpointError, ValueError):
        return None
    is_known = values.keys() <= set(Heartbeat.__slots__)
    return heartbeat if is_known and heartbeat.rank < heartbeat.world_size else None


def read_heartbeats(run: Path) -> list[Heartbeat | None]:
    """Return the heartbeat of each rank of the latest attempt, in rank order; empty if there are
    none."""
    paths = (run / HEARTBEATS).glob("rank_*.json")
    by_rank = {beat.rank: beat for beat in map(read_heartbeat, paths) if beat is not None}
    if not by_rank:
        return []
    return [by_rank.get(rank) for rank in range(latest(list(by_rank.values())).world_size)]


def latest(heartbeats: Sequence[Heartbeat | None]) -> Heartbeat:
    """Return the heartbeat that was written last."""
    return max(filter(None, heartbeats), key=lambda heartbeat: heartbeat.time)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is missing or behind, and how this was detected."""

    rank: int
    why: str
    heartbeat: Heartbeat | None = None

    def __str__(self) -> str:
        if self.heartbeat is None:
            return f"rank {self.rank}: {self.why}"
        last = self.heartbeat
        clock = time.strftime("%H:%M:%S", time.localtime(last.time))
        return (
            f"rank {self.rank} ({last.host}, pid {last.pid}): {self.why}; last heartbeat at "
            f"{clock} (its node's clock) in {last.place}, silent for "
            f"{last.silent_seconds:.0f} s at that time; last sign of life: {last.sign}"
        )


def find_suspects(heartbeats: Sequence[Heartbeat | None]) -> list[Suspect]:
    """Return the ranks that are missing or behind, of a run that is running or has ended.

    If any rank is missing, only missing ranks are returned: the others may be behind because they
    wait for the missing ranks.
    """
    newest = latest(heartbeats)
    is_hung = any(beat and beat.state is RankState.HUNG for beat in heartbeats)
    missing, others = [], []
    for rank, heartbeat in enumerate(heartbeats):
        if why := _why_missing(heartbeat, newest, is_hung=is_hung):
            missing.append(Suspect(rank, f"missing: {why}", heartbeat))
        elif heartbeat is not None and heartbeat.state is not RankState.ENDED:
            others.append(heartbeat)
    return missing or _fewer_collectives(others) or _elsewhere(others)


def _why_missing(heartbeat: Heartbeat | None, newest: Heartbeat, *, is_hung: bool) -> str:
    if heartbeat is None:
        return "it never wrote a heartbeat"
    if heartbeat.attempt != newest.attempt:
        return f"not started in this attempt (its heartbeat is of {heartbeat.attempt})"
    if heartbeat.state is RankState.ENDED:
        return "it had ended already" if is_hung else ""
    late = newest.time - heartbeat.time
    if heartbeat.state is RankState.RUNNING and late > 3 * HEARTBEAT_SECONDS:
        return (
            f"silent {late:.0f} s before others (stopped, dead, cut off, or a library holds the "
            "GIL)"
        )
    return ""


def _fewer_collectives(heartbeats: Sequence[Heartbeat]) -> list[Suspect]:
    most: Counter[str] = Counter()
    for heartbeat in heartbeats:
        most |= Counter(heartbeat.collectives)
    suspects = []
    for heartbeat in filter(lambda heartbeat: heartbeat.is_stuck, heartbeats):
        fewer = [
            f"{count} of {most[group]} in {group}"
            for group, count in heartbeat.collectives.items()
            if count < most[group]
        ]
        if fewer:
            why = f"behind: collectives {', '.join(fewer)}"
            suspects.append(Suspect(heartbeat.rank, why, heartbeat))
    return suspects


def _elsewhere(heartbeats: Sequence[Heartbeat]) -> list[Suspect]:
    places = Counter((heartbeat.step, heartbeat.phase) for heartbeat in heartbeats)
    if len(places) < 2:
        return []
    usual, count = places.most_common(1)[0]
    if 2 * count <= len(heartbeats):
        usual, why = (-1, ""), "ranks are in different phases"
    else:
        why = f"elsewhere: {count} ranks are in phase {usual[1]}"
    return [
        Suspect(heartbeat.rank, why, heartbeat)
        for heartbeat in heartbeats
        if heartbeat.is_stuck and (heartbeat.step, heartbeat.phase) != usual
    ]


def describe_suspects(heartbeats: Sequence[Heartbeat | None]) -> str:
    """Return a text about the suspects, with one line each."""
    suspects = find_suspects(heartbeats)
    if not suspects:
        places = sorted({heartbeat.place for heartbeat in heartbeats if heartbeat is not None})
        return f"no rank is missing or behind; all {len(heartbeats)} are in {' or '.join(places)}"
    lines = [str(suspect) for suspect in suspects[:NUM_NAMED]]
    if len(suspects) > NUM_NAMED:
        rest = [str(suspect.rank) for suspect in suspects[NUM_NAMED:]]
        more = f" and {len(rest) - MAX_RANKS:,} more" if len(rest) > MAX_RANKS else ""
        lines.append(f"and ranks {', '.join(rest[:MAX_RANKS])}{more}")
    return "\n".join(lines)
