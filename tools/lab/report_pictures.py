"""Make the pictures of reports in README.md and docs/report.md with Chromium.

    python tools/lab/report_pictures.py runs/tiny_cpu

`make test-browser` installs Chromium. Run this program again when the report's page changes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from dapo_megatron.report.command import report
from dapo_megatron.report.page import Options

REPOSITORY = Path(__file__).resolve().parents[2]
SETTLE_MS = 2500
"""Milliseconds until all charts are drawn on a busy machine."""


@dataclass(frozen=True)
class Picture:
    """A screenshot of a report."""

    name: str
    section: str = ""
    """Id of the element that is scrolled to the top."""
    height: int = 900
    """Pixels."""
    dark: bool = False
    anchor: str = ""
    """Fragment of the URL, with its #."""


PICTURES = (
    Picture("report_health", height=1580),
    Picture("report_groups", section="groups", height=690),
    Picture("report_time", section="timeline", height=560),
    Picture("report_viewer", anchor="#rollout-0-1-2", height=560, dark=True),
)


def main(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER")],
    output: Annotated[Path, typer.Option(help="Folder of the pictures.")] = REPOSITORY / "docs",
) -> None:
    """Write all pictures."""
    program = shutil.which("chromium") or sys.exit("no chromium on the PATH: make test-browser")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        page_file = Path(work) / "report.html"
        report([run_folder], page_file, Options(tickets=(1,)))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for picture in PICTURES:
            page = browser.new_page(
                viewport={"width": 1280, "height": picture.height},
                color_scheme="dark" if picture.dark else "light",
            )
            page.goto(page_file.as_uri() + picture.anchor)
            path = output / f"{picture.name}.png"
            _take(page, picture.section, path)
            page.close()
            print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
        browser.close()


def _take(page: Page, section: str, path: Path) -> None:
    page.wait_for_selector('body[data-ready="true"]', state="attached")
    if section:
        page.evaluate(
            "id => window.scrollTo(0, document.getElementById(id).getBoundingClientRect().top "
            "+ window.scrollY - document.querySelector('nav').offsetHeight)",
            section,
        )
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=path)
    # A page has few colors, so a palette reduces the file to a third.
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    typer.run(main)
