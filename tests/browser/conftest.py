"""Start Chromium, and write the reports that the tests open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from dapo_megatron.report.command import report
from dapo_megatron.report.page import Options
from tests.browser.chromium import Watched, find_chromium, launch
from tests.helpers.made_run import MadeRun

RECORDED = Path(__file__).parent / "recorded_run"


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
def watched(browser: Browser) -> Iterator[Watched]:
    """A page. Errors, dialogs and network requests fail the test."""
    opened = Watched.new(browser)
    yield opened
    opened.close()
    assert opened.problems == []


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on a few steps of a real run."""
    path = tmp_path_factory.mktemp("recorded") / "report.html"
    report([RECORDED], path, Options())
    return path


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on two runs, one full of texts that try to run as HTML or JavaScript."""
    folder = tmp_path_factory.mktemp("hostile")
    made = MadeRun(num_steps=4, groups_per_step=4, samples_per_group=4, hostile=True)
    runs = [made.write(folder / "hostile"), MadeRun(num_steps=5).write(folder / "plain")]
    report(runs, folder / "report.html", Options(completions=400))
    return folder / "report.html"
