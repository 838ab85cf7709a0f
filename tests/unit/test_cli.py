"""The command line: quick answers, error messages, and starting, watching and ending ranks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = "model_configs/tiny_cpu.yaml"
OTHER = "model_configs/tiny_qwen3_moe"
TIMEOUT = 60.0
"""Maximum seconds that a test waits for another process."""

pytestmark = pytest.mark.timeout(3 * TIMEOUT)


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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("--help",), 0), (("train", TINY, "loss.clip_hihg=0.3"), 2)],
    ids=["help", "config error"],
)
def test_help_and_config_errors_take_two_cpu_seconds(arguments: tuple[str, ...], code: int) -> None:
    """CPU seconds do not depend on other programs of a busy machine, as wall-clock time does."""
    fastest = float("inf")
    for _ in range(3):
        before = children_cpu_seconds()
        assert command_line(*arguments).returncode == code
        fastest = min(fastest, children_cpu_seconds() - before)
        if fastest < 2.0:
            return
    pytest.fail(f"the fastest of 3 took {fastest:.1f} CPU seconds")


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_lists_the_commands() -> None:
    text = command_line("--help").stdout
    assert all(command in text for command in ("train", "evaluate", "doctor"))


def test_a_config_error_is_one_line_with_the_key_and_the_nearest_key() -> None:
    completed = command_line("train", TINY, "loss.clip_hihg=0.3")
    assert completed.returncode == 2
    assert completed.stderr == "error: loss.clip_hihg: unknown key; did you mean 'clip_high'?\n"
    assert completed.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("train", TINY, "policy.tensor_parallel=3"), "policy.tensor_parallel x pipeline_parallel"),
        (("train", TINY, "model.path=nowhere"), "model.path: nowhere/config.json: cannot be read"),
        (("train", TINY, "data.train.0.grader=dapo_mth"), "data.train.0.grader: grader 'dapo_mth'"),
        (
            ("train", TINY, "loss.kl={coefficient: 0.1, reference: nowhere}"),
            "loss.kl.reference: nowhere: no such folder",
        ),
        (
            ("train", TINY, f"loss.kl={{coefficient: 0.1, reference: {OTHER}}}"),
            f"loss.kl.reference: {OTHER} is of another model than model.path: family qwen3_moe, ",
        ),
        (("train", TINY, "loss.kl.coefficient=-1"), "loss.kl.coefficient: Input should be greater"),
        (("evaluate", TINY, "evaluation.sets=[]"), "evaluation.sets: empty"),
        (("evaluate", TINY, "checkpoint=nowhere"), "checkpoint: nowhere is not a checkpoint"),
        (("samples", "nowhere", "--step", "3"), "nowhere/samples has no recorded steps; "),
    ],
)
def test_errors_are_reported_before_anything_starts(
    arguments: tuple[str, ...], message: str
) -> None:
    completed = command_line(*arguments)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"error: {message}")


def test_a_replay_of_an_empty_run_or_of_itself_is_rejected(tmp_path: Path) -> None:
    def refusal(run_folder: Path) -> str:
        where = (f"run.directory={tmp_path}", "run.name=mine")
        completed = command_line("train", TINY, *where, "--replay", str(run_folder))
        assert completed.returncode == 2
        return completed.stderr

    other = tmp_path / "other"
    assert refusal(other).startswith(f"error: {other}/samples has no recorded steps; ")
    itself = tmp_path / "other" / ".." / "mine"
    assert refusal(itself).startswith(f"error: run.name: {itself} is the run to replay")


@pytest.mark.parametrize(
    "command", [("train",), ("evaluate",), ("doctor", "layouts"), ("doctor", "sync")], ids=" ".join
)
def test_an_error_in_an_overlay_is_reported_with_its_file(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    fine, wrong = tmp_path / "fine.yaml", tmp_path / "wrong.yaml"
    fine.write_text("seed: 3\n")
    wrong.write_text("loss: {clip_hihg: 0.3}\n")
    completed = command_line(*command, TINY, "--overlay", str(fine), "--overlay", str(wrong))
    assert completed.returncode == 2
    assert completed.stderr == (
        f"error: loss.clip_hihg: unknown key; did you mean 'clip_high'? (in {wrong})\n"
    )


@pytest.mark.parametrize(("rank", "reports"), [("0", True), ("1", False)])
def test_under_a_launcher_only_rank_0_reports_an_error(rank: str, reports: bool) -> None:
    completed = command_line("train", TINY, "loss.clip_hihg=0.3", RANK=rank, WORLD_SIZE="2")
    assert completed.returncode == 2
    assert ("loss.clip_hihg" in completed.stderr) == reports


def test_an_invalid_command_line_is_rejected() -> None:
    assert command_line("trian", TINY).returncode == 2
    assert command_line("train").returncode == 2


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


def test_every_rank_gets_the_variables_of_torchrun(start: Start) -> None:
    code = """
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        say(" ".join([str(rank), *(os.environ[name] for name in names)]))
    """
    launcher = start(code, 3)
    split_lines = [line.rpartition(" ") for line in lines(launcher, 3)]
    assert [rest for rest, _, _ in split_lines] == [
        f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)
    ]
    ports = {port for _, _, port in split_lines}
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536
    assert launcher.wait(TIMEOUT) == 0


@pytest.mark.parametrize("given", [None, "5"])
def test_ranks_share_the_cores_unless_the_user_sets_omp_num_threads(
    start: Start, given: str | None
) -> None:
    environment = environment_without_launcher()
    environment.pop("OMP_NUM_THREADS", None)
    if given is not None:
        environment["OMP_NUM_THREADS"] = given
    launcher = start('say(os.environ["OMP_NUM_THREADS"])', 2, environment=environment)
    assert lines(launcher, 2) == [given or str(max(1, (os.cpu_count() or 1) // 2))] * 2


def test_a_failing_rank_ends_the_others_and_sets_the_exit_code(start: Start) -> None:
    launcher = start("sys.exit(7) if rank == 1 else time.sleep(1000)", 3)
    assert launcher.wait(TIMEOUT) == 7
    assert is_output_closed(launcher)


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


def test_a_killed_rank_gives_the_exit_code_that_a_shell_would(start: Start) -> None:
    launcher = start("os.kill(os.getpid(), signal.SIGKILL)", 1)
    assert launcher.wait(TIMEOUT) == 128 + signal.SIGKILL


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


BAD_RESULTS = {
    "gone/x.json": "is not a folder; make it first",
    "file/x.json": "is not a folder; make it first",
    ".": "Is a directory; name another file",
    "/proc/x.json": "No such file or directory; name another file",
}


@pytest.mark.parametrize("path", BAD_RESULTS)
@pytest.mark.parametrize(
    "command", [("plan", TINY), ("doctor", "run", "no_run"), ("doctor", "env")]
)
def test_an_unwritable_result_is_refused_before_the_work(
    tmp_path: Path, path: str, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    completed = command_line(*command, "--json", str(tmp_path / path))
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert re.fullmatch(rf"error: --json: .*({BAD_RESULTS[path]})\n", completed.stderr)


def test_a_config_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        completed = command_line("plan", str(path))
        assert completed.returncode == 2
        assert completed.stderr.startswith(f"error: {path}: not a regular file")


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>&1"])
@pytest.mark.parametrize("command", ["plan {config}", "plan gone.yaml", "--help"])
def test_closed_and_full_streams_cause_no_traceback(closed: str, command: str) -> None:
    shell = f"{sys.executable} -m dapo_megatron {command.format(config=TINY)} {closed}"
    completed = subprocess.run(
        ["bash", "-c", shell],
        env=environment_without_launcher(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == (2 if "gone" in command else 0)
    assert "Traceback" not in completed.stderr


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
MODULE = sys.argv.pop(1)
class Finder:
    def find_spec(name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
runpy.run_module("dapo_megatron", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "module", ["dapo_megatron.config", "dapo_megatron.model", "dapo_megatron.plan.forecast"]
)
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
