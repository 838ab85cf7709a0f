"""Compare the cost of rollout policies on a simulated cluster.

    python tools/lab/simulate_rollouts.py --preset dapo32b

The real coordinator (dapo_megatron/rollout) drives engines on a virtual clock. It is compared with
small simulations of what other systems do (tools/lab/rollout_policies.py). Speeds come from a model
(tools/lab/virtual_engines.py), answers are drawn or recorded (tools/lab/rollout_workload.py). So
the comparison is of decisions: which prompts to issue, what to wait for, and what to keep.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rollout_frontier import draw, frontier
from rollout_policies import (
    CARRYING,
    FIRST_FINISHED,
    ON_POLICY,
    POLICIES,
    TURN_SECONDS,
    WHOLE_BATCHES,
    Figures,
    Setting,
    run,
)
from rollout_workload import LogNormal, Recorded, Workload, read_recorded
from virtual_engines import EngineModel

from dapo_megatron.tracking.provenance import facts

MIN_BUSY = 0.97
MAX_AGE_MEAN = 2.0
MIN_P = 0.01
SHORT_MEAN = 2_000
"""Mean lengths up to this use the first target of each pair, longer ones the second."""
MAX_TIME = {CARRYING: (0.35, 0.50), ON_POLICY: (0.92, 0.85)}
"""Targets for the time per step, as a share of that of whole batches."""


class Preset(StrEnum):
    """Names of the predefined settings."""

    dapo32b = "dapo32b"
    small = "small"


PRESETS = {
    Preset.dapo32b: Setting(),
    Preset.small: Setting(
        replicas=4,
        engine=EngineModel(max_sequences=64, capacity=2_250, turn_seconds=TURN_SECONDS),
        training_seconds=20.0,
        prompts_per_step=32,
        samples=8,
        steps=24,
        warmup=8,
        batch_prompts=96,
    ),
}


@dataclass(frozen=True)
class Case:
    """One cell of the table: a policy on a workload."""

    policy: str
    setting: Setting
    workload: Workload
    mean: float
    keep_rate: float

    @property
    def name(self) -> str:
        """Name of the workload, without the policy."""
        return f"{self.mean:,.0f}, {self.keep_rate:.2g}"


def measure(case: Case) -> Figures:
    """Run a case."""
    return run(POLICIES[case.policy], case.setting, case.workload)


def measure_all(cases: Sequence[Case], jobs: int) -> list[Figures]:
    """Run the cases in `jobs` processes."""
    if jobs == 1:
        return [measure(case) for case in cases]
    results = []
    with multiprocessing.Pool(jobs) as pool:
        for case, figures in zip(cases, pool.imap(measure, cases)):
            print(f"{case.name}, {case.policy}: done", file=sys.stderr, flush=True)
            results.append(figures)
    return results


# ---------------------------------------------------------------------------- output


def add_row(table: Table, case: Case, figures: Figures, whole: Figures | None) -> None:
    """Add a row for a case. `whole` are the figures of whole batches on the same workload."""
    ratio = f" ({figures.seconds_per_step / whole.seconds_per_step:.2f})" if whole else ""
    table.add_row(
        case.name,
        case.policy,
        f"{figures.seconds_per_step:.0f}{ratio}",
        f"{figures.busy:.3f}",
        f"{figures.age_mean:.2f} / {figures.age_max}",
        f"{figures.prompts_per_step:,.0f}",
        f"{figures.lost_groups:,}",
        f"{figures.wasted_tokens:.1%}",
        f"{figures.length_ratio:.3f}",
        f"{figures.length_p:.2g}",
        end_section=case.policy == list(POLICIES)[-1],
    )


HEADS = (
    "mean length,\nkeep rate",
    "policy",
    "seconds per step\n(of whole batches)",
    "busy",
    "age, versions\nmean / largest",
    "prompts\nper step",
    "mixed groups\nlost",
    "tokens\nwasted",
    "trained length /\nmixed length",
    "p, same\nlengths",
)


def verdicts(case: Case, figures: Figures, whole: Figures | None) -> list[str]:
    """Return a line per target: met or missed."""
    checks: list[tuple[str, bool]] = []
    if case.policy in MAX_TIME and whole:
        limit = MAX_TIME[case.policy][case.mean > SHORT_MEAN]
        share = figures.seconds_per_step / whole.seconds_per_step
        checks.append((f"time {share:.3f} of whole batches, at most {limit}", share <= limit))
    if case.policy == CARRYING:
        p, age = figures.length_p, figures.age_mean
        checks += [
            (f"busy {figures.busy:.3f}, at least {MIN_BUSY}", figures.busy >= MIN_BUSY),
            (f"mean age {age:.2f}, at most {MAX_AGE_MEAN}", age <= MAX_AGE_MEAN),
            (f"{figures.lost_groups} mixed groups lost, none", figures.lost_groups == 0),
            (f"lengths as of mixed groups: p {p:.2g}, at least {MIN_P}", p >= MIN_P),
        ]
    if case.policy == FIRST_FINISHED:
        p = figures.length_p
        checks.append((f"lengths other than of mixed groups: p {p:.2g}", p < MIN_P))
    return [
        f"{case.name}, {case.policy}: {text}: target {'met' if is_met else 'missed'}"
        for text, is_met in checks
    ]


def main(
    preset: Annotated[Preset, typer.Option(help="Setting that the options below change.")] = (
        Preset.dapo32b
    ),
    mean: Annotated[list[float] | None, typer.Option(help="Mean lengths, after the cut.")] = None,
    keep_rate: Annotated[list[float] | None, typer.Option(help="Shares of mixed groups.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only policies whose name starts with this.")
    ] = None,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the log of lengths.")] = 1.0,
    between: Annotated[float, typer.Option(help="Share of its variance between prompts.")] = 0.0,
    recorded: Annotated[Path | None, typer.Option(help="A run's samples/ to draw from.")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout steps.")] = None,
    quick: Annotated[bool, typer.Option(help="20 steps, one keep rate.")] = False,
    replicas: Annotated[int | None, typer.Option(help="Engines.")] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Sequences that run at once per engine.")
    ] = None,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Speed of reading prompts and continued answers. By default no cost."),
    ] = None,
    training_seconds: Annotated[
        float | None, typer.Option(help="Seconds of training per step.")
    ] = None,
    report_seconds: Annotated[
        float | None, typer.Option(help="Seconds between two reports of a replica.")
    ] = None,
    turn_seconds: Annotated[
        float | None, typer.Option(help="Seconds of control between two engine steps.")
    ] = None,
    overhead_seconds: Annotated[
        float | None, typer.Option(help="Seconds of each step outside engines and training.")
    ] = None,
    overhead_per_token: Annotated[
        float | None, typer.Option(help="The same, per token that the step trains on.")
    ] = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Mixed groups (N).")] = None,
    batch_prompts: Annotated[
        int | None, typer.Option(help="Prompts per batch of the first two policies.")
    ] = None,
    lookahead: Annotated[float | None, typer.Option(help="As rollout.lookahead.")] = None,
    max_overtake: Annotated[int | None, typer.Option(help="As rollout.max_overtake.")] = None,
    max_age: Annotated[int | None, typer.Option(help="As rollout.max_age.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="As rollout.max_staleness.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = len(os.sched_getaffinity(0)),
    plot: Annotated[
        Path | None, typer.Option(help="Plot age against speed into this SVG instead.")
    ] = None,
) -> None:
    """Compare rollout policies. The last line is JSON."""
    base = PRESETS[preset]
    given: dict[str, Any] = {
        "steps": steps or (20 if quick else None),
        "replicas": replicas,
        "training_seconds": training_seconds,
        "report_seconds": report_seconds,
        "overhead_seconds": overhead_seconds,
        "overhead_per_token": overhead_per_token,
        "prompts_per_step": prompts_per_step,
        "batch_prompts": batch_prompts,
        "lookahead": lookahead,
        "max_overtake": max_overtake,
        "max_age": max_age,
        "max_staleness": max_staleness,
    }
    setting = replace(base, **{name: value for name, value in given.items() if value is not None})
    engine = replace(
        setting.engine,
        max_sequences=max_sequences or setting.engine.max_sequences,
        prefill=prefill_tokens_per_second,
        turn_seconds=setting.engine.turn_seconds if turn_seconds is None else turn_seconds,
    )
    setting = replace(setting, engine=engine)
    started = time.monotonic()
    workloads = _workloads(setting, mean, keep_rate, sigma, between, recorded, seed, quick)
    if plot is not None:
        points = frontier(setting, workloads, jobs)
        plot.write_text(draw(points), encoding="utf-8")
        results = [asdict(point) for point in points]
    else:
        names = [
            name for name in POLICIES if not policy or any(name.startswith(text) for text in policy)
        ]
        cases = [Case(n, setting, work, *of) for of, work in workloads.items() for n in names]
        results = report(cases, measure_all(cases, jobs))
    asked = {"sigma": sigma, "between": between, "recorded": recorded is not None, "seed": seed}
    seconds = {"seconds": round(time.monotonic() - started, 1)}
    print(json.dumps({**facts(), **seconds, **asked, **asdict(setting), "results": results}))


def _workloads(
    setting: Setting,
    means: list[float] | None,
    keep_rates: list[float] | None,
    sigma: float,
    between: float,
    recorded: Path | None,
    seed: int,
    quick: bool,
) -> dict[tuple[float, float], Workload]:
    """Return workloads by (mean length, keep rate)."""
    if recorded is not None:
        drawn = Recorded(read_recorded(recorded), seed)
        return {(drawn.mean, drawn.keep_rate): drawn}
    return {
        (mean, keep_rate): LogNormal(
            mean=mean,
            keep_rate=keep_rate,
            samples=setting.samples,
            cap=setting.max_tokens,
            sigma=sigma,
            between=between,
            seed=seed,
        )
        for mean in means or (1_500.0, 4_500.0)
        for keep_rate in keep_rates or ((0.5,) if quick else (0.3, 0.5, 0.7))
    }


def report(cases: Sequence[Case], results: Sequence[Figures]) -> list[dict[str, Any]]:
    """Print table and verdicts. Return all results as plain values."""
    whole = {c.name: f for c, f in zip(cases, results) if c.policy == WHOLE_BATCHES}
    setting = cases[0].setting
    table = Table(*HEADS)
    table.title = (
        f"{setting.replicas} engines, {setting.prompts_per_step} groups of {setting.samples}, "
        f"{setting.steps} steps; ages and lengths after step {setting.warmup}"
    )
    lines = []
    for case, figures in zip(cases, results):
        add_row(table, case, figures, whole.get(case.name))
        lines += verdicts(case, figures, whole.get(case.name))
    # Wider than many terminals, because truncated figures are useless.
    Console(soft_wrap=True, width=200).print(table)
    print(*lines, sep="\n")
    return [
        {"mean": case.mean, "keep_rate": case.keep_rate, "policy": case.policy, **asdict(figures)}
        for case, figures in zip(cases, results)
    ]


if __name__ == "__main__":
    typer.run(main)
