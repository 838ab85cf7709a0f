"""Test that `launch` starts ranks again that have allowed it. The ranks are small programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dapo_megatron.cluster import launch as module
from dapo_megatron.cluster.launch import launch
from dapo_megatron.types import ConfigError

PROGRAM = """
import os, sys, time
from pathlib import Path
from dapo_megatron.cluster.launch import allow_restart, forbid_restart
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
if rank == "0":
    while not (folder / "done").exists():
        time.sleep(0.01)
    sys.exit(0)
allow_restart()
starts = len(list(folder.glob("start_*"))) + 1
(folder / f"start_{starts}").touch()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.0)


def run(folder: Path, engine: str) -> tuple[int, int]:
    """Launch a rank that waits for the file `done` and one that runs `engine`. Return the exit code
    and how often the second was started."""
    command = [sys.executable, "-c", PROGRAM + engine, str(folder)]
    code = launch(command, 2, grace_seconds=0.2)
    return code, len(list(folder.glob("start_*")))


def test_a_rank_that_allows_it_is_started_again(tmp_path: Path) -> None:
    engine = "(folder / 'done').touch() if starts == 3 else sys.exit(7)"
    assert run(tmp_path, engine) == (0, 3)


def test_a_rank_that_ends_quickly_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.STARTS, "3")
    engine = """
if starts == 3:
    if os.fork() == 0:
        time.sleep(1.0)
        (folder / "done").touch()
        os._exit(0)
os._exit(7)
"""
    assert run(tmp_path, engine) == (0, 3)


def test_a_rank_that_lives_long_enough_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.STARTS, "3")
    monkeypatch.setenv(module.QUICK, "0")
    engine = "(folder / 'done').touch() if starts == 5 else sys.exit(7)"
    assert run(tmp_path, engine) == (0, 5)


@pytest.mark.parametrize("variable", [module.STARTS, module.QUICK])
def test_a_limit_that_is_no_number_is_refused(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "many")
    with pytest.raises(ConfigError, match=f"{variable}: 'many' is not a number"):
        run(tmp_path, "")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_takes_it_back_ends_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "forbid_restart(); sys.exit(7)") == (7, 1)


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("os.kill(os.getpid(), 9)", 137, "signal 9, often because memory was full (exit code -9)"),
        (
            "os.kill(os.getpid(), 7)",
            135,
            "signal 7, often because /dev/shm was full (exit code -7)",
        ),
        ("sys.exit(3)", 3, "exit code 3"),
    ],
)
def test_the_rank_that_ended_first_is_named_although_the_others_are_killed_too(
    end: str, code: int, how: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = f"import os, sys, time; os.environ['RANK'] == '1' and {end}; time.sleep(60)"
    assert launch([sys.executable, "-c", program], 3, grace_seconds=0.2) == code
    assert f"rank 1 ended first, with {how}; see its log" in capfd.readouterr().err
