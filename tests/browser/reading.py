"""What a report says, read with other code than its own: from its file, and from its page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

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
    """Every completion in samples/, with step, fate, ticket, prompt, truth and source of its
    group."""
    found = []
    for path in sorted((run / "samples").glob("step_*.jsonl")):
        step = int(path.stem.removeprefix("step_"))
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            group = json.loads(line)
            about = {key: group[key] for key in ("fate", "ticket", "prompt", "truth", "source")}
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
