"""Runs with the agent of docs/environments.md, with all processes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY
from tests.helpers.runs import check_ledger, kill_with_an_instance, metrics_of
from tests.learning.test_resume import check_same
from tests.unit.test_docs import blocks

CONFIG = REPOSITORY / "model_configs" / "tiny_tools.yaml"
PAGE = REPOSITORY / "docs" / "environments.md"
STEPS = 3
PRODUCTS = {
    "kind": "reasoning_gym",
    "name": "products",
    "dataset": "products",
    "size": 400,
    "seed": 1,
    "options": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
    "environment": {"agent": "my_agent:run"},
}
SMALL = (
    *("resume=auto", f"train.rollout_steps={STEPS}", "rollout.prompts_per_step=4"),
    *("train.updates_per_step=2", "rollout.samples_per_prompt=4", "evaluation.sets=[]"),
    *("checkpoint.every=1", "tracking.mlflow=false", "tracking.report=false"),
    f"model.path={REPOSITORY / 'model_configs' / 'tiny_qwen3_tools'}",
    *("run.processes=1", "policy.tensor_parallel=1", "rollout.max_response_tokens=224"),
    f"data.train=[{json.dumps(PRODUCTS)}]",
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the agent of the documentation, which makes the same calls each time."""
    folder = tmp_path_factory.mktemp("agent")
    (text,) = (block for block in blocks(PAGE, "python") if "async" in block)
    (folder / "my_agent.py").write_text(text + "\n\nrun.repeatable = True\n")
    return folder


def command(directory: Path, name: str) -> list[str]:
    return ["train", str(CONFIG), *SMALL, f"run.directory={directory}", f"run.name={name}"]


@pytest.fixture(scope="module")
def undisturbed(agent: Path) -> Path:
    done = run(*command(agent, "undisturbed"), folder=agent)
    assert done.returncode == 0, done.stdout + done.stderr
    return agent / "undisturbed"


def test_the_agent_of_the_documentation_trains(undisturbed: Path) -> None:
    rows = metrics_of(undisturbed)
    check_ledger(undisturbed, STEPS)
    assert not any(row.get("turns/restarts") or row.get("turns/branches") for row in rows)
    decided = [row for row in rows if "turns/mean" in row]
    assert decided and max(row["turns/mean"] for row in decided) > 1
    assert all(row["mismatch/gap_max"] < 1e-4 for row in decided)
    assert max(row["accuracy/raw"] for row in decided) > 0.2  # without a tool 0


def test_a_run_with_agents_that_is_killed_ends_in_the_same_bits(
    undisturbed: Path, agent: Path, ids: Path
) -> None:
    for number in range(4):
        words = command(undisturbed.parent, f"killed_{number}")
        is_killed = kill_with_an_instance(words, ids, random.Random(number), agent)
        done = run(*words, folder=agent)
        assert done.returncode == 0, done.stdout + done.stderr
        check_same(undisturbed.parent / f"killed_{number}", undisturbed)
        if is_killed:
            return
    raise AssertionError("all runs ended before the kill")
