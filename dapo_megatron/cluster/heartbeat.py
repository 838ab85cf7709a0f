"""Heartbeats: a small file per rank in the run's folder with the rank's state and position.

`RUN/.pulse/rank_00003.json` is replaced atomically and outlives the rank. The other ranks read it
when one of them hangs (watchdog.py), and people read it afterwards (`doctor run`). Clocks of nodes
differ, so ranks never use timestamps to decide whether another rank is alive: they ask it
(`Alarm`).

The folder is hidden because heartbeats are written before the run's folder is claimed, and must
stay when an older run is moved aside.
"""

from __future__ import annotations

import contextlib
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
"""Heartbeat interval of a rank that stays in the same phase and step."""


NUM_NAMED = 16
"""Maximum number of suspects that a report describes in full."""

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class RankState(StrEnum):
    RUNNING = "running"
    HUNG = "hung"
    """The rank has answered an alarm, its own or another rank's, and is about to exit."""
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
    num_exchanges: Natural = 0
    """Number of exchanges between all ranks (cluster/ranks.py) that this rank has entered."""
    in_exchange: bool = False
    """Whether the rank is still inside its last exchange."""
    exchange: str = ""
    """Name of the last exchange."""
    num_collectives: Mapping[str, Natural] = field(default_factory=dict)
    """Last collective by process group, from torch's flight recorder; only after an alarm."""
    engines: tuple[str, ...] = ()
    """Lines about the engines that are connected, from rank 0."""

    @property
    def place(self) -> str:
        where = f"phase {self.phase}" if self.phase else "outside of phases"
        return f"{where}, step {self.step}" + (f", in {self.exchange}" if self.in_exchange else "")

    @property
    def clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.time))

    @property
    def progress(self) -> tuple[int, bool]:
        """Position in the sequence of exchanges, which is the same on all ranks; comparable."""
        return self.num_exchanges, not self.in_exchange


def heartbeat_folder(run: Path) -> Path:
    return run / HEARTBEATS


def heartbeat_file(run: Path, rank: int) -> Path:
    return heartbeat_folder(run) / f"rank_{rank:05d}.json"


def write_heartbeat(run: Path, heartbeat: Heartbeat) -> None:
    """Replace the rank's heartbeat file atomically. Raises OSError."""
    heartbeat_folder(run).mkdir(parents=True, exist_ok=True)
    write_json(heartbeat_file(run, heartbeat.rank), asdict(heartbeat), durable=False)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return a heartbeat, or None if the file is missing, damaged or of another version."""
    try:
        values = read_json(path)
        heartbeat = msgspec.convert(values, Heartbeat)
    except (CheckpointError, ValueError):
        return None
    is_known = values.keys() <= set(Heartbeat.__slots__)
    return heartbeat if is_known and heartbeat.rank < heartbeat.world_size else None


def read_heartbeats(run: Path, world_size: int) -> list[Heartbeat | None]:
    """Return the heartbeat of each rank, in rank order."""
    return [read_heartbeat(heartbeat_file(run, rank)) for rank in range(world_size)]


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
        return (
            f"rank {self.rank} ({last.host}, pid {last.pid}): {self.why}; last heartbeat at "
            f"{last.clock} (its node's clock) in {last.place}, silent for "
            f"{last.silent_seconds:.0f} s at that time; last sign of life: {last.sign}"
        )


def find_suspects(heartbeats: Sequence[Heartbeat | None], attempt: str) -> list[Suspect]:
    """Return the ranks that are missing or behind after an alarm.

    If any rank is missing, only missing ranks are returned: the others may be behind because they
    wait for the missing ranks.
    """
    answered = [
        heartbeat
        for heartbeat in heartbeats
        if heartbeat is not None and not _reason_for_no_answer(heartbeat, attempt)
    ]
    return missing_ranks(heartbeats, attempt) or ranks_behind(answered)


def missing_ranks(heartbeats: Sequence[Heartbeat | None], attempt: str) -> list[Suspect]:
    """Return the ranks that did not answer an alarm of this attempt."""
    return [
        Suspect(rank, why, heartbeat)
        for rank, heartbeat in enumerate(heartbeats)
        if (why := _reason_for_no_answer(heartbeat, attempt))
    ]


def describe_suspects(heartbeats: Sequence[Heartbeat | None], attempt: str) -> str:
    """Return a text about the suspects, with one line each."""
    blamed = find_suspects(heartbeats, attempt)
    if not blamed:
        places = sorted({heartbeat.place for heartbeat in heartbeats if heartbeat is not None})
        return f"no rank is missing or behind; all {len(heartbeats)} are in {' or '.join(places)}"
    lines = [str(suspect) for suspect in blamed[:NUM_NAMED]]
    if len(blamed) > NUM_NAMED:
        rest = ", ".join(str(suspect.rank) for suspect in blamed[NUM_NAMED:])
        lines.append(f"and ranks {rest}")
    return "\n".join(lines)


def _reason_for_no_answer(heartbeat: Heartbeat | None, attempt: str) -> str:
    """Return why a rank did not answer an alarm, or "" if it did."""
    if heartbeat is None:
        return "missing: it never wrote a heartbeat"
    if heartbeat.attempt != attempt:
        return f"missing: not started in this attempt (its heartbeat is of {heartbeat.attempt})"
    if heartbeat.state is RankState.ENDED:
        return "missing: it had ended already"
    if heartbeat.state is RankState.RUNNING:
        return "missing: it does not answer (stopped, dead, cut off, or it holds the GIL)"
    return ""


def ranks_behind(heartbeats: Sequence[Heartbeat]) -> list[Suspect]:
    """Return the ranks that are behind others.

    Compares exchanges, then torch's collectives, then phases, and stops at the first difference.
    """
    furthest = max((heartbeat.progress for heartbeat in heartbeats), default=(0, True))
    late = [heartbeat for heartbeat in heartbeats if heartbeat.progress < furthest]
    if late:
        return [_late_in_exchanges(heartbeat, furthest[0]) for heartbeat in late]
    return _fewer_collectives(heartbeats) or _elsewhere(heartbeats)


def _fewer_collectives(heartbeats: Sequence[Heartbeat]) -> list[Suspect]:
    most: Counter[str] = Counter()
    for heartbeat in heartbeats:
        most |= Counter(heartbeat.num_collectives)
    with_fewer_collectives = []
    for heartbeat in heartbeats:
        less = [
            f"{count} of {most[group]} in group {group}"
            for group, count in heartbeat.num_collectives.items()
            if count < most[group]
        ]
        if less:
            with_fewer_collectives.append(
                Suspect(heartbeat.rank, f"behind: collectives {', '.join(less)}", heartbeat)
            )
    return with_fewer_collectives


def _elsewhere(heartbeats: Sequence[Heartbeat]) -> list[Suspect]:
    places = Counter((heartbeat.step, heartbeat.phase) for heartbeat in heartbeats)
    if len(places) < 2:
        return []
    usual, count = places.most_common(1)[0]
    if 2 * count <= len(heartbeats):
        return [
            Suspect(heartbeat.rank, "ranks are in different phases", heartbeat)
            for heartbeat in heartbeats
        ]
    return [
        Suspect(heartbeat.rank, f"elsewhere: {count} ranks are in phase {usual[1]}", heartbeat)
        for heartbeat in heartbeats
        if (heartbeat.step, heartbeat.phase) != usual
    ]


def _late_in_exchanges(heartbeat: Heartbeat, most: int) -> Suspect:
    if heartbeat.num_exchanges < most:
        why = f"behind: it entered {heartbeat.num_exchanges} exchanges, others {most}"
    else:
        why = f"behind: it has not left {heartbeat.exchange}, others have"
    return Suspect(heartbeat.rank, why, heartbeat)


@dataclass(frozen=True, slots=True)
class Alarm:
    """File with which a hanging rank asks all other ranks of its attempt for a heartbeat.

    The file exists from the start and is opened to check it. NFS may cache for a minute that a file
    does not exist, but it asks the server when an existing file is opened.
    """

    path: Path
    attempt: str

    @classmethod
    def of(cls, run: Path, attempt: str) -> Alarm:
        return cls(heartbeat_folder(run) / "alarm", attempt)

    def prepare(self, *, fresh: bool) -> None:
        """Create the file. `fresh` also clears an alarm of an earlier attempt with the same name.

        Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("w" if fresh else "a").close()

    def trigger(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self.path.write_text(f"{self.attempt}\t{why}\n", encoding="utf-8")

    def triggered(self) -> str | None:
        """Return the reason of an alarm in this attempt, or None if there is none.

        An alarm of another attempt, or a partially written one, is ignored.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        attempt, _, why = text.partition("\t")
        return why.strip() if attempt == self.attempt and text.endswith("\n") else None
