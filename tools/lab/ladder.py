"""Climb the paper's ladder (arXiv 2503.14476, table 1) on the tiny task: make ladder.

    python tools/lab/ladder.py
    python tools/lab/ladder.py --rungs model_configs/objectives --docs /tmp/objectives
    python tools/lab/ladder.py --rungs model_configs/corrections --base --noise 0.01 \
        --docs /tmp/corrections

The second line compares the objectives, and the third the corrections, with engines that sample
with perturbed weights (perturbed_engine.py).

Each rung is an overlay in model_configs/ladder and runs with several seeds. Two runs go side by
side, each in one process. A finished run with the same configuration is not repeated, so that the
tool continues where it was stopped. It writes docs/ladder.svg and the generated part of
docs/ladder.md: the text above MARK is written by hand and stays.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from ladder_plot import Panel, Point, svg

from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "model_configs" / "tiny_ladder.yaml"
RUNGS = REPOSITORY / "model_configs" / "ladder"
DOCS = REPOSITORY / "docs"
MARK = "<!-- tools/lab/ladder.py writes what follows -->"
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
PANELS = {
    "accuracy/raw": "accuracy before filtering",
    "policy/entropy": "entropy of the policy, nats",
    "response_tokens/mean": "response tokens, mean",
    "accuracy/perfect_fraction": "share of prompts with accuracy 1",
}
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
    """One rung with one seed."""

    rung: Path | None
    """The overlay; None: the config as it is."""
    seed: int
    config_file: Path
    overrides: tuple[str, ...]
    noise: float | None = None
    """Relative noise of the engine's weights; None: they are the policy's."""

    @property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return f"{self.rung_name.replace(' ', '_')}_seed{self.seed}"

    @property
    def rung_name(self) -> str:
        """Name of the rung."""
        return self.rung.stem if self.rung else "no overlay"

    def config(self, directory: Path) -> Config:
        """Return the configuration of the run."""
        return load_config(self.config_file, self._all_overrides(directory), self._overlays)

    def command(self, directory: Path) -> list[str]:
        """Return the command that runs it."""
        start = [sys.executable, "-m", "dapo_megatron", "train", str(self.config_file)]
        if self.noise is not None:
            program = str(Path(__file__).with_name("perturbed_engine.py"))
            start = [sys.executable, program, str(self.config_file), f"--noise={self.noise}"]
        overlays = [part for path in self._overlays for part in ("--overlay", str(path))]
        return [*start, *overlays, *self._all_overrides(directory)]

    @property
    def _overlays(self) -> list[Path]:
        return [self.rung] if self.rung else []

    def _all_overrides(self, directory: Path) -> tuple[str, ...]:
        of_run = (f"seed={self.seed}", f"run.name={self.name}", f"run.directory={directory}")
        of_noise = () if self.noise is None else ("sync.max_gap=1000.0",)
        no_tracking = ("tracking.mlflow=false", "tracking.samples=false")
        return (*self.overrides, *no_tracking, *of_noise, *of_run)


@dataclass(frozen=True)
class RungRun:
    """Summary and metrics of a finished run."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    """Metrics of each step, from step 1."""

    def end(self, metric: str) -> float:
        """Return the mean of a metric over the last steps."""
        values = [row[metric] for row in self.rows if row.get(metric) is not None]
        return fmean(values[-LAST_STEPS:])

    @property
    def k(self) -> int:
        """Samples per problem of the evaluations."""
        names = self.summary["evaluation_after"]
        return next(int(match[1]) for name in names if (match := re.search(r"/avg@(\d+)$", name)))

    def evaluated(self, when: str, metric: str) -> float:
        """Return avg, pass or cons at k, `before` or `after` training: the mean over the sets."""
        metrics = self.summary[f"evaluation_{when}"]
        return fmean(v for name, v in metrics.items() if name.endswith(f"/{metric}@{self.k}"))


def is_done(run: Run, directory: Path) -> bool:
    """Return whether the run has finished before with the current configuration."""
    folder = directory / run.name
    if not (folder / "summary.json").exists():
        return False
    try:
        return load_config(folder / "config.yaml") == run.config(directory)
    except ConfigError:  # another version of this program wrote it
        return False


def do(run: Run, directory: Path, at_once: int) -> str:
    """Run it, unless it is done. Return a line for the user. Raises RuntimeError if it fails."""
    if is_done(run, directory):
        return f"{run.name}: done before"
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{run.name}.log"
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            run.command(directory),
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8").splitlines()[-3:]
        raise RuntimeError("\n".join([f"{run.name} failed; see {log}", *last]))
    outcome = read(run, directory)
    return f"{run.name}: accuracy {outcome.evaluated('after', 'avg'):.3f}"


def read(run: Run, directory: Path) -> RungRun:
    """Return the outcome of a finished run."""
    folder = directory / run.name
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return RungRun(summary, [row for row in rows if row["step"] > 0])


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean of the seeds, with their lowest and highest value."""
    mean = format(fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def table(outcomes: dict[str, list[RungRun]]) -> list[str]:
    """Return the lines of a Markdown table: a row per rung, means over the seeds."""
    k = next(iter(outcomes.values()))[0].k
    evaluated = ("avg", "pass", "cons")
    heads = ["rung", *(f"held out: {name}@{k}" for name in evaluated)]
    heads += [head for head, _ in COLUMNS.values()]
    has_paper = outcomes.keys() <= PAPER.keys()
    heads += ["paper: AIME24 avg@32"] * has_paper
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    before = [
        spread([run.evaluated("before", name) for runs in outcomes.values() for run in runs], ".3f")
        for name in evaluated
    ]
    lines.append(f"| before training | {' | '.join(before)} |" + " |" * (len(COLUMNS) + has_paper))
    for rung, runs in outcomes.items():
        cells = [spread([run.evaluated("after", n) for run in runs], ".3f") for n in evaluated]
        cells += [
            spread([run.end(metric) for run in runs], form) for metric, (_, form) in COLUMNS.items()
        ]
        if has_paper:
            cells.append(str(PAPER[rung]))
        lines.append(f"| {title(rung)} | {' | '.join(cells)} |")
    return lines


def figures(outcomes: dict[str, list[RungRun]]) -> dict[str, dict[str, list[float]]]:
    """Return, by rung and metric, the value of each seed."""
    evaluated = [
        (metric, when) for metric in ("avg", "pass", "cons") for when in ("before", "after")
    ]
    return {
        rung: {
            f"{metric}@{runs[0].k}_{when}": [run.evaluated(when, metric) for run in runs]
            for metric, when in evaluated
        }
        | {metric: [run.end(metric) for run in runs] for metric in COLUMNS}
        for rung, runs in outcomes.items()
    }


def title(rung: str) -> str:
    """Return the title of a rung: 3_clip_higher becomes "3 + clip higher"."""
    number, _, words = rung.partition("_")
    if not number.isdigit():
        return rung.replace("_", " ")
    return f"{number} {'' if number == '1' else '+ '}{words.replace('_', ' ')}"


def panels(outcomes: dict[str, list[RungRun]]) -> list[Panel]:
    """Return a panel with the curves of each metric."""
    return [
        Panel(name, {title(rung): curve(runs, metric) for rung, runs in outcomes.items()})
        for metric, name in PANELS.items()
    ]


def curve(runs: Iterable[RungRun], metric: str) -> list[Point]:
    """Return (step, lowest, mean, highest) over the runs, for steps that have the metric."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows:
            if row.get(metric) is not None:
                by_step.setdefault(row["step"], []).append(row[metric])
    return [(step, min(v), fmean(v), max(v)) for step, v in sorted(by_step.items())]


def write(docs: Path, outcomes: dict[str, list[RungRun]], made_by: dict[str, Any]) -> None:
    """Write docs/ladder.svg, and docs/ladder.md from MARK on."""
    docs.mkdir(parents=True, exist_ok=True)
    names = [title(rung) for rung in outcomes]
    (docs / "ladder.svg").write_text(svg(panels(outcomes), names, "rollout step"), "utf-8")
    page = docs / "ladder.md"
    by_hand = "# Ladder\n\n"
    if page.exists():
        by_hand = page.read_text(encoding="utf-8").partition(MARK)[0]
    facts_of_runs = ", ".join(f"{name} {value}" for name, value in made_by.items())
    lines = [
        f"Made by `make ladder`: {facts_of_runs}.",
        "",
        *table(outcomes),
        "",
        "Mean of the seeds (lowest to highest). Held out: after the last step. The other columns "
        f"are means of the last {LAST_STEPS} steps, before any filtering; prompts per step are "
        "those issued.",
        "",
        "![accuracy, entropy, length and share of perfect prompts over the steps](ladder.svg)",
        "",
        "Lines are means over the seeds, bands go from the lowest to the highest.",
    ]
    page.write_text(by_hand + "\n".join([MARK, "", *lines]) + "\n", encoding="utf-8")


def climb(runs: Sequence[Run], directory: Path, at_once: int) -> None:
    """Do all runs and print a line for each.

    Exits with 1 if a run fails. Finished runs are kept.
    """
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for line in pool.map(lambda run: do(run, directory, at_once), runs):
                print(line, flush=True)
        except (RuntimeError, ConfigError) as error:
            pool.shutdown(cancel_futures=True)
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


def about(outcomes: Iterable[RungRun]) -> dict[str, Any]:
    """Return the seeds, steps, commit and seconds of the runs."""
    summaries = [outcome.summary for outcome in outcomes]
    return {
        "seeds": len({summary["seed"] for summary in summaries}),
        "steps": max(summary["steps"] for summary in summaries),
        "commit": "/".join(sorted({_short(str(summary["commit"])) for summary in summaries})),
        "seconds of the longest run": round(max(summary["seconds"] for summary in summaries)),
    }


def _short(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


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
    docs: Annotated[Path, typer.Option(help="Folder of table and plot.")] = DOCS,
    noise: Annotated[
        float | None, typer.Option(min=0.0, help="Relative noise of the engine's weights.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings of every run.")
    ] = None,
) -> None:
    """Run every rung with every seed, then write table and plot. The last line is JSON."""
    chosen: list[Path | None] = [None] * base
    chosen += [path.resolve() for path in sorted(rungs.glob("*.yaml")) if only in path.stem]
    if not chosen:
        raise typer.BadParameter(f"no overlay in {rungs} has {only!r} in its name")
    directory, config, settings = directory.resolve(), config.resolve(), tuple(overrides or ())
    # All rungs of a seed first, so that rungs can be compared if the tool is stopped early.
    runs = [Run(rung, seed, config, settings, noise) for seed in range(seeds) for rung in chosen]
    climb(runs, directory, at_once)
    outcomes: dict[str, list[RungRun]] = {run.rung_name: [] for run in runs}
    for run in runs:
        outcomes[run.rung_name].append(read(run, directory))
    made_by = about(outcome for of_rung in outcomes.values() for outcome in of_rung)
    write(docs, outcomes, made_by)
    print(json.dumps({**facts(), **made_by, "rungs": figures(outcomes)}))


if __name__ == "__main__":
    typer.run(main)
