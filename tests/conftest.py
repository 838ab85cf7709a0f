"""Configure all tests, and check that none leaves processes, threads or changes."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings

# Several test processes share few cores, where more threads only wait for each other. Torch reads
# this variable once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow example on a busy machine is not a failure.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", **PATIENT)
# Use the same examples for every mutant, and do not shrink failing ones.
settings.register_profile(
    "mutations",
    **PATIENT,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("default")

TESTS = Path(__file__).parent
_LONGEST = (
    "learning/test_train",
    "unit/test_mlflow",
    "unit/test_watchdog",
    "parity/test_layouts",
    "browser/test_page",
    "unit/test_pool",
    "parity/test_engine_weights",
    "unit/test_report",
    "unit/test_hostile",
    "parity/test_engine_routes",
    "parity/test_turns",
)
"""Test files that take half a minute or more, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that the workers of `make test` end at about one time."""
    places = {TESTS / f"{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(_LONGEST)))


_EXECUTORS = ("asyncio_", "Mlflow")
"""Name prefixes of executor threads of asyncio and MLflow, which Python ends at exit."""
ENDING_SECONDS = 30.0
"""Time in which processes and threads end that were told to, on a busy machine."""


@pytest.fixture(autouse=True, scope="module")
def processes_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a file whose tests leave a child process, or a thread that keeps this process alive."""
    before = _processes(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + ENDING_SECONDS
    while (processes := _processes() - before[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if threads := _threads(before[1]):
        # Threads of an executor without references end when it is garbage-collected.
        gc.collect()
        for thread in threads:
            thread.join(timeout=ENDING_SECONDS)
        threads = [thread for thread in threads if thread.is_alive()]
    assert not processes, f"{request.node.name}: its tests leave processes running: {processes}"
    assert not threads, f"{request.node.name}: its tests leave threads running: {threads}"


@pytest.fixture(autouse=True)
def state_is_restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes environment, working directory or process group and does not restore
    them."""
    before = _state()
    yield
    after = _state()
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, f"{request.node.name}: it does not restore: {', '.join(changed)}"


def _threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return live threads that are not in `before` and would keep this process alive."""
    return [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.is_alive() and not thread.daemon and not thread.name.startswith(_EXECUTORS)
    ]


def _processes() -> set[str]:
    """Return command lines of this process's children, except multiprocessing's, which serve all
    tests."""
    lines = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # the child has ended
            lines.add(" ".join(child.cmdline())[:200])
    return {line for line in lines if line and "multiprocessing" not in line}


_OWN_VARIABLES = ("DAPO", "LOCAL_", "MASTER_", "MLFLOW_", "RANK", "SLURM_", "WORLD_SIZE")
"""Prefixes of the variables that tests set. Libraries set other variables when imported."""


def _state() -> dict[str, object]:
    environment = {
        f"${name}": value for name, value in os.environ.items() if name.startswith(_OWN_VARIABLES)
    }
    torch = sys.modules.get("torch")
    return environment | {
        "working directory": os.getcwd(),
        "torch.distributed": torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized(),
    }
