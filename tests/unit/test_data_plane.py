"""The benchmark of the data plane runs, on a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KEYS = {
    "tokens",
    "processes",
    "rank0_cpu_seconds",
    "other_cpu_seconds_max",
    "record_blocking_seconds",
    "record_cpu_seconds",
    "received_over_own_max",
    "rss_over_raw_max",
}


def test_the_benchmark_counts_each_token_once() -> None:
    program = REPOSITORY / "tools" / "bench" / "data_plane.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(program), "--quick"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary.keys() >= KEYS
    assert summary["sequences"] == 16
    assert summary["received_over_own_max"] == 1.0
    assert summary["parts"]["exchange"]["rank 0"] > 0
