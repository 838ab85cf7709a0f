"""Skip tests that need the sandbox where it is missing. The reason names the installer."""

from __future__ import annotations

import pytest

from dapo_megatron.rewards import sandbox
from dapo_megatron.types import ConfigError


def _reason() -> str:
    try:
        sandbox.check_sandbox()
    except ConfigError as error:
        return f"tests/sandbox/install.sh: {error}"
    return ""


REASON = _reason()
needs_sandbox = pytest.mark.skipif(bool(REASON), reason=REASON)
