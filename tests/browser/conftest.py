"""Start one Chromium per test file, open pages per test, and write the reports once per session."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.chromium import Watched, find_chromium, launch
from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

RECORDED = Path(__file__).parent / "recorded_run"
SCREENSHOTS = REPOSITORY / "build" / "screenshots"
STARTED = time.time()

Open = Callable[..., Page]
"""(report, anchor, options of the browser's context) -> the loaded page."""


def write_report(*runs: Path, output: Path, options: tuple[str, ...] = ()) -> Path:
    """Write a report on run folders with `python -m dapo_megatron report`."""
    done = run("report", *runs, "--output", output, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


# Module scope: while Playwright runs, no other test of the process can use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: `make test-browser` installs it and runs these tests")
    with sync_playwright() as playwright:
        started = launch(playwright, program)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open reports. Errors, dialogs and network requests of a page fail the test."""
    opened: list[Watched] = []

    def open_report(report: Path, anchor: str = "", **options: Any) -> Page:
        opened.append(Watched.new(browser, **options))
        return opened[-1].open(report, anchor)

    yield open_report
    for watched in opened:
        watched.close()
    assert not [problem for watched in opened for problem in watched.problems]


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Save screenshots in build/screenshots, where people can look at them."""

    def keep(page: Page, name: str, **options: Any) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        page.screenshot(path=path, **options)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the screenshots are. The xdist workers that made them cannot print it."""
    pictures = [path for path in SCREENSHOTS.glob("*.png") if path.stat().st_mtime > STARTED]
    if pictures:
        terminalreporter.write_line(f"{len(pictures)} screenshots of pages: {SCREENSHOTS}")


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the reports and generated runs of this session."""
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def recorded_run(room: Path) -> Path:
    """A few steps of a real run. Tests may only read it."""
    return Path(shutil.copytree(RECORDED, room / "recorded"))


@pytest.fixture(scope="session")
def recorded(recorded_run: Path, room: Path) -> Path:
    """Report on `recorded_run`."""
    return write_report(recorded_run, output=room / "recorded.html")


@pytest.fixture(scope="session")
def hostile_run(room: Path) -> Path:
    """A generated run full of texts that try to run as HTML or JavaScript."""
    return MadeRun(num_steps=12, groups_per_step=4, samples_per_group=4, hostile=True).write(
        room / "hostile"
    )


@pytest.fixture(scope="session")
def hostile(hostile_run: Path, room: Path) -> Path:
    """Report on `hostile_run`."""
    return write_report(hostile_run, output=room / "hostile.html")
