"""The page as a whole, in a real browser: it says what the run's files say, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from dapo_megatron.report import command
from dapo_megatron.report.health_rules import findings
from dapo_megatron.report.page import Options
from dapo_megatron.report.provenance import facts
from dapo_megatron.report.run_data import read_run
from tests.browser.chromium import READY, Watched
from tests.browser.conftest import Open, write_report
from tests.browser.reading import metrics, payload, traces
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

Keep = Callable[..., None]


def test_without_scripts_the_health_can_be_read(
    recorded: Path, recorded_run: Path, browser: Browser
) -> None:
    watched = Watched.new(browser, java_script_enabled=False)
    page = watched.page
    page.goto(recorded.as_uri())
    said = page.inner_text("#health")
    run = read_run(recorded_run)
    assert run.name in said and "finished" in said.lower() and run.state.text in said
    shown = {
        one.locator("dt").inner_text().lower(): one.locator("dd").inner_text()
        for one in page.locator("#health dl > div").all()
    }
    assert shown == {label.lower(): text for label, text in facts(run)}
    found = findings(run)
    assert found, "a test without findings sees nothing"
    for number, finding in enumerate(found):
        text = page.locator(f'[data-finding="{number}"]').inner_text()
        assert finding.title in text and " ".join(finding.text.split()) in text
    assert "JavaScript" in said
    watched.close()
    assert not watched.problems


def test_a_finding_leads_to_its_chart(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    link = page.locator("[data-finding] a.see").first
    chart = (link.get_attribute("href") or "").removeprefix("#chart-")
    assert chart in payload(recorded)["charts"]
    link.click()
    expect(page.locator(f'[data-chart="{chart}"]')).to_be_in_viewport()
    expect(page.locator(f'[data-chart="{chart}"]')).to_have_attribute("data-drawn", "true")
    expect(page.locator(f"#chart-{chart}")).to_be_focused()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes(recorded: Path, open_page: Open, screenshot: Keep, theme: str) -> None:
    page = open_page(recorded, color_scheme=theme)
    assert _is_dark(page) == (theme == "dark")
    assert _contrast(page) > 7  # WCAG AAA, of text on its ground
    traces(page, "accuracy")
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, f"report_{theme}")
    page.locator("#theme").click()
    assert _is_dark(page) != (theme == "dark")
    assert _contrast(page) > 7
    page.reload()
    page.wait_for_selector(READY, state="attached")
    assert _is_dark(page) != (theme == "dark"), "forgotten on reload"


def _brightness(page: Page, what: str) -> float:
    """Relative luminance of a color of the body, as WCAG 2 has it."""
    text = page.evaluate(f"getComputedStyle(document.body).{what}")
    shares = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
    red, green, blue = (
        one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _is_dark(page: Page) -> bool:
    return _brightness(page, "backgroundColor") < 0.2


def _contrast(page: Page) -> float:
    dim, bright = sorted(_brightness(page, what) for what in ("color", "backgroundColor"))
    return (bright + 0.05) / (dim + 0.05)


def test_a_narrow_screen_scrolls_one_way_alone(
    recorded: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    screenshot(page, "report_narrow")


def test_the_keyboard_reaches_everything(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    seen = []
    for _ in range(400):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus is None:
            break
        seen.append(focus)
    names = [one["name"] for one in seen]
    wanted = ["#health", "#training", "#rollouts", "theme", "smoothing", "paper"]
    assert [name for name in names if name in wanted] == [
        *("#health", "#health", "#training", "#rollouts", "theme", "smoothing", "paper")
    ]
    assert sum(name.startswith("see-") for name in names) == page.locator("a.see").count() > 0
    assert all(one["visible"] for one in seen), [one for one in seen if not one["visible"]]


FOCUS = """
() => {
  const one = document.activeElement;
  if (one === document.body || one === null) return null;
  const style = getComputedStyle(one);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const name = one.id || one.getAttribute("href") || one.className || one.tagName;
  return {name, visible: ring || style.boxShadow !== "none"};
}
"""


def test_a_crashed_run_says_so(room: Path, open_page: Open, screenshot: Keep) -> None:
    run = MadeRun(num_steps=6, groups_per_step=2, samples_per_group=2, crashed=True).write(
        room / "crashed"
    )
    page = open_page(write_report(run, output=room / "crashed.html"))
    assert "crashed" in page.inner_text("#health").lower()
    assert any(max(one["x"]) == 6 for one in traces(page, "accuracy"))
    screenshot(page, "report_crashed")


def test_a_run_without_anything_but_metrics(
    recorded_run: Path, room: Path, open_page: Open
) -> None:
    bare = room / "bare"
    bare.mkdir()
    shutil.copy(recorded_run / "metrics.jsonl", bare)
    page = open_page(write_report(bare, output=room / "bare.html"))
    assert traces(page, "accuracy")
    assert "samples" in page.inner_text("#rollouts")


def test_a_link_leads_to_its_section(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded, "#chart-entropy")
    expect(page.locator('[data-chart="entropy"]')).to_be_in_viewport()
    page = open_page(recorded, "#provenance")
    expect(page.locator("#provenance h2")).to_be_in_viewport()


def test_a_watched_page_keeps_its_place(room: Path, open_page: Open) -> None:
    run = MadeRun(num_steps=8, groups_per_step=2, samples_per_group=2, alive=True).write(
        room / "alive"
    )
    report = room / "alive.html"
    writes = [sys.executable, "-m", "dapo_megatron", "report", str(run), "--output", str(report)]
    with subprocess.Popen(
        [*writes, "--watch", "--every", "3"], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    ) as watching:
        try:
            _wait_until(report.exists)
            page = open_page(report)
            page.locator("#paper").check()
            page.locator("#groups").scroll_into_view_if_needed()
            page.evaluate("scrollBy(0, 100)")
            place = page.evaluate("scrollY")
            assert place > 1000
            with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
                last = metrics(run)[8] | {"step": 9}
                file.write(json.dumps(last) + "\n")
            # Only a page that has loaded itself again knows of step 9.
            page.wait_for_function(
                """() => document.body.dataset.ready === "true" && scrollY > 0 &&
                   document.querySelector("#health").innerText.includes("9 of ")"""
            )
            assert page.evaluate("scrollY") == pytest.approx(place, abs=60)
            assert page.locator("#paper").is_checked()
        finally:
            watching.send_signal(signal.SIGINT)
    assert watching.returncode == 0


def test_a_watched_page_waits_for_its_reader(
    recorded_run: Path, room: Path, open_page: Open
) -> None:
    report = room / "watched.html"
    command.report([recorded_run], report, Options(completions=40, refresh_seconds=1.0))
    page = open_page(report)
    page.keyboard.press("Shift")
    loaded = page.evaluate("performance.timeOrigin")
    for _ in range(10):
        page.keyboard.press("Shift")
        page.wait_for_timeout(200)
    assert page.evaluate("performance.timeOrigin") == loaded
    page.wait_for_function(f"() => performance.timeOrigin > {loaded}")


def _wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
