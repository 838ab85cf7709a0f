"""The benchmark of the data plane runs, on a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_benchmark_brings_all_tokens_to_the_trainers() -> None:
    program = REPOSITORY / "tools" / "bench" / "data_plane.py"
    words = ("--quick", "--servers", "2", "--trainers", "2", "--engines", "8")
    done = subprocess.run(
        [sys.executable, str(program), *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert [figures["engines"] for figures in summary["measured"]] == [2, 8]
    assert all(figures["completions"] == 16 * 4 for figures in summary["measured"])
    assert all(figures["rank 0"] > 0 for figures in summary["measured"])
