"""The command line: quick answers, error messages, and starting, watching and ending ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_megatron.__main__ import app
from dapo_megatron.types import DapoError

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = "model_configs/tiny_cpu.yaml"
OTHER = "model_configs/tiny_qwen3_moe"
TIMEOUT = 300.0
"""Maximum seconds that a test waits for another process."""


def environment_without_launcher() -> dict[str, str]:
    launcher_variables = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {name: value for name, value in os.environ.items() if name not in launcher_variables}
    # Plain text in wide lines, wherever the tests run.
    return {**kept, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


def command_line(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dapo_megatron", *arguments],
        cwd=REPOSITORY,
        env={**environment_without_launcher(), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


# ---------------------------------------------------------------------------- answers


def test_help_lists_the_commands() -> None:
    completed = command_line("--help")
    assert completed.returncode == 0
    assert all(command in completed.stdout for command in ("train", "evaluate", "doctor"))


@pytest.mark.parametrize(("rank", "reports"), [("0", True), ("1", False)])
def test_a_config_error_is_one_line_of_rank_0(rank: str, reports: bool) -> None:
    completed = command_line("train", TINY, "loss.clip_hihg=0.3", RANK=rank, WORLD_SIZE="2")
    assert completed.returncode == 2
    line = "error: loss.clip_hihg: unknown key; did you mean 'clip_high'?\n"
    assert completed.stderr == (line if reports else "")
    assert completed.stdout == ""


ERRORS = {
    "train nowhere.yaml": "nowhere.yaml: cannot be read",
    "train {fifo}": "{fifo}: not a regular file",
    "plan /dev/zero": "/dev/zero: not a regular file",
    f"train {TINY} policy.tensor_parallel=3": "policy.tensor_parallel x pipeline_parallel",
    f"train {TINY} model.path=nowhere": "model.path: nowhere/config.json: cannot be read",
    f"train {TINY} data.train.0.grader=dapo_mth": "data.train.0.grader: grader 'dapo_mth'",
    f"train {TINY} loss.kl={{{{coefficient:\t0.1,reference:\tnowhere}}}}": (
        "loss.kl.reference: nowhere: no such folder"
    ),
    f"train {TINY} loss.kl={{{{coefficient:\t0.1,reference:\t{OTHER}}}}}": (
        f"loss.kl.reference: {OTHER} is of another model than model.path: family qwen3_moe, "
    ),
    f"train {TINY} loss.distill={{{{teacher:\tnowhere,coefficient:\t1}}}}": (
        "loss.distill.teacher: nowhere: no such folder"
    ),
    f"train {TINY} loss.kl.coefficient=-1": "loss.kl.coefficient: Input should be greater",
    f"train {TINY} run.directory={{file}}/runs": "run.directory: {file}/runs",
    f"train {TINY} run.directory={{folder}} run.name=mine --replay {{folder}}": (
        "{folder}/samples has no recorded steps; "
    ),
    f"train {TINY} run.directory={{folder}} run.name=x --replay {{folder}}/y/../x": (
        "run.name: {folder}/y/../x is the run to replay"
    ),
    f"evaluate {TINY} evaluation.sets=[]": "evaluation.sets: empty",
    f"evaluate {TINY} checkpoint=nowhere": "checkpoint: nowhere is not a checkpoint",
    "samples nowhere --step 3": "nowhere/samples has no recorded steps; ",
    **{
        f"{command} {TINY} --overlay {{fine}} --overlay {{wrong}}": (
            "loss.clip_hihg: unknown key; did you mean 'clip_high'? (in {wrong})"
        )
        for command in ("train", "evaluate", "doctor layouts", "doctor sync")
    },
    **{
        f"{command} --json {path}": f"--json: {problem}"
        for command in (f"plan {TINY}", f"doctor layouts {TINY}", "doctor run no_run", "doctor env")
        for path, problem in {
            "{folder}/gone/x.json": "{folder}/gone is not a folder; make it first",
            "{file}/x.json": "{file} is not a folder; make it first",
            "{folder}": "{folder}: Is a directory; name another file",
            "/proc/x.json": "/proc/x.json: No such file or directory; name another file",
        }.items()
    },
}
"""Command line, whose words may contain tabs -> the error before anything starts."""


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    names = ("fifo", "file", "fine", "wrong")
    paths = {name: str(tmp_path / name) for name in names} | {"folder": str(tmp_path)}
    os.mkfifo(paths["fifo"])
    (tmp_path / "file").touch()
    (tmp_path / "fine").write_text("seed: 3\n")
    (tmp_path / "wrong").write_text("loss: {clip_hihg: 0.3}\n")
    words = [word.format(**paths).replace("\t", " ") for word in line.split(" ")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, DapoError), result.output
    assert str(result.exception).startswith(ERRORS[line].format(**paths))
    assert result.output == ""


def test_an_invalid_command_line_is_rejected() -> None:
    for words in (["trian", TINY], ["train"]):
        assert CliRunner().invoke(app, words).exit_code == 2


# ---------------------------------------------------------------------------- ranks

LAUNCHER = """
import sys
from dapo_megatron.cluster.launch import launch
code, num_ranks, grace = sys.argv[1:]
sys.exit(launch([sys.executable, "-c", code], int(num_ranks), grace_seconds=float(grace)))
"""

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(text):
    os.write(1, (text + "\\n").encode())  # atomic, because the ranks share a pipe
"""

Launcher = subprocess.Popen[str]
Start = Callable[..., Launcher]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a launcher whose ranks run `code`, which may use `rank` and
    `say`."""
    launchers: list[Launcher] = []

    def start_launcher(
        code: str, num_ranks: int, *, grace: float = 0.2, environment: dict[str, str] | None = None
    ) -> Launcher:
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCHER,
                RANK + textwrap.dedent(code),
                str(num_ranks),
                str(grace),
            ],
            cwd=REPOSITORY,
            env=environment or environment_without_launcher(),
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # as a shell starts a job
        )
        launchers.append(launcher)
        return launcher

    yield start_launcher
    for launcher in launchers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def lines(launcher: Launcher, num_lines: int) -> list[str]:
    """Return the next lines that its ranks print, sorted."""
    assert launcher.stdout is not None
    return sorted(launcher.stdout.readline().strip() for _ in range(num_lines))


def is_output_closed(launcher: Launcher) -> bool:
    """Return whether launcher and ranks have exited without more output: the pipe is closed."""
    assert launcher.stdout is not None
    readable, _, _ = select.select([launcher.stdout], [], [], TIMEOUT)
    return bool(readable) and launcher.stdout.read() == ""


@pytest.mark.parametrize("threads", [None, "5"])
def test_every_rank_gets_the_variables_of_torchrun_and_its_share_of_the_cores(
    start: Start, threads: str | None
) -> None:
    code = """
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR",
                 "MASTER_PORT")
        say(" ".join([str(rank), *(os.environ[name] for name in names)]))
    """
    environment = environment_without_launcher()
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads  # set by the user
    launcher = start(code, 3, environment=environment)
    split_lines = [line.rpartition(" ") for line in lines(launcher, 3)]
    share = threads or max(1, (os.cpu_count() or 1) // 3)
    assert [rest for rest, _, _ in split_lines] == [
        f"{rank} {rank} 3 3 {share} 127.0.0.1" for rank in range(3)
    ]
    ports = {port for _, _, port in split_lines}
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536
    assert launcher.wait(TIMEOUT) == 0


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "signal 9, often because memory was full (exit code -9)"),
        ("os.kill(os.getpid(), 7)", 135, "signal 7, often because /dev/shm was full (exit code -7"),
    ],
)
def test_a_failing_rank_is_named_ends_the_others_and_sets_the_exit_code_of_a_shell(
    start: Start, end: str, code: int, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = start(f"{end} if rank == 1 else time.sleep(1000)", 3)
    assert launcher.wait(TIMEOUT) == code
    assert is_output_closed(launcher)
    assert f"rank 1 ended first, with {how}" in capfd.readouterr().err


def test_after_a_failure_the_others_have_time_to_clean_up(start: Start, tmp_path: Path) -> None:
    code = f"""
        path = {str(tmp_path / "pid")!r}
        if rank == 1:
            with open(path + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            sys.exit(9)
        while not os.path.exists(path):
            time.sleep(0.01)
        try:
            while True:  # until the launcher has reaped rank 1
                os.kill(int(open(path).read()), 0)
                time.sleep(0.01)
        except ProcessLookupError:
            say("cleaned up")
            sys.exit(3)
    """
    launcher = start(code, 2, grace=TIMEOUT)
    assert lines(launcher, 1) == ["cleaned up"]
    assert launcher.wait(TIMEOUT) == 9


def test_sigterm_is_forwarded_to_the_ranks(start: Start) -> None:
    code = """
        def leave(*_):
            say(f"rank {rank} leaves")
            sys.exit(5)
        signal.signal(signal.SIGTERM, leave)
        say("ready")
        while True:
            signal.pause()
    """
    launcher = start(code, 2, grace=TIMEOUT)
    assert lines(launcher, 2) == ["ready", "ready"]
    launcher.send_signal(signal.SIGTERM)
    assert lines(launcher, 2) == ["rank 0 leaves", "rank 1 leaves"]
    assert launcher.wait(TIMEOUT) == 5


def test_ctrl_c_lets_the_ranks_exit_first(start: Start) -> None:
    code = """
        try:
            say("ready")
            time.sleep(1000)
        except KeyboardInterrupt:
            say("clean")
    """
    launcher = start(code, 2)
    assert lines(launcher, 2) == ["ready", "ready"]
    os.killpg(launcher.pid, signal.SIGINT)  # a terminal signals the whole group
    assert lines(launcher, 2) == ["clean", "clean"]
    assert launcher.wait(TIMEOUT) == 0


def test_ranks_die_with_a_killed_launcher(start: Start) -> None:
    launcher = start('say("ready"); time.sleep(1000)', 2)
    assert lines(launcher, 2) == ["ready", "ready"]
    launcher.kill()
    assert is_output_closed(launcher)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_without_a_launcher_the_command_starts_itself_on_every_rank(
    tmp_path: Path, command: str
) -> None:
    # Python imports this module first. A rank prints its command line and exits.
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import os, sys
            if "RANK" in os.environ:
                line = f"{os.environ['RANK']} {' '.join(sys.orig_argv[1:])}\\n"
                os.write(1, line.encode())
                os._exit(4)
        """),
        encoding="utf-8",
    )
    arguments = (command, TINY, "run.processes=3", "policy.tensor_parallel=1")
    completed = command_line(*arguments, PYTHONPATH=str(tmp_path))
    assert completed.returncode == 4
    assert sorted(completed.stdout.splitlines()) == [
        f"{rank} -m dapo_megatron {' '.join(arguments)}" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("plan {config}", "<&- >&- 2>&-"),
        ("plan {config}", ">/dev/full 2>&1"),
        ("plan gone.yaml", ">/dev/full 2>&1"),
        ("--help", "<&- >&-"),
    ],
)
def test_closed_and_full_streams_cause_no_traceback(command: str, closed: str) -> None:
    shell = f"{sys.executable} -m dapo_megatron {command.format(config=TINY)} {closed}"
    completed = subprocess.run(
        ["bash", "-c", shell],
        env=environment_without_launcher(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert completed.returncode == (2 if "gone" in command else 0)
    assert "Traceback" not in completed.stderr


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
MODULE = sys.argv.pop(1)
class Finder:
    def find_spec(name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
runpy.run_module("dapo_megatron", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["dapo_megatron.config", "dapo_megatron.plan.forecast"])
def test_ctrl_c_during_imports_shows_no_traceback(module: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, "plan", TINY],
        env=environment_without_launcher(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert completed.returncode == 130
    assert "Traceback" not in completed.stderr
