"""Test that a run whose grader fails names the data set and the fix, and saves a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dapo_megatron.rollout.record import COMPLETIONS, read_groups, recorded_steps
from tests.helpers.commands import run
from tests.helpers.configs import TINY

OVERRIDES = (
    "run.processes=1",
    "policy.tensor_parallel=1",
    "train.rollout_steps=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_prompts_per_step=12",
    "rollout.on_policy=false",
    "rollout.deterministic=false",  # as on a cluster: grades arrive in any order
    "train.updates_per_step=2",
    "evaluation.sets=[]",
    "tracking.mlflow=false",
)


def train(directory: Path, rows: Path, grader: str, *more: str) -> subprocess.CompletedProcess[str]:
    source = f"data.train=[{{kind: jsonl, name: sums, path: {rows}, grader: '{grader}'}}]"
    return run("train", TINY, *OVERRIDES, source, f"run.directory={directory}", *more)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """File of sums that the tiny model answers correctly about half of the time."""
    path = tmp_path / "sums.jsonl"
    lines = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"State the final answer to the following "
                        f"arithmetic problem: {a} + {b} ="}],
            "ability": "MATH",
            "reward_model": {"ground_truth": f"sum {a + b}", "style": "rule"},
            "extra_info": {"index": a},
        }
        for a, b in ((10 + n, 73 - n) for n in range(60))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.long
def test_a_grader_that_always_raises_is_named_and_the_run_resumes_with_another(
    tmp_path: Path, rows: Path
) -> None:
    done = train(tmp_path, rows, "tests.helpers.graders:broken")
    assert done.returncode != 0
    assert "data set 'sums': its grader failed on every completion of" in done.stdout
    assert "no such table" in done.stdout  # the exception of the grader
    assert "Saved after step 0; to continue, start with resume=auto" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    folder = tmp_path / "tiny_cpu"
    state = json.loads((folder / "checkpoints" / "step_000000" / "state.json").read_text())
    ledger = state["coordinator"]["ledger"]
    assert ledger["next_ticket"] == sum(ledger["totals"].values()) + len(ledger["open"])

    done = train(tmp_path, rows, "tests.helpers.graders:near", "resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    tickets = [
        item.group.ticket
        for step in recorded_steps(folder / "samples").values()
        for item in read_groups(step / COMPLETIONS)
    ]
    assert len(tickets) == len(set(tickets))
    assert min(tickets) == 0  # groups that abstained before the restart are written as well
