"""Tests that run programs: left out, with the reason, where the sandbox has no namespaces."""

from __future__ import annotations

import pytest

from dapo_megatron.rewards import sandbox
from dapo_megatron.types import ConfigError


def _reason() -> str:
    try:
        sandbox.lacking()
    except ConfigError as error:
        return str(error)
    return ""


REASON = _reason()
needs_sandbox = pytest.mark.skipif(bool(REASON), reason=REASON)
