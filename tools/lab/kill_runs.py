"""Kills a small run with SIGKILL again and again, in every phase, and holds what comes out against
the same run left in peace.

    python tools/lab/kill_runs.py --kills 30
    python tools/lab/kill_runs.py --kills 30 --carrying

Each run is killed a few times at random moments, resumed after each, and then goes to its end. Its
last checkpoint (weights, optimizer, random numbers), its metrics and its books must be those of the
undisturbed run: bit for bit with on_policy, and with carrying too, for the runs are deterministic
(rollout.deterministic). Prints a table and ends in one JSON line; exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from dapo_megatron.tracking.provenance import commit, versions

REPOSITORY = Path(__file__).resolve().parents[2]
PHASES = ("start", "generate", "logprobs", "update", "sync", "checkpoint", "write", "evaluate")
"""`checkpoint`: copying into memory; `write`: the writing and publishing in the background."""
RANKS = 2
OVERRIDES = (
    f"run.processes={RANKS}",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.deterministic=true",
    "train.updates_per_step=2",
    "optimizer.warmup_rollout_steps=2",
    "optimizer.lr=1e-4",
    "checkpoint.every=2",
    "checkpoint.keep=100",
    "evaluation.every=5",
    "evaluation.resamples=0",
    "evaluation.sets.0.size=24",
    "tracking.mlflow=false",
    "resume=auto",
)
JOURNAL, AIM = "KILL_RUNS_JOURNAL", "KILL_RUNS_AIM"
"""Variables: where rank 0 writes down what it is at; "phase occurrences-to-pass seconds"."""


@dataclass
class Kill:
    """One SIGKILL to all processes of a run."""

    aimed_at: str
    hit: str
    """What rank 0 was at, by its journal."""
    step: int
    lost_steps: int
    """Rollout steps whose metrics were there and had to be done again."""
    recovery_seconds: float = 0.0
    """From starting again to the first prompt of the step that was under way."""


@dataclass
class DisturbedRun:
    """One run at its end, against the undisturbed one."""

    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def main(
    kills: Annotated[int, typer.Option(min=1, help="In all runs together.")] = 30,
    per_run: Annotated[int, typer.Option(min=1, help="Kills of one run, before its end.")] = 5,
    steps: Annotated[int, typer.Option(min=4)] = 20,
    carrying: Annotated[bool, typer.Option(help="Carry groups; otherwise on_policy.")] = False,
    seed: int = 0,
    config: Path = REPOSITORY / "model_configs" / "tiny_cpu.yaml",
    directory: Annotated[Path | None, typer.Option(help="For the runs; kept.")] = None,
) -> None:
    """Kill, resume, compare."""
    console = Console()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        where = directory or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        mode = f"rollout.on_policy={str(not carrying).lower()}"
        runs = Runs(config, where, (*OVERRIDES, mode, f"train.rollout_steps={steps}"))
        console.print("the undisturbed run ...")
        seconds = runs.to_the_end("undisturbed")
        targets = Targets(rng, steps)
        outcomes: list[DisturbedRun] = []
        while sum(len(one.kills) for one in outcomes) < kills:
            name = f"killed_{len(outcomes)}"
            left = min(per_run, kills - sum(len(one.kills) for one in outcomes))
            outcomes.append(disturbed(runs, name, left, targets))
            outcomes[-1].differences = list(runs.differences(name, "undisturbed"))
            console.print(f"{name}: {len(outcomes[-1].kills)} kills, "
                          f"differences: {outcomes[-1].differences or 'none'}")  # fmt: skip
    report(console, outcomes)
    figures = {
        "tool": "kill_runs",
        "mode": "carrying" if carrying else "on_policy",
        "steps": steps,
        "undisturbed_seconds": round(seconds, 1),
        "kills": [asdict(kill) for one in outcomes for kill in one.kills],
        "differences": [text for one in outcomes for text in one.differences],
        "commit": commit(),
        "machine": {"cores": os.cpu_count()},
        "versions": versions(),
    }
    print(json.dumps(figures))
    if figures["differences"]:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------- killing


class Targets:
    """What to aim at: each phase in turn, at a random later occurrence, somewhere inside."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self._rng = rng
        self._steps = steps
        self._queue: list[str] = []

    def next(self) -> tuple[str, int, float]:
        """(phase, occurrences to let pass, share of its typical length)."""
        if not self._queue:
            self._queue = list(PHASES)
            self._rng.shuffle(self._queue)
        phase = self._queue.pop()
        passed = 0 if phase in ("start", "evaluate") else self._rng.randrange(4)
        return phase, passed, self._rng.random()


def disturbed(runs: Runs, name: str, num_kills: int, targets: Targets) -> DisturbedRun:
    """A run killed `num_kills` times, or as often as it lasts, and then left to its end."""
    outcome = DisturbedRun()
    while len(outcome.kills) < num_kills:
        phase, passed, share = targets.next()
        killed = runs.kill(name, phase, passed, share)
        if outcome.kills:
            outcome.kills[-1].recovery_seconds = runs.recovery_seconds
        if killed is None:
            return outcome
        outcome.kills.append(killed)
    runs.to_the_end(name)
    outcome.kills[-1].recovery_seconds = runs.recovery_seconds
    return outcome


class Runs:
    """Starting, watching and comparing runs in one directory."""

    def __init__(self, config: Path, directory: Path, overrides: tuple[str, ...]) -> None:
        self._directory = directory
        self._train = ("train", str(config), *overrides, f"run.directory={directory}")
        self._typical: dict[str, float] = {}
        self.recovery_seconds = 0.0
        """Of the last start."""

    def to_the_end(self, name: str) -> float:
        """Start it and wait; seconds."""
        with self._started(name) as process:
            begun = time.monotonic()
            if process.wait() != 0:
                raise SystemExit(f"{name} failed: see {self._directory / name}")
        journal = self._journal(name)
        self._measure(journal)
        return time.monotonic() - begun

    def kill(self, name: str, phase: str, passed: int, share: float) -> Kill | None:
        """Start it, to be killed in the phase; None if it ended before."""
        delay = share * self._typical.get(phase, 0.5)
        with self._started(name, f"{phase} {passed} {delay}") as process:
            code = process.wait()
        journal = self._journal(name)
        self._measure(journal)
        if code == 0:
            return None
        if code != -signal.SIGKILL:
            raise SystemExit(f"{name} failed by itself: see {self._directory / name}")
        done = _steps_done(self._directory / name)
        saved = _newest_step(self._directory / name)
        return Kill(phase, _now(journal), _step(journal), max(0, done - saved))

    @contextmanager
    def _started(self, name: str, aim: str = "") -> Iterator[subprocess.Popen[bytes]]:
        path = self._directory / f"{name}.journal"
        path.write_text("")
        self._begun = time.time()
        process = subprocess.Popen(
            [sys.executable, __file__, "launch", *self._train, f"run.name={name}"],
            env={**os.environ, JOURNAL: str(path), AIM: aim, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(self._directory / f"{name}.err").open("ab"),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _journal(self, name: str) -> list[tuple[float, str, str, int]]:
        """(time, begin or end, phase, step) of rank 0."""
        lines = (self._directory / f"{name}.journal").read_text().splitlines()
        found = []
        for line in lines:
            moment, edge, phase, step = line.split()
            found.append((float(moment), edge, phase, int(step)))
        return found

    def _measure(self, journal: list[tuple[float, str, str, int]]) -> None:
        """How long phases take, and how long it took to begin."""
        begun: dict[str, float] = {}
        for moment, edge, phase, _ in journal:
            if edge == "begin":
                begun[phase] = moment
            elif phase in begun:
                self._typical[phase] = moment - begun.pop(phase)
        first = next((m for m, edge, phase, _ in journal if phase == "generate"), None)
        if first is not None:
            self.recovery_seconds = self._typical["start"] = first - self._begun

    # ------------------------------------------------------------------ comparing

    def differences(self, name: str, other: str) -> Iterator[str]:
        """What differs between two runs that ended."""
        one, two = self._directory / name, self._directory / other
        for mine, theirs in zip(_metrics(one), _metrics(two), strict=True):
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    where = f"{name}: step {mine['step']}: {key}"
                    yield f"{where} {mine.get(key)}, not {theirs.get(key)}"
        last = f"step_{_newest_step(two):06d}"
        for rank in range(RANKS):
            file = f"checkpoints/{last}/rank_{rank:05d}.safetensors"
            yield from _tensor_differences(one / file, two / file)
        yield from _book_differences(one, two)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The last two are of a start's first sync: fingerprints are compared there whatever is due.
    clocks = ("time/", "memory/", "throughput/", "sync/fingerprinted", "sync/canary_gap")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


def _tensor_differences(one: Path, two: Path) -> Iterator[str]:
    with safe_open(one, "pt") as mine, safe_open(two, "pt") as theirs:
        names = set(mine.keys()) ^ set(theirs.keys())
        if names:
            yield f"{one}: {sorted(names)[0]} is in one of both alone"
            return
        for name in mine.keys():  # noqa: SIM118
            if not torch.equal(mine.get_tensor(name), theirs.get_tensor(name)):
                yield f"{one}: {name} differs"


def _book_differences(one: Path, two: Path) -> Iterator[str]:
    """Each ticket ends once, none is lost, and every group is the same to the last token."""
    groups = [_ended(folder) for folder in (one, two)]
    for folder, ended in zip((one, two), groups, strict=True):
        tickets = Counter(group["ticket"] for group in ended)
        if twice := [ticket for ticket, count in tickets.items() if count > 1]:
            yield f"{folder}: ticket {twice[0]} ended twice"
        state = json.loads((newest(folder) / "state.json").read_text())["coordinator"]
        issued = set(range(state["ledger"]["next_ticket"]))
        held = {int(ticket) for ticket in state["ledger"]["open"]}
        if lost := issued - set(tickets) - held:
            yield f"{folder}: ticket {min(lost)} is lost"
    for mine, theirs in zip(*groups, strict=False):
        if mine != theirs:
            yield f"{one}: ticket {mine['ticket']} is not as in the undisturbed run"


def _ended(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "samples").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def newest(folder: Path) -> Path:
    """The newest checkpoint by name."""
    return max(path for path in (folder / "checkpoints").glob("step_??????"))


def _newest_step(folder: Path) -> int:
    found = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step_??????")]
    return max(found, default=0)


def _steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def _now(journal: list[tuple[float, str, str, int]]) -> str:
    """The phases that were begun and not ended."""
    open_phases: list[str] = []
    for _, edge, phase, _ in journal:
        if edge == "begin":
            open_phases.append(phase)
        elif phase in open_phases:
            open_phases.remove(phase)
    if open_phases:
        return " + ".join(open_phases)
    return "between phases" if journal else "start"


def _step(journal: list[tuple[float, str, str, int]]) -> int:
    return max((step for *_, step in journal), default=0)


def report(console: Console, outcomes: list[DisturbedRun]) -> None:
    """The table of what was hit."""
    table = Table("rank 0 was at", "kills", "steps done again", "seconds to go on")
    by_phase: dict[str, list[Kill]] = {}
    for kill in (kill for one in outcomes for kill in one.kills):
        by_phase.setdefault(kill.hit, []).append(kill)
    for phase, kills in sorted(by_phase.items()):
        lost = [kill.lost_steps for kill in kills]
        seconds = [kill.recovery_seconds for kill in kills]
        mean = sum(seconds) / len(seconds)
        table.add_row(phase, str(len(kills)), f"{min(lost)} to {max(lost)}", f"{mean:.1f}")
    console.print(table)


# ---------------------------------------------------------------------------- inside the run


def launch_ranks(arguments: list[str]) -> int:
    """Start the ranks as `python -m dapo_megatron` does, each of them with a journal."""
    from dapo_megatron.cluster.launch import launch

    return launch([sys.executable, __file__, "rank", *arguments], RANKS)


class Gun:
    """Kills the whole run (its launcher leads the process group) some time into a phase."""

    def __init__(self, aim: str) -> None:
        self._phase, passed, seconds = aim.split() if aim else ("", "0", "0")
        self._passed, self._seconds = int(passed), float(seconds)
        self.enters("start")

    def enters(self, phase: str) -> None:
        """Rank 0 has begun this phase."""
        if phase == self._phase:
            if self._passed == 0:
                timer = threading.Timer(self._seconds, os.killpg, (0, signal.SIGKILL))
                timer.daemon = True
                timer.start()
            self._passed -= 1


def be_rank(arguments: list[str]) -> None:
    """The program; rank 0 writes down what it is at, and has the gun."""
    from dapo_megatron import __main__ as program
    from dapo_megatron.checkpoints.saver import CheckpointSaver
    from dapo_megatron.cluster.watchdog import Watchdog

    if os.environ["RANK"] == "0":
        gun = Gun(os.environ[AIM])
        handle = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND)

        @contextmanager
        def noted(phase: str, step: int) -> Iterator[None]:
            os.write(handle, f"{time.time()} begin {phase} {step}\n".encode())
            gun.enters(phase)
            yield
            os.write(handle, f"{time.time()} end {phase} {step}\n".encode())

        watch_phase, write = Watchdog.phase, CheckpointSaver._run

        @contextmanager
        def phase(self: Watchdog, name: str, step: int = 0) -> Iterator[None]:
            with noted(name, step), watch_phase(self, name, step):
                yield

        def run(self: CheckpointSaver, job: Any) -> None:
            with noted("write", job.step):
                write(self, job)

        Watchdog.phase, CheckpointSaver._run = phase, run  # type: ignore[method-assign]
    sys.argv = [program.__file__, *arguments]
    program.main()


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["launch"]:
            raise SystemExit(launch_ranks(sys.argv[2:]))
        case ["rank"]:
            be_rank(sys.argv[2:])
        case _:
            typer.run(main)
