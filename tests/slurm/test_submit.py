"""Test that submit.py refuses jobs that would fail, and plans every shipped config.

Only the last tests need Slurm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.types import ConfigError
from tests.helpers import commands
from tests.helpers.published import PUBLISHED
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import REPOSITORY, SCRIPTS

TINY_CONFIGS = sorted(path.name for path in (REPOSITORY / "model_configs").glob("tiny_*.yaml"))
TINY = "model_configs/tiny_cpu.yaml"
ON_CPU = ("--gpus-per-node", "0")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("submit", SCRIPTS / "submit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["submit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


submit = load()


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run submit.py, with this Python as the venv unless `words` name a venv or an image."""
    if not {"--venv", "--container", "--apptainer"} & set(words):
        words = (*words, "--venv", sys.prefix)
    program = SCRIPTS / "submit.py"
    return commands.run(program, *words, folder=REPOSITORY, environment={**os.environ, **env})


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_every_tiny_config_can_be_planned(config: str) -> None:
    ran = run(f"model_configs/{config}", *ON_CPU, "--nodes=2", "--tasks-per-node=2", "--dry-run")
    assert ran.returncode == 0, ran.stderr
    assert "2 x 2 = 4 tasks" in ran.stdout
    assert "--ntasks-per-node=2 --gpus-per-node=0" in ran.stdout
    assert "optimizer" in ran.stdout, "no memory estimate"


def of_the_paper(folder: Path) -> list[str]:
    """Return arguments for the paper's config, with the model config and an empty data file."""
    data = folder / "data.parquet"
    data.touch()
    hf = PUBLISHED["Qwen2.5-32B"][1]
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    paths = [f"{key}.0.path={data}" for key in ("data.train", "evaluation.sets")]
    return ["model_configs/qwen2.5_32b_dapo.yaml", f"model.path={folder}", *paths, "--dry-run"]


def test_the_papers_run_can_be_planned(tmp_path: Path) -> None:
    ran = run(*of_the_paper(tmp_path), "--nodes=16", "--chain=10", COLUMNS="200")
    assert ran.returncode == 0, ran.stderr
    for text in (
        "16 x 8 = 128 tasks, one per GPU", "TP x PP x CP x EP x DP = 8 x 1 x 2 x 1 x 8",
        "32 of 4 ranks", "KV cache", "host memory of a node", "offloaded while generating",
        "checkpoint", "a rollout step", "generate", "sync", "update", "--signal=B:USR1@960",
    ):  # fmt: skip
        assert text in ran.stdout, text


def test_a_dry_run_without_model_and_data_plans_and_creates_nothing() -> None:
    paths = [f"{key}.0.path=nowhere/data.parquet" for key in ("data.train", "evaluation.sets")]
    words = ["model_configs/qwen3_30b_a3b.yaml", "model.path=nowhere/Qwen3-30B-A3B", *paths]
    before = {path for path in REPOSITORY.iterdir() if path.name != ".pytest_cache"}
    ran = run(*words, "--nodes=4", "--dry-run", COLUMNS="200")
    assert ran.returncode == 0, ran.stderr
    assert "published dimensions of Qwen/Qwen3-30B-A3B" in ran.stdout
    assert "missing data.train.0.path: no file nowhere/data.parquet" in ran.stdout
    assert "memory of every rank" in ran.stdout
    assert {path for path in REPOSITORY.iterdir() if path.name != ".pytest_cache"} == before
    submitted = run(*words, "--nodes=4")
    assert submitted.returncode == 2
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir nowhere" in submitted.stderr
    assert "evaluation.sets.0.path: no file" in submitted.stderr


def test_a_run_that_does_not_fit_is_not_submitted(tmp_path: Path) -> None:
    ran = run(*of_the_paper(tmp_path), "--nodes=16", "--gpu-memory=40")
    assert ran.returncode == 2, ran.stdout
    assert "more than there is" in ran.stderr
    assert "layouts that fit 128 GPUs of 40 GiB with memory to spare:" in ran.stderr
    assert "nothing was submitted" in ran.stderr


def test_too_few_nodes_and_too_little_host_memory_are_refused(tmp_path: Path) -> None:
    ran = run(*of_the_paper(tmp_path), "--nodes=1")
    assert ran.returncode == 2, ran.stdout
    assert "does not divide the 8 processes" in ran.stderr
    assert "layouts that fit 8 processes:" in ran.stderr
    ran = run(*of_the_paper(tmp_path), "--nodes=16", "--host-memory=100")
    assert ran.returncode == 2, ran.stdout
    assert "host: a node's ranks take" in ran.stderr


def test_a_plan_on_gpus_shows_layout_chain_and_sbatch_options() -> None:
    ran = run(
        TINY, "--nodes=2", "--chain=3", "--account=a", "--partition=p", "--qos=q", "--dry-run",
        "--time=2-0", "run.stop_seconds=400", "policy.pipeline_parallel=2",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for text in (
        "2 x 8 = 16 tasks, one per GPU", "TP x PP x CP x EP x DP = 2 x 2 x 1 x 1 x 4",
        "1 of 1 ranks", "3 jobs", "--signal=B:USR1@460", "--dependency=singleton", "--account=a",
        "--partition=p", "--qos=q", "--job-name=tiny_cpu", "runs/tiny_cpu",
        "slurm_logs/tiny_cpu/%x-%j.out", "slurm/train.sbatch model_configs/tiny_cpu.yaml",
    ):  # fmt: skip
        assert text in ran.stdout, text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.yaml",), "nowhere.yaml"),
        ((TINY, "--overlay", "nowhere.yaml"), "nowhere.yaml"),
        ((TINY, "train.steps=3"), "train.steps"),
        ((TINY, "policy.tensor_parallel=3"), "policy.tensor_parallel"),
        ((TINY, "--nodes=3", "policy.pipeline_parallel=4", *ON_CPU), "does not divide"),
        ((TINY, "--time=1 day"), "--time: 1 day is not a time"),
        ((TINY, "--time=5"), "--time: 5 is 300 s, and 300 s before its end"),
        ((TINY, "--time=10", "run.stop_seconds=700"), "lower run.stop_seconds"),
        ((TINY, "--tasks-per-node=4"), "--tasks-per-node: 4 on nodes of 8 GPUs"),
        (
            (TINY, "--nodes=2", "engine.tensor_parallel=2", *ON_CPU),
            "engine.tensor_parallel: the 2 ranks of an engine without",
        ),
        (
            (TINY, "engine.colocated=false", "engine.replicas=8"),
            "engine.replicas: 8 engines of 1 GPUs leave none of 8 to the policy",
        ),
        ((TINY, "--venv", "nowhere"), "--venv: no nowhere/bin/python"),
        ((TINY, "--container", "/nowhere.sqsh"), "--container: no image /nowhere.sqsh"),
        ((TINY, "--apptainer", "nowhere.sif"), "--apptainer: no image nowhere.sif"),
        ((TINY, "--container", "a", "--venv", "b"), "--container and --venv: give only one"),
        ((TINY, "--container", "a#b", "--mounts", "/nowhere:/x"), "--mounts: no folder /nowhere"),
        ((TINY, "--chain=2", "resume=never"), "resume: never; every job of a chain"),
        (
            (TINY, 'data.train=[{kind: jsonl, name: a, path: no.jsonl, grader: dapo_math}]'),
            "data.train.0.path: no file no.jsonl",
        ),
    ],
)  # fmt: skip
def test_a_job_that_would_fail_is_refused_with_its_cause(
    words: tuple[str, ...], message: str
) -> None:
    ran = run(*words, "--dry-run")
    assert ran.returncode == 2, ran.stdout
    assert message in ran.stderr
    assert "nothing was submitted" in ran.stderr


def test_engines_on_nodes_of_their_own_are_planned_as_two_steps() -> None:
    words = ("model_configs/qwen3_8b.yaml", "--dry-run", "engine.colocated=false",
             "engine.tensor_parallel=1")  # fmt: skip
    ran = run(*words, "--nodes=2", "engine.replicas=8")
    assert ran.returncode == 0, ran.stderr
    assert "DAPO_ENGINES=8x1 sbatch" in ran.stdout.replace("'", "")
    assert "--no-kill " in ran.stdout
    assert "every policy rank" in ran.stdout and "every engine rank" in ran.stdout
    assert "8 of 1, on the last 1 nodes; the policy has 8 ranks" in ran.stdout
    shared = run(*words, "--nodes=1", "engine.replicas=4")
    assert shared.returncode == 2
    assert "engine.replicas: 4 engines of 1 (engine.tensor_parallel) do not fill" in shared.stderr
    assert "use a multiple of 8" in shared.stderr


@given(
    days=st.integers(0, 30), hours=st.integers(0, 23), minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
)  # fmt: skip
def test_time_formats_are_those_of_slurm(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert submit.seconds_of(f"{days}-{hours}:{minutes}:{seconds}") == whole
    assert submit.seconds_of(f"{days * 24 + hours}:{minutes:02}:{seconds:02}") == whole
    assert submit.seconds_of(f"{(days * 24 + hours) * 60 + minutes}:{seconds:02}") == whole
    assert submit.seconds_of(f"{minutes}") == minutes * 60
    assert submit.seconds_of(f"{days}-{hours}") == (days * 24 + hours) * 3600


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1-", "24:00:00:00", "1.5"])
def test_other_time_formats_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        submit.seconds_of(text)


# ------------------------------------------------------------------ with Slurm


@pytest.fixture
def waiting(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that accepts jobs but starts none."""
    cluster.run("scontrol", "update", "partitionname=all", "state=down")
    yield cluster
    cluster.cancel_all()
    cluster.run("scontrol", "update", "partitionname=all", "state=up")


@pytest.mark.slurm
@pytest.mark.parametrize("config", TINY_CONFIGS)
@pytest.mark.parametrize("machine", [(), (*ON_CPU, "--tasks-per-node=4")], ids=["gpu", "cpu"])
def test_slurm_accepts_every_tiny_config(
    waiting: Cluster, config: str, machine: tuple[str, ...], tmp_path: Path
) -> None:
    """submit.py submits it, after `sbatch --test-only`."""
    at = f"model_configs/{config}"
    ran = run(
        at, "--nodes=4", "--time=1-0", "--chain=2", *machine,
        SLURM_CONF=waiting.env["SLURM_CONF"], DAPO_LOGS=str(tmp_path),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    jobs = [int(number) for number in re.findall(r"submitted job (\d+)", ran.stdout)]
    assert len(jobs) == 2
    for number in jobs:
        shown = waiting.run("scontrol", "show", "job", str(number))
        tasks = 16 if machine else 32
        for fact in ("JobState=PENDING", "NumNodes=4", f"NumTasks={tasks}", "TimeLimit=1-00:00:00"):
            assert fact in shown, shown
        assert ("gres:gpu:8" in shown) == (not machine)
        assert f"{REPOSITORY}/slurm/train.sbatch {at}" in shown


@pytest.mark.slurm
def test_a_job_that_slurm_refuses_is_not_submitted(cluster: Cluster) -> None:
    ran = run(TINY, "--nodes=9", "--chain=2", SLURM_CONF=cluster.env["SLURM_CONF"])
    assert ran.returncode == 2
    assert "Slurm refuses the job" in ran.stderr
    assert cluster.run("squeue", "-h") == ""
