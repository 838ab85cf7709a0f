"""The recorded timelines: who did what when, over ranks and replicas."""

from __future__ import annotations

from typing import Any

from dapo_megatron.report.folder import RunData


def timelines(run: RunData) -> list[dict[str, Any]]:
    """As recorded, by step."""
    return []
