"""Runs an untrusted program in bubblewrap (bwrap): private root, namespaces, limits, seccomp.

The program sees the interpreter, its installed packages and the system libraries, all read-only,
and an empty folder in memory. It has no network, no home, no data and no /proc of the machine. Each
run starts a new interpreter on the program's file, so the exit status is that of Python.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dapo_megatron.rewards.sandbox_root import (
    FOLDER,
    interpreter,
    library_path,
    mounts,
    package_folders,
    tool,
)
from dapo_megatron.rewards.seccomp import filter_program
from dapo_megatron.types import ConfigError, DapoError

MIB = 2**20
MEMORY_MIB = 2048
"""Address space of a program. A lower limit of this process applies instead."""
FOLDER_MIB = 64
"""Size of the folder that a program may write to."""
FILE_MIB = 16
"""Size of the largest file that a program may write."""
MAX_TASKS = 128
"""Maximum number of threads of a program, including one process of bwrap."""
OPEN_FILES = 64
OUTPUT_BYTES = MIB
"""Default limit of a program's output on stdout."""
ERROR_BYTES = 2000
"""Bytes of stderr to keep, for messages of bwrap."""

END_SECONDS = 5.0
"""Time limit for a killed sandbox to exit."""

UNPRIVILEGED_ID = 65_534
"""User and group id (nobody) of programs if the run belongs to root, because the kernel does not
limit the tasks of root."""

INSTALL = (
    "install bubblewrap, libseccomp and util-linux (Debian, Ubuntu: apt-get install bubblewrap "
    "libseccomp2; Fedora: dnf install bubblewrap libseccomp; elsewhere: "
    "conda install -c conda-forge bubblewrap libseccomp)"
)
_PROGRAM = f"{FOLDER}/program.py"
_TOO_LATE = "no end within the limit"
_SIGNALLED = 128
"""bwrap's exit code for a killed program is this plus the number of the signal."""


class SandboxError(DapoError):
    """Raised if the sandbox does not start."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Output of a program, and the reason why the run failed ("" if it succeeded)."""

    output: bytes
    failure: str


def run(program: str, stdin: str, seconds: float, max_output: int = OUTPUT_BYTES) -> ProgramResult:
    """Run a Python program. No process that it started is alive afterwards.

    program      source text
    stdin        text of its standard input
    seconds      wall-clock limit, including the start of the interpreter
    max_output   the program is killed if it writes more bytes to stdout

    Raises SandboxError if bwrap does not start it.

    Example: `run("print(int(input()) * 2)", "21", 5.0) == Run(b"42\\n", "")`
    """
    return _run(program, stdin, seconds, max_output, has_proc="/proc" not in missing_layers())


@functools.cache
def missing_layers() -> Mapping[str, str]:
    """Return the layers of the sandbox that this machine does not support: layer -> reason.

    Raises ConfigError if the sandbox does not work at all, with the command that installs it.
    """
    for name in ("bwrap", "prlimit"):
        if shutil.which(name) is None:
            raise ConfigError(f"grader 'code': program {name} is not on the PATH; {INSTALL}")
    try:
        filter_program()
    except OSError as error:
        raise ConfigError(f"grader 'code': no libseccomp ({error}); {INSTALL}") from error
    try:
        trial = _trial(has_proc=True)
        missing = {}
    except SandboxError as error:
        # Containers mask parts of their /proc, and the kernel then refuses to mount a new one.
        missing = {"/proc": str(error)}
        try:
            trial = _trial(has_proc=False)
        except SandboxError:
            raise ConfigError(
                f"grader 'code': {error}. It needs bubblewrap 0.8 or newer ({INSTALL}) with "
                "permission to create user namespaces: docs/rewards.md lists the settings for "
                "containers and distributions"
            ) from error
    if trial != ProgramResult(b"42\n", ""):
        raise ConfigError(f"grader 'code': a trial run failed: {trial}; see docs/rewards.md")
    return missing


def _trial(has_proc: bool) -> ProgramResult:
    return _run("print(6 * int(input()))", "7", 20.0, OUTPUT_BYTES, has_proc)


def _run(
    program: str, stdin: str, seconds: float, max_output: int, has_proc: bool
) -> ProgramResult:
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        bwrap = _Bwrap(stack, program, stdin, deadline, has_proc)
        failure = bwrap.read(deadline, max_output) or bwrap.wait(deadline)
        return ProgramResult(bytes(bwrap.output), failure)


class _Bwrap:
    """A bwrap process and its program. Closing `stack` ends both."""

    def __init__(
        self, stack: ExitStack, program: str, stdin: str, deadline: float, has_proc: bool
    ) -> None:
        self.output, self._errors = bytearray(), bytearray()
        self._status, status_end = _pipe(stack)
        mapped_end, mapped = _pipe(stack)
        source = _memory_file(stack, program.encode("utf-8", "surrogatepass"))
        system_calls = _memory_file(stack, filter_program())
        unread = _memory_file(stack, b"")
        is_root = os.geteuid() == 0
        command = [
            *(tool("bwrap"), "--die-with-parent", "--new-session", "--hostname", "sandbox"),
            *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
            *("--unshare-uts", "--unshare-cgroup-try", *mounts()),
            *(("--proc", "/proc") if has_proc else ("--dir", "/proc")),
            *("--perms", "1777", "--size", str(FOLDER_MIB * MIB), "--tmpfs", FOLDER),
            *("--perms", "0444", "--file", str(source), _PROGRAM, "--chdir", FOLDER),
            *("--remount-ro", "/", "--json-status-fd", str(status_end.fileno())),
            *("--seccomp", str(system_calls)),
            *(_become_nobody(mapped_end.fileno(), unread) if is_root else ("--",)),
            # prlimit inside: a task limit of bwrap itself would count the user's other processes.
            *(
                tool("prlimit"),
                *_limits(deadline - time.monotonic()),
                "--",
                interpreter(),
                _PROGRAM,
            ),
        ]
        passed = [source, system_calls, status_end.fileno()]
        passed += [mapped_end.fileno(), unread] if is_root else []
        self._process = _popen(command, _memory_file(stack, stdin.encode()), passed)
        stack.enter_context(self._process)
        self._first_process = 0  # init of the PID namespace; 0 if bwrap has not created it
        stack.callback(self._end)
        status_end.close()
        mapped_end.close()
        first_line = self._first_line(deadline)
        if first_line:
            self._first_process = json.loads(first_line)["child-pid"]
            if is_root:
                _map_nobody(self._first_process)
                for pipe in (self._process.stdout, self._process.stderr):
                    assert pipe is not None
                    os.fchown(pipe.fileno(), UNPRIVILEGED_ID, -1)  # lets it open /dev/stdout
                mapped.write(b"x")
                mapped.flush()

    def _first_line(self, deadline: float) -> bytes:
        """Return the first line of bwrap's status, or b"" if bwrap has failed already."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise SandboxError("bwrap did not create the sandbox in time")
        return self._status.readline()

    def read(self, deadline: float, max_output: int) -> str:
        """Read stdout and stderr until all writers are closed. Return why the run failed, or ""."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        buffers = {
            self._process.stdout.fileno(): self.output,
            self._process.stderr.fileno(): self._errors,
        }
        poll = select.poll()
        for descriptor in buffers:
            poll.register(descriptor, select.POLLIN)
        while buffers:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return _TOO_LATE
            for descriptor, _ in poll.poll(1000 * seconds_left):
                block = os.read(descriptor, 2**16)
                buffers[descriptor] += block
                if not block:
                    poll.unregister(descriptor)
                    del buffers[descriptor]
            del self._errors[ERROR_BYTES:]
            if len(self.output) > max_output:
                return f"more than {max_output} bytes of output"
        return ""

    def wait(self, deadline: float) -> str:
        """Wait for the program to end. Return why the run failed, or "". Raises SandboxError if the
        program was not started."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _TOO_LATE
        for line in self._status:
            exit_code = json.loads(line).get("exit-code")
            if exit_code is not None:
                break
        else:
            message = self._errors.decode("utf-8", "replace").partition("\n")[0]
            raise SandboxError(message or f"bwrap ended with code {self._process.returncode}")
        if exit_code > _SIGNALLED:
            return f"killed by signal {exit_code - _SIGNALLED}"
        return f"exit status {exit_code}" if exit_code else ""

    def _end(self) -> None:
        """Kill the sandbox unless it has ended, and wait until all its processes are gone.

        Killing bwrap, or waiting only for bwrap, is not enough, because it exits before the
        processes in its PID namespace. When the first process of the namespace dies, the kernel
        kills all others.
        """
        if self._first_process:
            with suppress(ProcessLookupError):
                first = os.pidfd_open(self._first_process)
                with os.fdopen(first, "rb", buffering=0):
                    if self._process.poll() is None:
                        signal.pidfd_send_signal(first, signal.SIGKILL)
                    end = select.poll()
                    end.register(first, select.POLLIN)
                    end.poll(1000 * END_SECONDS)
            with suppress(subprocess.TimeoutExpired):  # bwrap reaps it and exits
                self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        # Reap it if bwrap exited first and this process, a subreaper, adopted it.
        with suppress(ChildProcessError):
            if self._first_process:
                os.waitpid(self._first_process, os.WNOHANG)


def _popen(command: Sequence[str], stdin: int, passed: Sequence[int]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            cwd="/",
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": FOLDER,
                "TMPDIR": FOLDER,
                "LANG": "C.UTF-8",
                "PYTHONPATH": os.pathsep.join(package_folders()),
                # Libraries start a thread per core by default, but tasks are limited.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                **library_path(),
            },
        )
    except OSError as error:
        raise SandboxError(f"bwrap cannot be started: {error}") from error


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the read end and the write end of a pipe."""
    reading, writing = os.pipe()
    return stack.enter_context(open(reading, "rb")), stack.enter_context(open(writing, "wb"))


def _memory_file(stack: ExitStack, content: bytes) -> int:
    file = stack.enter_context(os.fdopen(os.memfd_create("sandbox"), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()


# ---------------------------------------------------------------------------- runs of root


def _become_nobody(mapped_end: int, unread: int) -> list[str]:
    """Return bwrap's options and the start of its command, for a run as root.

    The kernel does not limit the tasks of root, not even in a user namespace. bwrap must stay root
    to reach an interpreter in root's home, so only the program changes to the unprivileged user.
    That user must exist in the namespace: bwrap waits until `_map_nobody` has mapped it.
    """
    return [
        *("--userns-block-fd", str(mapped_end), "--uid", "0", "--gid", "0"),
        *("--info-fd", str(unread)),  # required by --userns-block-fd; not read
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", tool("setpriv")),
        *(f"--reuid={UNPRIVILEGED_ID}", f"--regid={UNPRIVILEGED_ID}", "--clear-groups"),
        "--inh-caps=-all",
    ]


def _map_nobody(process_id: int) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process_id}/{name}").write_text(
            f"0 0 1\n{UNPRIVILEGED_ID} {UNPRIVILEGED_ID} 1\n"
        )


# ---------------------------------------------------------------------------- limits


def _limits(seconds: float) -> list[str]:
    """Return options of prlimit(1) that set soft and hard limits."""
    limits = {
        "cpu": (resource.RLIMIT_CPU, int(seconds) + 2),  # backstop of the wall-clock limit
        "as": (resource.RLIMIT_AS, MEMORY_MIB * MIB),
        "fsize": (resource.RLIMIT_FSIZE, FILE_MIB * MIB),
        "nofile": (resource.RLIMIT_NOFILE, OPEN_FILES),
        "nproc": (resource.RLIMIT_NPROC, MAX_TASKS + _other_tasks()),
        "sigpending": (resource.RLIMIT_SIGPENDING, MAX_TASKS + _other_tasks()),
        "core": (resource.RLIMIT_CORE, 0),
        "memlock": (resource.RLIMIT_MEMLOCK, 0),
        "msgqueue": (resource.RLIMIT_MSGQUEUE, 0),
    }
    options = []
    for name, (limit, value) in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        options.append(f"--{name}={value}")
    return options


@functools.cache
def _other_tasks() -> int:
    """Return the number of other tasks of this user that count towards the program's limit. It is 0
    since Linux 5.14, which counts per user namespace."""
    major, minor = map(int, platform.release().split(".")[:2])
    if (major, minor) >= (5, 14):
        return 0
    user = UNPRIVILEGED_ID if os.geteuid() == 0 else os.getuid()
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += len(list((folder / "task").iterdir()))
    return count
