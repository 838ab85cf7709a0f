"""Settings of all tests, and a check that none leaves anything behind for those after it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import Phase, settings

# Three test processes on two cores: threads would only wait for each other. Torch reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure.
settings.register_profile("default", deadline=None)
# The same examples for every mutant, and no search for the smallest that fails.
settings.register_profile(
    "mutations",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("default")

TESTS = Path(__file__).parent
_LONGEST = (
    "learning/test_train",
    "unit/test_mirror",
    "unit/test_watchdog",
    "parity/test_layouts",
    "browser/test_page",
    "browser/test_charts",
    "browser/test_rollouts",
    "unit/test_pool",
    "parity/test_engine_weights",
    "unit/test_report_damage",
    "unit/test_hostile",
    "parity/test_engine_sleep",
)
"""Files of half a minute or more, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that the processes of `make test` end together."""
    places = {TESTS / f"{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(_LONGEST)))


_EXECUTORS = ("asyncio_", "Mlflow")
"""Threads of the executors of asyncio and MLflow's client, which Python ends at exit."""


@pytest.fixture(autouse=True, scope="module")
def processes_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a file whose tests leave a process or a thread that keeps this one alive."""
    before = _processes(), set(threading.enumerate())
    yield
    processes = _processes() - before[0]
    if threads := _threads(before[1]):
        # Those of an executor that a library has dropped end when it is collected.
        gc.collect()
        for thread in threads:
            thread.join(timeout=2.0)
        threads = [thread for thread in threads if thread.is_alive()]
    assert not processes, f"{request.node.name}: its tests leave processes running: {processes}"
    assert not threads, f"{request.node.name}: its tests leave threads running: {threads}"


@pytest.fixture(autouse=True)
def state_is_restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves another environment, working directory or process group."""
    before = _state()
    yield
    after = _state()
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, f"{request.node.name}: it leaves changed: {', '.join(changed)}"


def _threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads started since `before` that keep this process alive."""
    return [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.is_alive() and not thread.daemon and not thread.name.startswith(_EXECUTORS)
    ]


def _processes() -> set[str]:
    """Command lines of this process's children. Those of multiprocessing serve all tests."""
    lines = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            lines.add(" ".join(child.cmdline())[:200])
    return {line for line in lines if line and "multiprocessing" not in line}


_OWN_VARIABLES = ("DAPO", "LOCAL_", "MASTER_", "MLFLOW_", "RANK", "SLURM_", "WORLD_SIZE")
"""Beginnings of the variables that tests set. Libraries set others when they are imported."""


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
