"""The section "time": where the seconds of a step go."""

from __future__ import annotations

from typing import Any

from dapo_megatron.report.folder import RunData

CHARTS: list[dict[str, Any]] = []


def derived(run: RunData) -> dict[str, list[float | None]]:
    """Series made of the run's own, by name."""
    return {}
