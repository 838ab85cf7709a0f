"""The report's one HTML file. It loads nothing: styles, scripts, charts and data are inside, and
its Content-Security-Policy forbids the rest.

Text of runs is escaped by the template; data for the scripts is base64 of gzip of JSON, so that
nothing in it can end a script element.
"""

from __future__ import annotations

import base64
import gzip
import json
import secrets
import time
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

import dapo_megatron
from dapo_megatron.report.escape import visible
from dapo_megatron.report.payload import Payload

SCRIPTS = (
    *("charts.js", "timeline.js"),
    *("search.js", "viewer.js", "columns.js", "rollouts.js", "app.js"),
)
"""After plotly, in this order."""
STYLES = ("style.css", "rollouts.css")

SECTIONS = {"dynamics": "training", "groups": "groups", "time": "time"}
"""Section of a chart -> id of its element."""

LEVELS = {
    "good": ("✓", "good"),
    "note": ("i", "note"),
    "warn": ("!", "warning"),
    "bad": ("✕", "problem"),
}
"""Level of a finding -> sign and word: never colour alone."""

STATES = {
    "finished": "✓",
    "running": "▶",
    "stopped": "❚❚",
    "crashed": "✕",
    "hung": "✕",
    "unknown": "?",
}


def render(payload: Payload) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [view.run.name for view in payload.views]
    text = environment.from_string(_part("page.html.j2")).render(
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        views=payload.views,
        charts={
            section: [one for one in payload.data["charts"] if one["section"] == section]
            for section in SECTIONS
        },
        missing=payload.missing,
        looks=payload.looks,
        levels=LEVELS,
        states=STATES,
        nonce=secrets.token_urlsafe(16),
        style=Markup("\n".join(_part(name) for name in STYLES)),
        scripts=[_script(_plotly()), *(_script(_part(name)) for name in SCRIPTS)],
        data=Markup(packed(payload.data)),
        blobs={name: Markup(_packed(blob)) for name, blob in payload.blobs.items()},
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        version=dapo_megatron.__version__,
    )
    # A lone surrogate, as a tokenizer's broken bytes leave it, is no UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _seen(value: Any) -> Any:
    """What the template writes of a run shows all its characters."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def packed(value: Any) -> str:
    """JSON, gzip, base64."""
    return _packed(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _script(text: str) -> Markup:
    """A script as it stands between its tags."""
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script that ends its own element")
    return Markup(text)
