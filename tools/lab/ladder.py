"""Climb the paper's ladder (arXiv 2503.14476, table 1) on the tiny task: make ladder.

    python tools/lab/ladder.py
    python tools/lab/ladder.py --rungs model_configs/objectives --base
    python tools/lab/ladder.py --rungs model_configs/corrections --base train.rollout_steps=60

Each rung is an overlay and runs with several seeds. Two runs go side by side, each in one process.
A finished run with the same configuration is not repeated, so that the tool continues where it was
stopped. It prints the Markdown table of docs/ladder.md. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "model_configs" / "tiny_ladder.yaml"
RUNGS = REPOSITORY / "model_configs" / "ladder"
LAST_STEPS = 5
"""Number of steps at the end of a run over which its final metrics are averaged."""
PAPER = {
    "1_naive_grpo": 30,
    "2_overlong_filtering": 36,
    "3_clip_higher": 38,
    "4_soft_overlong_punishment": 41,
    "5_token_level_loss": 42,
    "6_dynamic_sampling": 50,
}
"""Table 1 of the paper: AIME 2024 avg@32 in percent, one run each, Qwen2.5-32B."""
EVALUATED = ("avg", "pass", "cons")
COLUMNS = {
    "accuracy/raw": ("accuracy/raw", ".3f"),
    "policy/entropy": ("entropy", ".3f"),
    "response_tokens/mean": ("tokens", ".2f"),
    "response_tokens/clipped_fraction": ("cut off", ".3f"),
    "accuracy/perfect_fraction": ("all correct", ".3f"),
    "groups/issued": ("prompts per step", ".1f"),
    "time/step": ("seconds per step", ".1f"),
}


@dataclass(frozen=True)
class Run:
    """One rung with one seed, in a folder of `directory`."""

    directory: Path
    rung: Path | None
    """The overlay; None: the config as it is."""
    seed: int
    config_file: Path = CONFIG
    overrides: tuple[str, ...] = ()

    @property
    def rung_name(self) -> str:
        """Name of the rung."""
        return self.rung.stem if self.rung else "no overlay"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.directory / f"{self.rung_name.replace(' ', '_')}_seed{self.seed}"

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        return load_config(self.config_file, self._overrides, [self.rung] if self.rung else [])

    @property
    def command(self) -> list[str]:
        """Command that runs it."""
        overlay = ["--overlay", str(self.rung)] if self.rung else []
        program = [sys.executable, "-m", "dapo_megatron", "train", str(self.config_file)]
        return [*program, *overlay, *self._overrides]

    @property
    def _overrides(self) -> tuple[str, ...]:
        of_run = (f"run.name={self.folder.name}", f"run.directory={self.directory}")
        return (*self.overrides, "tracking.mlflow=false", f"seed={self.seed}", *of_run)

    def is_done(self) -> bool:
        """Return whether the run has finished before with the current configuration."""
        if not (self.folder / "summary.json").exists():
            return False
        try:
            return load_config(self.folder / "config.yaml") == self.config
        except ConfigError:  # another version of this program wrote it
            return False

    def do(self, num_threads: int) -> RungRun:
        """Run it, unless it is done. Raises RuntimeError, with the end of its log, if it fails."""
        if not self.is_done():
            self.directory.mkdir(parents=True, exist_ok=True)
            log = self.folder.with_suffix(".log")
            with log.open("w", encoding="utf-8") as file:
                done = subprocess.run(
                    self.command,
                    cwd=REPOSITORY,
                    env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if done.returncode:
                last = log.read_text(encoding="utf-8").splitlines()[-3:]
                raise RuntimeError("\n".join([f"{self.folder.name} failed; see {log}", *last]))
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return RungRun(self, summary, [row for row in rows if row["step"] > 0])


@dataclass(frozen=True)
class RungRun:
    """Summary and metrics of a finished run."""

    run: Run
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    """Metrics of each step, from step 1."""

    @property
    def k(self) -> int:
        """Samples per problem of the evaluations."""
        names = self.summary["evaluation_after"]
        return next(int(match[1]) for name in names if (match := re.search(r"/avg@(\d+)$", name)))

    def evaluated(self, when: str, metric: str) -> float:
        """Return avg, pass or cons at k, `before` or `after` training: the mean over the sets."""
        metrics = self.summary[f"evaluation_{when}"]
        return fmean(v for name, v in metrics.items() if name.endswith(f"/{metric}@{self.k}"))

    def figures(self) -> dict[str, float]:
        """Return evaluations, and the mean of each metric over the last steps."""
        ends = {}
        for metric in COLUMNS:
            values = [row[metric] for row in self.rows if row.get(metric) is not None]
            ends[metric] = fmean(values[-LAST_STEPS:])
        return {
            f"{metric}_{when}": self.evaluated(when, metric)
            for metric in EVALUATED
            for when in ("before", "after")
        } | ends


def cell(runs: list[RungRun], name: str, form: str) -> str:
    """Format the mean of the seeds, with their lowest and highest value."""
    values = [run.figures()[name] for run in runs]
    mean, lowest, highest = (
        format(value, form) for value in (fmean(values), min(values), max(values))
    )
    return mean if len(values) == 1 else f"{mean} ({lowest} to {highest})"


def table(by_rung: dict[str, list[RungRun]]) -> list[str]:
    """Return the lines of a Markdown table: a row per rung, means over the seeds."""
    every_run = [run for runs in by_rung.values() for run in runs]
    heads = ["rung", *(f"held out: {name}@{every_run[0].k}" for name in EVALUATED)]
    heads += [head for head, _ in COLUMNS.values()]
    has_paper = by_rung.keys() <= PAPER.keys()
    heads += ["paper: AIME24 avg@32"] * has_paper
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    before = [cell(every_run, f"{name}_before", ".3f") for name in EVALUATED]
    lines.append(f"| before training | {' | '.join(before)} |" + " |" * (len(COLUMNS) + has_paper))
    for rung, runs in by_rung.items():
        cells = [cell(runs, f"{name}_after", ".3f") for name in EVALUATED]
        cells += [cell(runs, metric, form) for metric, (_, form) in COLUMNS.items()]
        cells += [str(PAPER[rung])] if has_paper else []
        lines.append(f"| {rung.replace('_', ' ')} | {' | '.join(cells)} |")
    return lines


def main(
    config: Annotated[
        Path, typer.Option(help="Config to which the overlays are applied.")
    ] = CONFIG,
    rungs: Annotated[Path, typer.Option(help="Folder of overlays, in the order of names.")] = RUNGS,
    base: Annotated[bool, typer.Option(help="Also run the config without overlay.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per rung, seeds 0, 1, ...")] = 3,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only rungs with TEXT in the name.")
    ] = "",
    directory: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/ladder"),
    at_once: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings of every run.")
    ] = None,
) -> None:
    """Run every rung with every seed, and print a table. Exits with 1 if a run fails; finished runs
    are kept."""
    overlays = [path.resolve() for path in sorted(rungs.glob("*.yaml")) if only in path.stem]
    chosen: list[Path | None] = [*([None] * base), *overlays]
    if not chosen:
        raise typer.BadParameter(f"no overlay in {rungs} has {only!r} in its name")
    # All rungs of a seed first, so that rungs can be compared if the tool is stopped early.
    runs = [
        Run(directory.resolve(), rung, seed, config.resolve(), tuple(overrides or ()))
        for seed in range(seeds)
        for rung in chosen
    ]
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    by_rung: dict[str, list[RungRun]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for done in pool.map(Run.do, runs, [threads] * len(runs)):
                by_rung.setdefault(done.run.rung_name, []).append(done)
                name, accuracy = done.run.folder.name, done.evaluated("after", "avg")
                print(f"{name}: accuracy {accuracy:.3f}", file=sys.stderr, flush=True)
        except (RuntimeError, ConfigError) as error:
            pool.shutdown(cancel_futures=True)
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    print(*table(by_rung), sep="\n")
    figures = {rung: [run.figures() for run in runs] for rung, runs in by_rung.items()}
    print(json.dumps({**facts(), "seeds": seeds, "overrides": overrides or [], "rungs": figures}))


if __name__ == "__main__":
    typer.run(main)
