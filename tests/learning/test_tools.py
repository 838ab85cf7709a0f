"""Runs with a tool, with all processes: what they learn, and that killed ones end in the same
bits."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import run, started
from tests.helpers.configs import REPOSITORY
from tests.helpers.runs import PATIENCE_SECONDS, check_ledger, metrics_of, servers, wait_for_the_end
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
    for name in (f"killed_{num_kills}_{number}" for number in range(num_kills)):
        while left:
            with started(*command(directory, name), new_session=True) as running:
                end = time.monotonic() + PATIENCE_SECONDS
                while running.poll() is None and not kill_an_instance(ids, rng):
                    assert time.monotonic() < end, running.stdout
                    time.sleep(rng.uniform(0.02, 0.5))
                end = time.monotonic() + rng.uniform(0.0, 3.0)
                while running.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                if running.poll() is not None:
                    break
                os.killpg(running.pid, signal.SIGKILL)
                left -= 1
            wait_for_the_end(ids)
        done = run(*command(directory, name))
        assert done.returncode == 0, done.stdout + done.stderr
        check_same(directory / name, undisturbed)
        if not left:
            return
    raise AssertionError(f"{left} kills are left: the runs ended before them")


def kill_an_instance(ids: Path, rng: random.Random) -> bool:
    """Kill the process of some completion's environment. Return whether there was any."""
    for server in servers(ids):
        with suppress(psutil.Error):
            for process in server.children():
                if "dapo_megatron.environments.process" in process.cmdline():
                    instances = process.children()
                    if len(instances) > 1:  # else it may be the one that describes environments
                        rng.choice(instances).kill()
                        return True
    return False
