"""Running an untrusted program from outside: start the jail, ask it, end it.

jail.py says how it locks itself in. Layers that a machine does not have are left out, except the
resource limits and the namespaces that jail.NEEDED names: without those nothing runs.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dapo_megatron.rewards import jail, seccomp
from dapo_megatron.types import ConfigError, DapoError

MEMORY_MIB = 2048
"""Address space of a program, unless this process has less (then as much)."""

END_SECONDS = 5.0
"""Allowed for an idle sandbox to end by itself, before it is killed."""

SPARE_TASKS = 512
"""Processes and threads that a program may have beyond those that its user has: RLIMIT_NPROC
counts all of a user's where there is no user namespace."""


class SandboxError(DapoError):
    """The sandbox did not start, or ended before its program."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a program wrote, and why it does not count ("" if it does)."""

    output: str
    failure: str


class Sandbox:
    """One program, locked up; use it as a context manager.

    program   Python source
    layers    kinds of isolation to try; `lacking` says which of them could not be had, and why

    Raises SandboxError if it does not start, or if a layer of jail.NEEDED is asked for and cannot
    be had: each sandbox is looked at, for namespaces can also run out. Leaving it ends all that
    the program started and removes its folder.

    Example:
        with Sandbox("print(int(input()) * 2)") as sandbox:
            assert sandbox.run("21", seconds=1.0) == Run("42\n", "")
    """

    def __init__(self, program: str, layers: Sequence[str] = jail.LAYERS) -> None:
        self._is_busy = False
        self._folder = tempfile.mkdtemp(prefix="program-")
        self._process = subprocess.Popen(
            [sys.executable, "-I", jail.__file__, ",".join(layers), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # An interpreter of a module system may need it; the program does not get it.
            env={key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ},
        )
        order = {
            "program": program,
            "memory_bytes": _memory_bytes(),
            "num_tasks": _num_tasks() + SPARE_TASKS,
            "filter": seccomp.assemble(platform.machine()).hex(),
        }
        try:
            self.lacking: dict[str, str] = self._ask(order)["lacking"]
            self._check_needed()
        except SandboxError:
            self.close()
            raise

    def run(self, stdin: str, seconds: float) -> Run:
        """Run the program from its start for so long at most. Raises SandboxError."""
        return Run(**self._ask({"input": stdin, "seconds": seconds}))

    def close(self) -> None:
        """End all of it, and reap it. Idempotent."""
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(0.0 if self._is_busy else END_SECONDS)
        except subprocess.TimeoutExpired:
            killed = jail.kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()
            for pid in killed:
                with suppress(ChildProcessError):  # unless this process adopts orphans
                    os.waitpid(pid, 0)
        self._process.stdout.close()
        remove(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_needed(self) -> None:
        missing = [f"{name} ({self.lacking[name]})" for name in jail.NEEDED if name in self.lacking]
        if missing:
            raise SandboxError(
                f"the kernel refuses its sandbox these namespaces: {', '.join(missing)}. In "
                "Docker, start the container with --security-opt seccomp=unconfined"
            )

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._is_busy = True
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SandboxError("the sandbox has ended") from error
        answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise SandboxError("the sandbox ended without an answer")
        self._is_busy = False
        return json.loads(answer)


@cache
def lacking() -> dict[str, str]:
    """The kinds of isolation that this machine does not give, each with the reason.

    Raises ConfigError if the resource limits or one of jail.NEEDED are among them: `code` cannot
    be used here.
    """
    if sys.platform != "linux":
        raise ConfigError("grader 'code': it needs Linux, whose limits it runs programs under")
    try:
        with Sandbox("print(6 * 7)") as sandbox:
            run = sandbox.run("", seconds=20.0)
    except SandboxError as error:
        raise ConfigError(f"grader 'code': {error}; see docs/rewards.md") from error
    if run != Run("42\n", ""):
        raise ConfigError(f"grader 'code': a trial run failed ({run.failure}); see docs/rewards.md")
    if "seccomp" in sandbox.lacking and os.geteuid() == 0:
        raise ConfigError(
            "grader 'code': the kernel limits no number of processes for root, and there is no "
            f"seccomp filter ({sandbox.lacking['seccomp']}); run as another user"
        )
    return sandbox.lacking


def remove(folder: str) -> None:
    """Remove a folder of temporary files, however deep an adversary made it."""
    try:
        os.rmdir(folder)
    except OSError:
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _memory_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_MIB * jail.MIB
    return limit if soft == resource.RLIM_INFINITY else min(limit, soft)


@cache
def _num_tasks() -> int:
    """Processes and threads of this user."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                count += len(list((folder / "task").iterdir()))
    return count
