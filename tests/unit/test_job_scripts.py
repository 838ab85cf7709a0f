"""The job scripts with fake Slurm commands: files that they write and read back, and permissions.
tests/slurm uses the real commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = {
    # A successful requeue would make the script wait for the end of the job.
    "scontrol": "[[ $1 == show ]] && echo node1 || { [[ $1 != requeue ]]; }",
    "squeue": "true",
    "scancel": "true",
    "srun": 'env >"$DAPO_HOME/task"; umask >"$DAPO_HOME/task_umask"; eval "${FAKE:-exit 1}"',
}
ATTACK = "a[$(touch owned)]"
"""Text that Bash executes when it is evaluated as a number."""


@dataclass(frozen=True)
class Checkout:
    """A folder with slurm/ and .venv, and a PATH with fake Slurm commands."""

    folder: Path
    path: str

    @property
    def logs(self) -> Path:
        """The folder of the job's logs."""
        return self.folder / "slurm_logs" / "dapo"

    def train(self, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run train.sbatch as Slurm does for a job of one task."""
        script = REPOSITORY / "slurm" / "train.sbatch"
        return self.run(f"exec bash {script} c.yaml", environ)

    def run(self, command: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        job = {
            "JOB_ID": "7", "JOB_NAME": "dapo", "JOB_NUM_NODES": "1", "JOB_NODELIST": "node1",
            "NTASKS_PER_NODE": "1", "CPUS_ON_NODE": "2", "SUBMIT_DIR": str(self.folder),
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={
                "PATH": self.path,
                **{f"SLURM_{name}": value for name, value in job.items()},
                "DAPO_PREFLIGHT": "0",
                **environ,
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    shutil.copytree(REPOSITORY / "slurm", tmp_path / "slurm")
    fake_commands = tmp_path / "bin"
    for path in (fake_commands, tmp_path / ".venv" / "bin"):
        path.mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name, body in COMMANDS.items():
        (fake_commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (fake_commands / name).chmod(0o755)
    return Checkout(tmp_path, f"{fake_commands}:{os.environ['PATH']}")


# ------------------------------------------------------------------ files that a job writes


def test_env_txt_contains_no_secrets(checkout: Checkout) -> None:
    secrets = {
        "SLURM_JWT", "VLLM_API_KEY", "DAPO_X_TOKEN", "DAPO_token", "NCCL_PASSWORD", "UCX_PASSWD",
        "DAPO_SECRETS", "VLLM_CREDENTIALS", "DAPO_MYAPIKEY",
    }  # fmt: skip
    harmless = {
        "NCCL_DEBUG": "INFO",
        "VLLM_TOKENIZER_MODE": "slow",
        "DAPO_NOTE": "two\nlines",
        "VLLM_PROXY": "https://me:hunter2@proxy:3128",
    }
    completed = checkout.train(**dict.fromkeys(secrets, "hunter2"), **harmless)
    text = (checkout.logs / "7.0" / "env.txt").read_text()
    assert "hunter2" not in text, completed.stdout
    assert not any(f"{name}=" in text for name in secrets)
    for line in (
        "NCCL_DEBUG=INFO", "VLLM_TOKENIZER_MODE=slow", "SLURM_JOB_ID=7", "DAPO_NOTE=two",
        "VLLM_PROXY=https://proxy:3128",
    ):  # fmt: skip
        assert line in text.splitlines()


def test_cache_folders_are_not_set_to_predictable_names(checkout: Checkout) -> None:
    """Each rank chooses and checks its own folder (cluster/scratch.py). Another user could prepare
    a folder with a predictable name."""
    checkout.train()
    task = (checkout.folder / "task").read_text()
    assert "NCCL_DEBUG=WARN" in task
    for variable in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert variable not in task


@pytest.mark.parametrize(
    ("driver", "link_layer", "is_infiniband"),
    [
        ("mlx5_core", "InfiniBand", True),
        ("mlx5_core", "Ethernet", False),  # RoCE
        ("efa", "Unspecified", False),
    ],
)
def test_only_infiniband_makes_nccl_use_it(
    checkout: Checkout, driver: str, link_layer: str, is_infiniband: bool
) -> None:
    """AWS EFA is in /sys/class/infiniband, too, and NCCL does not start with NCCL_NET=IB there."""
    devices = checkout.folder / "infiniband"
    port = devices / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link_layer}\n")
    (devices / "mlx5_0" / "device").mkdir()
    (devices / "mlx5_0" / "device" / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    completed = checkout.run(f"source slurm/env.sh; has_infiniband {devices}", {})
    assert (completed.returncode == 0, completed.stdout) == (is_infiniband, "")
    nothing = checkout.run("source slurm/env.sh; has_infiniband nowhere", {})
    assert (nothing.returncode, nothing.stdout) == (1, "")


# ------------------------------------------------------------------ files that are read back


def test_a_hostile_crash_count_is_not_executed(checkout: Checkout) -> None:
    checkout.logs.mkdir(parents=True)
    count = checkout.logs / "7.quick_crashes"
    count.write_text(f"{ATTACK}\n")
    completed = checkout.train(DAPO_MAX_QUICK_CRASHES="1")
    assert not (checkout.folder / "owned").exists()
    assert f"{count}: holds no number; counting from 0" in completed.stdout
    assert "crashed 1 times in a row" in completed.stdout
    assert count.read_text() == "1\n"


@pytest.mark.parametrize("verdict", [ATTACK, "256", "08"])
def test_a_hostile_exit_reason_file_is_not_executed(checkout: Checkout, verdict: str) -> None:
    (checkout.folder / "verdict").write_text(f"{verdict} reason\n")
    fake = 'cp "$DAPO_HOME/verdict" "$DAPO_MEGATRON_VERDICT"; exit 3'
    completed = checkout.train(FAKE=fake, DAPO_REQUEUE="0")
    assert not (checkout.folder / "owned").exists()
    assert completed.returncode == 3, completed.stdout
    assert "holds no exit code" in completed.stdout
    assert "this start ended with exit code 3" in completed.stdout


def test_an_old_exit_reason_does_not_decide(checkout: Checkout) -> None:
    (checkout.logs / "7.0").mkdir(parents=True)
    (checkout.logs / "7.0" / "verdict").write_text("99 of another job\n")
    assert checkout.train(FAKE="exit 3", DAPO_REQUEUE="0").returncode == 3


def test_a_log_folder_that_is_a_link_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    checkout.logs.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (checkout.logs / "7.0").symlink_to(tmp_path / "elsewhere")
    completed = checkout.train()
    assert completed.returncode == 2
    assert "7.0 is a link or belongs to another user" in completed.stdout
    assert not list((tmp_path / "elsewhere").iterdir())


def test_srun_binds_no_task_and_finds_no_pattern_in_a_path(checkout: Checkout) -> None:
    fake = 'printf "%s\\n" "$@" >"$DAPO_HOME/arguments"'
    checkout.train(FAKE=fake, DAPO_LOGS=str(checkout.folder / "100%j"))
    options = (checkout.folder / "arguments").read_text().splitlines()
    assert "--cpu-bind=none" in options  # ranks bind themselves near their GPUs
    assert f"--output={checkout.folder}/100%%j/dapo/7.0/%N-%t.log" in options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DAPO_MAX_QUICK_CRASHES", "three"),
        ("DAPO_PORT_BASE", "2e4"),
        ("SLURM_GPUS_PER_NODE", ATTACK),
        ("DAPO_UMASK", "$(touch owned)"),
        ("DAPO_UMASK", "999"),
    ],
)
def test_a_variable_that_is_not_a_number_is_rejected(
    checkout: Checkout, name: str, value: str
) -> None:
    completed = checkout.train(**{name: value})
    assert not (checkout.folder / "owned").exists()
    assert completed.returncode == 2, completed.stdout
    assert f": {value}" in completed.stdout


EXCLUDE_NODE = "source slurm/lib.sh; LOGS=$PWD; leave_out node9"


def test_invalid_node_names_are_not_passed_to_slurm(checkout: Checkout) -> None:
    (checkout.folder / "bad_nodes").write_text(f"node2\n--begin=now\nnode3 node4\n{ATTACK}\n")
    completed = checkout.run(EXCLUDE_NODE, {})
    assert "sbatch --exclude=node2,node9 ..." in completed.stdout
    for line in ("--begin=now", "node3 node4", ATTACK):
        assert f"bad_nodes: {line} is not the name of a node" in completed.stdout
    assert not (checkout.folder / "owned").exists()


def test_submit_rejects_invalid_node_names(tmp_path: Path) -> None:
    (tmp_path / "bad_nodes").write_text("node2\n--begin=now\n")
    command = [sys.executable, str(REPOSITORY / "slurm" / "submit.py")]
    arguments = ["model_configs/tiny_cpu.yaml", "--exclude-bad", "--dry-run"]
    completed = subprocess.run(
        [*command, *arguments, "--gpus-per-node", "0", "--tasks-per-node", "2"],
        cwd=REPOSITORY,
        env={**os.environ, "DAPO_LOGS": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert completed.returncode == 2
    assert (
        f"error: {tmp_path}/bad_nodes: '--begin=now' is not the name of a node" in completed.stderr
    )


def test_an_engine_that_ends_is_started_again_until_the_run_is_over(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    # The third start is told that the run is over.
    engine = f"echo $0 $1 >>{starts}; (($(wc -l <{starts}) == 3))"
    script = subprocess.run(
        ["bash", str(REPOSITORY / "slurm" / "engine.sh"), "bash", "-c", engine],
        env={**os.environ, "DAPO_ENGINE_PAUSE": "0", "SLURM_PROCID": "7"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert script.returncode == 0, script.stdout
    assert script.stdout.count("engine ended with exit code 1; starting it again") == 2
    assert starts.read_text().splitlines() == ["--replica 7"] * 3
