"""A console that keeps its warnings."""

from __future__ import annotations

import io

from dapo_megatron.tracking.console import RunConsole


class Console(RunConsole):
    """Keeps warnings, and shows nothing."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)
