"""Start processes that have torch, Megatron-core, vLLM and transformers already imported.

They are forked from one server per test process, which imports these once (10 s of CPU) and starts
no thread. Every process is new, so that no state passes from one test to another.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

_PRELOADED = "tests.helpers.preload"


def warm_context() -> ForkServerContext:
    """Return a context whose processes are forked from the server. The first process starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment, inherited from the server, by that of the test."""
    os.environ.clear()
    os.environ.update(environment)
