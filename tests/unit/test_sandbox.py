"""The sandbox for programs: its limits, isolation and cleanup, also for root."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dapo_megatron.rewards import pool, sandbox, sandbox_root
from dapo_megatron.rewards.sandbox import ProgramResult
from dapo_megatron.rewards.sandbox_root import library_path
from dapo_megatron.types import ConfigError
from tests.helpers.graders import processes_with
from tests.helpers.sandboxes import needs_sandbox

LONG_SECONDS = 100.0
"""Limit of programs that end by themselves, however loaded the machine is."""
SHORT_SECONDS = 3.0
"""Limit of programs that do not end. On a loaded machine bwrap still starts within it."""


def run(program: str, stdin: str = "", seconds: float = LONG_SECONDS) -> ProgramResult:
    return sandbox.run(textwrap.dedent(program), stdin, seconds)


def printed(program: str, seconds: float = LONG_SECONDS) -> str:
    result = run(program, seconds=seconds)
    assert result.failure == ""
    return result.output.decode()


# ------------------------------------------------------------------------ limits

LIMITED = {
    "memory": ("x = bytearray(2**34)", "exit status 1"),
    "cpu": ("while True: pass", "no end within the limit"),
    "sleep": ("import time; time.sleep(1000)", "no end within the limit"),
    "output": ("while True: print('x' * 2**20)", "more than 1048576 bytes of output"),
    "errors": ("import sys\nwhile True: sys.stderr.write('x' * 2**20)", "no end within the limit"),
    "file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))", "exit status 1"),
    "open files": ("fs = [open('/dev/stdin') for _ in range(100)]", "exit status 1"),
    "raised limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))",
        "exit status 1",
    ),
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed by signal 11"),
    "abort": ("import os; os.abort()", "killed by signal 6"),
    "exit": ("import os; os._exit(7)", "exit status 7"),
    "closed output": ("import os, time\nos.close(1); os.close(2); time.sleep(1000)", "no end"),
}


@needs_sandbox
@pytest.mark.parametrize("name", LIMITED)
def test_a_program_beyond_a_limit_fails(name: str) -> None:
    program, failure = LIMITED[name]
    result = run(program, seconds=SHORT_SECONDS if "no end" in failure else LONG_SECONDS)
    assert result.failure.startswith(failure)


@needs_sandbox
def test_threads_are_limited_also_for_root() -> None:
    program = """
        import os, threading
        threading.stack_size(32768)
        count, wait = 0, threading.Event().wait
        try:
            while count < 1000:
                threading.Thread(target=wait, daemon=True).start()
                count += 1
        except RuntimeError: pass
        print(count, flush=True)
        os._exit(0)
    """
    assert 50 < int(printed(program)) <= sandbox.MAX_TASKS


@needs_sandbox
def test_the_folder_is_limited_and_nothing_else_can_be_written() -> None:
    program = f"""
        import os
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
        try: os.mkfifo("/new")
        except OSError: print("no fifo")
    """
    assert printed(program) == "True\nno fifo\n"


# ------------------------------------------------------------------------ isolation


@needs_sandbox
def test_programs_inherit_neither_variables_nor_files_nor_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    program = """
        import os, sys
        print(sorted(os.environ), os.listdir("."), sys.argv)
        others = {name for name in os.listdir("/proc/self/fd") if int(name) > 2}
        print([os.readlink(f"/proc/self/fd/{name}")[:5] for name in others if os.path.exists(
            f"/proc/self/fd/{name}")])
        print([name for name in sys.modules if name.startswith("dapo")])
    """
    names = ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PWD"]
    names += ["PYTHONPATH", "TMPDIR", *library_path()]
    assert printed(program).splitlines() == [
        f"{sorted(names)} ['program.py'] ['/program/program.py']",
        # For root, bwrap leaves open the pipe that it waited on. Nothing can be read from it.
        "[]" if os.geteuid() else "['pipe:']",
        "[]",
    ]


@needs_sandbox
def test_programs_see_only_the_interpreter_and_libraries(tmp_path: Path) -> None:
    secret = tmp_path / "tests.jsonl"
    secret.write_text("expected output")
    program = f"""
        import os
        for path in ({str(secret)!r}, {__file__!r}, "/etc/passwd", "/etc/shadow", "/etc/hostname",
                     {str(Path.home() / ".bashrc")!r}, "/var/log", "/run", "/sys"):
            if os.path.exists(path): print("sees", path)
        print(sorted(os.listdir("/")), os.listdir("/home") if os.path.exists("/home") else [])
    """
    lines = printed(program).splitlines()
    assert len(lines) == 1
    assert "'home'" not in lines[0] or lines[0].endswith(" []")
    for name in ("'boot'", "'mnt'", "'opt'", "'run'", "'sys'", "'var'"):
        assert name not in lines[0]


@needs_sandbox
def test_programs_see_no_processes_of_the_machine() -> None:
    program = """
        import os
        print(sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))))
        for pid in (1, os.getppid()):
            for name in ("environ", "mem", "root/etc"):
                try: os.stat(f"/proc/{pid}/{name}"), open(f"/proc/{pid}/{name}", "rb").read(1)
                except OSError: continue
                print("opened", pid, name)
    """
    lines = printed(program).splitlines()
    assert lines == ["[1, 2]"]


@needs_sandbox
def test_programs_have_no_privileges() -> None:
    program = """
        import os
        print(os.getresuid(), os.getresgid(), os.getgroups())
        print(open('/proc/self/status').read())
    """
    first, *lines = printed(program).splitlines()
    nobody = (sandbox.UNPRIVILEGED_ID,) * 3
    if os.geteuid() == 0:
        assert first == f"{nobody} {nobody} []"
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    names = ("CapInh:", "CapPrm:", "CapEff:", "CapAmb:")
    assert {name: int(fields[name], 16) for name in names} == dict.fromkeys(names, 0)
    assert fields["NoNewPrivs:"] == "1"


@needs_sandbox
@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp"])
def test_packages_are_visible_wherever_the_environment_is(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        Path(folder).chmod(0o755)
        Path(folder, "somewhere.py").write_text("answer = 42")
        monkeypatch.setattr(sandbox, "package_folders", lambda: (folder,))
        monkeypatch.setattr(sandbox_root, "package_folders", lambda: (folder,))
        sandbox_root._visible_paths.cache_clear()
        try:
            assert printed("import somewhere; print(somewhere.answer)") == "42\n"
            if parent != "/tmp":
                assert printed("open('/tmp/x', 'w')") == ""
        finally:
            sandbox_root._visible_paths.cache_clear()


@needs_sandbox
def test_each_run_starts_with_an_empty_folder() -> None:
    program = "import os; print(os.listdir()); open('x', 'w').write('1')"
    assert [printed(program) for _ in range(2)] == ["['program.py']\n"] * 2


@needs_sandbox
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert run(program).failure == "exit status 1"
    program = """
        import socket
        for family in range(46):
            for kind in (1, 2, 3, 5):
                try: socket.socket(family, kind)
                except OSError: continue
                print(family, kind)
    """
    assert printed(program) == ""


# ------------------------------------------------------------------------ system calls


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/usr/bin/prlimit', ['true'], {})",
        "import subprocess; subprocess.run(['/usr/bin/prlimit'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import fcntl; fcntl.flock(open('x', 'w'), fcntl.LOCK_EX)",
        "import fcntl; fcntl.lockf(open('x', 'w'), fcntl.LOCK_EX)",
        "import fcntl; fcntl.fcntl(open('x', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, 1)",
        "import os; os.nice(5)",
        "import os; os.sched_setaffinity(0, {0})",
        "import os; os.memfd_create('x')",
        "import os; os.mkfifo('x')",
        # Kernel memory that counts for no limit: descriptors in flight and buffers of sockets.
        "import socket; socket.socketpair()[0].sendmsg([b'x'])",
        "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
        *(
            f"import socket as s; s.socketpair()[0].setsockopt(s.SOL_SOCKET, {option}, 2**20)"
            for option in ("s.SO_SNDBUF", "s.SO_RCVBUF", "32", "33")  # 32 and 33 end in FORCE
        ),
        "import resource as r; r.prlimit(1, r.RLIMIT_CPU)",
    ],
)
def test_system_calls_outside_the_list_are_refused(program: str) -> None:
    result = run(program + "\nprint('went through')")
    assert result == ProgramResult(b"", "exit status 1")


# Calls that Python has no function for: x86_64 numbers, and arguments that need no privilege.
RAW = {
    "io_setup": (206, "(60000, ctypes.byref(ctypes.c_ulong(0)))"),
    "inotify_init": (253, "()"),
    "inotify_init1": (294, "(0,)"),
    "fanotify_init": (300, "(0x200, 0)"),
    "io_uring_setup": (425, "(1, bytes(120))"),
    "userfaultfd": (323, "(1,)"),
    "unshare": (272, "(0x10000000,)"),
    "clone into a namespace": (56, "(0x10000011, 0, 0, 0, 0)"),
    "clone3": (435, "(bytes(64), 64)"),
    "ptrace": (101, "(0, 0, 0, 0)"),
    "process_vm_readv": (310, "(1, 0, 0, 0, 0, 0)"),
    "keyctl": (250, "(0, -3, 0)"),
    "add_key": (248, "(b'user', b'x', b'y', 1, -3)"),
    "shmget": (29, "(0, 4096, 0o1600)"),
    "msgget": (68, "(0, 0o1600)"),
    "bpf": (321, "(0, bytes(64), 64)"),
    "perf_event_open": (298, "(bytes(112), 0, -1, -1, 0)"),
    "personality": (135, "(0x40000,)"),
    "modify_ldt": (154, "(0, bytes(64), 64)"),
    "mount": (165, "(b'x', b'/tmp', b'tmpfs', 0, 0)"),
    "pivot_root": (155, "(b'/tmp', b'/tmp')"),
    "chroot": (161, "(b'/tmp',)"),
    "pidfd_open": (434, "(1, 0)"),
    "sendmsg": (46, "(0, bytes(64), 0)"),
    "sendmmsg": (307, "(0, bytes(64), 1, 0)"),
    "a call of the future": (900, "()"),
}


@needs_sandbox
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls on x86-64")
def test_raw_system_calls_outside_the_list_give_enosys() -> None:
    calls = ", ".join(f"{name!r}: ({number}, {args})" for name, (number, args) in RAW.items())
    program = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, (number, arguments) in {{{calls}}}.items():
            wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *wide)
            if ctypes.get_errno() != errno.ENOSYS: print(name, ctypes.get_errno())
    """
    assert printed(program) == ""


@needs_sandbox
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code of x86-64")
def test_system_calls_of_another_architecture_kill_the_program() -> None:
    program = """
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by int 0x80
        print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
    """
    assert run(program).failure == "killed by signal 31"


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import resource as r; r.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))",
        "import asyncio; asyncio.run(asyncio.sleep(0.01))",
        "import asyncio; asyncio.run(asyncio.to_thread(print))",
        """
        import asyncio, socket
        async def main():
            ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
            ends[0][1].write(bytes(10**6))
            ends[0][1].write(b"end")
            assert len(await ends[1][0].readexactly(10**6 + 3)) == 10**6 + 3
        asyncio.run(main())
        """,
        "import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recvmsg(1)[0] == b'x'",
        "import signal; signal.alarm(100)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_GETFL)",
        "import threading as t; x = t.Thread(target=print); x.start(); x.join()",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import shutil; open('x', 'w').close(); shutil.copy2('x', 'y')",
        "import sqlite3; sqlite3.connect(':memory:').execute('select 1')",
        "import concurrent.futures as f; list(f.ThreadPoolExecutor(4).map(abs, [1, 2]))",
        "import zoneinfo; zoneinfo.ZoneInfo('Europe/Berlin')",
        "import secrets, uuid; secrets.token_hex(), uuid.uuid4()",
        "import numpy as n; n.linalg.svd(n.ones((50, 50)))",
        "import sympy; sympy.integrate(sympy.Symbol('x'))",
    ],
)
def test_system_calls_that_solutions_need_are_allowed(program: str) -> None:
    assert run(program).failure == ""


# ------------------------------------------------------------------------ cleanup


@needs_sandbox
@pytest.mark.parametrize("seconds", [SHORT_SECONDS, LONG_SECONDS])
def test_neither_descriptors_nor_processes_are_left_after_a_run(seconds: float) -> None:
    # A separate process adopts orphans, as a worker does; the test process must not.
    code = f"""
        import os
        from dapo_megatron.rewards import sandbox
        from dapo_megatron.cluster.processes import adopt_orphans
        adopt_orphans()
        sandbox.missing_layers()
        before = len(os.listdir("/proc/self/fd"))
        program = "import time; time.sleep({0 if seconds == LONG_SECONDS else 1000})"
        assert bool(sandbox.run(program, "", {seconds}).failure) == {seconds == SHORT_SECONDS}
        assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
        try: os.waitpid(-1, os.WNOHANG)
        except ChildProcessError: pass
        else: raise SystemExit("a child process is left")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@needs_sandbox
def test_a_program_ends_with_its_killed_parent(tmp_path: Path) -> None:
    mark = f"sandbox-{os.getpid()}"
    program = "import time, ctypes\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(1000)"
    code = f"from dapo_megatron.rewards import sandbox; sandbox.run({program!r}, '', 1000.0)"
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"MARK": mark})
    try:
        wait_for(lambda: len(children(parent.pid)) > 0 and bool(sandboxed_processes(parent.pid)))
        processes = sandboxed_processes(parent.pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not any(map(is_alive, processes)))
    assert processes_with(mark) == []


def sandboxed_processes(process_id: int) -> set[int]:
    """Return the processes below its bwrap process, or none until the program has started."""
    below = {inner for bwrap in children(process_id) for inner in children(bwrap)}
    programs = {program for inner in below for program in children(inner)}
    return below | programs if programs else set()


def children(process_id: int) -> set[int]:
    try:
        text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    except OSError:
        return set()
    return set(map(int, text.split()))


def is_alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_sandbox
def test_a_program_cannot_lock_files_of_the_machine(tmp_path: Path) -> None:
    library = Path(os.__file__)
    program = f"import fcntl; fcntl.flock(open({str(library)!r}), fcntl.LOCK_EX)"
    assert run(program).failure == "exit status 1"
    with library.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


ORDINARY = """
import os, threading
print(os.listdir("/"), len(os.listdir("/proc/self/fd")))
try:
    for count in range(1000):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
except RuntimeError: print("stopped", count < 128, flush=True)
try: os.fork()
except OSError: print("no fork", flush=True)
os._exit(0)
"""


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    # The interpreter of this run may lie in root's home.
    python = next((path for path in (sys.executable, "/usr/bin/python3") if startable(path)), None)
    if python is None:
        pytest.skip("no Python that another user than root can start")
    package = Path(sandbox.__file__).parents[1]
    code = f"""
        import sys, types
        sys.path.insert(0, {str(package.parent)!r})
        # The __init__ of the package imports libraries that only this environment has.
        room = types.ModuleType("dapo_megatron.rewards")
        room.__path__ = [{str(package / "rewards")!r}]
        sys.modules[room.__name__] = room
        from dapo_megatron.rewards import sandbox
        result = sandbox.run({ORDINARY!r}, "", 100.0)
        print(result.output.decode() + result.failure)
    """
    done = subprocess.run(
        [*AS_NOBODY, python, "-c", textwrap.dedent(code)],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert lines == ["stopped True", "no fork", ""]
    assert first.endswith(" 4")  # three standard descriptors, and that of the listing
    assert "'home'" not in first


AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    "env",  # setpriv itself starts a program with root's privileges
)


def startable(python: str) -> bool:
    """Return whether the user `nobody` can start this Python."""
    command = [*AS_NOBODY, python, "-c", ""]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


# ------------------------------------------------------------------------ unsupported machines


@pytest.fixture
def clear_lacking() -> Iterator[None]:
    sandbox.missing_layers.cache_clear()
    yield
    sandbox.missing_layers.cache_clear()


def test_without_bubblewrap_the_grader_is_refused_with_the_install_command(
    clear_lacking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"program bwrap is not on.*apt-get install bubblewrap"):
        pool.GradingPool({"a": "code"}, workers=1, timeout_seconds=9.0)


def test_other_graders_work_without_bubblewrap(
    clear_lacking: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pool.GradingPool({"a": "dapo_math"}, workers=1, timeout_seconds=60.0) as grading:
        grading.submit(0, "a", "Answer: 7", "7", {})
        assert [why for _, _, why in grading.collect(wait=True)] == ["graded"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("bwrap: No permissions to create new namespace", "No permissions to create new namespace"),
        ("bwrap: Unknown option --size", "Unknown option --size"),
    ],
)
def test_a_bubblewrap_that_fails_is_reported_with_its_reason(
    clear_lacking: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    message: str,
    reason: str,
) -> None:
    """Messages of bwrap without user namespaces, and of a version that is too old."""
    script = tmp_path / "bwrap"
    script.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=rf"grader 'code': .*{reason}.*docs/rewards\.md"):
        sandbox.missing_layers()


def test_a_bubblewrap_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(sandbox.SandboxError, match="in time"):  # this bwrap sleeps for 1000 s
        sandbox._run("print(1)", "", 0.5, 100, has_proc=True)


def test_home_folders_in_the_library_path_are_not_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, libraries, data = tmp_path / "libby", tmp_path / "lib", tmp_path / "libby" / "data"
    for folder in (home, libraries, data):
        folder.mkdir()
    (libraries / "libx.so.1").touch()
    (home / "libx.so").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{home}:{libraries}::{data}:{tmp_path}")
    assert sandbox_root._library_folders() == [str(libraries)]


@needs_sandbox
def test_without_a_new_proc_programs_still_run(
    clear_lacking: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers mask parts of /proc, and then no new one can be mounted."""
    trial = sandbox._trial

    def refuse_proc(has_proc: bool) -> ProgramResult:
        if has_proc:
            raise sandbox.SandboxError("Can't mount proc on /newroot/proc")
        return trial(has_proc)

    monkeypatch.setattr(sandbox, "_trial", refuse_proc)
    assert sandbox.missing_layers() == {"/proc": "Can't mount proc on /newroot/proc"}
    assert printed("import os; print(os.listdir('/proc'))") == "[]\n"


def test_missing_layers_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing_layers() -> Mapping[str, str]:
        return {"/proc": "a container"}

    monkeypatch.setattr(pool, "missing_layers", missing_layers)
    monkeypatch.setattr(pool, "check_grader", lambda name: None)
    with pool.GradingPool({"a": "code", "b": "code"}, workers=2, timeout_seconds=9.0):
        pass
    with pool.GradingPool({"a": "dapo_math"}, workers=1, timeout_seconds=9.0):
        pass
    (record,) = caplog.records
    assert "its sandbox has no /proc on this machine (a container)" in record.getMessage()


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
