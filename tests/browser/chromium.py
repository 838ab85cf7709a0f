"""Find and start Chromium, and record what a page does that a report may not do."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOCAL = ("file:", "data:", "blob:", "about:")
VIEW = {"width": 1280, "height": 900}
READY = 'body[data-ready="true"]'


def find_chromium() -> str | None:
    """Return the path of a Chromium that runs, or None.

    Ubuntu's chromium-browser may be a stub that only asks to install another package.
    """
    return next((path for path in map(shutil.which, NAMES) if path and _runs(path)), None)


def _runs(program: str) -> bool:
    done = subprocess.run([program, "--version"], capture_output=True, check=False)
    return done.returncode == 0


def launch(playwright: Playwright, program: str) -> Browser:
    """Start a headless browser. Chromium's own sandbox does not work for root."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    # Draw on the CPU. Containers have a small /dev/shm.
    arguments = [*sandbox, "--disable-gpu", "--disable-dev-shm-usage"]
    return playwright.chromium.launch(executable_path=program, args=arguments)


@dataclass
class Watched:
    """A page, and a list of what it did that a report may not do."""

    page: Page
    problems: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, browser: Browser, **options: Any) -> Watched:
        """Open a page in its own context. `close` ends both."""
        context = browser.new_context(**{"viewport": VIEW, **options})
        watched = cls(context.new_page())
        page, note = watched.page, watched.problems.append
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on(
            "console", lambda message: message.type == "error" and note(f"console: {message.text}")
        )
        page.on(
            "request",
            lambda request: (
                request.url.startswith(LOCAL) or note(f"network request: {request.url}")
            ),
        )
        page.on("dialog", lambda dialog: (note(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.set_default_timeout(120_000)  # two busy cores
        return watched

    def open(self, report: Path, anchor: str = "") -> Page:
        """Load a report and wait until its scripts have run. `anchor` includes the #."""
        self.page.goto(report.as_uri() + anchor)
        self.page.wait_for_selector(READY, state="attached")
        return self.page

    def close(self) -> None:
        """Close the page and its context."""
        self.page.context.close()
