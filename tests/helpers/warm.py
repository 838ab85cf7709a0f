"""Processes that start with torch, Megatron-core, vLLM and transformers imported.

They are forked from one server per test process, which imports these once (10 s of CPU) and starts
no thread. Every process is new, so that no test can leave anything behind for another.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

_PRELOADED = "tests.helpers.preload"


def warm_context() -> ForkServerContext:
    """Return a context whose processes are forked from the server, which starts with the first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment, which is the server's, by the one of the test."""
    os.environ.clear()
    os.environ.update(environment)
