"""Measure the cost of a report: seconds to write, bytes, and seconds until Chromium shows it.

    python tools/bench/report.py

It uses three generated runs (tests/helpers/made_run.py): a long one of 2,000 steps, a broad one of
200 steps with more completions each, and a wordy one whose answers have thousands of tokens.
Generating them is not counted. Without Chromium, it does not measure the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # tests/ is not installed

from dapo_megatron.rollout.record import recorded_steps, summaries  # noqa: E402
from dapo_megatron.tracking.provenance import facts  # noqa: E402
from tests.browser.chromium import Watched, find_chromium, launch  # noqa: E402
from tests.helpers.made_run import MadeRun  # noqa: E402

MAX_WRITE_SECONDS = 20.0
MAX_BYTES = 30_000_000
MAX_READY_SECONDS = 2.0
NUM_LOADS = 5
"""Minimum number of loads of a page. A load is short, so other processes disturb it more."""


@dataclass(frozen=True)
class Measurement:
    """Measurements of one report. Those of the page are None without a browser."""

    run: str
    steps: int
    completions: int
    """Completions that the run recorded."""
    kept: int
    """Completions that the report shows in full (--completions)."""
    write_seconds: float
    """Seconds of the whole command, including the start of the interpreter."""
    bytes: int
    first_paint_seconds: float | None = None
    ready_seconds: float | None = None
    """Seconds from the start of the load until the page can be used (body[data-ready])."""
    network_requests: int | None = None


def measure(made: MadeRun, folder: Path, kept: int, rounds: int) -> Measurement:
    """Generate the run, write its report and open it.

    Returns the best of `rounds`, because other processes may slow a round.
    """
    run = made.write(folder / made.name)
    report = folder / f"{made.name}.html"
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "dapo_megatron", "report", str(run), "--output", str(report),
             "--completions", str(kept)],
            cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
    return Measurement(
        made.name,
        made.num_steps,
        _num_completions(run),
        kept,
        min(seconds),
        report.stat().st_size,
        *_measure_page(report, max(rounds, NUM_LOADS)),
    )


def _num_completions(run: Path) -> int:
    return sum(map(len, map(summaries, recorded_steps(run / "samples").values())))


def _measure_page(report: Path, rounds: int) -> tuple[float | None, float | None, int | None]:
    """Return the seconds to first paint, the seconds until ready, and the network requests."""
    program = find_chromium()
    if program is None:
        return None, None, None
    paints, readies, num_requests = [], [], 0
    with sync_playwright() as playwright:
        browser = launch(playwright, program)
        for _ in range(rounds):
            watched = Watched.new(browser)
            page = watched.page
            page.set_default_timeout(60_000)
            # The page takes the time itself, because wait_for_function polls at intervals.
            page.add_init_script(READY_SCRIPT)
            page.goto(report.as_uri(), timeout=60_000)
            page.wait_for_function("window.readyAt")
            readies.append(page.evaluate("window.readyAt") / 1000)
            if paint := page.evaluate(PAINT_SCRIPT):
                paints.append(paint / 1000)
            num_requests += len([problem for problem in watched.problems if "network" in problem])
            watched.close()
        browser.close()
    return min(paints, default=None), min(readies), num_requests


READY_SCRIPT = """
new MutationObserver(() => {
  if (!window.readyAt && document.body?.dataset.ready === "true") {
    window.readyAt = performance.now();
  }
}).observe(document, {subtree: true, attributeFilter: ["data-ready"]});
"""
PAINT_SCRIPT = """
performance.getEntriesByName("first-contentful-paint")[0]?.startTime
"""


def table(measurements: list[Measurement]) -> Table:
    """Return a table with a row per report."""
    head = ("run", "steps", "completions", "in full", "written in, s", "MB", "first paint, s",
            "ready, s")  # fmt: skip
    result = Table(*head)
    for row in measurements:
        page_seconds = [
            "-" if value is None else f"{value:.2f}"
            for value in (row.first_paint_seconds, row.ready_seconds)
        ]
        result.add_row(
            row.run, f"{row.steps:,}", f"{row.completions:,}", f"{row.kept:,}",
            f"{row.write_seconds:.1f}", f"{row.bytes / 1e6:.1f}", *page_seconds,
        )  # fmt: skip
    return result


def verdicts(measured: Measurement) -> list[str]:
    """Return a line per target: met or missed."""
    targets = [
        ("written in", measured.write_seconds, MAX_WRITE_SECONDS, "s"),
        ("size", measured.bytes / 1e6, MAX_BYTES / 1e6, "MB"),
        ("ready in", measured.ready_seconds, MAX_READY_SECONDS, "s"),
    ]
    return [
        f"{measured.run}: {what} {value:.2f} {unit}, at most {limit:g}: target "
        + ("met" if value <= limit else "missed")
        for what, value, limit, unit in targets
        if value is not None
    ]


def main(
    steps: Annotated[int, typer.Option(help="Rollout steps of the long run.")] = 2_000,
    kept: Annotated[int, typer.Option(help="Completions in full (--completions).")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Measurements of each run; the best counts.")] = 2,
) -> None:
    """Measure the reports. The last line is JSON."""
    runs = [
        MadeRun(steps, name="long"),
        MadeRun(200, groups_per_step=16, samples_per_group=16, name="broad"),
        MadeRun(40, tokens_per_completion=4_000, name="wordy"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        measurements = [measure(made, Path(folder), kept, rounds) for made in runs]
    Console(soft_wrap=True, width=140).print(table(measurements))
    for measured in measurements:
        print(*verdicts(measured), sep="\n")
    if find_chromium() is None:
        print("no Chromium: the page was not measured; tests/browser/install.sh installs it")
    results = [asdict(measured) for measured in measurements]
    print(json.dumps({**facts(), "results": results}, allow_nan=False))


if __name__ == "__main__":
    typer.run(main)
