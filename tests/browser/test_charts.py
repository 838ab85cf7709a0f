"""The charts, in a real browser: they draw what the run measured, alone and beside other runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dapo_megatron.report.charts import columns_of, defined
from dapo_megatron.report.folder import read_run
from tests.browser.chromium import READY
from tests.browser.conftest import Open, write_report
from tests.browser.reading import Json, metrics, payload, traces
from tests.helpers.made_run import MadeRun

Keep = Callable[..., None]


def test_every_chart_draws_what_the_run_measured(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    measured = metrics(recorded_run)
    steps = [step for step in measured if step]
    run = read_run(recorded_run)
    derived = columns_of(run)
    shown = payload(recorded)["charts"].keys()
    num_series = 0
    assert {"accuracy", "entropy", "length"} <= shown
    for chart in defined([run]):
        drawn = traces(page, chart.id) if chart.id in shown else []
        for series in chart.series if drawn else ():
            name = series.metric
            if name in measured[steps[-1]]:
                # What is stacked is 0 where it was not measured.
                no_value = 0 if chart.stacked and not series.line else None
                wanted = {step: measured[step].get(name, no_value) for step in steps}
                assert any(_same(one, wanted) for one in drawn), (chart.id, name)
                num_series += 1
            elif any(value is not None for value in derived.get(name, [])):
                assert any(_same(one, dict(zip(steps, derived[name]))) for one in drawn), name
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
    charts = len(payload(recorded)["charts"]) + 1  # the timeline that is open
    drawn = page.locator('[data-chart][data-drawn="true"]')
    assert drawn.count() < charts
    page.evaluate("addEventListener('beforeprint', () => { wasDark = " + IS_DARK + "; })")
    page.pdf(path=room / "printed.pdf")
    assert drawn.count() == charts
    assert page.evaluate("wasDark") is False and page.evaluate(IS_DARK) is True


IS_DARK = "getComputedStyle(document.documentElement).colorScheme === 'dark'"


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
