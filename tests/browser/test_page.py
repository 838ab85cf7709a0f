"""The page of a report in Chromium: charts, table and viewer work, and texts are only text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from dapo_megatron.rollout.record import COMPLETIONS, read_groups
from tests.browser.chromium import Watched
from tests.browser.conftest import RECORDED


def traces(page: Page, name: str) -> list[dict[str, Any]]:
    """Scroll to a chart, and return the traces that Plotly has drawn in it."""
    element = page.locator(f'[data-figure="{name}"]')
    element.scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-figure="{name}"][data-drawn="true"]')
    return list(
        element.evaluate("element => element.data.map(trace => ({...trace, y: [...trace.y]}))")
    )


def rows(page: Page) -> list[str]:
    """Return the ticket/sample of every visible row of the table, from the top."""
    visible = "[data-run]:not([hidden]) .rollouts tbody tr:not([hidden]) a"
    return page.locator(visible).all_inner_texts()


def test_charts_are_drawn_smoothed_and_in_both_themes(recorded: Path, watched: Watched) -> None:
    page = watched.open(recorded)
    lines = (RECORDED / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line)["policy/entropy"] for line in lines[1:]]
    [entropy] = traces(page, "entropy")
    assert [round(value, 4) for value in entropy["y"]] == [round(value, 4) for value in measured]
    page.fill("#smoothing", "0.9")
    page.dispatch_event("#smoothing", "change")
    faint, smooth = traces(page, "entropy")
    assert faint["y"] == entropy["y"] and faint["opacity"] < 1
    assert max(smooth["y"]) - min(smooth["y"]) < max(faint["y"]) - min(faint["y"])
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    page.locator(".see").first.click()
    expect(page.locator("figure:target")).to_be_in_viewport()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator('.plot:not([data-drawn="true"])').count() == 0


def test_rollouts_are_sorted_filtered_and_searched(recorded: Path, watched: Watched) -> None:
    page = watched.open(recorded)
    everything = rows(page)
    recorded_groups = [
        group
        for step in (1, 20, 39, 40)
        for group in read_groups(RECORDED / "samples" / f"step_{step:06d}" / COMPLETIONS)
    ]
    completions = {
        f"{recorded.group.ticket}/{completion.sample}": (recorded.group, completion)
        for recorded in recorded_groups
        for completion in recorded.group.completions
    }
    assert sorted(everything) == sorted(completions)
    page.click("#rollouts th button:text-is('tokens')")
    lengths = [completions[name][1].num_tokens for name in rows(page)]
    assert lengths == sorted(lengths)
    page.select_option("#rollouts select[aria-label=graded]", "✗ wrong")
    wrong = {
        name for name, (_, made) in completions.items() if made.grade and not made.grade.correct
    }
    assert {*rows(page)} == wrong and wrong
    page.select_option("#rollouts select[aria-label=graded]", "")
    prompt = recorded_groups[0].group.prompt.text.splitlines()[0]
    page.fill("#rollouts [type=search]", prompt)
    page.press("#rollouts [type=search]", "Enter")
    expect(page.locator(".r-count")).to_contain_text("texts searched")
    matching = {name for name, (group, _) in completions.items() if prompt in group.prompt.text}
    assert {*rows(page)} == matching


def test_the_viewer_shows_the_recorded_tokens(recorded: Path, watched: Watched) -> None:
    page = watched.open(recorded)
    [recorded_group] = read_groups(RECORDED / "samples" / "step_000020" / COMPLETIONS, [626])
    made = recorded_group.group.completions[3]
    page.keyboard.press("/")
    page.keyboard.type("626/3")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    viewer = page.locator("#viewer")
    expect(viewer.locator("h2")).to_have_text("Ticket 626 · sample 3")
    assert "".join(viewer.locator(".t:not(.v-special)").all_inner_texts()) == made.text
    expect(viewer.locator(".v-text pre").first).to_have_text(recorded_group.group.prompt.text)
    page.keyboard.press("ArrowRight")
    value = str(round(made.logprobs[0], 3)).replace("-", "\u2212")
    expect(viewer.locator(".v-detail")).to_contain_text(f"log-prob {value}")
    depths = "tokens => tokens.map(token => token.style.getPropertyValue('--depth'))"
    by_logprob = viewer.locator(".t").evaluate_all(depths)
    viewer.get_by_label("gap").check()
    assert viewer.locator(".t").evaluate_all(depths) != by_logprob
    viewer.locator(".v-samples a").first.click()
    expect(viewer.locator("h2")).to_have_text("Ticket 626 · sample 0")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    page.goto(recorded.as_uri() + "#rollout-0-626-3")
    page.reload()
    expect(viewer.locator("h2")).to_have_text("Ticket 626 · sample 3")


def test_hostile_texts_of_a_run_are_only_text(hostile: Path, watched: Watched) -> None:
    page = watched.open(hostile)
    for name in ("accuracy-on-held-out-problems", "entropy"):
        assert len(traces(page, name)) == 2
    for row in page.locator("[data-run='0'] .rollouts tbody tr").all()[:20]:
        row.click()
        expect(page.locator("#viewer")).to_be_visible()
        page.keyboard.press("Escape")
    page.select_option("#run", "1")
    expect(page.locator("#health [data-run='1']")).to_be_visible()
    assert len(traces(page, "where-a-step-s-time-goes")[0]["y"]) == 5
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main svg[onload]").count() == 0
