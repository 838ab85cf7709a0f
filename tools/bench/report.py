"""Measure the cost of a report: seconds to write, bytes, and seconds until Chromium shows it.

    python tools/bench/report.py

It uses three generated runs (tests/helpers/made_run.py): a long one of 2,000 steps, a broad one of
200 steps with more completions each, and a wordy one whose answers have thousands of tokens.
Generating them is not counted. Without Chromium, it does not measure the page.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import sync_playwright

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # tests/ is not installed

from dapo_megatron.rollout.record import recorded_steps, summaries  # noqa: E402
from tests.browser.chromium import Watched, find_chromium, launch  # noqa: E402
from tests.helpers.made_run import MadeRun  # noqa: E402
from tools.bench.bench import finish, show  # noqa: E402

TARGETS = {"written in, s": 20.0, "MB": 30.0, "ready, s": 2.0}
NUM_LOADS = 5
"""Loads of a page; the best counts, because other processes may slow a load."""

READY_SCRIPT = """
new MutationObserver(() => {
  if (!window.readyAt && document.body?.dataset.ready === "true") {
    window.readyAt = performance.now();
  }
}).observe(document, {subtree: true, attributeFilter: ["data-ready"]});
"""


def measure(made: MadeRun, folder: Path, rounds: int) -> dict[str, Any]:
    """Generate the run, write its report and open it. Returns the best of `rounds`."""
    run = made.write(folder / made.name)
    report = folder / f"{made.name}.html"
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "dapo_megatron", "report", str(run), "--output", str(report)],
            cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
    return {
        "run": made.name,
        "steps": made.num_steps,
        "completions": sum(map(len, map(summaries, recorded_steps(run / "samples").values()))),
        "written in, s": min(seconds),
        "MB": report.stat().st_size / 1e6,
        "ready, s": _seconds_until_ready(report),
    }


def _seconds_until_ready(report: Path) -> float | None:
    program = find_chromium()
    if program is None:
        return None
    seconds = []
    with sync_playwright() as playwright:
        browser = launch(playwright, program)
        for _ in range(NUM_LOADS):
            watched = Watched.new(browser)
            # The page takes the time itself, because wait_for_function polls at intervals.
            watched.page.add_init_script(READY_SCRIPT)
            watched.page.goto(report.as_uri(), timeout=60_000)
            watched.page.wait_for_function("window.readyAt")
            seconds.append(float(watched.page.evaluate("window.readyAt")) / 1000)
            watched.close()
        browser.close()
    return min(seconds)


def main(
    steps: Annotated[int, typer.Option(help="Rollout steps of the long run.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Writes of each report; the best counts.")] = 2,
) -> None:
    """Measure the reports. The last line is JSON."""
    runs = [
        MadeRun(steps, name="long"),
        MadeRun(200, groups_per_step=16, samples_per_group=16, name="broad"),
        MadeRun(40, tokens_per_completion=4_000, name="wordy"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(made, Path(folder), rounds) for made in runs]
    show("Reports", rows)
    for row in rows:
        missed = [name for name, most in TARGETS.items() if (row[name] or 0) > most]
        print(f"{row['run']}: targets {'missed: ' + ', '.join(missed) if missed else 'met'}")
    finish("report", results=rows)


if __name__ == "__main__":
    typer.run(main)
