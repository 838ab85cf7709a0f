"""A search in the texts of completions: what it finds, what it marks, and how it ends."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.conftest import Open
from tests.browser.reading import Json, completions, rollouts, shown_rows
from tests.helpers.made_run import HOSTILE


def search(page: Page, phrase: str) -> None:
    """For a phrase in the texts, to the end."""
    page.fill("#rollout-filter", phrase)
    page.keyboard.press("Enter")
    expect(page.locator(".r-count")).to_have_text(re.compile("completions have it in a text$"))


def with_text(every: list[Json], phrase: str) -> set[tuple[int, int]]:
    """(ticket, sample) of the completions that have it in their prompt, truth or answer."""
    return {
        (one["ticket"], one["sample"])
        for one in every
        if any(phrase.lower() in one[name].lower() for name in ("prompt", "truth", "text"))
    }


def test_a_word_of_a_text_finds_its_completions(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    every = completions(recorded_run)
    rollouts(page)
    answer = max((one["text"] for one in every), key=len)
    prompt = every[-1]["prompt"]
    assert 0 < len(with_text(every, answer)) < len(with_text(every, prompt)) < len(every)
    for phrase in (answer, prompt, prompt.upper()):
        page.fill("#rollout-filter", "")
        search(page, phrase)
        assert set(shown_rows(page)) == with_text(every, phrase)
    right = {(one["ticket"], one["sample"]) for one in every if one["correct"]}
    page.locator("#rollouts label", has_text="graded").locator("select").select_option("right")
    assert set(shown_rows(page)) == with_text(every, prompt) & right
    page.fill("#rollout-filter", "no text has this")
    expect(page.locator(".r-empty")).to_contain_text("No label has it")
    page.get_by_role("button", name="search texts").click()
    expect(page.locator(".r-empty")).to_contain_text("No text has it")
    page.get_by_role("button", name="clear").click()
    assert len(shown_rows(page)) == len(every)


def test_a_search_ends_when_the_box_changes(
    recorded: Path, recorded_run: Path, open_page: Open
) -> None:
    page = open_page(recorded)
    every = completions(recorded_run)
    rollouts(page)
    page.evaluate(
        """([first, second]) => {
          const box = document.querySelector("#rollout-filter");
          box.value = first;
          box.dispatchEvent(new Event("input"));
          box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
          box.value = second;
          box.dispatchEvent(new Event("input"));
        }""",
        [every[0]["prompt"], "trained"],
    )
    page.wait_for_timeout(300)
    trained = {(one["ticket"], one["sample"]) for one in every if one["fate"] == "trained"}
    assert set(shown_rows(page)) == trained
    expect(page.locator(".r-count")).not_to_contain_text("have it")
    expect(page.locator("#rollouts progress")).to_be_hidden()


def test_what_was_searched_for_is_marked(hostile: Path, hostile_run: Path, open_page: Open) -> None:
    page = open_page(hostile)
    every = completions(hostile_run)
    rollouts(page)
    phrase = "{{ 7 * 7 }} {% raw %} ${window.hacked=1}"
    assert phrase in HOSTILE
    search(page, phrase)
    assert set(shown_rows(page)) == with_text(every, phrase)
    page.keyboard.press("Enter")
    by_name = {(one["ticket"], one["sample"]): one for one in every}
    viewer = page.locator("#viewer")
    names = shown_rows(page)
    answers = [phrase in by_name[name]["text"] for name in names]
    for place in (answers.index(True), answers.index(False)):
        name = names[place]
        page.keyboard.press("Home")
        for _ in range(place):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        title = f"Ticket {name[0]} · sample {name[1]}"
        expect(viewer.locator("h2")).to_have_text(title)
        expect(viewer.locator(".v-tokens")).to_be_focused()
        inside = [phrase] * (phrase in by_name[name]["text"])
        assert viewer.locator(".v-tokens .v-found").all_inner_texts() == inside
        expect(viewer.locator(".v-found.v-at")).to_have_count(len(inside))
        others = [phrase for key in ("prompt", "truth") if phrase in by_name[name][key]]
        assert viewer.locator(".v-text mark").all_inner_texts() == others
        page.keyboard.press("Escape")
    assert page.evaluate("window.hacked") is None
