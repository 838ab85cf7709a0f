"""Kill a small run with SIGKILL in every phase, and compare the result with an undisturbed run.

    python tools/lab/kill_runs.py --kills 30
    python tools/lab/kill_runs.py --kills 30 --carrying

Each run is killed several times at random moments, resumed each time, and then runs to its end. Its
last checkpoint (weights, optimizer, random states), its metrics and its ledger must equal those of
the undisturbed run bit for bit, with on_policy and with carried groups. That is possible because
the runs are deterministic (rollout.deterministic). It prints a table and, at the end, one JSON
line. It exits with 1 if anything differs.
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

from dapo_megatron.rollout import record
from dapo_megatron.rollout.record import RecordedGroup
from dapo_megatron.tracking.provenance import commit, versions

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.helpers.training_state import stored_tensors  # noqa: E402

PHASES = ("start", "generate", "logprobs", "update", "sync", "checkpoint", "write", "evaluate")
"""`checkpoint` is the copy into memory; `write` is the background write and publication."""
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
"""Environment variables: the file in which rank 0 logs its phases, and where to kill the run:
"PHASE OCCURRENCES_TO_SKIP SECONDS_INTO_THE_PHASE"."""


@dataclass
class Kill:
    """One SIGKILL to all processes of a run."""

    aimed_at: str
    hit: str
    """Phases in which rank 0 was, according to its journal."""
    step: int
    lost_steps: int
    """Finished rollout steps that had to be repeated."""
    recovery_seconds: float = 0.0
    """From the next start to the first prompt of the interrupted step."""


@dataclass
class DisturbedRun:
    """Kills of one finished run, and its differences from the undisturbed run."""

    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def main(
    kills: Annotated[int, typer.Option(min=1, help="Kills in all runs together.")] = 30,
    per_run: Annotated[int, typer.Option(min=1, help="Most kills of one run.")] = 5,
    steps: Annotated[int, typer.Option(min=4)] = 20,
    carrying: Annotated[bool, typer.Option(help="Carry groups, instead of on_policy.")] = False,
    seed: int = 0,
    config: Path = REPOSITORY / "model_configs" / "tiny_cpu.yaml",
    directory: Annotated[Path | None, typer.Option(help="Folder of the runs; it is kept.")] = None,
) -> None:
    """Kill, resume and compare runs."""
    console = Console()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = directory or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        mode = f"rollout.on_policy={str(not carrying).lower()}"
        runs = Runs(config, folder, (*OVERRIDES, mode, f"train.rollout_steps={steps}"))
        console.print("undisturbed run ...")
        seconds = runs.run_to_end("undisturbed")
        targets = Targets(rng, steps)
        outcomes: list[DisturbedRun] = []
        while (num_kills := sum(len(outcome.kills) for outcome in outcomes)) < kills:
            name = f"killed_{len(outcomes)}"
            outcome = disturb(runs, name, min(per_run, kills - num_kills), targets)
            outcome.differences = list(runs.differences(name, "undisturbed"))
            outcomes.append(outcome)
            console.print(f"{name}: {len(outcome.kills)} kills, "
                          f"differences: {outcome.differences or 'none'}")  # fmt: skip
    report(console, outcomes)
    results = {
        "tool": "kill_runs",
        "mode": "carrying" if carrying else "on_policy",
        "steps": steps,
        "undisturbed_seconds": round(seconds, 1),
        "kills": [asdict(kill) for outcome in outcomes for kill in outcome.kills],
        "differences": [text for outcome in outcomes for text in outcome.differences],
        "commit": commit(),
        "machine": {"cores": os.cpu_count()},
        "versions": versions(),
    }
    print(json.dumps(results))
    if results["differences"]:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------- killing


class Targets:
    """Moments at which to kill: each phase in turn, a random occurrence of it, a random share."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self._rng = rng
        self._steps = steps
        self._queue: list[str] = []

    def next(self) -> tuple[str, int, float]:
        """Return (phase, occurrences to skip, share of its typical duration)."""
        if not self._queue:
            self._queue = list(PHASES)
            self._rng.shuffle(self._queue)
        phase = self._queue.pop()
        num_skipped = 0 if phase in ("start", "evaluate") else self._rng.randrange(4)
        return phase, num_skipped, self._rng.random()


def disturb(runs: Runs, name: str, num_kills: int, targets: Targets) -> DisturbedRun:
    """Kill a run `num_kills` times, or until it ends before a kill, and let it run to its end."""
    outcome = DisturbedRun()
    while len(outcome.kills) < num_kills:
        phase, num_skipped, share = targets.next()
        kill = runs.kill(name, phase, num_skipped, share)
        if outcome.kills:
            outcome.kills[-1].recovery_seconds = runs.recovery_seconds
        if kill is None:
            return outcome
        outcome.kills.append(kill)
    runs.run_to_end(name)
    outcome.kills[-1].recovery_seconds = runs.recovery_seconds
    return outcome


class Runs:
    """Runs in one directory: start, watch and compare them."""

    def __init__(self, config: Path, directory: Path, overrides: tuple[str, ...]) -> None:
        self._directory = directory
        self._train = ("train", str(config), *overrides, f"run.directory={directory}")
        self._typical: dict[str, float] = {}
        self.recovery_seconds = 0.0
        """Seconds from the last start to the first prompt."""

    def run_to_end(self, name: str) -> float:
        """Start a run and wait for its end. Return its seconds."""
        with self._started(name) as process:
            started = time.monotonic()
            if process.wait() != 0:
                raise SystemExit(f"{name} failed: see {self._directory / name}")
        journal = self._journal(name)
        self._measure(journal)
        return time.monotonic() - started

    def kill(self, name: str, phase: str, num_skipped: int, share: float) -> Kill | None:
        """Start a run that is killed in the phase. Return None if it ended before."""
        delay = share * self._typical.get(phase, 0.5)
        with self._started(name, f"{phase} {num_skipped} {delay}") as process:
            code = process.wait()
        journal = self._journal(name)
        self._measure(journal)
        if code == 0:
            return None
        if code != -signal.SIGKILL:
            raise SystemExit(f"{name} failed before it was killed: see {self._directory / name}")
        done = _steps_done(self._directory / name)
        saved = _newest_step(self._directory / name)
        return Kill(phase, _now(journal), _step(journal), max(0, done - saved))

    @contextmanager
    def _started(self, name: str, aim: str = "") -> Iterator[subprocess.Popen[bytes]]:
        path = self._directory / f"{name}.journal"
        path.write_text("")
        self._started_at = time.time()
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
        """Return (time, "begin" or "end", phase, step) of rank 0."""
        lines = (self._directory / f"{name}.journal").read_text().splitlines()
        entries = []
        for line in lines:
            moment, edge, phase, step = line.split()
            entries.append((float(moment), edge, phase, int(step)))
        return entries

    def _measure(self, journal: list[tuple[float, str, str, int]]) -> None:
        """Record how long each phase took, and the seconds from the start to the first prompt."""
        begin_of: dict[str, float] = {}
        for moment, edge, phase, _ in journal:
            if edge == "begin":
                begin_of[phase] = moment
            elif phase in begin_of:
                self._typical[phase] = moment - begin_of.pop(phase)
        first = next((m for m, edge, phase, _ in journal if phase == "generate"), None)
        if first is not None:
            self.recovery_seconds = self._typical["start"] = first - self._started_at

    # ------------------------------------------------------------------ comparing

    def differences(self, name: str, reference_name: str) -> Iterator[str]:
        """Yield the differences between two finished runs."""
        folder, reference = self._directory / name, self._directory / reference_name
        for row, expected in zip(_metrics(folder), _metrics(reference), strict=True):
            for key in sorted(row.keys() | expected.keys()):
                if row.get(key) != expected.get(key):
                    where = f"{name}: step {row['step']}: {key}"
                    yield f"{where} {row.get(key)}, not {expected.get(key)}"
        last = f"step_{_newest_step(reference):06d}"
        checkpoints = (path / "checkpoints" / last for path in (folder, reference))
        yield from _tensor_differences(*checkpoints)
        yield from _ledger_differences(folder, reference)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The two sync metrics depend on the start: its first sync always compares fingerprints.
    ignored = ("time/", "memory/", "throughput/", "sync/fingerprinted")
    return [{k: v for k, v in row.items() if not k.startswith(ignored)} for row in rows]


def _tensor_differences(path: Path, reference_path: Path) -> Iterator[str]:
    tensors, references = stored_tensors(path), stored_tensors(reference_path)
    for name in sorted(tensors.keys() ^ references.keys()):
        yield f"{path}: {name} is in only one of the two runs"
    for name in sorted(tensors.keys() & references.keys()):
        if not torch.equal(tensors[name], references[name]):
            yield f"{path}: {name} differs"


def _ledger_differences(run: Path, reference: Path) -> Iterator[str]:
    """Check that each ticket ended once, that none is lost, and that all groups are equal."""
    groups = [_ended(folder) for folder in (run, reference)]
    for folder, ended in zip((run, reference), groups, strict=True):
        tickets = Counter(recorded.group.ticket for recorded in ended)
        if repeated := [ticket for ticket, count in tickets.items() if count > 1]:
            yield f"{folder}: ticket {repeated[0]} ended twice"
        state = json.loads((newest(folder) / "state.json").read_text())["coordinator"]
        issued = set(range(state["ledger"]["next_ticket"]))
        open_tickets = {int(ticket) for ticket in state["ledger"]["open"]}
        if lost := issued - set(tickets) - open_tickets:
            yield f"{folder}: ticket {min(lost)} is lost"
    if len(groups[0]) != len(groups[1]):
        yield f"{run}: {len(groups[0])} recorded groups, {len(groups[1])} in the undisturbed run"
    for recorded, expected in zip(*groups, strict=False):
        if recorded != expected:
            ticket = recorded.group.ticket
            yield f"{run}: ticket {ticket} is not as in the undisturbed run"


def _ended(folder: Path) -> list[RecordedGroup]:
    """Return every recorded group. Raises DataError for a step that is damaged."""
    groups = []
    for step_folder in record.recorded_steps(folder / "samples").values():
        record.check(step_folder)
        groups += record.read_groups(step_folder / record.COMPLETIONS)
    return groups


def newest(folder: Path) -> Path:
    """Return the newest checkpoint, by name."""
    return max(path for path in (folder / "checkpoints").glob("step_??????"))


def _newest_step(folder: Path) -> int:
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0)


def _steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def _now(journal: list[tuple[float, str, str, int]]) -> str:
    """Return the phases that have a begin and no end."""
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
    """Print a table of the kills by phase."""
    table = Table("phase of rank 0", "kills", "steps repeated", "seconds to recover")
    by_phase: dict[str, list[Kill]] = {}
    for kill in (kill for outcome in outcomes for kill in outcome.kills):
        by_phase.setdefault(kill.hit, []).append(kill)
    for phase, kills in sorted(by_phase.items()):
        lost = [kill.lost_steps for kill in kills]
        seconds = [kill.recovery_seconds for kill in kills]
        mean = sum(seconds) / len(seconds)
        table.add_row(phase, str(len(kills)), f"{min(lost)} to {max(lost)}", f"{mean:.1f}")
    console.print(table)


# ---------------------------------------------------------------------------- inside the run


def launch_ranks(arguments: list[str]) -> int:
    """Start the ranks as `python -m dapo_megatron` does, but through this file (`run_rank`)."""
    from dapo_megatron.cluster.launch import launch

    return launch([sys.executable, __file__, "rank", *arguments], RANKS)


class Killer:
    """Kill the whole run some seconds into a phase. Its launcher leads the process group."""

    def __init__(self, aim: str) -> None:
        self._phase, num_skipped, seconds = aim.split() if aim else ("", "0", "0")
        self._num_skipped, self._seconds = int(num_skipped), float(seconds)
        self.on_phase("start")

    def on_phase(self, phase: str) -> None:
        """Handle the start of a phase on rank 0."""
        if phase == self._phase:
            if self._num_skipped == 0:
                timer = threading.Timer(self._seconds, os.killpg, (0, signal.SIGKILL))
                timer.daemon = True
                timer.start()
            self._num_skipped -= 1


def run_rank(arguments: list[str]) -> None:
    """Run the program as one rank. Rank 0 writes its phases to the journal and kills the run."""
    from dapo_megatron import __main__ as program
    from dapo_megatron.checkpoints.saver import CheckpointSaver
    from dapo_megatron.cluster.watchdog import Watchdog

    if os.environ["RANK"] == "0":
        killer = Killer(os.environ[AIM])
        handle = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND)

        @contextmanager
        def journaled(phase: str, step: int) -> Iterator[None]:
            os.write(handle, f"{time.time()} begin {phase} {step}\n".encode())
            killer.on_phase(phase)
            yield
            os.write(handle, f"{time.time()} end {phase} {step}\n".encode())

        watch_phase, write = Watchdog.phase, CheckpointSaver._run

        @contextmanager
        def phase(self: Watchdog, name: str, step: int = 0) -> Iterator[None]:
            with journaled(name, step), watch_phase(self, name, step):
                yield

        def run(self: CheckpointSaver, job: Any) -> None:
            with journaled("write", job.step):
                write(self, job)

        Watchdog.phase, CheckpointSaver._run = phase, run  # type: ignore[method-assign]
    sys.argv = [program.__file__, *arguments]
    program.main()


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["launch"]:
            raise SystemExit(launch_ranks(sys.argv[2:]))
        case ["rank"]:
            run_rank(sys.argv[2:])
        case _:
            typer.run(main)
