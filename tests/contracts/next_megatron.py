"""A pytest plugin for a Megatron-core newer than the pinned one (`make test-contracts`).

Known failures are marked xfail with a reason. A known failure that passes again is an error.
"""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

KNOWN: dict[str, str] = {}
"""Regular expression for test ids -> reason why they fail."""


def pytest_report_header() -> str:
    return f"megatron-core {version('megatron-core')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in KNOWN.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
