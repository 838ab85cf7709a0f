"""What a report costs: seconds to write, bytes, and how soon Chromium shows it.

    python tools/bench/report.py

Made runs (tests/helpers/made_run.py): a long one of 2,000 steps, a broad one of 200 steps with more
completions in each, and a wordy one whose answers have thousands of tokens. Making them is not
counted. Without a Chromium the figures of the page are left out.
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

from dapo_megatron.tracking.provenance import facts  # noqa: E402
from tests.browser.chromium import Watched, find_chromium, launch  # noqa: E402
from tests.helpers.made_run import MadeRun  # noqa: E402

MAX_WRITE_SECONDS = 20.0
MAX_BYTES = 30_000_000
MAX_READY_SECONDS = 2.0
NUM_LOADS = 5
"""Of a page, at least: it is soon done, and a neighbor disturbs it more."""


@dataclass(frozen=True)
class Figures:
    """Of one report; None without a browser."""

    run: str
    steps: int
    completions: int
    """Recorded by the run."""
    kept: int
    """Completions asked for in full."""
    write_seconds: float
    """Of the whole command, the interpreter's start included."""
    bytes: int
    first_paint_seconds: float | None = None
    ready_seconds: float | None = None
    """Until body[data-ready]: from the page's begin to where it can be used."""
    network_requests: int | None = None


def measure(made: MadeRun, folder: Path, kept: int, rounds: int) -> Figures:
    """Make the run, write its report, open it; the best of `rounds`, for machines are busy."""
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
    return Figures(
        made.name,
        made.num_steps,
        _num_completions(run),
        kept,
        min(seconds),
        report.stat().st_size,
        *_shown(report, max(rounds, NUM_LOADS)),
    )


def _num_completions(run: Path) -> int:
    indices = (run / "samples" / "index").glob("step_*.json")
    return sum(len(json.loads(path.read_bytes())["completions"]["group"]) for path in indices)


def _shown(report: Path, rounds: int) -> tuple[float | None, float | None, int | None]:
    program = find_chromium()
    if program is None:
        return None, None, None
    paints, readies, asked = [], [], 0
    with sync_playwright() as playwright:
        browser = launch(playwright, program)
        for _ in range(rounds):
            watched = Watched.new(browser)
            page = watched.page
            page.set_default_timeout(60_000)
            # The time is taken in the page: waiting from here asks at intervals.
            page.add_init_script(READY_SCRIPT)
            page.goto(report.as_uri(), timeout=60_000)
            page.wait_for_function("window.readyAt")
            readies.append(page.evaluate("window.readyAt") / 1000)
            if paint := page.evaluate(PAINT_SCRIPT):
                paints.append(paint / 1000)
            asked += len([one for one in watched.problems if "network" in one])
            watched.close()
        browser.close()
    return min(paints, default=None), min(readies), asked


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


def table(found: list[Figures]) -> Table:
    """A row per report."""
    head = ("run", "steps", "completions", "in full", "written in, s", "MB", "first paint, s",
            "ready, s")  # fmt: skip
    made = Table(*head)
    for one in found:
        shown = [
            "-" if value is None else f"{value:.2f}"
            for value in (one.first_paint_seconds, one.ready_seconds)
        ]
        made.add_row(
            one.run, f"{one.steps:,}", f"{one.completions:,}", f"{one.kept:,}",
            f"{one.write_seconds:.1f}", f"{one.bytes / 1e6:.1f}", *shown,
        )  # fmt: skip
    return made


def verdicts(one: Figures) -> list[str]:
    """A line per target, met or missed."""
    targets = [
        ("written in", one.write_seconds, MAX_WRITE_SECONDS, "s"),
        ("size", one.bytes / 1e6, MAX_BYTES / 1e6, "MB"),
        ("ready in", one.ready_seconds, MAX_READY_SECONDS, "s"),
    ]
    return [
        f"{one.run}: {what} {value:.2f} {unit}, at most {most:g}: target "
        + ("met" if value <= most else "missed")
        for what, value, most, unit in targets
        if value is not None
    ]


def main(
    steps: Annotated[int, typer.Option(help="Rollout steps of the long run.")] = 2_000,
    kept: Annotated[int, typer.Option(help="Completions in full (--completions).")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Each is measured so often; the best counts.")] = 2,
) -> None:
    """Measure the reports; the last line is JSON."""
    runs = [
        MadeRun(steps, name="long"),
        MadeRun(200, groups_per_step=16, samples_per_group=16, name="broad"),
        MadeRun(40, tokens_per_completion=4_000, name="wordy"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(made, Path(folder), kept, rounds) for made in runs]
    Console(soft_wrap=True, width=140).print(table(found))
    for one in found:
        print(*verdicts(one), sep="\n")
    if find_chromium() is None:
        print("no Chromium here: nothing is said of the page (tests/browser/install.sh)")
    print(json.dumps({**facts(), "results": [asdict(one) for one in found]}, allow_nan=False))


if __name__ == "__main__":
    typer.run(main)
