"""What a report says, read with other code than its own: from its file, and from its page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

Json = dict[str, Any]


def payload(report: Path) -> Json:
    """The data that Python gave the page."""
    text = report.read_text(encoding="utf-8")
    found = re.search(r'<script[^>]*\bid="data"[^>]*>([^<]*)</script>', text)
    assert found, "no data in the page"
    value = json.loads(gzip.decompress(base64.b64decode(found[1])))
    assert isinstance(value, dict)
    return value


def metrics(run: Path) -> dict[int, Json]:
    """Step -> the values of metrics.jsonl, whole lines alone."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return {value["step"]: value for value in map(json.loads, lines)}


def completions(run: Path) -> list[Json]:
    """Every completion in samples/, with step, fate, verdict, ticket, prompt, truth and source of
    its group."""
    found = []
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            group = json.loads(line)
            keys = ("fate", "verdict", "ticket", "prompt", "truth", "source")
            about = {key: group[key] for key in keys}
            found += [{"step": step, **about, **one} for one in group["completions"]]
    return found


def chart(page: Page, name: str) -> Locator:
    """A chart, scrolled to and drawn."""
    element = page.locator(f'[data-chart="{name}"]')
    element.scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-chart="{name}"][data-drawn="true"]')
    return element


def traces(page: Page, name: str) -> list[Json]:
    """What Plotly has drawn in a chart: name, x and y of each trace."""
    found = chart(page, name).evaluate(
        """element => {
          const inside = element.querySelector(".js-plotly-plot");
          return (inside ?? element).data.map(one => ({
            ...one, x: Array.from(one.x ?? []), y: Array.from(one.y ?? []),
          }));
        }"""
    )
    return list(found)


def code_units(text: str) -> list[int]:
    """A text as JavaScript counts it: half a surrogate pair survives no other way out of a page."""
    raw = text.encode("utf-16-le", "surrogatepass")
    return [raw[at] | raw[at + 1] << 8 for at in range(0, len(raw), 2)]


def shown_text(locator: Locator) -> list[int]:
    """The textContent of an element in code units."""
    return list(locator.evaluate(CODE_UNITS))


CODE_UNITS = """element => {
  const text = element.textContent;
  return Array.from({length: text.length}, (_, at) => text.charCodeAt(at));
}"""


def contrasts(page: Page, selector: str) -> dict[str, float]:
    """The lowest contrast (WCAG 2) of the texts below `selector` that are in the page, by class."""
    return dict(page.evaluate(CONTRASTS, selector))


CONTRASTS = """selector => {
  const dot = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (color, below) => {
    dot.fillStyle = `rgb(${below.join(" ")})`;
    dot.fillRect(0, 0, 1, 1);
    dot.fillStyle = color;
    dot.fillRect(0, 0, 1, 1);
    return [...dot.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = color => color.map(one => one / 255)
    .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0.05);
  const behind = element => over(getComputedStyle(element).backgroundColor,
    element.parentElement ? behind(element.parentElement) : [255, 255, 255]);
  const lowest = {};
  for (const element of document.querySelectorAll(`${selector} *`)) {
    const says = [...element.childNodes].some(one => one.nodeType === 3 && one.data.trim());
    if (!says || element.disabled || !element.offsetParent) continue;
    const below = behind(element);
    const [a, b] = [light(below), light(over(getComputedStyle(element).color, below))];
    const name = `${element.tagName}.${element.className}`;
    lowest[name] = Math.min(lowest[name] ?? 21, Math.max(a, b) / Math.min(a, b));
  }
  return lowest;
}"""


def shown_rows(page: Page) -> list[tuple[int, int]]:
    """(ticket, sample) of every row of the table that is shown, from the top."""
    links = page.locator("#rollouts tbody tr:not([hidden]) a").all_inner_texts()
    return [(int(ticket), int(sample)) for ticket, sample in (text.split("/") for text in links)]


def rollouts(page: Page) -> Locator:
    """The table, in sight."""
    page.locator("#rollouts").scroll_into_view_if_needed()
    return page.locator("#rollouts table")


def open_completion(page: Page, ticket: int, sample: int) -> Locator:
    """The viewer, with one completion in it, by way of the filter."""
    rollouts(page)
    page.fill("#rollouts [type=search]", f"{ticket}/{sample}")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    viewer = page.locator("#viewer")
    expect(viewer).to_be_visible()
    expect(viewer.locator("h2")).to_have_text(f"Ticket {ticket} · sample {sample}")
    return viewer
