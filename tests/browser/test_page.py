"""Test the page as a whole in a real browser: themes, keyboard, links, reloading."""

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


def test_health_can_be_read_without_javascript(
    recorded: Path, recorded_run: Path, browser: Browser
) -> None:
    watched = Watched.new(browser, java_script_enabled=False)
    page = watched.page
    page.goto(recorded.as_uri())
    health = page.inner_text("#health")
    run = read_run(recorded_run)
    assert run.name in health and "finished" in health.lower() and run.state.text in health
    shown = {
        fact.locator("dt").inner_text().lower(): fact.locator("dd").inner_text()
        for fact in page.locator("#health dl > div").all()
    }
    assert shown == {label.lower(): text for label, text in facts(run)}
    run_findings = findings(run)
    assert run_findings, "the recorded run has no findings, so this test checks nothing"
    for number, finding in enumerate(run_findings):
        text = page.locator(f'[data-finding="{number}"]').inner_text()
        assert finding.title in text and " ".join(finding.text.split()) in text
    assert "JavaScript" in health
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
def test_both_themes_are_readable_and_a_reload_keeps_the_chosen_one(
    recorded: Path, open_page: Open, screenshot: Keep, theme: str
) -> None:
    page = open_page(recorded, color_scheme=theme)
    assert _is_dark(page) == (theme == "dark")
    assert _contrast(page) > 7  # WCAG AAA for text on its background
    traces(page, "accuracy")
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, f"report_{theme}")
    page.locator("#theme").click()
    assert _is_dark(page) != (theme == "dark")
    assert _contrast(page) > 7
    page.reload()
    page.wait_for_selector(READY, state="attached")
    assert _is_dark(page) != (theme == "dark"), "the reload dropped the chosen theme"


def _brightness(page: Page, css_property: str) -> float:
    """Return the relative luminance (WCAG 2) of a color of the body."""
    text = page.evaluate(f"getComputedStyle(document.body).{css_property}")
    shares = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
    red, green, blue = (
        share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _is_dark(page: Page) -> bool:
    return _brightness(page, "backgroundColor") < 0.2


def _contrast(page: Page) -> float:
    dim, bright = sorted(
        _brightness(page, css_property) for css_property in ("color", "backgroundColor")
    )
    return (bright + 0.05) / (dim + 0.05)


def test_a_narrow_screen_scrolls_only_vertically(
    recorded: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    screenshot(page, "report_narrow")


def test_the_keyboard_reaches_everything(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    focused = []
    for _ in range(400):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus is None:
            break
        focused.append(focus)
    names = [element["name"] for element in focused]
    wanted = ["#health", "#training", "#rollouts", "theme", "smoothing", "paper"]
    assert [name for name in names if name in wanted] == [
        *("#health", "#health", "#training", "#rollouts", "theme", "smoothing", "paper")
    ]
    assert sum(name.startswith("see-") for name in names) == page.locator("a.see").count() > 0
    assert all(element["visible"] for element in focused), [
        element for element in focused if not element["visible"]
    ]


FOCUS = """
() => {
  const element = document.activeElement;
  if (element === document.body || element === null) return null;
  const style = getComputedStyle(element);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const name = element.id || element.getAttribute("href") || element.className || element.tagName;
  return {name, visible: ring || style.boxShadow !== "none"};
}
"""


def test_the_report_says_that_a_run_crashed(room: Path, open_page: Open, screenshot: Keep) -> None:
    run = MadeRun(num_steps=6, groups_per_step=2, samples_per_group=2, crashed=True).write(
        room / "crashed"
    )
    page = open_page(write_report(run, output=room / "crashed.html"))
    assert "crashed" in page.inner_text("#health").lower()
    assert any(max(trace["x"]) == 6 for trace in traces(page, "accuracy"))
    screenshot(page, "report_crashed")


def test_a_report_needs_only_metrics_jsonl(recorded_run: Path, room: Path, open_page: Open) -> None:
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


def test_a_reloading_page_keeps_its_scroll_position_and_options(
    room: Path, open_page: Open
) -> None:
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
            # Only a page that reloaded itself shows step 9.
            page.wait_for_function(
                """() => document.body.dataset.ready === "true" && scrollY > 0 &&
                   document.querySelector("#health").innerText.includes("9 of ")"""
            )
            assert page.evaluate("scrollY") == pytest.approx(place, abs=60)
            assert page.locator("#paper").is_checked()
        finally:
            watching.send_signal(signal.SIGINT)
    assert watching.returncode == 0


def test_a_page_does_not_reload_while_its_reader_is_active(
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


def _wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
