"""Measure how well micro-batches are filled and ranks balanced, on lengths like a DAPO run's.

    python tools/bench/packing.py

Lengths are log-normal, cut at the response limit. Padding is given as a share of all computed
tokens. Work is `data.packing.work`, padding included.

Ranks wait for each other at the end of an update, so the slowest rank is compared with the mean
rank. With expert parallelism or pipelines they also wait in every micro-batch, so the slowest
micro-batch of each position is compared with the mean of that position.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.data.packing import (
    MicrobatchPlan,
    microbatch_work,
    padded_tokens,
    plan_microbatches,
    work,
)
from dapo_megatron.tracking.provenance import facts

MAX_PADDING = 0.01
MAX_SLOWEST_RANK = 1.03


@dataclass(frozen=True)
class Setting:
    """Number of ranks, and the limits of a micro-batch."""

    ranks: int = 16
    max_tokens: int = 24_576
    sequence_multiple: int = 4
    row_multiple: int = 4
    naive_count: int = 8
    """Sequences per micro-batch of the naive plan."""

    def tokens(self, lengths: Sequence[int], packed: bool) -> int:
        """Return the tokens of a micro-batch of sequences of these lengths, padding included."""
        return padded_tokens(
            lengths,
            packed=packed,
            sequence_multiple=self.sequence_multiple,
            row_multiple=self.row_multiple,
        )


@dataclass(frozen=True)
class Figures:
    """Quality of a plan. Ratios are at least 1, and 1 is best."""

    padding: float
    """Share of padding in all computed tokens."""
    slowest_rank: float
    """Work of the slowest rank over that of the mean rank."""
    lower_bound: float
    """max(work of the longest sequence, of the mean rank) over that of the mean rank. No plan has a
    smaller `slowest_rank`."""
    worst_position: float
    """Work of the slowest micro-batch over the mean of its position; the worst position."""
    all_positions: float
    """The same ratio, summed over all positions."""
    microbatches: int
    """Micro-batches per rank."""
    largest_tokens: int
    """Tokens of the largest micro-batch, padding included."""
    seconds: float
    """CPU seconds of the planning."""


def draw_lengths(
    num: int, seed: int, *, median: float = 1_500, sigma: float = 1.0, cap: int = 20_480
) -> list[int]:
    """Return log-normal lengths in tokens, between 1 and `cap`, the response limit."""
    rng = random.Random(seed)
    drawn = (rng.lognormvariate(math.log(median), sigma) for _ in range(num))
    return [min(max(round(length), 1), cap) for length in drawn]


def measure(
    plan: MicrobatchPlan,
    lengths: Sequence[int],
    setting: Setting,
    *,
    packed: bool,
    seconds: float = 0.0,
) -> Figures:
    """Return the figures of a plan that took `seconds` CPU seconds to make."""
    micros = [[[lengths[index] for index in micro] for micro in rank] for rank in plan]
    works = [[microbatch_work(micro, packed=packed) for micro in rank] for rank in micros]
    tokens = [setting.tokens(micro, packed) for rank in micros for micro in rank]
    ranks = [sum(rank) for rank in works]
    mean = statistics.fmean(ranks)
    slowest = [max(position) for position in zip(*works)]
    means = [statistics.fmean(position) for position in zip(*works)]
    return Figures(
        padding=1 - sum(lengths) / sum(tokens),
        slowest_rank=max(ranks) / mean,
        lower_bound=max(work(max(lengths)) / mean, 1.0),
        worst_position=max(largest / mean for largest, mean in zip(slowest, means)),
        all_positions=sum(slowest) / sum(means),
        microbatches=len(plan[0]),
        largest_tokens=max(tokens),
        seconds=seconds,
    )


def balanced(lengths: Sequence[int], setting: Setting, packed: bool) -> MicrobatchPlan:
    """Plan as training does: balance the work of micro-batches and ranks."""
    return plan_microbatches(
        lengths,
        setting.ranks,
        max_tokens=setting.max_tokens,
        packed=packed,
        sequence_multiple=setting.sequence_multiple,
        row_multiple=setting.row_multiple,
    )


def greedy_tokens(lengths: Sequence[int], setting: Setting, packed: bool) -> MicrobatchPlan:
    """Give each sequence, longest first, to the part with the fewest tokens (LPT).

    The parts are first the ranks, then a rank's micro-batches: the smallest number that fits.
    """

    def fits(micro: Sequence[int]) -> bool:
        return setting.tokens([lengths[index] for index in micro], packed) <= setting.max_tokens

    plan = []
    for share in _greedy(lengths, range(len(lengths)), setting.ranks):
        micros = [share]
        while not all(map(fits, micros)):
            micros = _greedy(lengths, share, len(micros) + 1)
        plan.append(micros)
    return _same_number(plan)


def _greedy(lengths: Sequence[int], indices: Sequence[int], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        least = tokens.index(min(tokens))
        parts[least].append(index)
        tokens[least] += lengths[index]
    return parts


def naive(lengths: Sequence[int], setting: Setting, packed: bool) -> MicrobatchPlan:
    """Deal sequences in order: equally many per rank, `naive_count` per micro-batch, no limit."""
    size, count = -(-len(lengths) // setting.ranks), setting.naive_count
    shares = [range(len(lengths))[rank * size :][:size] for rank in range(setting.ranks)]
    cuts = (range(0, len(share), count) for share in shares)
    return _same_number(
        [[list(share[start : start + count]) for start in cut] for share, cut in zip(shares, cuts)]
    )


def _same_number(plan: MicrobatchPlan) -> MicrobatchPlan:
    """Add empty micro-batches, so that all ranks have the same number."""
    number = max(map(len, plan))
    return [micros + [[] for _ in range(number - len(micros))] for micros in plan]


@dataclass(frozen=True)
class Planner:
    name: str
    make: Callable[[Sequence[int], Setting, bool], MicrobatchPlan]
    packed: bool


BALANCED = Planner("ours, packed", balanced, True)
PLANNERS = [
    BALANCED,
    Planner("ours, padded", balanced, False),
    Planner("greedy by tokens, packed", greedy_tokens, True),
    Planner("naive, padded", naive, False),
]


def compare(drawn: Sequence[Sequence[int]], setting: Setting) -> dict[str, list[Figures]]:
    """Return, by planner, the figures of each list of lengths."""
    by_planner: dict[str, list[Figures]] = {planner.name: [] for planner in PLANNERS}
    for lengths in drawn:
        for planner in PLANNERS:
            started = time.process_time()
            plan = planner.make(lengths, setting, planner.packed)
            seconds = time.process_time() - started
            figures = measure(plan, lengths, setting, packed=planner.packed, seconds=seconds)
            by_planner[planner.name].append(figures)
    return by_planner


def summary(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Return the worst (largest) value and the mean over seeds of each figure."""
    rows = [asdict(row) for row in figures]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: {"worst": max(values), "mean": statistics.fmean(values)}
        for name, values in columns.items()
    }


FORMATS = {
    "padding": ("padding", "{:.2%}"),
    "slowest_rank": ("slowest rank\n/ mean", "{:.4f}"),
    "lower_bound": ("its lower\nbound", "{:.4f}"),
    "worst_position": ("slowest micro\n/ mean, worst\nposition", "{:.2f}"),
    "all_positions": ("the same,\nall positions", "{:.3f}"),
    "microbatches": ("micro-batches\nper rank", "{:.0f}"),
    "largest_tokens": ("largest,\ntokens", "{:,.0f}"),
    "seconds": ("planning,\nCPU seconds", "{:.3f}"),
}


def add_rows(table: Table, case: str, summaries: dict[str, dict[str, dict[str, float]]]) -> None:
    """Add a row per planner. Each cell is worst / mean."""
    for name, figures in summaries.items():
        cells = [
            " / ".join(text.format(figures[key][kind]) for kind in ("worst", "mean"))
            for key, (_, text) in FORMATS.items()
        ]
        table.add_row(case, name, *cells, end_section=name == list(summaries)[-1])
        case = ""


def verdicts(case: str, figures: dict[str, dict[str, float]]) -> list[str]:
    """Return a line per target: met or missed at the worst seed."""
    targets = {"padding": MAX_PADDING, "slowest_rank": MAX_SLOWEST_RANK}
    lines = []
    for key, target in targets.items():
        text, worst = FORMATS[key][1], figures[key]["worst"]
        verdict = "met" if worst <= target else "missed"
        bound = figures["lower_bound"]["worst"]
        if key == "slowest_rank" and bound > target:
            verdict += (
                f" (one sequence is more work than the mean rank: no plan is below {bound:.4f})"
            )
        name = key.replace("_", " ")
        lines.append(f"{case}: {name} {text.format(worst)}, at most {target}: target {verdict}")
    return lines


def main(
    sequences: Annotated[
        list[int] | None, typer.Option(help="Sequences over all ranks. By default 8192 and 512.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = Setting.ranks,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = Setting.max_tokens,
    sequence_multiple: Annotated[
        int, typer.Option(help="Sequences are padded to multiples of this. 1 is measured too.")
    ] = Setting.sequence_multiple,
    row_multiple: Annotated[
        int, typer.Option(help="Rows are padded to multiples of this. 1 is measured too.")
    ] = Setting.row_multiple,
    naive_count: Annotated[
        int, typer.Option(help="Sequences per micro-batch of the naive plan.")
    ] = Setting.naive_count,
    median: Annotated[float, typer.Option(help="Median length in tokens.")] = 1_500,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the log of lengths.")] = 1.0,
    cap: Annotated[int, typer.Option(help="Longest length in tokens.")] = 20_480,
    seeds: Annotated[int, typer.Option(help="Number of random draws, with seeds 0, 1, ...")] = 10,
) -> None:
    """Compare plans of micro-batches. The last line is JSON."""
    setting = Setting(ranks, max_tokens, sequence_multiple, row_multiple, naive_count)
    aligned = {(sequence_multiple, row_multiple): setting}
    aligned[1, 1] = replace(setting, sequence_multiple=1, row_multiple=1)
    table = Table("sequences,\nmultiples", "plan", *(head for head, _ in FORMATS.values()))
    table.title = f"DP {ranks}, {max_tokens:,} tokens; worst / mean of {seeds} seeds"
    lines: list[str] = []
    results: list[dict[str, Any]] = []
    for num in sequences or [8192, 512]:
        drawn = [draw_lengths(num, s, median=median, sigma=sigma, cap=cap) for s in range(seeds)]
        for multiples, case_setting in aligned.items():
            case = f"{num}, {multiples[0]}/{multiples[1]}"
            figures_of = compare(drawn, case_setting)
            summaries = {name: summary(figures) for name, figures in figures_of.items()}
            add_rows(table, case, summaries)
            lines += verdicts(case, summaries[BALANCED.name])
            results.append({"sequences": num, **asdict(case_setting), "plans": summaries})
    # Wider than many terminals, because truncated figures are useless.
    console = Console(soft_wrap=True, width=200)
    console.print(table)
    print(*lines, sep="\n")
    distribution = {"median": median, "sigma": sigma, "cap": cap, "seeds": seeds}
    print(json.dumps({**facts(), **distribution, "results": results}))


if __name__ == "__main__":
    typer.run(main)
