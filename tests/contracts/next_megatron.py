"""A pytest plugin for a Megatron-core newer than the pinned one (`make test-contracts`): what is
known to fail on it fails as expected, and with a reason; that it passes again is a failure, too."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

KNOWN: dict[str, str] = {}
"""Part of a test's name, as a pattern -> why it fails."""


def pytest_report_header() -> str:
    return f"megatron-core {version('megatron-core')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in KNOWN.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
