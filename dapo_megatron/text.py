"""Makes hidden characters of names and texts visible. Names in files of others could otherwise
control the terminal, or make a page show something else than a file contains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2069\ufeff]"
)
"""Hidden characters: control characters except tab and newline, zero-width characters except
joiners, and direction overrides."""


def visible(text: str) -> str:
    """Replace each hidden character by its code point, as in ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda hidden: f"⟨U+{ord(hidden[0]):04X}⟩", text)


class LiteralConsole(Console):
    """rich Console that prints any text literally: without markup, and with hidden characters made
    visible. Only rich's own styles and cursor movements control the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render to segments, the last form in which text and control codes are separate."""
        for segment in super().render(renderable, options):
            is_text = not segment.control
            yield Segment(visible(segment.text), segment.style) if is_text else segment
