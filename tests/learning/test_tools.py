"""Runs with a tool, with all processes: what they learn, and that killed ones end in the same
bits."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import run, started
from tests.helpers.configs import REPOSITORY
from tests.helpers.runs import check_ledger, metrics_of, wait_for_row
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
    check_ledger(rows)
    assert sum(row["turns/calls"] for row in rows) > 100
    assert all(row["turns/observed_tokens_mean"] > 5 for row in rows)
    assert all(row["mismatch/gap_max"] < 1e-4 for row in rows)
    assert not any(row["turns/restarts"] for row in rows)
    # Only with the tool it is right.
    assert max(row["accuracy/raw"] for row in rows) > 0.25


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_a_run_that_is_killed_ends_in_the_same_bits(undisturbed: Path, num_kills: int) -> None:
    """Kills everything, or processes of environments, at random moments while the engine samples
    and tools answer."""
    directory, name = undisturbed.parent, f"killed_{num_kills}"
    rng = random.Random(num_kills)
    for number in range(num_kills):
        before = len(metrics_of(directory / name)) if (directory / name).exists() else 0
        if before >= STEPS:
            break
        with started(*command(directory, name)) as process:
            wait_for_row(directory / name, before + 1, process)
            end = time.monotonic() + rng.uniform(0.0, 3.0)
            while time.monotonic() < end and process.poll() is None:
                kill_an_instance(process.pid, rng)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert number == 0 or metrics_of(directory / name)
    done = run(*command(directory, name))
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(directory / name, undisturbed)


def kill_an_instance(root: int, rng: random.Random) -> None:
    """Kill the process of some completion's environment."""
    descendants = psutil.Process(root).children(recursive=True)
    for process in rng.sample(descendants, len(descendants)):
        try:
            is_of_environments = "dapo_megatron.environments.process" in process.cmdline()
            if is_of_environments and process.parent().cmdline() == process.cmdline():  # type: ignore[union-attr]
                process.kill()
                return
        except psutil.Error:
            continue
