"""rich's console for texts of others. Not in text.py, because importing rich takes time that the
launcher does not have to spend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from dapo_megatron.text import visible


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
