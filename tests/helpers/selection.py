"""Find the parameters of the selected tests, so that fixtures prepare only what these need."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """Return the values of the parameters `names` in the tests of this file that were not
    deselected (`-m`, `-k`) and have them all."""
    calls = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.path == request.path
    ]
    return {
        tuple(call.params[name] for name in names)
        for call in calls
        if call is not None and all(name in call.params for name in names)
    }
