"""Compare both forms of a run on a simulated cluster: all GPUs with policy and engine in turns, or
engines on other GPUs than the policy.

    python tools/lab/simulate_forms.py

It uses the real coordinator, with engines on a virtual clock and answers as in
simulate_rollouts.py. The work is the same in every row. The seconds of training are inversely
proportional to the number of the policy's GPUs, and proportional to the mean length of the answers.
Engines are alike in all rows, only their number differs. Between the two turns of a GPU that has
both, policy and engine exchange the memory (--turn-seconds), and everything waits during a sync
(--sync-seconds).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rollout_policies import Figures, Policy, Setting, asynchronous, coordinated, on_policy, run
from rollout_workload import LogNormal

from dapo_megatron.tracking.provenance import facts

GPUS = 128
GPUS_PER_ENGINE = 4
MEAN = 1_500.0
"""Mean length for which `Setting.training_seconds` holds."""
SPLITS = (32, 48, 56, 64, 96)
"""Numbers of the policy's GPUs."""
CARRYING, ON_POLICY, ASYNCHRONOUS = "carrying", "on-policy", "asynchronous"
POLICIES: dict[str, Policy] = {
    CARRYING: coordinated,
    ON_POLICY: on_policy,
    ASYNCHRONOUS: asynchronous,
}


@dataclass(frozen=True)
class Form:
    """A row of the table: which GPUs have what, and how a step proceeds."""

    policy: str
    """Key of POLICIES."""
    policy_gpus: int
    engine_gpus: int

    @property
    def is_hybrid(self) -> bool:
        """Whether every GPU has a policy and an engine."""
        return self.policy_gpus == self.engine_gpus == GPUS

    @property
    def name(self) -> str:
        """Name in the table."""
        return "hybrid" if self.is_hybrid else f"{self.policy_gpus} + {self.engine_gpus}"


@dataclass(frozen=True)
class Case:
    """A form with a workload."""

    form: Form
    setting: Setting
    mean: float
    keep_rate: float

    @property
    def title(self) -> str:
        """Name of the workload."""
        return f"{self.mean:,.0f}, {self.keep_rate:.2g}"


@dataclass(frozen=True)
class Result:
    """Figures of a case. Shares are of the time of a step, after the warmup."""

    figures: Figures
    generating: float
    """Generated tokens over the most that the engines can generate in the whole time."""
    training: float
    """Share of the time in which the policy trains."""
    at_work: float
    """Both, over all GPUs."""


def forms(splits: Sequence[int]) -> Iterator[Form]:
    """Yield the rows of a workload."""
    for policy in (CARRYING, ON_POLICY):
        yield Form(policy, GPUS, GPUS)
    for number in splits:
        for policy in (ASYNCHRONOUS, ON_POLICY):
            yield Form(policy, number, GPUS - number)


def setting_of(form: Form, base: Setting, mean: float, turn_seconds: float) -> Setting:
    """Return the setting of a form. `turn_seconds` are lost in a step where GPUs have both."""
    return replace(
        base,
        replicas=form.engine_gpus // GPUS_PER_ENGINE,
        training_seconds=base.training_seconds * mean / MEAN * GPUS / form.policy_gpus,
        overhead_seconds=base.overhead_seconds + turn_seconds * form.is_hybrid,
    )


def measure(case: Case) -> Result:
    """Simulate a case."""
    setting, form = case.setting, case.form
    workload = LogNormal(case.mean, case.keep_rate, setting.samples, setting.max_tokens)
    figures = run(POLICIES[form.policy], setting, workload)
    training = setting.training_seconds / figures.steady_seconds
    share_generating = 1.0 if form.policy == ASYNCHRONOUS else 1.0 - training
    generating = figures.busy * share_generating
    at_work = (generating * form.engine_gpus + training * form.policy_gpus) / GPUS
    return Result(figures, generating, training, at_work)


def add_row(table: Table, case: Case, result: Result, hybrid: Result) -> None:
    """Add a row. `hybrid` is the result of carrying with both on every GPU."""
    figures = result.figures
    table.add_row(
        case.title,
        case.form.name,
        case.form.policy,
        f"{figures.steady_seconds:.0f} "
        f"({figures.steady_seconds / hybrid.figures.steady_seconds:.2f})",
        f"{result.generating:.2f}",
        f"{result.training:.2f}",
        f"{result.at_work:.2f}",
        f"{figures.age_mean:.2f} / {figures.age_max}",
        f"{figures.lost_groups:,}",
    )


HEADS = (
    "mean length,\nkeep rate",
    "GPUs: policy\n+ engines",
    "groups",
    "seconds per step\n(of hybrid, carrying)",
    "engines\ngenerate",
    "policy\ntrains",
    "GPUs\nat work",
    "age, versions\nmean / largest",
    "mixed groups\nlost",
)


def main(
    mean: Annotated[list[float] | None, typer.Option(help="Mean lengths, after the cut.")] = None,
    keep_rate: Annotated[list[float] | None, typer.Option(help="Shares of mixed groups.")] = None,
    split: Annotated[list[int] | None, typer.Option(help="Numbers of the policy's GPUs.")] = None,
    training_seconds: Annotated[
        float, typer.Option(help="Seconds of training per step on all GPUs, at mean length 1,500.")
    ] = 60.0,
    sync_seconds: Annotated[float, typer.Option(help="Seconds of a sync, in every form.")] = 1.0,
    turn_seconds: Annotated[
        float, typer.Option(help="Seconds per step in which policy and engine exchange a GPU.")
    ] = 1.0,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Speed of reading prompts and continued answers. By default no cost."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Rollout steps.")] = 50,
    jobs: Annotated[int, typer.Option(help="Processes.")] = len(os.sched_getaffinity(0)),
) -> None:
    """Compare both forms. The last line is JSON."""
    started = time.monotonic()
    base = Setting(
        training_seconds=training_seconds,
        overhead_seconds=0.5 + sync_seconds,
        overhead_per_token=5e-8,
        steps=steps,
    )
    base = replace(base, engine=replace(base.engine, prefill=prefill_tokens_per_second))
    cases = [
        Case(form, setting_of(form, base, length, turn_seconds), length, rate)
        for length in mean or (1_500.0, 4_500.0)
        for rate in keep_rate or (0.3, 0.5, 0.7)
        for form in forms(split or SPLITS)
    ]
    with multiprocessing.Pool(jobs) as pool:
        results = pool.map(measure, cases, chunksize=1)
    hybrid = {
        case.title: result
        for case, result in zip(cases, results)
        if case.form.is_hybrid and case.form.policy == CARRYING
    }
    table = Table(*HEADS)
    table.title = f"{GPUS} GPUs, engines of {GPUS_PER_ENGINE}, {steps} steps"
    for case, result in zip(cases, results):
        add_row(table, case, result, hybrid[case.title])
    Console(soft_wrap=True, width=160).print(table)
    rows = [
        {"mean": case.mean, "keep_rate": case.keep_rate, **asdict(case.form), **asdict(result)}
        for case, result in zip(cases, results)
    ]
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({**facts(), "seconds": seconds, **asdict(base), "results": rows}))


if __name__ == "__main__":
    typer.run(main)
