"""Memory of each phase, against the plan."""

from __future__ import annotations

from typing import Any

from dapo_megatron.report.folder import RunData


def memory_plan(run: RunData) -> dict[str, Any] | None:
    """The plan's peaks, as plan.json has them."""
    return None


def charts(run: RunData) -> list[dict[str, Any]]:
    """Chart definitions."""
    return []
