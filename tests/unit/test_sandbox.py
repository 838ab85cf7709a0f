"""The sandbox for programs: its limits, isolation and cleanup, also for root."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_megatron.rewards import pool, sandbox
from dapo_megatron.rewards.sandbox import ProgramResult
from dapo_megatron.rewards.seccomp import REFUSED
from dapo_megatron.types import ConfigError
from tests.helpers.processes import is_alive, wait_until
from tests.helpers.sandboxes import needs_sandbox

LONG_SECONDS = 100.0
"""Limit of programs that end by themselves, however loaded the machine is."""
SHORT_SECONDS = 3.0
"""Limit of programs that do not end. On a loaded machine bwrap still starts within it."""


def run(program: str, stdin: str = "", seconds: float = LONG_SECONDS) -> ProgramResult:
    return sandbox.run(textwrap.dedent(program), stdin, seconds)


def printed(program: str) -> str:
    result = run(program)
    assert result.failure == ""
    return result.output.decode()


# ------------------------------------------------------------------------ limits

LIMITED = {
    "memory": ("x = bytearray(2**34)", "exit status 1"),
    "sleep": ("import time; time.sleep(1000)", "no end within the limit"),
    "output": ("while True: print('x' * 2**20)", "exit status 120"),
    "a large file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))", "exit status 1"),
    "raised limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))",
        "exit status 1",
    ),
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed by signal 11"),
    "closed output": ("import os, time\nos.close(1); os.close(2); time.sleep(1000)", "no end"),
    "all signals ignored": (
        "import signal\nfor n in range(1, 32):\n"
        "  if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "no end within the limit",
    ),
}


@needs_sandbox
@pytest.mark.parametrize("name", LIMITED)
def test_a_program_beyond_a_limit_fails(name: str) -> None:
    program, failure = LIMITED[name]
    result = run(program, seconds=SHORT_SECONDS if "no end" in failure else LONG_SECONDS)
    assert result.failure.startswith(failure)
    assert len(result.output) <= sandbox.FILE_MIB * sandbox.MIB


@needs_sandbox
def test_threads_and_the_folder_are_limited_and_nothing_else_can_be_written() -> None:
    program = f"""
        import os, threading
        written = 0
        try:
            for number in range(100):
                with open(f"file{{number}}", "wb") as file: file.write(bytes(15 * 2**20))
                written += 15
        except OSError: pass
        print(written <= {sandbox.FOLDER_MIB})
        for folder in ("/", "/dev", "/dev/shm", "/etc", "/usr/lib", "/var/tmp", {os.getcwd()!r}):
            try: open(folder + "/new", "w")
            except OSError: continue
            print("wrote to", folder)
        threading.stack_size(32768)
        count, wait = 0, threading.Event().wait
        try:
            while count < 1000:
                threading.Thread(target=wait, daemon=True).start()
                count += 1
        except RuntimeError: pass
        print(50 < count <= {sandbox.MAX_TASKS}, flush=True)
        os._exit(0)
    """
    assert printed(program) == "True\nTrue\n"


@needs_sandbox
def test_a_lower_limit_of_this_process_is_not_raised() -> None:
    code = """
        import resource
        from dapo_megatron.rewards import sandbox
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        program = "import resource; print(resource.getrlimit(resource.RLIMIT_AS))"
        print(sandbox.run(program, "", 100.0).output.decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"({2**30}, {2**30})"
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY


# ------------------------------------------------------------------------ isolation


@needs_sandbox
def test_programs_inherit_neither_variables_nor_files_nor_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, libraries, data = tmp_path / "home", tmp_path / "lib", tmp_path / "home" / "data"
    for folder in (home, libraries, data):
        folder.mkdir()
    for folder in (home, libraries):
        (folder / "libx.so").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{home}:{libraries}::{data}:{tmp_path}")
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    (tmp_path / "tests.jsonl").write_text("expected output")
    paths = [tmp_path / "tests.jsonl", __file__, "/etc/passwd", "/etc/hostname", "/var/log"]
    paths += [home / "libx.so", data, "/run", "/sys", "/proc/self", "/proc/1", "/home", "/boot"]
    program = f"""
        import importlib.util, os, sys
        print(sorted(os.environ), sys.argv, sys.stdin.read())
        for path in {list(map(str, paths))!r}:
            if os.path.exists(path): print("sees", path)
        print(importlib.util.find_spec("dapo_megatron"), os.path.exists({str(libraries)!r}))
        for number in range(3, 4096):
            try: print(number, os.fstat(number).st_mode >> 12)
            except OSError: pass
    """
    sandbox._mounts.cache_clear()
    try:
        result = run(program, "input")
    finally:
        sandbox._mounts.cache_clear()
    names = ["HOME", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    first, modules, *descriptors = result.output.decode().splitlines()
    assert (
        first
        == f"{[*names, 'PATH', 'PWD', 'PYTHONHASHSEED', 'PYTHONPATH']} ['/tmp/program.py'] input"
    )
    assert modules == "None True"
    # For root, bwrap leaves open the pipe that it waited on. Nothing can be read from it.
    assert [text.split()[1] for text in descriptors] == ([] if os.geteuid() else ["1"])


@needs_sandbox
def test_programs_have_no_privileges_and_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
            import ctypes, os, socket
            print(os.getresuid(), os.getresgid(), os.getgroups(), os.getpid())
            prctl = ctypes.CDLL(None).prctl
            print(prctl(39, 0, 0, 0, 0), [prctl(47, 1, n, 0, 0) for n in range(40) if
                                          prctl(47, 1, n, 0, 0) > 0])  # no new privileges, ambient
            header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            ctypes.CDLL(None).capget(header, sets)
            print(list(sets))
            try: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=2)
            except OSError: print("no network")
        """
        first, *rest = printed(program).splitlines()
    if os.geteuid() == 0:
        nobody = (sandbox.NOBODY,) * 3
        assert first == f"{nobody} {nobody} [] 2"
    assert rest == ["1 []", "[0, 0, 0, 0, 0, 0]", "no network"]


@needs_sandbox
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls on x86-64")
def test_refused_system_calls_give_enosys_and_other_architectures_end_the_program() -> None:
    numbers = {name: call[0] for name, call in REFUSED.items()}
    program = f"""
        import ctypes, errno, mmap
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(number, *arguments):
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
            return ctypes.get_errno() == errno.ENOSYS
        print([name for name, number in {numbers!r}.items() if not refused(number, *[0] * 6)])
        print(refused(56, 17, 0, 0, 0, 0), refused(39), flush=True)  # clone of a process; getpid
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by int 0x80
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    """
    assert run(program) == ProgramResult(b"[]\nTrue False\n", "killed by signal 31")


@needs_sandbox
def test_what_solutions_need_is_allowed() -> None:
    program = """
        import asyncio, concurrent.futures, resource, secrets, shutil, signal, socket, sqlite3
        import tempfile, threading, uuid, zoneinfo
        import numpy, sympy
        resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
        print()
        async def main():
            ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
            ends[0][1].write(bytes(10**6))
            assert len(await ends[1][0].readexactly(10**6)) == 10**6
        asyncio.run(main())
        signal.alarm(100)
        tempfile.TemporaryFile().write(b"x")
        open("x", "w").close(); shutil.copy2("x", "y")
        sqlite3.connect(":memory:").execute("select 1")
        list(concurrent.futures.ThreadPoolExecutor(4).map(abs, [1, 2]))
        zoneinfo.ZoneInfo("Europe/Berlin"), secrets.token_hex(), uuid.uuid4()
        numpy.linalg.svd(numpy.ones((50, 50))), sympy.integrate(sympy.Symbol("x"))
        print(open("/dev/stdin").read(), input())
    """
    assert run(program, "1").output == b"\n1 1\n"


# ------------------------------------------------------------------------ cleanup


@needs_sandbox
@pytest.mark.parametrize("is_endless", [True, False])
def test_neither_descriptors_nor_processes_are_left_after_a_run(is_endless: bool) -> None:
    # A separate process adopts orphans, as a worker does; the test process must not.
    code = f"""
        import os
        from dapo_megatron.rewards import sandbox
        from dapo_megatron.cluster.processes import adopt_orphans
        adopt_orphans()
        sandbox.check_sandbox()
        before = len(os.listdir("/proc/self/fd"))
        program = "import time; time.sleep({1000 if is_endless else 0})"
        result = sandbox.run(program, "", {SHORT_SECONDS if is_endless else LONG_SECONDS})
        assert bool(result.failure) == {is_endless}
        assert len(os.listdir("/proc/self/fd")) == before
        children = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read()
        assert children == "", children
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@needs_sandbox
def test_a_program_ends_with_its_killed_parent() -> None:
    code = "from dapo_megatron.rewards import sandbox\n"
    code += "sandbox.run('import time; time.sleep(1000)', '', 1000.0)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    below = {parent.pid}
    for _ in range(3):  # bwrap, the first process of its namespace, the program
        while not (children := children_of(below)):
            assert parent.poll() is None
            time.sleep(0.02)
        below = children
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, below)))


def children_of(parents: set[int]) -> set[int]:
    paths = [Path(f"/proc/{parent}/task/{parent}/children") for parent in parents]
    return {int(child) for path in paths if path.exists() for child in path.read_text().split()}


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    as_nobody = [*("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"), "env"]
    # The interpreter of this run may lie in root's home.
    pythons = [sys.executable, "/usr/bin/python3"]
    commands = [[*as_nobody, path, "-c"] for path in pythons]
    starts = [subprocess.run([*command, ""], stderr=-3).returncode for command in commands]
    if 0 not in starts:
        pytest.skip("no Python that another user than root can start")
    package = Path(sandbox.__file__).parents[1]
    program = "import os\ntry: os.fork()\nexcept OSError: print(os.getuid(), 'no fork')"
    code = f"""
        import sys, types
        sys.path.insert(0, {str(package.parent)!r})
        # The __init__ of the package imports libraries that only this environment has.
        room = types.ModuleType("dapo_megatron.rewards")
        room.__path__ = [{str(package / "rewards")!r}]
        sys.modules[room.__name__] = room
        from dapo_megatron.rewards import sandbox
        result = sandbox.run({program!r}, "", 100.0)
        print(result.output.decode() + result.failure)
    """
    command = [*commands[starts.index(0)], textwrap.dedent(code)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.stdout == "65534 no fork\n\n", done.stderr


# ------------------------------------------------------------------------ unsupported machines


@pytest.fixture
def unchecked() -> Iterator[None]:
    sandbox.check_sandbox.cache_clear()
    yield
    sandbox.check_sandbox.cache_clear()


def test_without_bubblewrap_only_this_grader_is_refused_with_the_install_command(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"program bwrap is not on.*apt-get install bubblewrap"):
        pool.GradingPool({"a": "code"}, workers=1, timeout_seconds=9.0)
    with pool.GradingPool({"a": "dapo_math"}, workers=1, timeout_seconds=60.0) as grading:
        grading.submit(0, "a", "Answer: 7", "7", {})
        assert [why for _, _, why in grading.collect(wait=True)] == ["graded"]


def test_a_bubblewrap_that_fails_is_reported_with_its_reason(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"No permissions to create.*docs/rewards\.md"):
        sandbox.check_sandbox()
