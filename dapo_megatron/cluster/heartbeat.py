"""The pulse of a rank: a small file in the run's folder that says where the rank is.

`RUN/.pulse/rank_00003.json` is replaced as a whole, survives the rank, and is read by the other
ranks when one of them hangs (watchdog.py) and by people afterwards (`doctor run`). Clocks of nodes
differ: ranks never judge by time stamps whether another one is alive, they ask it (`Alarm`).
The folder is a hidden one: pulses are there before the run's folder is taken, and stay when an
older run is moved aside.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from dapo_megatron.files import read_json, write_json
from dapo_megatron.types import CheckpointError

PULSE_SECONDS = 5.0
"""A rank with nothing new to say writes its pulse this often."""


NUM_NAMED = 16
"""Suspects told of in full."""

_MAX_RANKS = 1_000_000


class State(StrEnum):
    RUNNING = "running"
    HUNG = "hung"
    """It has answered an alarm (its own or another rank's), and ends."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank says of itself."""

    rank: int
    world_size: int
    attempt: str
    host: str
    pid: int
    state: State
    time: float
    """time.time() of the rank's own node when it wrote this."""
    phase: str
    step: int
    limit_seconds: float
    """How long the phase may be silent."""
    silent_seconds: float
    """Since the last sign of life, when this was written."""
    sign: str
    """The last sign of life."""
    num_exchanges: int = 0
    """Exchanges between all ranks (cluster/ranks.py) that this rank has entered."""
    in_exchange: bool = False
    """Whether it has not left the last one."""
    exchange: str = ""
    """The last one's name."""
    num_collectives: Mapping[str, int] = field(default_factory=dict)
    """By process group of torch, as its flight recorder counts; only in answer to an alarm."""

    @property
    def place(self) -> str:
        where = f"phase {self.phase}" if self.phase else "outside of phases"
        return f"{where}, step {self.step}" + (f", in {self.exchange}" if self.in_exchange else "")

    @property
    def clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.time))

    @property
    def progress(self) -> tuple[int, bool]:
        """Grows along the exchanges, which all ranks go through in the same order."""
        return self.num_exchanges, not self.in_exchange


def pulse_folder(run: Path) -> Path:
    return run / ".pulse"


def pulse_file(run: Path, rank: int) -> Path:
    return pulse_folder(run) / f"rank_{rank:05d}.json"


def write(run: Path, pulse: Pulse) -> None:
    """Replace the rank's pulse. Raises OSError."""
    pulse_folder(run).mkdir(parents=True, exist_ok=True)
    write_json(pulse_file(run, pulse.rank), asdict(pulse), durable=False)


def read(path: Path) -> Pulse | None:
    """None where there is none, or none that can be read (torn, of another version)."""
    try:
        values = read_json(path)
        pulse = Pulse(**{**values, "state": State(values["state"])})
    except (CheckpointError, ValueError, TypeError, KeyError):
        return None
    return pulse if _is_whole(pulse) else None


def _is_whole(pulse: Pulse) -> bool:
    """Whether its numbers are some: the file may be damaged."""
    whole = (pulse.rank, pulse.world_size, pulse.step, pulse.num_exchanges)
    seconds = (pulse.time, pulse.silent_seconds, pulse.limit_seconds)
    counts = pulse.num_collectives
    return (
        all(isinstance(one, int) for one in whole)
        and all(isinstance(one, int | float) and abs(one) < 1e12 for one in seconds)
        and 0 <= pulse.rank < pulse.world_size <= _MAX_RANKS
        and isinstance(counts, dict)
        and all(isinstance(one, int) for one in counts.values())
    )


def read_all(run: Path, world_size: int) -> list[Pulse | None]:
    """The pulse of each rank, in rank order."""
    return [read(pulse_file(run, rank)) for rank in range(world_size)]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that is missing or behind, and why it is said to be."""

    rank: int
    why: str
    pulse: Pulse | None = None

    def __str__(self) -> str:
        if self.pulse is None:
            return f"rank {self.rank}: {self.why}"
        on, last = self.pulse.host, self.pulse
        return (
            f"rank {self.rank} ({on}, pid {last.pid}): {self.why}; last seen {last.clock} (its "
            f"clock) in {last.place}, silent for {last.silent_seconds:.0f} s then; last sign of "
            f"life: {last.sign}"
        )


def suspects(pulses: Sequence[Pulse | None], attempt: str) -> list[Suspect]:
    """Who is missing or behind, among ranks that were all asked by an alarm.

    Ranks that gave no answer come alone: the others may be behind only because they wait for them.
    """
    here = [pulse for pulse in pulses if pulse is not None and not _silence(pulse, attempt)]
    return missing(pulses, attempt) or behind(here)


def missing(pulses: Sequence[Pulse | None], attempt: str) -> list[Suspect]:
    """The ranks that did not answer an alarm of this attempt."""
    return [
        Suspect(rank, why, pulse)
        for rank, pulse in enumerate(pulses)
        if (why := _silence(pulse, attempt))
    ]


def accusation(pulses: Sequence[Pulse | None], attempt: str) -> str:
    """`suspects` in words, a line each."""
    found = suspects(pulses, attempt)
    if not found:
        places = sorted({pulse.place for pulse in pulses if pulse is not None})
        return f"no rank is missing or behind; all {len(pulses)} are in {' or '.join(places)}"
    lines = [str(suspect) for suspect in found[:NUM_NAMED]]
    if len(found) > NUM_NAMED:
        rest = ", ".join(str(suspect.rank) for suspect in found[NUM_NAMED:])
        lines.append(f"and ranks {rest}")
    return "\n".join(lines)


def _silence(pulse: Pulse | None, attempt: str) -> str:
    """Why a rank did not answer, or "" if it did."""
    if pulse is None:
        return "missing: it never wrote a pulse"
    if pulse.attempt != attempt:
        return f"missing: it has not begun in this attempt (its pulse is of {pulse.attempt})"
    if pulse.state is State.ENDED:
        return "missing: it had ended already"
    if pulse.state is State.RUNNING:
        return "missing: it does not answer (stopped, dead, cut off, or it holds the GIL)"
    return ""


def behind(pulses: Sequence[Pulse]) -> list[Suspect]:
    """The first of three signs that tells ranks apart: exchanges, torch's collectives, phases."""
    first = max((pulse.progress for pulse in pulses), default=(0, True))
    late = [pulse for pulse in pulses if pulse.progress < first]
    if late:
        return [_late(pulse, first[0]) for pulse in late]
    most: Counter[str] = Counter()
    for pulse in pulses:
        most |= Counter(pulse.num_collectives)
    found = []
    for pulse in pulses:
        less = [
            f"{count} of {most[group]} in group {group}"
            for group, count in pulse.num_collectives.items()
            if count < most[group]
        ]
        if less:
            found.append(Suspect(pulse.rank, f"behind: collectives {', '.join(less)}", pulse))
    if found:
        return found
    places = Counter((pulse.step, pulse.phase) for pulse in pulses)
    if len(places) < 2:
        return []
    usual, count = places.most_common(1)[0]
    if 2 * count <= len(pulses):
        return [Suspect(pulse.rank, "ranks are in different phases", pulse) for pulse in pulses]
    return [
        Suspect(pulse.rank, f"elsewhere: {count} ranks are in phase {usual[1]}", pulse)
        for pulse in pulses
        if (pulse.step, pulse.phase) != usual
    ]


def _late(pulse: Pulse, most: int) -> Suspect:
    if pulse.num_exchanges < most:
        why = f"behind: it entered {pulse.num_exchanges} exchanges, others {most}"
    else:
        why = f"behind: it has not left {pulse.exchange}, others have"
    return Suspect(pulse.rank, why, pulse)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A file by which a rank that hangs asks all others of its attempt to say where they are.

    It is there from the start and is opened, not looked up: NFS may remember for a minute that a
    name does not exist, but checks a file with the server when it is opened.
    """

    path: Path
    attempt: str

    @classmethod
    def of(cls, run: Path, attempt: str) -> Alarm:
        return cls(pulse_folder(run) / "alarm", attempt)

    def prepare(self, *, fresh: bool) -> None:
        """Make it; `fresh`: silence what an attempt of the same name left. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("w" if fresh else "a").close()

    def ring(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self.path.write_text(f"{self.attempt}\t{why}\n", encoding="utf-8")

    def heard(self) -> str | None:
        """Why it rings in this attempt. Text of another attempt, or half of one, does not count."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        attempt, _, why = text.partition("\t")
        return why.strip() if attempt == self.attempt and text.endswith("\n") else None
