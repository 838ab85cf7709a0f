"""Read a report's file and page, and a run's files, without the code of dapo_megatron.report."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from playwright.sync_api import Locator, Page, expect

Json = dict[str, Any]


def payload(report: Path) -> Json:
    """Return the data that Python embedded in the page."""
    text = report.read_text(encoding="utf-8")
    script = re.search(r'<script[^>]*\bid="data"[^>]*>([^<]*)</script>', text)
    assert script, "no data in the page"
    value = json.loads(gzip.decompress(base64.b64decode(script[1])))
    assert isinstance(value, dict)
    return value


def metrics(run: Path) -> dict[int, Json]:
    """Return the rows of metrics.jsonl by step, without an unfinished last line."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return {value["step"]: value for value in map(json.loads, lines)}


def completions(run: Path) -> list[Json]:
    """Return every completion in samples/, with its step and the columns of its file."""
    rows = []
    for path in sorted((run / "samples").glob("step_*/completions.parquet")):
        step = int(path.parent.name.removeprefix("step_"))
        rows += [{"step": step, **row} for row in pq.read_table(path).to_pylist()]
    return rows


def chart(page: Page, name: str) -> Locator:
    """Scroll to a chart, wait until it is drawn, and return it."""
    element = page.locator(f'[data-chart="{name}"]')
    element.scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-chart="{name}"][data-drawn="true"]')
    return element


def traces(page: Page, name: str) -> list[Json]:
    """Return the traces that Plotly has drawn in a chart, with `x` and `y` as lists."""
    drawn = chart(page, name).evaluate(
        """element => {
          const inside = element.querySelector(".js-plotly-plot");
          return (inside ?? element).data.map(trace => ({
            ...trace, x: Array.from(trace.x ?? []), y: Array.from(trace.y ?? []),
          }));
        }"""
    )
    return list(drawn)


def code_units(text: str) -> list[int]:
    """Return the UTF-16 code units of a text. Only in this form do lone surrogates leave a page."""
    raw = text.encode("utf-16-le", "surrogatepass")
    return [raw[at] | raw[at + 1] << 8 for at in range(0, len(raw), 2)]


def shown_text(locator: Locator) -> list[int]:
    """Return the textContent of an element as UTF-16 code units."""
    return list(locator.evaluate(CODE_UNITS))


CODE_UNITS = """element => {
  const text = element.textContent;
  return Array.from({length: text.length}, (_, at) => text.charCodeAt(at));
}"""


def contrasts(page: Page, selector: str) -> dict[str, float]:
    """Return the lowest contrast (WCAG 2) of visible texts below `selector`, by tag and class."""
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
  const light = color => color.map(channel => channel / 255)
    .map(share => share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4)
    .reduce((sum, share, at) => sum + share * [0.2126, 0.7152, 0.0722][at], 0.05);
  const behind = element => over(getComputedStyle(element).backgroundColor,
    element.parentElement ? behind(element.parentElement) : [255, 255, 255]);
  const lowest = {};
  for (const element of document.querySelectorAll(`${selector} *`)) {
    const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!hasText || element.disabled || !element.offsetParent) continue;
    const below = behind(element);
    const [a, b] = [light(below), light(over(getComputedStyle(element).color, below))];
    const name = `${element.tagName}.${element.className}`;
    lowest[name] = Math.min(lowest[name] ?? 21, Math.max(a, b) / Math.min(a, b));
  }
  return lowest;
}"""


def shown_rows(page: Page) -> list[tuple[int, int]]:
    """Return (ticket, sample) of every visible row of the table, from the top."""
    links = page.locator("#rollouts tbody tr:not([hidden]) a").all_inner_texts()
    return [(int(ticket), int(sample)) for ticket, sample in (text.split("/") for text in links)]


def rollouts(page: Page) -> Locator:
    """Scroll to the table of completions and return it."""
    page.locator("#rollouts").scroll_into_view_if_needed()
    return page.locator("#rollouts table")


def open_completion(page: Page, ticket: int, sample: int) -> Locator:
    """Open a completion in the viewer, through the search field, and return the viewer."""
    rollouts(page)
    page.fill("#rollouts [type=search]", f"{ticket}/{sample}")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    viewer = page.locator("#viewer")
    expect(viewer).to_be_visible()
    expect(viewer.locator("h2")).to_have_text(f"Ticket {ticket} · sample {sample}")
    return viewer
