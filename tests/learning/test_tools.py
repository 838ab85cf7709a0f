"""Runs with a tool, with all processes: what they learn, and that killed ones end in the same
bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.configs import REPOSITORY
from tests.helpers.runs import check_ledger, kill_with_an_instance, metrics_of
from tests.learning.test_resume import STEPS, check_same

CONFIG = REPOSITORY / "model_configs" / "tiny_tools.yaml"
SMALL = (
    *("resume=auto", f"train.rollout_steps={STEPS}", "rollout.prompts_per_step=8"),
    *("train.updates_per_step=2", "rollout.samples_per_prompt=8", "evaluation.sets=[]"),
    *("checkpoint.every=1", "tracking.mlflow=false", "tracking.report=false"),
    *("run.processes=1", "policy.tensor_parallel=1"),
)


def command(directory: Path, name: str) -> list[str]:
    return ["train", str(CONFIG), *SMALL, f"run.directory={directory}", f"run.name={name}"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools")
    done = run(*command(directory, "undisturbed"))
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "undisturbed"


def test_a_model_calls_its_tool(undisturbed: Path) -> None:
    rows = metrics_of(undisturbed)
    check_ledger(undisturbed, STEPS, samples_per_prompt=8)
    assert sum(row.get("turns/calls", 0) for row in rows) > 100
    assert not any(row.get("turns/restarts") for row in rows)
    decided = [row for row in rows if "turns/mean" in row]  # no group was, if all were carried
    assert decided and all(row["turns/observed_tokens_mean"] > 5 for row in decided)
    assert all(row["mismatch/gap_max"] < 1e-4 for row in decided)
    assert max(row["accuracy/raw"] for row in decided) > 0.25  # without a tool 0


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_a_run_that_is_killed_ends_in_the_same_bits(
    undisturbed: Path, ids: Path, num_kills: int
) -> None:
    """Each time the process of an environment is killed, and soon afterwards everything, at random
    moments while the engine samples and tools answer. A second kill in the same turn would count as
    the call's fault, and change what is sampled."""
    directory, rng, left = undisturbed.parent, random.Random(num_kills), num_kills
    for number in range(num_kills + 4):
        words = command(directory, f"killed_{num_kills}_{number}")
        while left and kill_with_an_instance(words, ids, rng):
            left -= 1
        done = run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        check_same(directory / f"killed_{num_kills}_{number}", undisturbed)
        if not left:
            return
    raise AssertionError(f"{left} kills are left: the runs ended before them")
