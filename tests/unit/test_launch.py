"""The launcher names the rank that ended first. The ranks are small programs."""

from __future__ import annotations

import sys

import pytest

from dapo_megatron.cluster.launch import launch


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
    end: str, code: int, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"import os, sys, time; os.environ['RANK'] == '1' and {end}; time.sleep(60)"
    assert launch([sys.executable, "-c", program], 3, grace_seconds=0.2) == code
    assert f"rank 1 ended first, with {how}; see its log" in capfd.readouterr().err
