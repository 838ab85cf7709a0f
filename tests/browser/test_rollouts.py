"""The table of completions and the viewer: what they show is what the run recorded, letter by
letter, and nothing that a completion says is ever more than text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from dapo_megatron.report.wording import visible
from tests.browser.chromium import READY
from tests.browser.conftest import Open
from tests.browser.reading import (
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


def rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else round(value, 4)


def head(page: Page, name: str) -> Locator:
    """A column's head, with its filters."""
    return page.locator(f'#rollouts [data-name="{name}"]')


def depths(viewer: Locator) -> list[float]:
    """How deep the color of each token is, in percent."""
    texts = viewer.locator("[data-at]").evaluate_all(
        "all => all.map(one => one.style.getPropertyValue('--depth'))"
    )
    return [float(text.removesuffix("%")) for text in texts]


def test_the_table_holds_what_was_recorded(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    rollouts(page)
    screenshot(page, "rollouts_table")
    every = {(one["ticket"], one["sample"]): one for one in completions(recorded_run)}
    names = page.locator("#rollouts thead th").evaluate_all(
        "all => all.map(one => one.dataset.name)"
    )
    rows = page.locator("#rollouts tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(one => one.dataset.value ?? one.textContent))"
    )
    shown = shown_rows(page)
    assert set(shown) == set(every) and len(every) > 100
    for place, values in zip(shown, rows, strict=True):
        one, row = every[place], dict(zip(names, values, strict=True))
        assert (row["fate"], row["source"]) == (one["fate"].replace("_", " "), one["source"])
        assert row["finish"] == one["finish"]
        assert row["graded"] == ("✓ right" if one["correct"] else "✗ wrong")
        assert int(row["step"]) == one["step"]
        assert int(row["num_tokens"]) == len(one["tokens"])
        assert float(row["logprob_min"]) == pytest.approx(min(one["logprobs"]), abs=1e-4)
        assert int(row["age"]) == one["step"] - 1 - one["segments"][0][0]


def test_filters_and_sorting_are_those_of_python(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    rollouts(page)
    every = completions(recorded_run)

    head(page, "verdict").locator("select").select_option("mixed")
    mixed = {(one["ticket"], one["sample"]) for one in every if one["verdict"] == "mixed"}
    assert set(shown_rows(page)) == mixed and 0 < len(mixed) < len(every)
    page.get_by_role("button", name="clear").click()

    head(page, "graded").locator("select").select_option("✗ wrong")
    wrong = {(one["ticket"], one["sample"]) for one in every if one["correct"] is False}
    assert set(shown_rows(page)) == wrong and wrong

    head(page, "step").locator("input").first.fill("6")
    late = {(one["ticket"], one["sample"]) for one in every if one["step"] >= 6} & wrong
    assert set(shown_rows(page)) == late and late < wrong
    expect(page.locator(".r-count")).to_contain_text(f"{len(late)} of {len(every)}")
    head(page, "step").locator("input").last.fill("20")
    middle = {(one["ticket"], one["sample"]) for one in every if one["step"] <= 20} & late
    assert set(shown_rows(page)) == middle and middle < late

    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)
    page.fill("#rollouts [type=search]", "lowest log-prob")
    assert 0 < len(shown_rows(page)) < len(every)
    head(page, "why").locator("select").select_option("lowest log-prob")
    least = min(every, key=lambda one: min(one["logprobs"]))
    assert (least["ticket"], least["sample"]) in shown_rows(page)
    page.get_by_role("button", name="clear").click()

    for name, column in (("logprob_min", lambda one: min(one["logprobs"])),
                         ("num_tokens", lambda one: len(one["tokens"])),
                         ("verdict", lambda one: one["verdict"])):  # fmt: skip
        values = {(one["ticket"], one["sample"]): rounded(column(one)) for one in every}
        for order in ("ascending", "descending"):
            head(page, name).locator("button").click()
            expect(head(page, name)).to_have_attribute("aria-sort", order)
            assert [values[row] for row in shown_rows(page)] == sorted(
                values.values(), reverse=order == "descending"
            )
    some = every[len(every) // 2]
    page.fill("#rollouts [type=search]", f"{some['ticket']}/{some['sample']}")
    assert shown_rows(page) == [(some["ticket"], some["sample"])]
    page.fill("#rollouts [type=search]", str(some["ticket"]))
    assert {ticket for ticket, _ in shown_rows(page)} == {some["ticket"]}


def test_a_search_finds_texts(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    rollouts(page)
    every = completions(recorded_run)
    phrase = every[-1]["prompt"]
    with_text = {
        (one["ticket"], one["sample"])
        for one in every
        if any(phrase.lower() in one[name].lower() for name in ("prompt", "truth", "text"))
    }
    assert 0 < len(with_text) < len(every)
    page.fill("#rollouts [type=search]", phrase.upper())
    expect(page.locator(".r-count")).to_have_text(f"0 of {len(every)} completions")
    page.keyboard.press("Enter")
    expect(page.locator(".r-count")).to_contain_text("texts searched")
    assert set(shown_rows(page)) == with_text
    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)


def test_a_completion_is_shown_to_the_letter(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    every = completions(recorded_run)
    for one in (every[0], every[-1], max(every, key=lambda one: len(one["tokens"]))):
        viewer = open_completion(page, one["ticket"], one["sample"])
        tokens = viewer.locator(".v-tokens")
        end = "<eos>" if one["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(one["text"]) + end)
        assert tokens.locator("[data-at]").count() == len(one["tokens"])
        facts = {
            part.locator("dt").inner_text(): part.locator("dd").inner_text()
            for part in viewer.locator(".v-facts > div").all()
        }
        assert facts["tokens"] == str(len(one["tokens"]))
        assert ("right" in facts["graded"]) == one["correct"]
        assert facts["here because"]
        said = [text.inner_text() for text in viewer.locator(".v-text pre").all()]
        assert said == [one["prompt"], one["truth"], one["pred"]]
        page.keyboard.press("Escape")
        expect(viewer).to_be_hidden()
    open_completion(page, every[0]["ticket"], every[0]["sample"])
    screenshot(page, "viewer")


def test_colors_follow_the_figures(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    one = min(completions(recorded_run), key=lambda one: min(one["logprobs"]))
    viewer = open_completion(page, one["ticket"], one["sample"])
    by_logprob = depths(viewer)
    assert by_logprob == [
        pytest.approx(48 * min(1, -round(value, 3) / 9) ** 0.5, abs=0.06)
        for value in one["logprobs"]
    ]
    backgrounds = viewer.locator("[data-at]").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    least, most = (one["logprobs"].index(pick(one["logprobs"])) for pick in (min, max))
    assert backgrounds[least] != backgrounds[most]
    viewer.locator("[value=version]").check()
    assert set(depths(viewer)) == {0.0}  # all by one version
    viewer.locator("[value=logprob]").check()
    assert depths(viewer) == by_logprob


def test_gaps_of_a_cpu_have_colors(recorded: Path, recorded_run: Path, open_page: Open) -> None:
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
    largest = max(few[name])
    assert largest > 1e-6
    viewer = open_completion(page, *name)
    viewer.locator("[value=gap]").check()
    assert depths(viewer)[few[name].index(largest)] > 40
    no_policy = next(name for name, one in every.items() if one["fate"] != "trained")
    page.keyboard.press("Escape")
    viewer = open_completion(page, *no_policy)
    expect(viewer.locator("[value=gap]")).to_be_disabled()
    expect(viewer.locator("[value=logprob]")).to_be_checked()


def test_the_keyboard_alone(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    page = open_page(recorded)
    rollouts(page)
    page.keyboard.press("/")
    expect(page.locator("#rollouts [type=search]")).to_be_focused()
    page.keyboard.type("trained")
    rows = shown_rows(page)
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    viewer = page.locator("#viewer")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {rows[1][0]} · sample {rows[1][1]}")
    expect(viewer.locator(".v-tokens")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(viewer.locator(".v-at")).to_have_attribute("data-at", "0")
    num = len(
        next(one for one in completions(recorded_run) if (one["ticket"], one["sample"]) == rows[1])[
            "tokens"
        ]
    )
    expect(viewer.locator(".v-detail")).to_contain_text(f"token 1 of {num}")
    page.keyboard.press("j")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {rows[2][0]} · sample {rows[2][1]}")
    page.keyboard.press("k")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {rows[1][0]} · sample {rows[1][1]}")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    expect(page.get_by_role("link", name=f"{rows[1][0]}/{rows[1][1]}", exact=True)).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_on_every_color(
    recorded: Path, recorded_run: Path, open_page: Open, scheme: str
) -> None:
    page = open_page(recorded, color_scheme=scheme)
    one = next(one for one in completions(recorded_run) if one["correct"] is False)
    viewer = open_completion(page, one["ticket"], one["sample"])
    viewer.locator("[data-at]").evaluate_all(
        "all => all.forEach(one => one.style.setProperty('--depth', '48%'))"
    )
    found = contrasts(page, "#rollouts")
    assert any(name.startswith("SPAN.t v-special") for name in found)
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_a_link_leads_to_a_completion(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    one = completions(recorded_run)[40]
    link = f"#rollout-0-{one['ticket']}-{one['sample']}"
    page = open_page(recorded, link)
    viewer = page.locator("#viewer")
    expect(viewer.locator("h2")).to_have_text(f"Ticket {one['ticket']} · sample {one['sample']}")
    assert page.url.endswith(link)
    sibling = 1 if one["sample"] == 0 else 0
    viewer.locator(".v-samples a").nth(sibling).click()
    expect(viewer.locator("h2")).to_have_text(f"Ticket {one['ticket']} · sample {sibling}")


def test_what_was_chosen_stays_over_a_reload(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    head(page, "graded").locator("select").select_option("✓ right")
    head(page, "num_tokens").locator("button").click()
    rows = shown_rows(page)
    page.reload()
    page.wait_for_selector(READY, state="attached")
    assert shown_rows(page) == rows
    expect(head(page, "num_tokens")).to_have_attribute("aria-sort", "ascending")


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
        tokens = viewer.locator(".v-tokens")
        # The tokenizer has no half of a pair.
        text = one["text"].replace("\ud800", "\ufffd")
        end = "<eos>" if one["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(text) + end)
        prompt, truth, _ = viewer.locator(".v-text pre").all()
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
