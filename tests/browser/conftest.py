"""A Chromium for each file of tests, a page for each test, and the reports that they look at: made
once."""

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
"""(report, anchor, options of the browser's context) -> its page, ready."""


def write_report(*runs: Path, output: Path, options: tuple[str, ...] = ()) -> Path:
    """What `python -m dapo_megatron report` makes of runs' folders."""
    done = run("report", *runs, "--output", output, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


# Not of the session: while Playwright is up, no other test of the process can use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: `make test-browser` installs it and runs these tests")
    with sync_playwright() as playwright:
        up = launch(playwright, program)
        yield up
        up.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens reports. What none may do (errors, a word to the network) fails the test."""
    opened: list[Watched] = []

    def opens(report: Path, anchor: str = "", **options: Any) -> Page:
        opened.append(Watched.new(browser, **options))
        return opened[-1].open(report, anchor)

    yield opens
    for watched in opened:
        watched.close()
    assert not [problem for watched in opened for problem in watched.problems]


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps what a page looks like where a person finds it."""

    def keep(page: Page, name: str, **options: Any) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        page.screenshot(path=path, **options)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the pictures are; workers of pytest-xdist made them, and tell nobody."""
    pictures = [path for path in SCREENSHOTS.glob("*.png") if path.stat().st_mtime > STARTED]
    if pictures:
        terminalreporter.write_line(f"{len(pictures)} pictures of the pages: {SCREENSHOTS}")


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the reports and made runs of this session."""
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def recorded_run(room: Path) -> Path:
    """A real run, of which a few steps were kept: read-only."""
    return Path(shutil.copytree(RECORDED, room / "recorded"))


@pytest.fixture(scope="session")
def recorded(recorded_run: Path, room: Path) -> Path:
    """Its report."""
    return write_report(recorded_run, output=room / "recorded.html")


@pytest.fixture(scope="session")
def hostile_run(room: Path) -> Path:
    """A made run full of texts that try to be more than text."""
    return MadeRun(num_steps=12, groups_per_step=4, samples_per_group=4, hostile=True).write(
        room / "hostile"
    )


@pytest.fixture(scope="session")
def hostile(hostile_run: Path, room: Path) -> Path:
    """Its report."""
    return write_report(hostile_run, output=room / "hostile.html")
