"""Test what the processes of a run import. Imports take most of the time until the first prompt."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_megatron.cluster.imports import COMPILER, UNUSED, quick_imports
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.sockets import unused_port

HEAVY = {"torch", "transformers", "vllm", "megatron", "mlflow", "numpy", "reasoning_gym", "rich"}
"""Packages that only ranks and their child processes need."""
NOT_ON_A_RANK = {
    *UNUSED,
    COMPILER,
    "torch._inductor.compile_fx",
    "mlflow",
    "math_verify",
    "networkx",
    "ray",
}
LAUNCHER = """
import sys
from pathlib import Path
from dapo_megatron import __main__ as command_line
command_line._load(Path(sys.argv[1]), [], [])
print(*sys.modules)
"""
RANK = """
import atexit, sys
from pathlib import Path
from dapo_megatron.__main__ import main
modules = Path(sys.argv.pop())
atexit.register(lambda: modules.write_text(" ".join(sys.modules)))
main()
"""


def run_python(code: str, *arguments: str | Path, **variables: str) -> str:
    """Run `code` in a new process and return what it printed."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_launcher_imports_nothing_heavy() -> None:
    """The launcher only checks the config while the ranks wait to be started."""
    assert not HEAVY & set(run_python(LAUNCHER, TINY).split())


def test_ranks_and_engines_import_only_what_they_use(tmp_path: Path) -> None:
    short = ("train.rollout_steps=1", "rollout.prompts_per_step=2", "evaluation.every=0")
    folder = (f"run.directory={tmp_path}", "run.name=run", "tracking.mlflow=false")
    alone = ("run.processes=1", "policy.tensor_parallel=1", "tracking.report=false")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    modules = tmp_path / "modules"
    arguments = ("train", TINY, *short, *folder, *alone, modules)
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    run_python(RANK, *arguments, **place, PYTHONPROFILEIMPORTTIME="1")
    imported = set(modules.read_text().split())
    assert "megatron.core" in imported and "vllm" not in imported
    assert not NOT_ON_A_RANK & imported
    log = (tmp_path / "run" / "logs" / "engine_0.log").read_text().splitlines()
    lines = [line for line in log if line.startswith("import time:")]
    of_engine = {line.rpartition("|")[2].strip() for line in lines}
    assert "vllm" in of_engine
    assert not {name for name in of_engine if name.partition(".")[0] == "megatron"}


def test_modules_are_hidden_only_inside_quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for name in (*UNUSED, COMPILER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with quick_imports():
        assert not gc.isenabled()
        assert importlib.util.find_spec("sklearn") is None
        with pytest.raises(ModuleNotFoundError):
            import sklearn  # noqa: F401
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(COMPILER)
    assert gc.isenabled()
    assert importlib.util.find_spec("sklearn") is not None
    assert COMPILER not in sys.modules
    monkeypatch.setitem(sys.modules, "sklearn", sys)  # what is imported already stays visible
    with quick_imports():
        assert sys.modules["sklearn"] is sys
    assert sys.modules["sklearn"] is sys
