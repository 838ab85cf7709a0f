"""Only ranks that know the run's secret can join, and it is never exposed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo_megatron.cluster import secret as secrets
from dapo_megatron.cluster.secret import answer, prove, secret_variable, take_secret
from dapo_megatron.types import ConfigError, RankError
from tests.helpers.sockets import unused_port

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = "0123456789abcdef" * 4
SECRET = bytes.fromhex(TEXT)
OTHER = bytes(32)

# ------------------------------------------------------------------- sources of the secret


def test_a_secret_is_new_each_time_and_taken_out_of_the_environment() -> None:
    first, second = secret_variable(), secret_variable()
    assert first != second
    environ = {"PATH": "/bin", **first, secrets.SECRET_FILE: "/nowhere"}
    assert take_secret(environ) == bytes.fromhex(first[secrets.SECRET])
    assert environ == {"PATH": "/bin"}
    assert take_secret(environ) is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A private file with the secret."""
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    return path


def test_the_secret_is_read_from_a_private_file(file: Path) -> None:
    environ = {secrets.SECRET_FILE: str(file)}
    assert take_secret(environ) == SECRET
    assert environ == {}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.chmod(0o640), "with mode 640;"),
        (lambda file: file.chmod(0o602), "with mode 602;"),
        (lambda file: file.rename(file.with_name("x")), "No such file"),
        (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
        (lambda file: (file.unlink(), os.mkfifo(file, 0o600)), "Not a regular file"),
        (lambda file: file.write_text(TEXT[:-1]), "not 64 hexadecimal digits"),
        (lambda file: file.write_bytes(b"\xff" * 64), "not 64 hexadecimal digits"),
        (lambda file: file.write_text(""), "not 64 hexadecimal digits"),
        pytest.param(
            lambda file: os.chown(file, 65534, 65534),
            "belongs to user 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user"),
        ),
    ],
)
def test_a_file_that_is_not_private_or_malformed_is_refused(
    file: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(file)
    with pytest.raises(ConfigError) as refused:
        take_secret({secrets.SECRET_FILE: str(file)})
    assert message in str(refused.value)
    assert str(refused.value).startswith("DAPO_MEGATRON_SECRET_FILE")
    assert TEXT[:-1] not in str(refused.value)


def test_a_malformed_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        take_secret({secrets.SECRET: "hunter2"})
    assert "hunter2" not in str(refused.value)


# ------------------------------------------------------------------------- the proof


class Table:
    """An all-gather between threads. Rank 1 sends `forge(round, values)` instead of its value."""

    def __init__(self, size: int, forge: Callable[[int, list[bytes]], bytes] | None = None) -> None:
        self.values = [[b""] * size for _ in range(2)]
        self.barrier = threading.Barrier(size)
        self.forge = forge

    def gather(self, rank: int) -> Callable[[bytes], list[bytes]]:
        rounds = iter(range(2))

        def gather(value: bytes) -> list[bytes]:
            number = next(rounds)
            self.values[number][rank] = value
            self.barrier.wait(60)
            if rank == 1 and self.forge is not None:
                self.values[number][1] = self.forge(number, self.values[number])
            self.barrier.wait(60)
            return list(self.values[number])

        return gather


def outcomes(table: Table, known: list[bytes]) -> list[str]:
    """Run the proof on all ranks; return the error of each rank, or ""."""
    ends = [""] * len(known)

    def run(rank: int) -> None:
        try:
            prove(table.gather(rank), rank, len(known), known[rank])
        except RankError as error:
            ends[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(known))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return ends


def test_ranks_that_know_the_secret_pass_and_name_one_with_another() -> None:
    assert outcomes(Table(3), [SECRET] * 3) == [""] * 3
    ends = outcomes(Table(4), [SECRET, SECRET, OTHER, SECRET])
    assert all(ends[rank].startswith("rank 2 did not prove") for rank in (0, 1, 3))
    assert ends[2].startswith("rank 0, 1, 3 did not prove")


def test_an_answer_replayed_from_an_earlier_start_is_no_proof() -> None:
    """The impostor replays the messages of the true rank 1 from an earlier start."""
    earlier = Table(2)
    assert outcomes(earlier, [SECRET, SECRET]) == ["", ""]
    recorded = [values[1] for values in earlier.values]
    ends = outcomes(Table(2, forge=lambda number, values: recorded[number]), [SECRET, OTHER])
    assert ends[0].startswith("rank 1 did not prove")


def test_an_answer_depends_on_rank_world_size_and_nonces() -> None:
    nonces = [bytes([number]) * 32 for number in range(3)]
    answers = {
        answer(SECRET, 0, nonces), answer(SECRET, 1, nonces), answer(SECRET, 1, nonces[:2]),
        answer(SECRET, 1, nonces[::-1]), answer(OTHER, 1, nonces),
    }  # fmt: skip
    assert len(answers) == 5
    assert {len(value) for value in answers} == {32}


# ------------------------------------------------------------------------ real processes

HONEST = """
import os, sys
from dapo_megatron.cluster.ranks import join
from dapo_megatron.types import DapoError
try:
    print("exchanged", join("gloo").all_gather("plain value", str))
except DapoError as error:
    print(type(error).__name__, error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def port() -> int:
    return unused_port()


def environment(**more: str) -> dict[str, str]:
    left_out = {"LOCAL_WORLD_SIZE", secrets.SECRET, secrets.SECRET_FILE}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **more}


def start_rank(rank: int, port: int, **more: str) -> subprocess.Popen[str]:
    """Start one of two ranks that believe they are on different nodes."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", HONEST], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(**place, MASTER_PORT=str(port), **more),
    )  # fmt: skip


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    return out or err


@pytest.mark.parametrize("attack", ["pickle", "leave"])
def test_an_impostor_cannot_join(attack: str, port: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    file = tmp_path / "ran"
    honest = start_rank(0, port, DAPO_MEGATRON_SECRET=TEXT)
    impostor = subprocess.run(
        [sys.executable, "-m", "tests.helpers.impostor", str(port), attack, str(file)],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    output = output_of(honest)
    assert "joined" in impostor.stdout, impostor.stderr
    assert output.startswith("RankError"), output
    assert "rank 1" in output and "secret" in output
    assert "exchanged" not in output and TEXT not in output
    assert not file.exists(), "the message of the impostor was unpickled"


@pytest.mark.parametrize("is_one_node", [False, True])
def test_ranks_of_srun_meet_with_the_secret_of_the_environment_or_a_file(
    is_one_node: bool, port: int, file: Path
) -> None:
    """srun, unlike the launcher, makes no folder for the store of ranks on one node."""
    more = {"LOCAL_WORLD_SIZE": "2"} if is_one_node else {}
    ranks = [
        start_rank(0, port, DAPO_MEGATRON_SECRET=TEXT, **more),
        start_rank(1, port, DAPO_MEGATRON_SECRET_FILE=str(file), **more),
    ]
    assert [output_of(process) for process in ranks] == [
        "exchanged ['plain value', 'plain value']\n"
    ] * 2


def test_without_a_secret_no_connection_is_made(port: int) -> None:
    """Nothing listens on the port: a rank that tried to reach rank 0 would wait."""
    output = output_of(start_rank(1, port))
    assert output.startswith(
        "ConfigError DAPO_MEGATRON_SECRET: not set, and this is one of 2 ranks"
    )
    assert "export DAPO_MEGATRON_SECRET=$(openssl rand -hex 32)" in output


# --------------------------------------------------------------------- ranks on one machine

LAUNCHED = """
import json, os, subprocess, sys
from pathlib import Path
from dapo_megatron.cluster.launch import is_launched, launch
if not is_launched():
    sys.exit(launch([sys.executable, *sys.argv], int(sys.argv[2])))
folder = Path(os.environ["DAPO_MEGATRON_STORE"]).parent
facts = {"folder": str(folder), "mode": folder.stat().st_mode & 0o777}
facts["environ"] = os.environ["DAPO_MEGATRON_SECRET"]
from dapo_megatron.cluster.ranks import join
ranks = join("gloo")
second = ranks.second()
from tests.helpers.sockets import listening
facts["listening"] = sorted(listening([os.getpid()]))
facts["cmdline"] = Path("/proc/self/cmdline").read_text()
facts["inherited"] = subprocess.run(["env"], capture_output=True, text=True).stdout
facts["exchanged"] = [ranks.all_gather(7, int), second.all_gather(8, int)]
if ranks.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(facts))
ranks.barrier()
os._exit(0)
"""


def test_launched_ranks_listen_only_on_loopback_and_hide_their_secret(tmp_path: Path) -> None:
    script, result_file = tmp_path / "two.py", tmp_path / "result.json"
    script.write_text(LAUNCHED)
    left_out = {"GLOO_SOCKET_IFNAME"}
    launcher = subprocess.run(
        [sys.executable, str(script), str(result_file), "2"],
        env={name: value for name, value in environment().items() if name not in left_out},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert launcher.returncode == 0, launcher.stdout + launcher.stderr
    facts = json.loads(result_file.read_text())
    assert facts["exchanged"] == [[7, 7], [8, 8]]
    assert facts["listening"], "gloo has sockets"
    assert {address.rpartition(":")[0] for address in facts["listening"]} == {"127.0.0.1"}
    assert facts["mode"] == 0o700
    assert not Path(facts["folder"]).exists(), "the launcher removes it"
    assert len(facts["environ"]) == 64
    assert (
        facts["environ"]
        not in facts["cmdline"] + facts["inherited"] + launcher.stdout + launcher.stderr
    )
    assert "DAPO_MEGATRON_SECRET" not in facts["inherited"]
