"""The inside of the sandbox: `python -I jail.py LAYER,LAYER,... FOLDER`, started by sandbox.py.

It locks itself in, then runs an untrusted program once per test, each time in a fork of itself.
It speaks JSON lines over its stdin and stdout, which the program does not have:

    <- {"program": text, "memory_bytes": n, "num_tasks": n, "filter": of system calls, in hex}
    -> {"lacking": {layer: why it is not there}}
    <- {"input": text, "seconds": wall-clock limit}              once per test, until the end
    -> {"output": text, "failure": "" or why the run does not count}

Nothing of this package is imported: the interpreter is a bare one, and the program sees all that
is in it. It is told no expected output. Facts about the kernel: namespaces(7), seccomp(2),
prctl(2), mount_setattr(2), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "network": 0x40000000,
    "ipc": 0x08000000,
}
LAYERS = (*NAMESPACES, "read-only files", "seccomp")
NEEDED = ("user", "pid")
"""Without a namespace of its own a program could open the memory of other processes of the user,
which lie in /proc, or signal them: it would be outside."""

MIB = 2**20
OUTPUT_BYTES = 16 * MIB
"""Largest file a program may write, its output included."""
FOLDER_BYTES = 64 * MIB
"""What its folder may hold."""
OPEN_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_ATTR_READ_ONLY_NOSUID_NODEV = 0x1 | 0x2 | 0x4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442


def main() -> None:
    """Lock up, then serve until stdin ends."""
    layers, folder = set(filter(None, sys.argv[1].split(","))), sys.argv[2]
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open("/dev/null", os.O_RDWR)  # while there are devices
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    die_with_parent()
    adopt_orphans()
    order: dict[str, Any] = json.loads(requests.readline()) | {"folder": folder}
    with suppress(OSError):  # should memory run out: this, not the training
        _write("/proc/self/oom_score_adj", "1000")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    lacking = dict(_enter_namespaces(layers, folder))
    _hide_memory()  # not before: what is hidden cannot map its users
    owns_processes = "pid" in layers - set(lacking)
    if owns_processes:
        _become_first_process()
    order["filter"] = bytes.fromhex(order["filter"]) if "seccomp" in layers else b""
    if "seccomp" in layers and (why := _no_filter(order["filter"])):
        lacking["seccomp"], order["filter"] = why, b""
    answers.write(json.dumps({"lacking": lacking}).encode() + b"\n")
    while line := requests.readline():
        answer = _run(order, json.loads(line), owns_processes)
        answers.write(json.dumps(answer).encode() + b"\n")
    os._exit(0)  # there is nothing to tidy up, and this is quicker


# ---------------------------------------------------------------------------- one run


def _run(order: dict[str, Any], test: dict[str, Any], owns_processes: bool) -> dict[str, str]:
    """Run the program once on test["input"]; afterwards nothing that it started is there."""
    stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
    try:
        with open(stdin, "wb", closefd=False) as file:
            file.write(test["input"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            _be_the_program(order, stdin, stdout, test["seconds"])
        status = _wait(child, test["seconds"])
        _end_all(owns_processes)
        os.lseek(stdout, 0, os.SEEK_SET)
        with open(stdout, "rb", closefd=False) as file:
            output = file.read(OUTPUT_BYTES).decode("utf-8", "replace")
    finally:
        os.close(stdin)
        os.close(stdout)
    failure = ""
    if status is None:
        failure = f"no end within {test['seconds']:.3g} s"
    elif os.WIFSIGNALED(status):
        failure = f"killed by signal {os.WTERMSIG(status)}"
    elif status:
        failure = f"exit status {os.waitstatus_to_exitcode(status)}"
    return {"output": output, "failure": failure}


def _wait(child: int, seconds: float) -> int | None:
    """The child's wait status, or None if it still runs after so long."""
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        signal.sigtimedwait([signal.SIGCHLD], left)


def _end_all(owns_processes: bool) -> None:
    """Kill and reap all that is below this process."""
    while True:
        if owns_processes:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of the namespace but its first process, this one
        else:
            kill_descendants(os.getpid())
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _be_the_program(order: dict[str, Any], stdin: int, stdout: int, seconds: float) -> NoReturn:
    """The rest of a forked child: limits, then the program as __main__."""
    try:
        die_with_parent()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, 256)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(HOME=order["folder"], TMPDIR=order["folder"], PATH="/usr/bin:/bin")
        _limit(order, seconds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _give_up_privileges()
        if order["filter"]:
            filter_system_calls(order["filter"])
        status = _execute(order["program"])
    except BaseException:  # noqa: BLE001 - whatever it was, the program did not do its work
        status = 1
    os._exit(status)


def _execute(program: str) -> int:
    """Run the text as a script would be; its exit status."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else 1
    sys.stdout.flush()
    return status


# ---------------------------------------------------------------------------- limits


def _limit(order: dict[str, Any], seconds: float) -> None:
    """Soft and hard limits alike. Raises if one cannot be set: there is no run without them."""
    cpu_seconds = int(seconds) + 2  # the wall clock ends it first, unless it has many threads
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, order["num_tasks"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        resource.setrlimit(limit, (value, value))


def _hide_memory() -> None:
    """Nobody without privilege may trace this process, nor open its /proc/PID/mem or environ."""
    _check("prctl", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _give_up_privileges() -> None:
    """No capability, now or after an exec: a limit could be raised, a mount made writable."""
    _check("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = struct.pack("=Ii", 0x20080522, 0)
    _check("capset", _libc.capset(header, bytes(24)))


# ---------------------------------------------------------------------------- namespaces


def _enter_namespaces(layers: set[str], folder: str) -> Iterator[tuple[str, str]]:
    """Enter those that can be had; yields (layer, why) of the others."""
    uid, gid = os.geteuid(), os.getegid()
    for name, flag in NAMESPACES.items():
        if name in layers:
            try:
                _check("unshare", _libc.unshare(flag))
                if name == "user":
                    _write("/proc/self/setgroups", "deny")
                    _write("/proc/self/uid_map", f"{uid} {uid} 1")
                    _write("/proc/self/gid_map", f"{gid} {gid} 1")
                if name == "mount":
                    nothing, flags = b"none", _MS_REC | _MS_PRIVATE
                    _check("mount", _libc.mount(nothing, b"/", None, ctypes.c_ulong(flags), None))
            except OSError as error:
                yield name, str(error.strerror)
                if name == "mount":
                    layers.discard("read-only files")
                    yield "read-only files", "no mount namespace"
    if "read-only files" in layers:
        try:
            _make_files_read_only(folder)
        except OSError as error:
            yield "read-only files", str(error.strerror)


def _make_files_read_only(folder: str) -> None:
    """Nothing can be written and no device opened any more, but for what is in `folder`."""
    attributes = struct.pack("=QQQQ", _ATTR_READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    _check(
        "mount_setattr",
        _libc.syscall(
            *(ctypes.c_long(number) for number in (_MOUNT_SETATTR, _AT_FDCWD)),
            b"/",
            *(ctypes.c_long(_AT_RECURSIVE), attributes, ctypes.c_size_t(len(attributes))),
        ),
    )
    options = f"size={FOLDER_BYTES},nr_inodes=4096,mode=700".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check("mount", _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options))


def _become_first_process() -> None:
    """Go on as process 1 of the new namespace: with it, the kernel ends all that are in it."""
    inner = os.fork()
    if inner:
        _, status = os.waitpid(inner, 0)
        os._exit(1 if status else 0)
    die_with_parent()


# ---------------------------------------------------------------------------- system calls


def _no_filter(rules: bytes) -> str:
    """Why the system calls of programs will not be filtered here, or "" if they will be."""
    if not rules:
        return f"no table of system calls for {platform.machine()}"
    if _libc.prctl(_PR_SET_SECCOMP, 2, None) and ctypes.get_errno() != errno.EFAULT:
        return os.strerror(ctypes.get_errno())  # a kernel that has filters finds none at address 0
    return ""


def filter_system_calls(rules: bytes) -> None:
    """Have the kernel apply them (seccomp.py) to this thread and all that it starts, for good."""
    buffer = ctypes.create_string_buffer(rules, len(rules))
    filters = struct.pack("@HP", len(rules) // 8, ctypes.addressof(buffer))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, filters, 0, 0))


# ---------------------------------------------------------------------------- processes


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, whatever it does then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Have what loses its parent below this process become its child: no daemon gets away."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(root: int) -> set[int]:
    """Kill all that is below process `root`, which must adopt orphans; not `root` itself. Returns
    their ids.

    All are stopped before the first is killed: what is stopped cannot fork away.
    """
    stopped: set[int] = set()
    while fresh := _descendants(root) - stopped:
        _signal(fresh, signal.SIGSTOP)
        stopped |= fresh
    _signal(stopped, signal.SIGKILL)
    return stopped


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        fresh = [child for parent in frontier for child in children.get(parent, ())]
        found.update(fresh)
        frontier = fresh
    return found


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
