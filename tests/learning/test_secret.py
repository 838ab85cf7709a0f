"""Watch a real run from outside: on which addresses it listens, and where its secret appears."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dapo_megatron.cluster.secret import SECRET
from tests.helpers.configs import REPOSITORY, TINY
from tests.helpers.sockets import children, listening

OVERRIDES = (
    "train.rollout_steps=1",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "evaluation.every=0",
    "tracking.report=true",
)


@pytest.mark.long
def test_a_run_listens_only_on_loopback_and_its_secret_does_not_leak(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "dapo_megatron", "train", str(TINY), *OVERRIDES)
    where = (f"run.directory={tmp_path}", "run.name=run")
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
    output = tmp_path / "output"
    secrets, addresses, commands, inheriting_commands = set(), set(), set(), set()
    with output.open("wb") as file:
        run = subprocess.Popen(
            [*command, *where], cwd=REPOSITORY, env=environment, stdout=file, stderr=file
        )
        while run.poll() is None:
            for pid in children(run.pid):
                with suppress(psutil.Error):  # it may have ended
                    process = psutil.Process(pid)
                    command_line = " ".join(process.cmdline())
                    commands.add(command_line)
                    addresses |= listening([pid])
                    secret = process.environ().get(SECRET)
                    secrets |= {secret} - {None}
                    has_it = ("dapo_megatron train", "dapo_megatron engine")
                    if secret and not any(words in command_line for words in has_it):
                        inheriting_commands.add(command_line)
            time.sleep(0.1)
    assert run.returncode == 0, output.read_text()
    [secret] = secrets
    assert len(secret) == 64
    assert not inheriting_commands, "child processes of a rank inherited the secret"
    assert addresses and {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert not [line for line in commands if secret in line]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if secret.encode() in path.read_bytes()]
