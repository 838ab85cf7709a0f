"""Runs an untrusted program in bubblewrap (bwrap): private root, namespaces, limits, seccomp.

The program sees the interpreter, its installed packages and the system's libraries, all read-only,
and an empty folder in memory. It has no network, no home, no data and no /proc. Each run starts a
new interpreter on the program's file, so the exit status is Python's.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dapo_megatron.rewards.seccomp import filter_program
from dapo_megatron.types import ConfigError, DapoError

MIB = 2**20
MEMORY_MIB = 2048
"""Address space of a program. A lower limit of this process applies instead."""
FOLDER_MIB = 64
"""Size of the folder that a program may write to."""
FILE_MIB = 16
"""Size of the largest file that a program may write, including stdout and stderr."""
MAX_TASKS = 128
"""Maximum number of threads of a program, including the processes of bwrap."""
OPEN_FILES = 64
FOLDER = "/tmp"
NOBODY = 65_534
"""User and group id of programs if the run belongs to root, whose tasks the kernel does not
limit."""

INSTALL = (
    "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install "
    "bubblewrap; elsewhere: conda install -c conda-forge bubblewrap)"
)
_PROGRAM = f"{FOLDER}/program.py"
_ERROR_BYTES = 2000
_SIGNALLED = 128
"""bwrap's exit code for a killed program is this plus the number of the signal."""


class SandboxError(DapoError):
    """Raised if the sandbox does not start."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Output of a program, and the reason why the run failed ("" if it succeeded)."""

    output: bytes
    failure: str


@functools.cache
def check_sandbox(user: str = "grader 'code'") -> None:
    """Raise ConfigError if the sandbox does not work here, with the command that installs it.
    `user` is what needs it."""
    for name in ("bwrap", "prlimit", "setpriv"):
        if shutil.which(name) is None:
            raise ConfigError(f"{user}: program {name} is not on the PATH; {INSTALL}")
    try:
        result = run("print(6 * int(input()))", "7", 20.0)
    except KeyError as error:
        raise ConfigError(f"{user}: no filter of system calls for {error}") from error
    except SandboxError as error:
        raise ConfigError(
            f"{user}: {error}. It needs bubblewrap 0.8 or newer ({INSTALL}) with permission "
            "to create user namespaces: docs/rewards.md lists the settings for containers and "
            "distributions"
        ) from error
    if result != ProgramResult(b"42\n", ""):
        raise ConfigError(f"{user}: a trial run failed: {result}; see docs/rewards.md")


def run(
    program: str, stdin: str, seconds: float, max_output: int = FILE_MIB * MIB
) -> ProgramResult:
    """Run a Python program. No process that it started is alive afterwards.

    program      source text
    stdin        text of its standard input
    seconds      wall-clock limit, including the start of the interpreter
    max_output   bytes that it may write to stdout, if more than FILE_MIB; further writes fail

    Raises SandboxError if bwrap does not start it.

    Example: `run("print(int(input()) * 2)", "21", 5.0) == ProgramResult(b"42\\n", "")`
    """
    deadline = time.monotonic() + seconds
    cpu_seconds = int(seconds) + 2  # backstop of the wall-clock limit
    max_file_bytes = max(max_output, FILE_MIB * MIB)
    with Sandbox(program, stdin, cpu=cpu_seconds, fsize=max_file_bytes) as sandbox:
        sandbox.wait(deadline)
        return sandbox.result()


class Sandbox:
    """A Python program that runs in bubblewrap. No process is alive after the context.

    program      source text
    stdin        text of its standard input, or a socket in its place
    with_stderr  whether the output has what the program writes to stderr, too
    limits       of resources, as prlimit names them, in place of the default ones

    Raises SandboxError if bwrap does not start it.
    """

    def __init__(
        self,
        program: str,
        stdin: str | socket.socket,
        *,
        with_stderr: bool = False,
        **limits: int,
    ) -> None:
        self._report, self._has_ended = b"", False
        with ExitStack() as files:
            # Files in memory instead of pipes: nothing to read while it runs, and the limit of the
            # size of files holds for them too.
            self._output = _memory_file(files, b"")
            self._errors = self._output if with_stderr else _memory_file(files, b"")
            status_start, status_end = os.pipe()
            self._status = files.enter_context(open(status_start, "rb", buffering=0))
            mapped_end, mapped = os.pipe()
            files.callback(os.close, mapped)
            text = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else b""
            passed = {
                "program": _memory_file(files, program.encode("utf-8", "surrogatepass")),
                "stdin": _memory_file(files, text),
                "filter": _memory_file(files, filter_program()),
                "status": status_end,
                "mapped": mapped_end,
                "unread": _memory_file(files, b""),
            }
            try:
                self._process = subprocess.Popen(
                    [*_command(passed, limits)],
                    stdin=_memory_file(files, text) if isinstance(stdin, str) else stdin.fileno(),
                    stdout=self._output,
                    stderr=self._errors,
                    pass_fds=tuple(passed.values()),
                    cwd="/",
                    env=_environment(),
                )
            except OSError as error:
                raise SandboxError(f"bwrap cannot be started: {error}") from error
            finally:
                os.close(status_end)
                os.close(mapped_end)
            # bwrap reports the process id of its child, the first in the namespace of processes,
            # and later the exit code. It ends after its child, with which the kernel ends the rest.
            first_line = self._status.readline()
            if not first_line:
                raise self._failure_to_start()
            self._child: int = json.loads(first_line)["child-pid"]
            files.callback(self._kill)
            if os.geteuid() == 0:
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{self._child}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                os.write(mapped, b"x")
            self._files = files.pop_all()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def wait(self, deadline: float, *others: socket.socket) -> bool:
        """Wait until the program has ended, or one of the sockets can be read, or the deadline has
        passed. Return whether the program has ended."""
        while not self._has_ended:
            seconds_left = max(0.0, deadline - time.monotonic())
            files = [self._status.fileno(), *(other.fileno() for other in others)]
            if files[0] not in select.select(files, [], [], seconds_left)[0]:
                break
            block = self._status.read(4096)
            self._report += block
            self._has_ended = not block
        return self._has_ended

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program, if it runs and is in its first process group."""
        if not self.wait(0.0):
            with suppress(ProcessLookupError):
                os.killpg(self._child, number)

    def take_output(self) -> bytes:
        """Return what the program has written since the last call."""
        output = os.pread(self._output, os.fstat(self._output).st_size, 0)
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)  # for the program, which has the same open file
        return output

    def result(self) -> ProgramResult:
        """Kill the program if it still runs. Return its output, and why it failed."""
        self._kill()
        if not self._has_ended:
            return ProgramResult(self.take_output(), "no end within the limit")
        codes = [json.loads(line)["exit-code"] for line in self._report.splitlines()]
        if not codes:
            raise self._failure_to_start()
        failure = f"exit status {codes[0]}" if codes[0] else ""
        if codes[0] > _SIGNALLED:
            failure = f"killed by signal {codes[0] - _SIGNALLED}"
        return ProgramResult(self.take_output(), failure)

    def _kill(self) -> None:
        """Kill what runs, and wait until it is gone."""
        if self._process.returncode is not None:
            return
        if not self.wait(0.0):
            os.kill(self._child, signal.SIGKILL)  # bwrap runs, so it has not reaped its child yet
        self._process.wait()
        with suppress(ChildProcessError):  # a worker adopts the child if bwrap ended before it
            os.waitpid(self._child, 0)

    def _failure_to_start(self) -> SandboxError:
        code = self._process.wait()
        message = os.pread(self._errors, _ERROR_BYTES, 0).decode("utf-8", "replace").strip()
        return SandboxError(message or f"bwrap ended with code {code}")


def _environment() -> dict[str, str]:
    inherited = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    # Libraries start a thread per core by default, but tasks are limited.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The virtual environment's own interpreter would run .pth files at each start.
    packages = os.pathsep.join(site.getsitepackages())
    fixed = {"PATH": "/usr/bin:/bin", "HOME": FOLDER, "LANG": "C.UTF-8", "PYTHONPATH": packages}
    # A program does the same each time: sets of strings keep their order.
    return {**fixed, "PYTHONHASHSEED": "0", **threads, **inherited}


def _memory_file(files: ExitStack, content: bytes) -> int:
    file = files.enter_context(os.fdopen(os.memfd_create("sandbox"), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()


def _command(passed: Mapping[str, int], limits: Mapping[str, int]) -> Iterator[str]:
    """Yield the command line of bwrap. `passed` are descriptors, by their purpose."""
    tool = {name: shutil.which(name) or name for name in ("bwrap", "prlimit", "setpriv")}
    yield from (tool["bwrap"], "--die-with-parent", "--new-session", "--hostname", "sandbox")
    yield from ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc")
    yield from ("--unshare-uts", "--unshare-cgroup-try", "--dir", "/proc")
    yield from ("--perms", "1777", "--size", str(FOLDER_MIB * MIB), "--tmpfs", FOLDER)
    yield from _mounts()
    # Programs may read it like this, although there is no /proc.
    yield from ("--perms", "0444", "--file", str(passed["stdin"]), "/dev/stdin")
    yield from ("--perms", "0444", "--file", str(passed["program"]), _PROGRAM)
    yield from ("--chdir", FOLDER, "--remount-ro", "/")
    yield from ("--json-status-fd", str(passed["status"]), "--seccomp", str(passed["filter"]))
    if os.geteuid() == 0:
        # bwrap must stay root to reach an interpreter in root's home, so only the program changes
        # to the unprivileged user. bwrap waits until that user is mapped into its namespace.
        yield from ("--userns-block-fd", str(passed["mapped"]), "--uid", "0", "--gid", "0")
        yield from ("--info-fd", str(passed["unread"]))  # required by --userns-block-fd
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", tool["setpriv"])
        yield from (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        yield "--inh-caps=-all"
    # prlimit inside: a task limit of bwrap itself would count the user's other processes.
    yield tool["prlimit"]
    for name, value in {
        "as": MEMORY_MIB * MIB,
        "fsize": FILE_MIB * MIB,
        "nofile": OPEN_FILES,
        "nproc": MAX_TASKS,
        "core": 0,
        **limits,
    }.items():
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        yield f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}"
    yield from ("--", os.path.realpath(sys.executable), _PROGRAM)


@functools.cache
def _mounts() -> tuple[str, ...]:
    """Return bwrap's options that mount what a program can read, at the same paths."""
    home = Path.home()
    libraries = [
        Path(entry)
        for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        if entry.startswith("/")
        and Path(entry) not in (home, *home.parents)
        and any(Path(entry).glob("*.so*"))
    ]
    paths = {Path("/usr"), Path("/lib"), Path("/lib64"), Path("/bin"), *libraries}
    paths |= {Path("/etc/ld.so.cache"), Path("/etc/alternatives")}
    paths |= {Path(sys.prefix), Path(sys.base_prefix)}
    options: list[str] = []
    # bwrap creates the parents of a mount itself, but readable only by its own user.
    for parent in sorted(
        {parent for path in paths for parent in path.parents[:-1]} | {Path("/dev")}
    ):
        options += ["--dir", str(parent)]
    for path in sorted(path for path in paths if path.exists()):
        if path.is_symlink() and path.parent == Path("/"):  # /lib with merged /usr
            options += ["--symlink", os.readlink(path), str(path)]
        else:
            options += ["--ro-bind", str(path), str(path)]
    # The packages of the interpreter below a virtual environment are not the run's.
    below = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if below not in site.getsitepackages() and os.path.isdir(below):
        options += ["--size", "4096", "--tmpfs", below]
    for name in ("null", "zero", "full", "random", "urandom"):
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return tuple(options)
