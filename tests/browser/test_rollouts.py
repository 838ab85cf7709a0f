"""The table of completions and the viewer: what they show is what the run recorded, letter by
letter, and nothing that a completion says is ever more than text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.reading import (
    Json,
    code_units,
    completions,
    contrasts,
    open_completion,
    payload,
    rollouts,
    shown_rows,
    shown_text,
)
from tests.helpers.made_run import HOSTILE

Keep = Callable[..., None]

CONTROLS = {*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)}
WITHOUT_WIDTH = {
    0xAD,
    0x200B,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2060, 0x206A),
    0xFEFF,
}
"""Shown by their numbers: they would not be seen, or would turn around what is."""


def visible(text: str) -> str:
    """A text as the viewer is to show it."""
    hidden = CONTROLS | WITHOUT_WIDTH
    return "".join(f"⟨U+{ord(one):04X}⟩" if ord(one) in hidden else one for one in text)


def table(report: Path) -> list[Json]:
    """The rows that Python gave the page."""
    found = payload(report)["runs"][0]["rollouts"]
    columns = found["rows"]
    return [{name: columns[name][at] for name in columns} for at in range(found["kept"])]


def rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else round(value, 4)


def test_the_table_holds_what_was_recorded(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    rollouts(page)
    screenshot(page, "rollouts_table")
    every = {(one["ticket"], one["sample"]): one for one in completions(recorded_run)}
    assert set(shown_rows(page)) == set(every) and len(every) > 100
    for row in table(recorded):
        one = every[row["ticket"], row["sample"]]
        for name in ("step", "fate", "score", "correct", "finish", "source"):
            assert row[name] == one[name]
        assert row["num_tokens"] == len(one["tokens"])
        assert row["logprob_min"] == pytest.approx(min(one["logprobs"]), abs=1e-4)
        assert row["age"] == one["step"] - 1 - one["segments"][0][0]


def test_filters_and_sorting_are_those_of_python(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    rollouts(page)
    every = completions(recorded_run)
    key = {"ticket": lambda one: one["ticket"], "sample": lambda one: one["sample"]}

    page.locator("#rollouts label", has_text="verdict").locator("select").select_option("mixed")
    mixed = {(one["ticket"], one["sample"]) for one in every if one["verdict"] == "mixed"}
    assert set(shown_rows(page)) == mixed and 0 < len(mixed) < len(every)
    page.get_by_role("button", name="clear").click()

    page.locator("#rollouts label", has_text="graded").locator("select").select_option("wrong")
    wrong = {(one["ticket"], one["sample"]) for one in every if one["correct"] is False}
    assert set(shown_rows(page)) == wrong and wrong

    page.locator("#rollouts label", has_text="step").locator("input").first.fill("6")
    late = {(one["ticket"], one["sample"]) for one in every if one["step"] >= 6} & wrong
    assert set(shown_rows(page)) == late and late < wrong
    expect(page.locator(".r-count")).to_contain_text(f"{len(late)} of {len(every)}")

    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)

    for name, column in (("logprob_min", lambda one: min(one["logprobs"])),
                         ("num_tokens", lambda one: len(one["tokens"])),
                         ("verdict", lambda one: one["verdict"])):  # fmt: skip
        head = page.locator(f'#rollout-table .r-head [data-name="{name}"]')
        head.locator("button").click()
        down = head.get_attribute("aria-sort") == "descending"
        values = {(one["ticket"], one["sample"]): rounded(column(one)) for one in every}
        assert [values[row] for row in shown_rows(page)] == sorted(values.values(), reverse=down)
        head.locator("button").click()
        assert [values[row] for row in shown_rows(page)] == sorted(
            values.values(), reverse=not down
        )
    some = every[len(every) // 2]
    page.fill("#rollout-filter", f"{some['ticket']}/{some['sample']}")
    assert shown_rows(page) == [tuple(some[name] for name in key)]


def test_a_completion_is_shown_to_the_letter(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    every = completions(recorded_run)
    for one in (every[0], every[-1], max(every, key=lambda one: len(one["tokens"]))):
        viewer = open_completion(page, one["ticket"], one["sample"])
        tokens = viewer.locator("div.v-tokens")
        expect(tokens).to_have_attribute("data-whole", "true")
        end = "<eos>" if one["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(one["text"]) + end)
        assert tokens.locator("[data-at]").count() == len(one["tokens"])
        facts = {
            part.locator("dt").inner_text(): part.locator("dd").inner_text()
            for part in viewer.locator(".v-facts > div").all()
        }
        assert facts["tokens"] == str(len(one["tokens"]))
        assert ("right" in facts["graded"]) == one["correct"]
        assert facts["answer read"] == one["pred"]
        said = [text.inner_text() for text in viewer.locator(".v-text pre").all()]
        assert said == [one["prompt"], one["truth"]]
        page.keyboard.press("Escape")
        expect(viewer).to_be_hidden()
    open_completion(page, every[0]["ticket"], every[0]["sample"])
    screenshot(page, "viewer")


def test_colours_follow_the_figures(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    one = min(completions(recorded_run), key=lambda one: min(one["logprobs"]))
    viewer = open_completion(page, one["ticket"], one["sample"])
    spans = viewer.locator("[data-at]")

    def colours() -> list[str]:
        return list(
            spans.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
        )

    by_logprob = colours()
    least = one["logprobs"].index(min(one["logprobs"]))
    most = one["logprobs"].index(max(one["logprobs"]))
    assert by_logprob[least] != by_logprob[most]
    viewer.locator('[data-color="advantage"]').click()
    assert len(set(colours())) == 1 and colours() != by_logprob
    viewer.locator('[data-color="logprob"]').click()
    assert colours() == by_logprob
    # The keys go on from there.
    expect(viewer.locator('[data-color="logprob"]')).to_be_focused()
    page.keyboard.press("c")
    expect(viewer.locator(".v-half")).to_have_count(2)


def test_gaps_of_a_cpu_have_colours(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    every = {(one["ticket"], one["sample"]): one for one in completions(recorded_run)}
    gaps = {}
    for path in (recorded_run / "samples" / "policy").iterdir():
        for said in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            name = said["ticket"], said["sample"]
            ours = every[name]["logprobs"] if name in every else []
            pairs = zip(ours, said["logprobs"] or [])
            gaps[name] = [abs(one - other) for one, other in pairs]
    few = {name: found for name, found in gaps.items() if found and max(found) < 1e-4}
    name = max(few, key=lambda name: max(few[name]))
    found = few[name]
    assert max(found) > 1e-6
    viewer = open_completion(page, *name)
    viewer.locator('[data-color="gap"]').click()
    spans = viewer.locator("[data-at]")
    colours = spans.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert colours[found.index(max(found))] != "rgba(0, 0, 0, 0)"


def test_two_of_a_group_side_by_side(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    every = {(one["ticket"], one["sample"]): one for one in completions(recorded_run)}
    (ticket, sample), one = next(item for item in every.items() if item[1]["correct"])
    viewer = open_completion(page, ticket, sample)
    viewer.locator("#compare").click()
    panes = viewer.locator(".v-half")
    expect(panes).to_have_count(2)
    shown = [int(re.sub(r"\D", "", text.get_attribute("aria-label") or "")) for text in panes.all()]
    assert shown[0] == sample and every[ticket, shown[1]]["correct"] != one["correct"]
    for place, pane in enumerate(panes.all()):
        other = every[ticket, shown[place]]
        end = "<eos>" if other["finish"] == "stop" else ""
        assert shown_text(pane.locator("div.v-tokens")) == code_units(other["text"] + end)
    screenshot(page, "viewer_side_by_side")
    viewer.locator("#compare").click()
    expect(panes).to_have_count(1)


def test_the_keyboard_alone(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    rollouts(page)
    page.keyboard.press("/")
    expect(page.locator("#rollout-filter")).to_be_focused()
    page.keyboard.type("trained")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#rollout-table")).to_be_focused()
    rows = shown_rows(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    viewer = page.locator("#viewer")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {rows[1][0]} · sample {rows[1][1]}")
    expect(viewer.locator("div.v-tokens")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(viewer.locator("[data-at].v-at")).to_have_attribute("data-at", "0")
    page.keyboard.press("End")
    last = len(
        next(one for one in completions(recorded_run) if (one["ticket"], one["sample"]) == rows[1])[
            "tokens"
        ]
    )
    expect(viewer.locator("[data-at].v-at")).to_have_attribute("data-at", str(last - 1))
    expect(viewer.locator(".v-detail")).to_contain_text(f"{last} of {last}")
    page.keyboard.press("j")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {rows[2][0]} · sample {rows[2][1]}")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    expect(page.locator("#rollout-table")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_on_every_colour(recorded: Path, open_page: Open, scheme: str) -> None:
    page = open_page(recorded, color_scheme=scheme)
    rollouts(page)
    one = next(row for row in table(recorded) if row["correct"] is False)
    viewer = open_completion(page, one["ticket"], one["sample"])
    expect(viewer.locator(".v-tokens")).to_be_visible()
    page.evaluate(
        """() => {
          const names = [...[1, 2, 3, 4, 5].flatMap(at => [`u${at}`, `d${at}`]),
            ...[1, 2, 3, 4, 5, 6, 7, 8, 9].map(at => `s${at}`)];
          for (const name of names) {
            for (const kind of ["t", "t v-special", "v-box"]) {
              const made = document.createElement("span");
              made.className = `${kind} ${name}`;
              made.textContent = "<eos>";
              document.querySelector("#viewer .v-tokens").append(made);
            }
          }
        }"""
    )
    found = contrasts(page, "#rollouts-view")
    assert {"SPAN.r-wrong selected", "SPAN.t v-special s9", "SPAN.v-box d5"} <= found.keys()
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_a_table_of_very_many_completions_opens(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    text = page.evaluate(
        """table => {
          const num = 150_000, rows = {};
          for (const [name, values] of Object.entries(table.rows)) {
            rows[name] = Array.from({length: num}, (_, at) => values[at % values.length]);
          }
          const element = document.createElement("div");
          Rollouts.mount(element, {rollouts: {...table, kept: num, rows}}, () => null);
          return element.querySelector(".r-count").textContent;
        }""",
        payload(recorded)["runs"][0]["rollouts"],
    )
    assert text == "150,000 completions"


def test_a_link_leads_to_a_completion(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    one = completions(recorded_run)[40]
    link = f"#ticket={one['ticket']}&sample={one['sample']}"
    page = open_page(recorded, link)
    expect(page.locator("#viewer h2")).to_have_text(
        f"Ticket {one['ticket']} · sample {one['sample']}"
    )
    assert page.url.endswith(link)
    page = open_page(recorded, "#ticket=999999999&sample=0")
    expect(page.locator("#rollouts")).to_contain_text("999999999 is not among")


def test_hostile_texts_are_nothing_but_text(
    hostile: Path, hostile_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(hostile)
    every = completions(hostile_run)
    seen = set()
    for one in every:
        inside = [text for text in HOSTILE if text in one["text"]]
        found = max(inside, key=len, default="half a pair")
        if found in seen:
            continue
        seen.add(found)
        viewer = open_completion(page, one["ticket"], one["sample"])
        tokens = viewer.locator("div.v-tokens")
        expect(tokens).to_have_attribute("data-whole", "true")
        # The tokenizer has no half of a pair.
        text = one["text"].replace("\ud800", "\ufffd")
        end = "<eos>" if one["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(text) + end)
        prompt, truth = viewer.locator(".v-text pre").all()
        assert shown_text(prompt) == code_units(visible(one["prompt"]))
        # A long truth is cut, with a word about it.
        begin = code_units(visible(one["truth"][:2000]))
        assert shown_text(truth)[: len(begin)] == begin
        assert page.evaluate("window.hacked") is None
        if found == HOSTILE[0]:
            screenshot(page, "viewer_hostile")
        page.keyboard.press("Escape")
    assert len(seen) == len(HOSTILE)
    expect(page.locator("h1")).to_have_text(HOSTILE[0])
    # Nothing but what the page itself is made of.
    for kind in ("img", "iframe", "svg[onload]", "a[href^=javascript]"):
        assert page.locator(kind).count() == 0, kind
    assert page.evaluate("window.hacked") is None


def test_hostile_names_stay_text_in_charts(hostile: Path, open_page: Open) -> None:
    page = open_page(hostile)
    for chart in payload(hostile)["charts"]:
        element = page.locator(f'[data-chart="{chart}"]')
        element.scroll_into_view_if_needed()
        expect(element).to_have_attribute("data-drawn", "true")
        element.hover()
    assert HOSTILE[0] in page.locator('[data-chart="evaluation"]').inner_text()
    assert page.evaluate("window.hacked") is None
