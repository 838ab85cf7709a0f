"""Measure what a rollout step costs besides engines and policy: control, tokens, files, memory.

    python tools/bench/data_plane.py            # 41 M tokens, 16 processes, no GPU
    python tools/bench/data_plane.py --quick    # seconds

Engines are replaced by a generator of completions, and the policy by nothing. Everything else is
the product's: coordinator, sockets, workers, delivery, assembly, recording, checkpoint. Seconds are
of CPU time, so they hardly depend on what else the machine does. The benchmark's own work, such as
making completions up, is subtracted.

- *blocks the step*: all threads of a rank except those that write files, without what threads of
  gloo and ZeroMQ take on an idle rank in the same time
- *memory*: peak of the resident memory above that of an idle start, over the raw bytes of what a
  rank holds: 8 per token of completions on rank 0 and of the sequences that it trains on, and 4 per
  token that its engine continues without being the leader
- *scaling*: the coordinator with many leaders in real time (data_plane_scaling.py)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from data_plane_ranks import Setting, run
from data_plane_scaling import Scaling, measure
from rich.console import Console
from rich.table import Table

from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.tracking.provenance import facts

REPOSITORY = Path(__file__).resolve().parents[2]
LEADERS = (16, 64, 256)
GENERATION_SHARE = 0.81
"""Share of a step in which engines generate: 262 of 322 s in docs/rollout.md (mean 4,500, keep rate
0.5, 32 engines). A step of 2,048 GPUs with as many prompts per GPU takes as long."""
ENGINE_STEPS_PER_SECOND = 60.0
"""Steps of a real engine, as in tools/lab/virtual_engines.py (one token per sequence and step)."""
TARGETS = {
    "rank0_cpu_seconds": 2.5,
    "other_cpu_seconds_max": 0.5,
    "record_blocking_seconds": 0.3,
    "record_cpu_seconds": 20.0,
    "received_over_own_max": 1.05,
    "rss_over_raw_max": 3.0,
    "coordinator_share_2048": 0.01,
}
NAMES = {
    "rank0_cpu_seconds": "blocks the step on rank 0, s",
    "other_cpu_seconds_max": "on any other rank, s",
    "record_blocking_seconds": "recording and checkpoint: blocks, s",
    "record_cpu_seconds": "in the background, all ranks, s",
    "received_over_own_max": "received / own sequences",
    "rss_over_raw_max": "memory / raw",
    "coordinator_share_2048": "coordinator at 256 leaders, share of rank 0",
}
RECORDING_PARTS = ("close", "diagnose", "save")


Ranks = Sequence[dict[str, Any]]
"""Figures of all ranks in a step."""


def _all(ranks: Ranks) -> Ranks:
    return ranks


def _rank0(ranks: Ranks) -> Ranks:
    return ranks[:1]


def _leaders(ranks: Ranks) -> Ranks:
    return [rank for rank in ranks[1:] if rank["is_leader"]] or ranks[:1]


def _followers(ranks: Ranks) -> Ranks:
    return [rank for rank in ranks if not rank["is_leader"]] or ranks[:1]


GROUPS = {"rank 0": _rank0, "other leaders": _leaders, "others": _followers}
"""Ranks whose largest figure is printed."""


@dataclass(frozen=True)
class Steps:
    """Figures of all measured steps."""

    steps: Sequence[Ranks]

    def largest(
        self, value: Callable[[dict[str, Any]], float], of: Callable[[Ranks], Ranks] = _all
    ) -> float:
        """Return the largest value of some ranks, mean over steps."""
        return fmean(max(map(value, of(ranks))) for ranks in self.steps)

    def total(self, value: Callable[[dict[str, Any]], float]) -> float:
        """Return the sum over all ranks, mean over steps."""
        return fmean(sum(map(value, ranks)) for ranks in self.steps)


def part(*names: str) -> Callable[[dict[str, Any]], float]:
    """Return a function from a rank's figures to its seconds in these parts; without names, in all
    of them."""

    def seconds(rank: dict[str, Any]) -> float:
        parts: dict[str, float] = rank["seconds"]
        return sum(parts.get(name, 0.0) for name in names or parts)

    return seconds


def summarize(steps: Steps) -> dict[str, Any]:
    """Return the figures of the JSON line."""

    def peak(rank: dict[str, Any]) -> float:
        return float(rank["peak_bytes"] / 2**20)

    parts = dict.fromkeys(name for rank in steps.steps[-1] for name in rank["seconds"])
    return {
        "tokens": round(steps.largest(itemgetter("num_tokens"), _rank0)),
        "sequences": round(steps.largest(itemgetter("num_sequences"), _rank0)),
        "rank0_cpu_seconds": steps.largest(part(), _rank0),
        "other_cpu_seconds_max": steps.largest(part(), lambda ranks: ranks[1:]),
        "follower_cpu_seconds_max": steps.largest(part(), _followers),
        "record_blocking_seconds": steps.largest(part(*RECORDING_PARTS)),
        "record_cpu_seconds": steps.total(
            lambda rank: rank["record_seconds"] + rank["checkpoint_seconds"]
        ),
        "received_over_own_max": steps.largest(
            lambda rank: rank["received_bytes"] / max(rank["own_bytes"], 1)
        ),
        "rss_over_raw_max": steps.largest(
            lambda rank: rank["peak_bytes"] / max(rank["raw_bytes"], 1)
        ),
        "rss_over_raw": {
            name: steps.largest(lambda rank: rank["peak_bytes"] / max(rank["raw_bytes"], 1), group)
            for name, group in GROUPS.items()
        },
        "peak_mib": {name: steps.largest(peak, group) for name, group in GROUPS.items()},
        "plan_bytes": steps.largest(itemgetter("plan_bytes"), _rank0),
        "state_bytes": steps.largest(itemgetter("state_bytes"), _rank0),
        "file_bytes": steps.largest(itemgetter("file_bytes"), _rank0),
        "bench_seconds_max": steps.largest(itemgetter("bench_seconds")),
        "idle_seconds_max": steps.largest(itemgetter("idle_seconds")),
        "turns": steps.largest(itemgetter("turns")),
        "parts": {
            name: {label: steps.largest(part(name), group) for label, group in GROUPS.items()}
            for name in parts
        },
    }


def measure_step(setting: Setting) -> Steps:
    """Run the processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, "--rank-of", json.dumps(asdict(setting)), "--folder"]
        if launch([*command, folder], setting.processes):
            raise SystemExit("a process failed")
        return Steps(json.loads(result.read_text())["steps"])


# ---------------------------------------------------------------------------- output


def print_parts(console: Console, figures: dict[str, Any]) -> None:
    """Print CPU seconds per part."""
    table = Table("part", *GROUPS, title="CPU seconds that block a step; largest rank")
    for part, seconds in figures["parts"].items():
        table.add_row(part, *(f"{seconds[name]:.3f}" for name in GROUPS))
    console.print(table)


def print_scaling(console: Console, rows: Sequence[Scaling]) -> None:
    """Print the coordinator's cost by number of leaders."""
    table = Table(
        "leaders", "completions\nper s", "messages\nper s", "CPU µs per\ncompletion",
        "CPU of rank 0\nwhile generating", "longest wait\nof a slot, s", "free\nslots",
        "idle\nengines, s",
        title="coordinator and its sockets; engines of 9,000 tokens/s in real time",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row.leaders),
            f"{row.completions / row.wall_seconds:.0f}",
            f"{(row.messages_received + row.messages_sent) / row.wall_seconds:.0f}",
            f"{1e6 * row.process_seconds / max(row.completions, 1):.0f}",
            f"{row.share:.2%}",
            f"{row.longest_wait:.2f}",
            f"{row.free_slots:.2%}",
            f"{row.idle_seconds:.1f}",
        )
    console.print(table)


def print_targets(console: Console, figures: dict[str, Any], title: str) -> None:
    """Print the figures that have a target."""
    table = Table("", "now", "target", "", title=title)
    for name, target in TARGETS.items():
        value = figures.get(name)
        if value is None:
            table.add_row(NAMES[name], "not measured", f"{target:g}", "")
            continue
        table.add_row(
            NAMES[name],
            f"{value:.4g}",
            f"{target:g}",
            "met" if value <= target else "missed",
        )
    console.print(table)


def main(
    processes: Annotated[int, typer.Option(help="Ranks.")] = Setting.processes,
    prompts: Annotated[int, typer.Option(help="Prompts per step.")] = Setting.prompts,
    samples: Annotated[int, typer.Option(help="Completions per prompt.")] = Setting.samples,
    mean_tokens: Annotated[float, typer.Option(help="Mean length.")] = Setting.mean_tokens,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = Setting.steps,
    engine_ranks: Annotated[int, typer.Option(help="Ranks per engine.")] = Setting.engine_ranks,
    seed: Annotated[int, typer.Option(help="Seed of the completions.")] = Setting.seed,
    leaders: Annotated[
        list[int] | None, typer.Option(help="Leaders to simulate; 0: none. By default 16, 64, 256.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A tiny size, no scaling.")] = False,
    rank_of: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the data plane. The last line is JSON."""
    if is_launched() and folder is not None:
        run(Setting(**json.loads(rank_of)), folder, folder / "result.json")
        return
    setting = Setting(processes, prompts, samples, mean_tokens, steps, engine_ranks, seed=seed)
    if quick:
        setting = Setting(2, 4, 4, 50, 1, 1, turn_seconds=0.0, updates=2, seed=seed)
        leaders = [0]
    figures = {"processes": setting.processes, **summarize(measure_step(setting))}
    rows = [measure(setting, number, 1) for number in leaders or LEADERS if number]
    if rows and rows[-1].leaders >= 256:
        figures["coordinator_share_2048"] = GENERATION_SHARE * rows[-1].share
    console = Console(soft_wrap=True, width=120)
    print_parts(console, figures)
    if rows:
        print_scaling(console, rows)
    title = f"{figures['tokens']:,} tokens, {setting.processes} processes"
    print_targets(console, figures, title)
    scaling = [{**asdict(row), "share": row.share} for row in rows]
    print(json.dumps({**facts(), **asdict(setting), **figures, "scaling": scaling}))


if __name__ == "__main__":
    typer.run(main)
