"""Compare the cost of rollout policies on a simulated cluster.

    python tools/lab/simulate_rollouts.py
    python tools/lab/simulate_rollouts.py --keep-rate 0.5 replicas=8 prompts_per_step=128 \
        batch_prompts=384 engine.prefill=40000

The real coordinator (dapo_megatron/rollout) drives engines on a virtual clock
(tools/lab/virtual_engines.py). It is compared with small simulations of what other systems do
(tools/lab/rollout_policies.py). Answers are drawn, speeds come from a model. So the comparison is
of decisions: which prompts to issue, what to wait for, and what to keep.

KEY=VALUE changes a field of `Setting`, or of its `engine`. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rollout_policies import Figures, LogNormal, Policy, Setting, run

from dapo_megatron.tracking.provenance import facts

HEADS = (
    "mean length,\nkeep rate",
    "policy",
    "seconds per step\n(of the first)",
    "busy",
    "age, versions\nmean / largest",
    "prompts\nper step",
    "mixed groups\nlost",
    "tokens\nwasted",
    "trained length /\nmixed length",
    "p, same\nlengths",
)
COMPARED = [policy for policy in Policy if policy is not Policy.ASYNCHRONOUS]


@dataclass(frozen=True)
class Case:
    """A policy on a workload: one row of the table."""

    policy: Policy
    setting: Setting
    workload: LogNormal

    def run(self) -> Figures:
        """Run the case."""
        return run(self.policy, self.setting, self.workload)


def changed(setting: Setting, assignments: list[str]) -> Setting:
    """Return the setting with each KEY=VALUE assigned. Raises typer.BadParameter, by key."""
    tree = asdict(setting)
    for text in assignments:
        key, _, value = text.partition("=")
        of_engine, name = key.startswith("engine."), key.removeprefix("engine.")
        branch = tree["engine"] if of_engine else tree
        if name not in branch or name == "engine":
            raise typer.BadParameter(f"{key}: not a field of Setting in rollout_policies.py")
        branch[name] = value
    try:
        return msgspec.convert(tree, Setting, strict=False)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error)) from None


def show(cases: list[Case], results: list[Figures]) -> Table:
    """Return a table with a row per case."""
    setting, table = cases[0].setting, Table(*HEADS)
    table.title = (
        f"{setting.replicas} engines, {setting.prompts_per_step} groups of {setting.samples}, "
        f"{setting.steps} steps; ages and lengths after step {setting.warmup}"
    )
    first: dict[str, float] = {}
    for case, figures in zip(cases, results, strict=True):
        name = f"{case.workload.mean:,.0f}, {case.workload.keep_rate:.2g}"
        share = figures.seconds_per_step / first.setdefault(name, figures.seconds_per_step)
        table.add_row(
            name,
            case.policy,
            f"{figures.seconds_per_step:.0f} ({share:.2f})",
            f"{figures.busy:.3f}",
            f"{figures.age_mean:.2f} / {figures.age_max}",
            f"{figures.prompts_per_step:,.0f}",
            f"{figures.lost_groups:,}",
            f"{figures.wasted_tokens:.1%}",
            f"{figures.length_ratio:.3f}",
            f"{figures.length_p:.2g}",
        )
    return table


def main(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Fields of Setting to change.")
    ] = None,
    mean: Annotated[list[float], typer.Option(help="Mean length, after the cut; repeatable.")] = [  # noqa: B006
        1_500.0,
        4_500.0,
    ],
    keep_rate: Annotated[list[float], typer.Option(help="Share of mixed groups; repeatable.")] = [  # noqa: B006
        0.5
    ],
    policy: Annotated[list[Policy], typer.Option(help="Policy to run; repeatable.")] = COMPARED,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the log of lengths.")] = 1.0,
    between: Annotated[float, typer.Option(help="Share of its variance between prompts.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = len(os.sched_getaffinity(0)),
) -> None:
    """Compare rollout policies on a simulated cluster."""
    setting = changed(Setting(), settings or [])
    workloads = [
        LogNormal(length, rate, setting.samples, setting.max_tokens, sigma, between, seed)
        for length in mean
        for rate in keep_rate
    ]
    cases = [Case(name, setting, workload) for workload in workloads for name in policy]
    results = []
    with multiprocessing.Pool(jobs) as pool:
        for case, figures in zip(cases, pool.imap(Case.run, cases), strict=True):
            print(f"{case.workload.mean:,.0f}, {case.policy}: done", file=sys.stderr, flush=True)
            results.append(figures)
    # Wider than many terminals, because truncated figures are useless.
    Console(soft_wrap=True, width=200).print(show(cases, results))
    rows = [
        {"mean": case.workload.mean, "keep_rate": case.workload.keep_rate, "policy": case.policy}
        | asdict(figures)
        for case, figures in zip(cases, results, strict=True)
    ]
    asked = {"sigma": sigma, "between": between, "seed": seed, "setting": asdict(setting)}
    print(json.dumps({**facts(), **asked, "results": rows}))


if __name__ == "__main__":
    typer.run(main)
