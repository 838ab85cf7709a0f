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
from dapo_megatron.report.facts import facts
from dapo_megatron.report.findings import findings
from dapo_megatron.report.folder import read_run
from dapo_megatron.report.payload import Options
from tests.browser.chromium import READY, Watched
from tests.browser.conftest import Open, write_report
from tests.browser.reading import Json, metrics, payload, traces
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

Keep = Callable[..., None]


def test_every_chart_draws_what_the_run_measured(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    measured = metrics(recorded_run)
    steps = [step for step in measured if step]
    data = payload(recorded)
    num_series = 0
    assert {"accuracy", "entropy", "length"} <= {chart["id"] for chart in data["charts"]}
    for chart in data["charts"]:
        drawn = traces(page, chart["id"])
        for series in chart["series"]:
            name = series["metric"]
            if name in measured[steps[-1]]:
                # What is stacked is 0 where it was not measured.
                no_value = 0 if chart["kind"].startswith("stacked") else None
                wanted = {step: measured[step].get(name, no_value) for step in steps}
                assert any(_same(one, wanted) for one in drawn), (chart["id"], name)
                num_series += 1
            else:
                values = data["runs"][0]["metrics"][name]
                assert any(_same(one, dict(zip(steps, values))) for one in drawn), name
    assert num_series > 40


def _same(trace: Json, wanted: dict[int, float | None]) -> bool:
    drawn = dict(zip(trace["x"], trace["y"]))
    return drawn.keys() == wanted.keys() and all(
        drawn[step] is None if value is None else drawn[step] == pytest.approx(value, rel=1e-5)
        for step, value in wanted.items()
    )


def test_the_last_accuracy_is_that_of_the_metrics(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    right, _ = traces(open_page(recorded), "accuracy")
    measured = metrics(recorded_run)
    assert len(right["y"]) == len(measured) - 1 == 40  # step 0 is an evaluation alone
    assert right["x"][-1] == 40
    assert right["y"][-1] == pytest.approx(measured[40]["accuracy/raw"], rel=1e-5)


def test_evaluations_come_with_their_intervals(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    [drawn] = traces(open_page(recorded), "evaluation")
    name = "eval/chain_sum_held_out/avg@4"
    wanted = {step: line for step, line in metrics(recorded_run).items() if name in line}
    assert drawn["x"] == list(wanted) and len(wanted) > 1
    for at, line in enumerate(wanted.values()):
        low, middle, high = line[f"{name}_low"], line[name], line[f"{name}_high"]
        error = drawn["error_y"]
        found = [middle, middle - error["arrayminus"][at], middle + error["array"][at]]
        assert found == pytest.approx([drawn["y"][at], low, high], abs=1e-5)


def test_smoothing_keeps_what_was_measured(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    before = traces(page, "entropy")
    page.locator("#smoothing").fill("0.9")
    faint, smooth = traces(page, "entropy")
    measured = [line["policy/entropy"] for step, line in metrics(recorded_run).items() if step]
    assert len(before) == 1 and faint["y"] == pytest.approx(measured, rel=1e-5)
    assert len(smooth["y"]) == len(measured) and smooth["y"] != faint["y"]
    assert max(smooth["y"]) <= max(faint["y"]) and min(smooth["y"]) >= min(faint["y"])


def test_the_paper_s_curves_come_when_asked_for(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    own = len(traces(page, "entropy"))
    page.select_option("#paper", "all")
    drawn = traces(page, "entropy")
    assert len(drawn) > own and any("paper" in one["name"] for one in drawn)
    assert max(max(one["x"]) for one in drawn) > 100
    page.select_option("#paper", "off")
    assert len(traces(page, "entropy")) == own


def test_the_paper_s_curve_has_an_axis_where_it_would_flatten_the_run_s(
    recorded: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    page.select_option("#paper", "all")
    paper, *own = traces(page, "length")  # thousands of tokens, and a dozen
    assert paper["yaxis"] == "y2" and {one["yaxis"] for one in own} == {"y"}
    low, high = _axis(page, "length", "yaxis")
    assert high < 3 * max(max(one["y"]) for one in own)
    low, high = _axis(page, "length", "yaxis2")
    assert low <= min(paper["y"]) and max(paper["y"]) <= high
    assert "yaxis" not in traces(page, "reward")[0]  # from -1 to 1, both


def _axis(page: Page, chart: str, axis: str) -> list[float]:
    """The range that is drawn."""
    return list(
        page.locator(f'[data-chart="{chart}"]').evaluate(f"one => one._fullLayout.{axis}.range")
    )


def test_the_axis_of_a_constant_begins_at_0(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    [moved] = [one for one in traces(page, "time_sync") if one["yaxis"] == "y2"]
    assert len(set(moved["y"])) == 1, "not a constant"
    low, high = _axis(page, "time_sync", "yaxis2")
    assert low == 0 and high > moved["y"][0]


def test_values_can_be_read_without_a_pointer(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    traces(page, "entropy")
    column = {s: line["policy/entropy"] for s, line in metrics(recorded_run).items() if s}
    low = min(column, key=lambda step: column[step])
    high = max(column, key=lambda step: column[step])
    wanted = [f"{float(f'{column[step]:.4g}'):g} at {step}" for step in (1, 40, low, high)]
    page.locator("#values-of-entropy").focus()
    page.keyboard.press("Enter")
    row = page.locator("#values-entropy tbody tr")
    assert row.locator("th").inner_text() == "entropy"
    assert row.locator("td").all_inner_texts() == wanted
    said = page.locator('[data-chart="entropy"]').get_attribute("aria-label") or ""
    assert said.startswith("Entropy. entropy: ") and all(one.split()[0] in said for one in wanted)
    assert page.locator(".modebar-btn").count() == 0


def test_charts_are_drawn_one_in_a_frame(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded, viewport={"width": 1280, "height": 3000})
    page.wait_for_function(
        "() => document.querySelectorAll('[data-chart][data-drawn=true]').length >= 10"
    )
    page.evaluate(COUNT_DRAWN)
    page.locator("#theme").click()
    page.wait_for_function("() => drawnIn.length >= 10 && !document.querySelector(NOT_DRAWN)")
    frames = page.evaluate("drawnIn")
    assert len(set(frames)) == len(frames)


def test_a_long_run_has_no_thousands_of_bars(room: Path, open_page: Open) -> None:
    run = room / "long"
    run.mkdir()
    lines = [{"step": step, "grading/timeout": 1, "grading/crash": 2} for step in range(1, 301)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    page = open_page(write_report(run, output=room / "long.html"))
    drawn = traces(page, "groups_grading")
    assert [one["y"] for one in drawn] == [[1] * 300, [2] * 300]
    assert _axis(page, "groups_grading", "yaxis")[1] > 3, "not on top of each other"
    assert page.locator('[data-chart="groups_grading"] path').count() < 50


COUNT_DRAWN = """() => {
  const react = Plotly.react;
  let frame = 0;
  const next = () => { frame += 1; requestAnimationFrame(next); };
  requestAnimationFrame(next);
  window.drawnIn = [];
  window.NOT_DRAWN = "#chart-accuracy [data-drawn=false]";
  Plotly.react = (...all) => { drawnIn.push(frame); return react(...all); };
}"""


def test_a_printed_report_has_all_its_charts(recorded: Path, open_page: Open, room: Path) -> None:
    page = open_page(recorded, color_scheme="dark")
    charts = len(payload(recorded)["charts"])
    drawn = page.locator('[data-chart][data-drawn="true"]')
    assert drawn.count() < charts
    page.evaluate("addEventListener('beforeprint', () => { wasDark = " + IS_DARK + "; })")
    page.pdf(path=room / "printed.pdf")
    assert drawn.count() == charts
    assert page.evaluate("wasDark") is False and page.evaluate(IS_DARK) is True


IS_DARK = "getComputedStyle(document.documentElement).colorScheme === 'dark'"


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
    finding = page.locator("[data-finding]").filter(has=page.locator("button")).first
    number = int(finding.get_attribute("data-finding") or "")
    chart = payload(recorded)["runs"][0]["findings"][number]["chart"]
    finding.locator("button").click()
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
    """Relative luminance of a colour of the body, as WCAG 2 has it."""
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
    data = payload(recorded)
    assert sum(name.startswith("see-") for name in names) == sum(
        one["chart"] is not None for one in data["runs"][0]["findings"]
    )
    assert sum(name.startswith("values-of-") for name in names) == len(data["charts"])
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


def test_two_runs_are_laid_over_each_other(
    recorded_run: Path, room: Path, open_page: Open, screenshot: Keep
) -> None:
    other = MadeRun(num_steps=30, groups_per_step=2, samples_per_group=2, name="other").write(
        room / "other"
    )
    page = open_page(write_report(recorded_run, other, output=room / "two.html"))
    drawn = traces(page, "accuracy")
    drawn = [one for one in drawn if None not in one["x"]]  # an entry of the legend alone
    assert {max(one["x"]) for one in drawn} == {30, max(metrics(recorded_run))}
    colors = {one["line"]["color"] for one in drawn}
    assert len(colors) == 2
    for chart in ("reward", "evaluation_best_and_vote"):
        traces(page, chart)
    screenshot(page, "report_two_runs")
    first = traces(page, "groups_fates")
    page.locator("#run").select_option(label="other")
    assert "other" in page.inner_text("h1:visible")
    assert max(first[0]["x"]) != 30 and max(traces(page, "groups_fates")[0]["x"]) == 30


def test_repeats_of_a_run_are_drawn_alike(
    recorded_run: Path, room: Path, open_page: Open, screenshot: Keep
) -> None:
    runs = [room / "repeats" / f"{way}_seed{seed}" for way in "abc" for seed in range(3)]
    for run in runs:
        run.mkdir(parents=True)
        shutil.copy(recorded_run / "metrics.jsonl", run)
    page = open_page(write_report(*runs, output=room / "repeats.html"))
    drawn = [one for one in traces(page, "accuracy") if None not in one["x"]]
    assert len(drawn) == 18
    looks = {
        (one["name"].partition("_")[0], one["legendgroup"]): one["line"]["color"] for one in drawn
    }
    assert len(looks) == 6 and len(set(looks.values())) == 3
    dashes = {(one["legendgroup"], one["line"]["dash"]) for one in drawn}
    assert dashes == {("answers right", "solid"), ("groups all right", "dash")}
    mode = page.locator('[data-chart="accuracy"]').evaluate("one => one.layout.hovermode")
    assert mode == "closest"  # 18 rows would not fit a screen
    chips = page.locator("[data-chip]")
    assert chips.all_inner_texts() == ["a, 3 runs", "b, 3 runs", "c, 3 runs"]
    screenshot(page, "report_repeats")
    chips.nth(1).click()
    names = {one["name"] for one in traces(page, "accuracy") if None not in one["x"]}
    assert {name[0] for name in names} == {"a", "c"}


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
        [*writes, "--watch", "--every", "1"], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    ) as watching:
        try:
            _wait_until(report.exists)
            page = open_page(report)
            page.select_option("#paper", "all")
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
            assert page.locator("#paper").input_value() == "all"
        finally:
            watching.send_signal(signal.SIGINT)
    assert watching.returncode == 0


def test_a_reload_keeps_what_was_zoomed_opened_and_focused(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    traces(page, "accuracy")
    plot = page.locator('[data-chart="accuracy"] .nsewdrag').first.bounding_box()
    assert plot is not None
    page.mouse.move(plot["x"] + 100, plot["y"] + 60)
    page.mouse.down()
    page.mouse.move(plot["x"] + 250, plot["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function(
        """() => document.querySelector('[data-chart="accuracy"]').layout.xaxis.range[0] > 2"""
    )
    zoomed = _axis(page, "accuracy", "xaxis")
    page.locator("#values-of-accuracy").click()
    page.locator("#config-of-0").focus()
    page.reload()
    page.wait_for_selector(READY, state="attached")
    expect(page.locator("#config-of-0")).to_be_focused()
    traces(page, "accuracy")
    assert _axis(page, "accuracy", "xaxis") == pytest.approx(zoomed)
    assert page.locator("#values-accuracy tbody tr").count() == 2
    page.locator('[data-chart="accuracy"] .nsewdrag').first.dblclick()
    page.wait_for_function(
        """() => document.querySelector('[data-chart="accuracy"]').layout.xaxis.range[0] < 1"""
    )


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
