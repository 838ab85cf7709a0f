"""Kill a small run or one of its ranks in every phase, and compare it with an undisturbed run.

    python tools/lab/kill_runs.py --kills 30
    python tools/lab/kill_runs.py --kills 30 --carrying

Each run is killed with SIGKILL several times at random moments, as a whole or one rank of it,
resumed each time, and then runs to its end. Its last checkpoint (weights, optimizer, random
states), its metrics and its ledger must equal those of the undisturbed run bit for bit. That is
possible because the runs are deterministic (rollout.deterministic). It prints a table and, at the
end, one JSON line. It exits with 1 if anything differs.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.cluster.launch import launch
from dapo_megatron.rollout import record
from dapo_megatron.rollout.record import RecordedGroup
from dapo_megatron.tracking.provenance import facts

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.helpers.training_state import stored_tensors  # noqa: E402

CONFIG = REPOSITORY / "model_configs" / "tiny_cpu.yaml"
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
KILLED = "killed"
"""Last line of the journal of a victim, instead of a phase."""
JOURNAL, AIM = "KILL_RUNS_JOURNAL", "KILL_RUNS_AIM"
"""Environment variables: the file in which a rank notes the start of each phase, and whom to kill
when: "VICTIM PHASE OCCURRENCES_TO_SKIP SECONDS_INTO_THE_PHASE"."""
VICTIMS = ("run", *map(str, range(RANKS)))
"""The whole run, or a rank. Its phases decide the moment; those of rank 0 for the whole run."""


@dataclass
class Kill:
    """One SIGKILL."""

    victim: str
    phase: str
    """Phase that the victim had entered last."""
    step: int
    lost_steps: int
    """Finished rollout steps that had to be repeated."""
    recovery_seconds: float = 0.0
    """From the next start to its first prompt."""


class Runs:
    """Runs in one directory: start, kill and compare them."""

    def __init__(self, directory: Path, overrides: tuple[str, ...]) -> None:
        self._directory = directory
        self._train = ("train", str(CONFIG), *overrides, f"run.directory={directory}")
        self._typical = {"start": 5.0}
        """Seconds of each phase in the undisturbed run."""
        self._phases: list[str] = []

    def undisturbed(self) -> None:
        """Run without kills."""
        if self._start("undisturbed") != 0:
            raise SystemExit(f"the run failed: see {self._directory / 'undisturbed.err'}")
        self._typical["start"] = self._seconds_to_prompt
        for phase in PHASES:
            rows = _metrics_rows(self._directory / "undisturbed")
            if seconds := [row[f"time/{phase}"] for row in rows if row.get(f"time/{phase}")]:
                self._typical[phase] = fmean(seconds)

    def disturbed(self, name: str, num_kills: int, rng: random.Random) -> list[Kill]:
        """Kill a run `num_kills` times, or until it ends before a kill, and let it end."""
        kills: list[Kill] = []
        while True:
            aim, victim = "", rng.choice(VICTIMS)
            if len(kills) < num_kills:
                phase = self._next_phase(rng)
                num_skipped = 0 if phase in ("start", "evaluate") else rng.randrange(4)
                seconds = rng.random() * self._typical.get(phase, 0.5)
                aim = f"{victim} {phase} {num_skipped} {seconds}"
            code = self._start(name, aim)
            if kills:
                kills[-1].recovery_seconds = self._seconds_to_prompt
            if code == 0:
                return kills
            if not self._is_killed:
                raise SystemExit(f"{name} failed: see {self._directory / name}.err")
            folder = self._directory / name
            _, phase, step = self._entered[-1] if self._entered else (0.0, "start", 0)
            done = max((row["step"] for row in _metrics_rows(folder)), default=0)
            kills.append(Kill(victim, phase, step, max(0, done - _newest_step(folder))))

    def _next_phase(self, rng: random.Random) -> str:
        """Return each phase once in random order, then again."""
        if not self._phases:
            self._phases = rng.sample(PHASES, len(PHASES))
        return self._phases.pop()

    def _start(self, name: str, aim: str = "") -> int:
        """Start a run and wait for its end. Return its exit code."""
        journal = self._directory / f"{name}.journal"
        journal.write_text("")
        started_at = time.time()
        with (self._directory / f"{name}.err").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, "launch", *self._train, f"run.name={name}"],
                env={**os.environ, JOURNAL: str(journal), AIM: aim, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = (line.split() for line in journal.read_text().splitlines())
        self._entered = [(float(moment), phase, int(step)) for moment, phase, step in lines]
        self._is_killed = bool(self._entered) and self._entered[-1][1] == KILLED
        self._entered = [line for line in self._entered if line[1] != KILLED]
        prompts = [moment for moment, phase, _ in self._entered if phase == "generate"]
        self._seconds_to_prompt = prompts[0] - started_at if prompts else 0.0
        return code

    def differences(self, name: str) -> list[str]:
        """Return the differences of a finished run from the undisturbed one."""
        folder, reference = self._directory / name, self._directory / "undisturbed"
        texts = []
        pairs = zip(_metrics_rows(folder), _metrics_rows(reference), strict=True)
        for row, expected in pairs:
            texts += [
                f"{name}: step {row['step']}: {key} {row.get(key)}, not {expected.get(key)}"
                for key in sorted(row.keys() | expected.keys())
                # The first sync of a start always compares fingerprints.
                if not key.startswith(("time/", "memory/", "throughput/", "sync/fingerprinted"))
                and row.get(key) != expected.get(key)
            ]
        last = f"checkpoints/step_{_newest_step(reference):06d}"
        tensors, references = stored_tensors(folder / last), stored_tensors(reference / last)
        for key in sorted(tensors.keys() | references.keys()):
            if key not in tensors or key not in references:
                texts.append(f"{name}: {key} is in only one of the two runs")
            elif not torch.equal(tensors[key], references[key]):
                texts.append(f"{name}: {key} differs")
        return [*texts, *_ledger_differences(folder, reference)]


def _metrics_rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _newest_step(folder: Path) -> int:
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0)


def _ledger_differences(run: Path, reference: Path) -> Iterator[str]:
    """Check that each ticket ended once, that none is lost, and that all groups are equal."""
    ended = _ended(run)
    tickets = Counter(recorded.group.ticket for recorded in ended)
    for ticket in (ticket for ticket, count in tickets.items() if count > 1):
        yield f"{run}: ticket {ticket} ended twice"
    checkpoint = run / f"checkpoints/step_{_newest_step(run):06d}"
    ledger = json.loads((checkpoint / "state.json").read_text())["coordinator"]["ledger"]
    open_tickets = {int(ticket) for ticket in ledger["open"]}
    for ticket in set(range(ledger["next_ticket"])) - set(tickets) - open_tickets:
        yield f"{run}: ticket {ticket} is lost"
    expected = _ended(reference)
    if len(ended) != len(expected):
        yield f"{run}: {len(ended)} recorded groups, {len(expected)} in the undisturbed run"
    for recorded, other in zip(ended, expected, strict=False):
        if recorded != other:
            yield f"{run}: ticket {recorded.group.ticket} is not as in the undisturbed run"


def _ended(folder: Path) -> list[RecordedGroup]:
    """Return every recorded group. Raises DataError for a step that is damaged."""
    groups = []
    for step_folder in record.recorded_steps(folder / "samples").values():
        record.check(step_folder)
        groups += record.read_groups(step_folder / record.COMPLETIONS)
    return groups


def show(kills: list[Kill]) -> Table:
    """Return a table of the kills by phase."""
    table = Table("phase of the victim", "kills", "steps repeated", "seconds to recover")
    for phase in dict.fromkeys(kill.phase for kill in kills):
        of_phase = [kill for kill in kills if kill.phase == phase]
        lost = [kill.lost_steps for kill in of_phase]
        seconds = fmean(kill.recovery_seconds for kill in of_phase)
        table.add_row(phase, str(len(lost)), f"{min(lost)} to {max(lost)}", f"{seconds:.1f}")
    return table


def main(
    kills: Annotated[int, typer.Option(min=1, help="Kills in all runs together.")] = 30,
    per_run: Annotated[int, typer.Option(min=1, help="Most kills of one run.")] = 5,
    steps: Annotated[int, typer.Option(min=4)] = 20,
    carrying: Annotated[bool, typer.Option(help="Carry groups, instead of on_policy.")] = False,
    seed: int = 0,
    directory: Annotated[Path | None, typer.Option(help="Folder of the runs; it is kept.")] = None,
) -> None:
    """Kill, resume and compare runs."""
    console, rng = Console(), random.Random(seed)
    mode = f"rollout.on_policy={str(not carrying).lower()}"
    done: list[Kill] = []
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = directory or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder, (*OVERRIDES, mode, f"train.rollout_steps={steps}"))
        runs.undisturbed()
        for number in range(kills):
            if len(done) >= kills:
                break
            name = f"killed_{number}"
            of_run = runs.disturbed(name, min(per_run, kills - len(done)), rng)
            differing = runs.differences(name)
            console.print(f"{name}: {len(of_run)} kills, {len(differing)} differences")
            done += of_run
            differences += differing
    console.print(show(done))
    about = {"mode": "carrying" if carrying else "on_policy", "steps": steps}
    print(json.dumps({"tool": "kill_runs", **facts(), **about, "kills": list(map(asdict, done)),
                      "differences": differences}))  # fmt: skip
    raise typer.Exit(int(bool(differences)))


# ---------------------------------------------------------------------------- inside the run


class Victim:
    """Note the start of each phase, and kill the run or this rank some seconds into one of them.
    The launcher leads the process group of the run."""

    def __init__(self, journal: str, aim: str) -> None:
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND)
        self._victim, self._phase, num_skipped, seconds = aim.split() if aim else ("", "", "0", "0")
        self._num_skipped, self._seconds = int(num_skipped), float(seconds)
        self.enter("start", 0)

    def enter(self, phase: str, step: int) -> None:
        """Handle the start of a phase."""
        self._note(phase, step)
        if phase == self._phase:
            if self._num_skipped == 0:
                timer = threading.Timer(self._seconds, self._kill)
                timer.daemon = True
                timer.start()
            self._num_skipped -= 1

    def _kill(self) -> None:
        self._note(KILLED, 0)
        if self._victim == "run":
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, phase: str, step: int) -> None:
        os.write(self._journal, f"{time.time()} {phase} {step}\n".encode())


def run_rank(arguments: list[str]) -> None:
    """Run the program as one rank."""
    from dapo_megatron import __main__ as program
    from dapo_megatron.checkpoints.saver import CheckpointSaver
    from dapo_megatron.cluster.watchdog import Watchdog

    aim = os.environ[AIM]
    if os.environ["RANK"] == (aim.split()[0] if aim else "run").replace("run", "0"):
        victim = Victim(os.environ[JOURNAL], aim)
        watch_phase, write = Watchdog.phase, CheckpointSaver._run

        @contextmanager
        def phase(self: Watchdog, name: str, step: int = 0) -> Iterator[None]:
            victim.enter(name, step)
            with watch_phase(self, name, step):
                yield

        def run(self: CheckpointSaver, step: int, *snapshot: Any) -> None:
            victim.enter("write", step)
            write(self, step, *snapshot)

        Watchdog.phase, CheckpointSaver._run = phase, run  # type: ignore[method-assign]
    sys.argv = [program.__file__, *arguments]
    program.main()


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["launch"]:  # as `python -m dapo_megatron` does, but through this file
            raise SystemExit(launch([sys.executable, __file__, "rank", *sys.argv[2:]], RANKS))
        case ["rank"]:
            run_rank(sys.argv[2:])
        case _:
            typer.run(main)
