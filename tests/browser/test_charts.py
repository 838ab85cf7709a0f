"""Test in a real browser that charts draw what was measured, for one run and for several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dapo_megatron.report.charts import CHARTS, columns_of
from dapo_megatron.report.run_data import Metrics, read_run
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
    derived = Metrics(columns_of(run))
    shown = payload(recorded)["charts"].keys()
    num_series = 0
    assert {"accuracy", "entropy", "length"} <= shown
    for chart in CHARTS:
        drawn = traces(page, chart.id) if chart.id in shown else []
        for name in chart.series if drawn else ():
            if name in measured[steps[-1]]:
                # A stacked series is 0 where it was not measured.
                no_value = 0 if chart.stacked and name not in chart.lines else None
                wanted = {step: measured[step].get(name, no_value) for step in steps}
                assert any(_same(trace, wanted) for trace in drawn), (chart.id, name)
                num_series += 1
            elif derived.values(name):
                wanted = dict(zip(steps, derived.column(name)))
                assert any(_same(trace, wanted) for trace in drawn), name
    assert num_series > 40


def _same(trace: Json, wanted: dict[int, float | None]) -> bool:
    drawn = dict(zip(trace["x"], trace["y"]))
    return drawn.keys() == wanted.keys() and all(
        drawn[step] is None if value is None else drawn[step] == pytest.approx(value, rel=1e-5)
        for step, value in wanted.items()
    )


def test_the_accuracy_chart_ends_with_the_last_value_of_metrics_jsonl(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    right, *_ = traces(open_page(recorded), "accuracy")
    measured = metrics(recorded_run)
    assert len(right["y"]) == len(measured) - 1 == 40  # step 0 has only an evaluation
    assert right["x"][-1] == 40
    assert right["y"][-1] == pytest.approx(measured[40]["accuracy/raw"], rel=1e-5)


def test_evaluations_are_drawn_with_their_confidence_intervals(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    [drawn, paper] = traces(open_page(recorded), "evaluation")
    assert paper["visible"] is False
    name = "eval/chain_sum_held_out/avg@4"
    wanted = {step: line for step, line in metrics(recorded_run).items() if name in line}
    assert drawn["x"] == list(wanted) and len(wanted) > 1
    for at, line in enumerate(wanted.values()):
        low, middle, high = line[f"{name}_low"], line[name], line[f"{name}_high"]
        error = drawn["error_y"]
        interval = [middle, middle - error["arrayminus"][at], middle + error["array"][at]]
        assert interval == pytest.approx([drawn["y"][at], low, high], abs=1e-5)


def test_smoothing_still_shows_the_measured_values(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    before = traces(page, "entropy")
    page.locator("#smoothing").fill("0.9")
    page.locator("#smoothing").dispatch_event("change")
    faint, smooth, *_ = traces(page, "entropy")
    measured = [line["policy/entropy"] for step, line in metrics(recorded_run).items() if step]
    assert len(before) == 3 and faint["y"] == pytest.approx(measured, rel=1e-5)
    assert len(smooth["y"]) == len(measured) and smooth["y"] != faint["y"]
    assert max(smooth["y"]) <= max(faint["y"]) and min(smooth["y"]) >= min(faint["y"])


def test_curves_of_the_paper_are_shown_only_when_selected(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)

    def shown() -> list[str]:
        return [
            trace["name"] for trace in traces(page, "entropy") if trace.get("visible") is not False
        ]

    assert shown() == ["entropy"]
    page.locator("#paper").check()
    assert len(shown()) == 3 and all("paper" in name for name in shown()[1:])
    page.locator("#paper").uncheck()
    assert shown() == ["entropy"]


def _axis(page: Page, chart: str, axis: str) -> list[float]:
    """Return the drawn range of an axis."""
    return list(
        page.locator(f'[data-chart="{chart}"]').evaluate(f"chart => chart._fullLayout.{axis}.range")
    )


def test_a_printed_report_has_all_its_charts(recorded: Path, open_page: Open, room: Path) -> None:
    page = open_page(recorded, color_scheme="dark")
    charts = len(payload(recorded)["charts"]) + 1  # plus the open timeline
    drawn = page.locator('[data-chart][data-drawn="true"]')
    assert drawn.count() < charts
    page.evaluate(COUNT_PRINTED)
    page.pdf(path=room / "printed.pdf")
    assert page.evaluate("printed") == {"charts": charts, "isDark": False}
    assert page.evaluate(IS_DARK) is True


COUNT_PRINTED = """() => addEventListener("beforeprint", () => {
  const isDark = document.documentElement.dataset.theme !== "light";
  window.printed = {charts: document.querySelectorAll("[data-drawn=true]").length, isDark};
})"""
IS_DARK = "document.documentElement.dataset.theme !== 'light'"


def test_two_runs_share_the_charts_in_two_colors(
    recorded_run: Path, room: Path, open_page: Open, screenshot: Keep
) -> None:
    other = MadeRun(num_steps=30, groups_per_step=2, samples_per_group=2, name="other").write(
        room / "other"
    )
    page = open_page(write_report(recorded_run, other, output=room / "two.html"))
    drawn = traces(page, "accuracy")
    drawn = [trace for trace in drawn if "look" in trace["meta"]]
    assert {max(trace["x"]) for trace in drawn} == {30, max(metrics(recorded_run))}
    colors = {trace["line"]["color"] for trace in drawn}
    assert len(colors) == 2
    for chart in ("reward", "evaluation_best_and_vote"):
        traces(page, chart)
    screenshot(page, "report_two_runs")
    first = traces(page, "groups_fates")
    page.locator("#run").select_option(label="other")
    assert "other" in page.inner_text("h1:visible")
    assert max(first[0]["x"]) != 30 and max(traces(page, "groups_fates")[0]["x"]) == 30


def test_runs_that_differ_only_in_the_seed_share_a_color(
    recorded_run: Path, room: Path, open_page: Open, screenshot: Keep
) -> None:
    runs = [room / "repeats" / f"{way}_seed{seed}" for way in "abc" for seed in range(3)]
    for run in runs:
        run.mkdir(parents=True)
        shutil.copy(recorded_run / "metrics.jsonl", run)
    page = open_page(write_report(*runs, output=room / "repeats.html"))
    drawn = [trace for trace in traces(page, "accuracy") if "look" in trace["meta"]]
    assert len(drawn) == 18
    looks = {(trace["name"].partition("_")[0], trace["line"]["color"]) for trace in drawn}
    assert len(looks) == 3 and len({color for _, color in looks}) == 3
    dashes = {(trace["name"].rpartition("· ")[2], trace["line"]["dash"]) for trace in drawn}
    assert dashes == {("answers right", "solid"), ("groups all right", "dash")}
    mode = page.locator('[data-chart="accuracy"]').evaluate("chart => chart.layout.hovermode")
    assert mode == "closest"  # 18 rows would not fit a screen
    chips = page.locator(".chips label")
    assert [text.strip() for text in chips.all_inner_texts()] == [f"{way}, 3 runs" for way in "abc"]
    screenshot(page, "report_repeats")
    chips.nth(1).click()
    names = {trace["name"] for trace in traces(page, "accuracy") if "look" in trace["meta"]}
    assert {name[0] for name in names} == {"a", "c"}


def test_a_reload_keeps_zoom_open_sections_and_focus(recorded: Path, open_page: Open) -> None:
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
    page.locator("#config-of-0").click()
    page.locator("#config-of-0").focus()
    page.reload()
    page.wait_for_selector(READY, state="attached")
    expect(page.locator("#config-of-0")).to_be_focused()
    traces(page, "accuracy")
    assert _axis(page, "accuracy", "xaxis") == pytest.approx(zoomed)
    assert page.locator("#config-0 pre").is_visible()
    page.locator('[data-chart="accuracy"] .nsewdrag').first.dblclick()
    page.wait_for_function(
        """() => document.querySelector('[data-chart="accuracy"]').layout.xaxis.range[0] <= 1"""
    )
