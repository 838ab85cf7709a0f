"""Test the table of completions and the viewer in a real browser: they show exactly the recorded
text, and a completion's text is never interpreted as HTML or JavaScript."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Locator, Page, expect

from dapo_megatron.text import visible
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
    """Return the header cell of a column, which holds its filters."""
    return page.locator(f'#rollouts [data-name="{name}"]')


def depths(viewer: Locator) -> list[float]:
    """Return the color intensity of each token, in percent."""
    texts = viewer.locator("[data-at]").evaluate_all(
        "all => all.map(token => token.style.getPropertyValue('--depth'))"
    )
    return [float(text.removesuffix("%")) for text in texts]


def test_the_table_shows_the_recorded_completions(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    rollouts(page)
    screenshot(page, "rollouts_table")
    every = {
        (completion["ticket"], completion["sample"]): completion
        for completion in completions(recorded_run)
    }
    names = page.locator("#rollouts thead th").evaluate_all(
        "all => all.map(cell => cell.dataset.name)"
    )
    rows = page.locator("#rollouts tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(cell => cell.dataset.value ?? cell.textContent))"
    )
    shown = shown_rows(page)
    assert set(shown) == set(every) and len(every) > 100
    for place, values in zip(shown, rows, strict=True):
        completion, row = every[place], dict(zip(names, values, strict=True))
        assert (row["fate"], row["source"]) == (
            completion["outcome"].replace("_", " "),
            completion["source"],
        )
        assert row["finish"] == completion["finish"]
        assert row["graded"] == ("✓ right" if completion["correct"] else "✗ wrong")
        assert int(row["step"]) == completion["step"]
        assert int(row["num_tokens"]) == len(completion["tokens"])
        assert float(row["logprob_min"]) == pytest.approx(min(completion["logprobs"]), abs=1e-4)
        assert int(row["age"]) == completion["step"] - 1 - completion["segments"][0]["version"]


def test_filters_and_sorting_agree_with_python(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    rollouts(page)
    every = completions(recorded_run)

    head(page, "verdict").locator("select").select_option("mixed")
    mixed = {
        (completion["ticket"], completion["sample"])
        for completion in every
        if completion["verdict"] == "mixed"
    }
    assert set(shown_rows(page)) == mixed and 0 < len(mixed) < len(every)
    page.get_by_role("button", name="clear").click()

    head(page, "graded").locator("select").select_option("✗ wrong")
    wrong = {
        (completion["ticket"], completion["sample"])
        for completion in every
        if completion["correct"] is False
    }
    assert set(shown_rows(page)) == wrong and wrong

    head(page, "step").locator("input").first.fill("6")
    late = {
        (completion["ticket"], completion["sample"])
        for completion in every
        if completion["step"] >= 6
    } & wrong
    assert set(shown_rows(page)) == late and late < wrong
    expect(page.locator(".r-count")).to_contain_text(f"{len(late)} of {len(every)}")
    head(page, "step").locator("input").last.fill("20")
    middle = {
        (completion["ticket"], completion["sample"])
        for completion in every
        if completion["step"] <= 20
    } & late
    assert set(shown_rows(page)) == middle and middle < late

    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)
    page.fill("#rollouts [type=search]", "lowest log-prob")
    assert 0 < len(shown_rows(page)) < len(every)
    head(page, "why").locator("select").select_option("lowest log-prob")
    least = min(every, key=lambda completion: min(completion["logprobs"]))
    assert (least["ticket"], least["sample"]) in shown_rows(page)
    page.get_by_role("button", name="clear").click()

    for name, column in (("logprob_min", lambda completion: min(completion["logprobs"])),
                         ("num_tokens", lambda completion: len(completion["tokens"])),
                         ("verdict", lambda completion: completion["verdict"])):  # fmt: skip
        values = {
            (completion["ticket"], completion["sample"]): rounded(column(completion))
            for completion in every
        }
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


def test_a_search_looks_in_prompts_truths_and_responses(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    rollouts(page)
    every = completions(recorded_run)
    phrase = every[-1]["prompt"]
    with_text = {
        (completion["ticket"], completion["sample"])
        for completion in every
        if any(phrase.lower() in completion[name].lower() for name in ("prompt", "truth", "text"))
    }
    assert 0 < len(with_text) < len(every)
    page.fill("#rollouts [type=search]", phrase.upper())
    expect(page.locator(".r-count")).to_have_text(f"0 of {len(every)} completions")
    page.keyboard.press("Enter")
    expect(page.locator(".r-count")).to_contain_text("texts searched")
    assert set(shown_rows(page)) == with_text
    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)


def test_the_viewer_shows_exactly_the_recorded_text(
    recorded: Path, recorded_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(recorded)
    every = completions(recorded_run)
    for completion in (
        every[0],
        every[-1],
        max(every, key=lambda completion: len(completion["tokens"])),
    ):
        viewer = open_completion(page, completion["ticket"], completion["sample"])
        tokens = viewer.locator(".v-tokens")
        end = "<eos>" if completion["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(completion["text"]) + end)
        assert tokens.locator("[data-at]").count() == len(completion["tokens"])
        facts = {
            part.locator("dt").inner_text(): part.locator("dd").inner_text()
            for part in viewer.locator(".v-facts > div").all()
        }
        assert facts["tokens"] == str(len(completion["tokens"]))
        assert ("right" in facts["graded"]) == completion["correct"]
        assert facts["here because"]
        texts = [text.inner_text() for text in viewer.locator(".v-text pre").all()]
        assert texts == [completion["prompt"], completion["truth"], completion["pred"]]
        page.keyboard.press("Escape")
        expect(viewer).to_be_hidden()
    open_completion(page, every[0]["ticket"], every[0]["sample"])
    screenshot(page, "viewer")


def test_token_colors_follow_log_probs_and_versions(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    completion = min(completions(recorded_run), key=lambda completion: min(completion["logprobs"]))
    viewer = open_completion(page, completion["ticket"], completion["sample"])
    by_logprob = depths(viewer)
    assert by_logprob == [
        pytest.approx(48 * min(1, -round(value, 3) / 9) ** 0.5, abs=0.06)
        for value in completion["logprobs"]
    ]
    backgrounds = viewer.locator("[data-at]").evaluate_all(
        "all => all.map(token => getComputedStyle(token).backgroundColor)"
    )
    least, most = (
        completion["logprobs"].index(pick(completion["logprobs"])) for pick in (min, max)
    )
    assert backgrounds[least] != backgrounds[most]
    viewer.locator("[value=version]").check()
    assert set(depths(viewer)) == {0.0}  # one version sampled all tokens
    viewer.locator("[value=logprob]").check()
    assert depths(viewer) == by_logprob


def test_gaps_below_1e_4_still_have_visible_colors(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    every = {(row["ticket"], row["sample"]): row for row in completions(recorded_run)}
    gaps = {}
    for path in (recorded_run / "policy").glob("step_*.parquet"):
        for policy_row in pq.read_table(path).to_pylist():
            name = policy_row["ticket"], policy_row["sample"]
            engine_logprobs = every[name]["logprobs"] if name in every else []
            pairs = zip(engine_logprobs, policy_row["logprobs"] or [])
            gaps[name] = [abs(engine - policy) for engine, policy in pairs]
    few = {
        name: token_gaps
        for name, token_gaps in gaps.items()
        if token_gaps and max(token_gaps) < 1e-4
    }
    name = max(few, key=lambda name: max(few[name]))
    largest = max(few[name])
    assert largest > 1e-6
    viewer = open_completion(page, *name)
    viewer.locator("[value=gap]").check()
    assert depths(viewer)[few[name].index(largest)] > 40
    no_policy = next(
        name for name, completion in every.items() if completion["outcome"] != "trained"
    )
    page.keyboard.press("Escape")
    viewer = open_completion(page, *no_policy)
    expect(viewer.locator("[value=gap]")).to_be_disabled()
    expect(viewer.locator("[value=logprob]")).to_be_checked()


def test_table_and_viewer_work_with_only_the_keyboard(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
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
        next(
            completion
            for completion in completions(recorded_run)
            if (completion["ticket"], completion["sample"]) == rows[1]
        )["tokens"]
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
def test_texts_have_enough_contrast_on_every_token_color(
    recorded: Path, recorded_run: Path, open_page: Open, scheme: str
) -> None:
    page = open_page(recorded, color_scheme=scheme)
    completion = next(
        completion for completion in completions(recorded_run) if completion["correct"] is False
    )
    viewer = open_completion(page, completion["ticket"], completion["sample"])
    viewer.locator("[data-at]").evaluate_all(
        "all => all.forEach(token => token.style.setProperty('--depth', '48%'))"
    )
    lowest = contrasts(page, "#rollouts")
    assert any(name.startswith("SPAN.t v-special") for name in lowest)
    assert {name: ratio for name, ratio in lowest.items() if ratio < 4.5} == {}


def test_a_link_opens_its_completion(recorded: Path, recorded_run: Path, open_page: Open) -> None:
    completion = completions(recorded_run)[40]
    link = f"#rollout-0-{completion['ticket']}-{completion['sample']}"
    page = open_page(recorded, link)
    viewer = page.locator("#viewer")
    expect(viewer.locator("h2")).to_have_text(
        f"Ticket {completion['ticket']} · sample {completion['sample']}"
    )
    assert page.url.endswith(link)
    sibling = 1 if completion["sample"] == 0 else 0
    viewer.locator(".v-samples a").nth(sibling).click()
    expect(viewer.locator("h2")).to_have_text(f"Ticket {completion['ticket']} · sample {sibling}")


def test_a_reload_keeps_filters_and_sorting(recorded: Path, open_page: Open) -> None:
    page = open_page(recorded)
    head(page, "graded").locator("select").select_option("✓ right")
    head(page, "num_tokens").locator("button").click()
    rows = shown_rows(page)
    page.reload()
    page.wait_for_selector(READY, state="attached")
    assert shown_rows(page) == rows
    expect(head(page, "num_tokens")).to_have_attribute("aria-sort", "ascending")


def test_hostile_completions_are_shown_only_as_text(
    hostile: Path, hostile_run: Path, open_page: Open, screenshot: Keep
) -> None:
    page = open_page(hostile)
    every = completions(hostile_run)
    shown_texts = set()
    for completion in every:
        inside = [text for text in HOSTILE if text in completion["text"]]
        hostile_text = max(inside, key=len, default="lone surrogate")
        if hostile_text in shown_texts:
            continue
        shown_texts.add(hostile_text)
        viewer = open_completion(page, completion["ticket"], completion["sample"])
        tokens = viewer.locator(".v-tokens")
        # Neither UTF-8 nor the tokenizer can hold a lone surrogate.
        text = completion["text"].replace("\\ud800", "\ufffd")
        end = "<eos>" if completion["finish"] == "stop" else ""
        assert shown_text(tokens) == code_units(visible(text) + end)
        prompt, truth, _ = viewer.locator(".v-text pre").all()
        assert shown_text(prompt) == code_units(visible(completion["prompt"]))
        # A long truth is truncated, with a note.
        begin = code_units(visible(completion["truth"][:2000]))
        assert shown_text(truth)[: len(begin)] == begin
        assert page.evaluate("window.hacked") is None
        if hostile_text == HOSTILE[0]:
            screenshot(page, "viewer_hostile")
        page.keyboard.press("Escape")
    assert len(shown_texts) == len(HOSTILE)
    expect(page.locator("h1")).to_have_text(HOSTILE[0])
    # No elements except those of the page itself.
    for kind in ("img", "iframe", "svg[onload]", "a[href^=javascript]"):
        assert page.locator(kind).count() == 0, kind
    assert page.evaluate("window.hacked") is None


def test_hostile_names_are_shown_only_as_text_in_charts(hostile: Path, open_page: Open) -> None:
    page = open_page(hostile)
    for chart in payload(hostile)["charts"]:
        element = page.locator(f'[data-chart="{chart}"]')
        element.scroll_into_view_if_needed()
        expect(element).to_have_attribute("data-drawn", "true")
        element.hover()
    assert HOSTILE[0] in page.locator('[data-chart="evaluation"]').inner_text()
    assert page.evaluate("window.hacked") is None
