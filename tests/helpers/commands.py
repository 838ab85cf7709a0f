"""Run commands of this project in forked processes that have their imports already (warm.py).

`python -m dapo_megatron ...` and `python tools/... ...`, and the ranks that they launch, run in
their own processes, with their arguments, folder, environment, signals and exit codes. Only exec is
left out, and with it 10 s of CPU per process for imports. tests/unit/test_cli.py and
tests/learning/test_train.py start real interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from tests.helpers.configs import REPOSITORY
from tests.helpers.warm import fork_servers, take_environment, warm_context


@dataclass
class Running:
    """A running command. Its output goes to files in `folder`."""

    arguments: list[str]
    process: BaseProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return (self.folder / "stderr").read_text(errors="replace")


@contextlib.contextmanager
def started(
    *arguments: object,
    folder: Path = REPOSITORY,
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> Iterator[Running]:
    """Start `program.py ...`, `-m module ...`, or a command of `python -m dapo_megatron`. Kill it
    at the end of the block."""
    words = [str(argument) for argument in arguments]
    if words[0] != "-m" and not words[0].endswith(".py"):
        words = ["-m", "dapo_megatron", *words]
    with TemporaryDirectory(prefix="dapo-command-") as output:
        process = warm_context().Process(
            target=_main,
            args=(words, folder, dict(environment or os.environ), new_session, Path(output)),
        )
        for name in ("stdout", "stderr"):
            (Path(output) / name).touch()
        process.start()
        try:
            yield Running(words, process, Path(output))
        finally:
            process.kill()
            process.join()


def run(
    *arguments: object,
    folder: Path = REPOSITORY,
    environment: Mapping[str, str] | None = None,
    timeout: float = 400.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, like `subprocess.run` with captured output."""
    with started(*arguments, folder=folder, environment=environment) as running:
        code = running.wait(timeout)
        return subprocess.CompletedProcess(running.arguments, code, running.stdout, running.stderr)


# ------------------------------------------------------------------ inside the process


def _main(
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    new_session: bool,
    output: Path,
) -> None:
    take_environment(environment)
    os.chdir(folder)
    if new_session:
        os.setsid()
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        target = os.open(output / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(target, stream.fileno())
        os.close(target)
    from dapo_megatron.cluster import launch

    launch.subprocess = SimpleNamespace(Popen=_ForkedRank)  # type: ignore[assignment]
    fork_servers()
    run_and_exit(words)


def _run_program(words: Sequence[str]) -> None:
    """Run the arguments of `python`: `-m module ...` or `program.py ...`."""
    if words[0] == "-m":
        _, module, *arguments = words
        sys.argv = [module, *arguments]
        sys.modules.pop(f"{module}.__main__", None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def run_and_exit(words: Sequence[str]) -> None:
    """Run the arguments of `python`, then end this process as the interpreter would."""
    code = 0
    try:
        _run_program(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - Python would print it and exit as well
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _ForkedRank:
    """The part of `subprocess.Popen` that `launch` uses. It forks the rank from the launcher."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], preexec_fn: Callable[[], None]
    ) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            take_environment(env)
            preexec_fn()
            run_and_exit(command[1:])

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
