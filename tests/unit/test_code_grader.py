"""The `code` grader: what it reads, what it accepts, and what its sandbox keeps inside."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rewards import jail, pool, sandbox, seccomp
from dapo_megatron.rewards.code import Case, grade, last_program, read_tests
from dapo_megatron.rewards.sandbox import Run, Sandbox
from dapo_megatron.types import ConfigError, Grade
from tests.helpers.graders import processes_with

DOUBLE = json.dumps({"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]})


def answer(program: str) -> str:
    return f"So I write:\n```python\n{textwrap.dedent(program)}\n```\nThat is it."


def run(
    program: str, *, stdin: str = "", seconds: float = 5.0, layers: Sequence[str] = jail.LAYERS
) -> Run:
    with Sandbox(textwrap.dedent(program), layers) as box:
        return box.run(stdin, seconds)


# ------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("no code", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\ntext\n```Python3\n  b\n\nc\n```\nend", "  b\n\nc\n"),
        ("```python\na\n```\n```cpp\nb\n```", "a\n"),
        ("```python\na\n```\n```python\nnot closed", "a\n"),
        ("```python\n```", "\n"),
        ("```python\r\na\f\u2028b\r\n```", "a\f\u2028b\r\n"),
        ("in ``` a line ``` of text", None),
        ("    ```python\n    a\n    ```", "    a\n"),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


@given(st.text(alphabet="`\n py", max_size=200), st.text(alphabet="ab \t=", max_size=40))
def test_a_closed_block_is_found_behind_anything_without_an_open_one(
    before: str, line: str
) -> None:
    before = before.replace("```", "")
    assert last_program(f"{before}\n```python\n{line}\n```\n") == f"{line}\n"


def test_reading_a_long_hostile_response_is_quick() -> None:
    started = time.monotonic()
    for response in ("```python\n" * 200_000, "`" * 2_000_000, "```\n" * 300_001):
        last_program(response)
    assert time.monotonic() - started < 5.0


TESTS = [Case("1\n", "2"), Case("a\nb", "c")]


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        ("see tests", {"inputs": ["1\n", "a\nb"], "outputs": ["2", "c"]}),
        ("see tests", {"inputs": ["1\n", ["a", "b"]], "outputs": [["2"], "c"]}),
        ("see tests", [{"input": "1\n", "output": "2"}, {"input": "a\nb", "output": "c"}]),
        (
            "see tests",
            [
                {"input": "1\n", "output": "2", "testtype": None},
                {"input": "a\nb", "output": "c", "testtype": "stdin"},
            ],
        ),
        ("see tests", '{"inputs": ["1\\n", "a\\nb"], "outputs": ["2", "c"]}'),
        ('{"inputs": ["1\\n", "a\\nb"], "outputs": ["2", "c"]}', None),
    ],
)
def test_tests_are_read_in_the_forms_of_public_data_sets(truth: str, tests: Any) -> None:
    extra = {} if tests is None else {"extra_info": {"index": 1, "tests": tests}}
    assert read_tests(truth, extra) == TESTS


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("42 apples", "not valid JSON"),
        ("42", "need"),
        ("{}", "need"),
        ('{"inputs": [], "outputs": []}', "at least one test"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "1 inputs and 2 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be a text"),
        ('{"fn_name": "add", "inputs": [[1]], "outputs": [2]}', "they call 'add'"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "call a function"),
        ('{"inputs": ["1"], "outputs": [""]}', "output 0 is empty: a program that does nothing"),
        ('{"inputs": ["", ""], "outputs": ["1", [" ", ""]]}', "output 1 is empty"),
        ('{"inputs": ["\\ud83d"], "outputs": ["1"]}', "input 0 has half a character"),
        ('{"inputs": ["1"], "outputs": ["\\udead"]}', "output 0 has half a character"),
        ("[" * 100_000, "not valid JSON: nested more than 64 deep"),
    ],
)
def test_tests_that_cannot_be_used_are_refused(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade(answer("print(1)"), truth, {})


# ------------------------------------------------------------------------ grading

PROGRAMS = {
    "right": ("print(int(input()) * 2)", True),
    "trailing blanks": ("print(int(input()) * 2, '  \\n\\n')", True),
    "wrong on the second": ("print(2)", False),
    "leading blank": ("print(' ', int(input()) * 2)", False),
    "reads stdin in its own way": (
        "import sys\nfor x in sys.stdin.buffer.read().split(): sys.stdout.write(str(2*int(x)))",
        True,
    ),
    "opens stdin": ("print(2 * int(open('/dev/stdin').readline()))", True),
    "is a script": (
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()",
        True,
    ),
    "works in a thread": (
        """
        import sys, threading
        sys.setrecursionlimit(10**6)
        threading.stack_size(2**26)
        def sum_to(n): return n and 1 + sum_to(n - 1)
        threading.Thread(target=lambda: print(2 * int(input()) + 0 * sum_to(20000))).start()
        """,
        True,
    ),
    "exits with 0": ("import sys\nprint(2 * int(input()))\nsys.exit()", True),
    "exits with 1": ("import sys\nprint(2 * int(input()))\nsys.exit(1)", False),
    "raises at the end": ("print(2 * int(input()))\n1 / 0", False),
    "no Python": ("print(2 *", False),
    "too deep for the compiler": ("x = " + "(" * 5000 + ")" * 5000, False),
    "reads too much": ("input(); input()", False),
    "uses a file": ("open('x', 'w').write(str(2 * int(input())))\nprint(open('x').read())", True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_must_pass_every_test(name: str) -> None:
    program, correct = PROGRAMS[name]
    program = textwrap.dedent(program)
    assert grade(answer(program), DOUBLE, {}) == Grade(
        1.0 if correct else -1.0,
        correct,
        program.rstrip("\n") + "\n" * program.endswith("\n") + "\n",
    )


def test_without_a_program_nothing_was_parsed() -> None:
    assert grade("I do not know.", DOUBLE, {}) == Grade(-1.0, False, "", parsed=False)


def test_an_endless_program_is_wrong_within_the_limit() -> None:
    for program in ("while True: pass", "import time\ntime.sleep(1000)", "print(2)\ninput('')"):
        started = time.monotonic()
        assert not grade(answer(program), DOUBLE, {}, seconds=0.6).correct
        assert time.monotonic() - started < 10.0  # starting Python, on a busy machine


# ------------------------------------------------------------------------ the sandbox

try:
    LACKING = sandbox.lacking()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)
ALL, NONE = jail.LAYERS, ()
NAMESPACES = tuple(layer for layer in jail.LAYERS if layer != "seccomp")


def needs(layers: Sequence[str]) -> Any:
    missing = sorted(set(layers) & set(LACKING))
    return pytest.mark.skipif(bool(missing), reason=f"not to be had here: {missing}")


EACH = [
    pytest.param(ALL, id="all", marks=needs(ALL)),
    pytest.param(NAMESPACES, id="namespaces", marks=needs(NAMESPACES)),
    pytest.param(("seccomp",), id="seccomp", marks=needs(["seccomp"])),
    pytest.param(NONE, id="limits"),
]
LOCKED = EACH[:1]
NO_PROCESSES = [EACH[0], EACH[2]]
OWN_FILES = EACH[:2]


@pytest.mark.parametrize("layers", EACH)
def test_a_program_runs_in_every_kind_of_sandbox(layers: Sequence[str]) -> None:
    assert run("print(int(input()) * 2)", stdin="21", layers=layers) == Run("42\n", "")


LIMITED = {
    "memory": ("x = bytearray(2**34)", "exit status 1"),
    "cpu": ("while True: pass", "no end within 0.5 s"),
    "sleep": ("import time; time.sleep(100)", "no end within 0.5 s"),
    "output": ("while True: print('x' * 2**20)", "exit status 1"),
    "file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))", "exit status 1"),
    "open files": ("fs = [open('/dev/stdin') for _ in range(100)]", "exit status 1"),
    "raised limit": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))",
        "exit status 1",
    ),
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed by signal 11"),
    "exit": ("import os; os._exit(7)", "exit status 7"),
}


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("layers", EACH)
def test_what_goes_beyond_a_limit_fails(layers: Sequence[str], name: str) -> None:
    program, failure = LIMITED[name]
    seconds = 0.5 if "0.5" in failure else 20.0
    result = run(program, seconds=seconds, layers=layers)
    assert result.failure == failure
    assert len(result.output) <= jail.OUTPUT_BYTES


@pytest.mark.parametrize("layers", EACH)
def test_nothing_of_this_process_is_inherited(
    layers: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    program = """
        import os, sys
        print(sorted(os.environ), os.listdir("."), sys.argv)
        try: os.fstat(3)
        except OSError: print("no more descriptors")
        print([name for name in sys.modules if name.startswith("dapo")])
    """
    result = run(program, layers=layers)
    assert result == Run(
        "['HOME', 'PATH', 'TMPDIR'] [] ['program.py']\nno more descriptors\n[]\n", ""
    )


@pytest.mark.parametrize("layers", EACH)
def test_a_program_has_no_privilege(layers: Sequence[str]) -> None:
    result = run("print(open('/proc/self/status').read())", layers=layers)
    fields = dict(line.split() for line in result.output.splitlines() if len(line.split()) == 2)
    names = ("CapInh:", "CapPrm:", "CapEff:", "CapAmb:", "NoNewPrivs:")
    assert {name: int(fields[name], 16) for name in names} == {
        **dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapAmb:"), 0),
        "NoNewPrivs:": 1,
    }


@pytest.mark.parametrize("layers", EACH)
def test_each_run_starts_afresh(layers: Sequence[str]) -> None:
    program = "import builtins; n = getattr(builtins, 'n', 0); builtins.n = n + 1; print(n)"
    with Sandbox(program, layers) as box:
        assert [box.run("", 5.0).output for _ in range(3)] == ["0\n"] * 3


@pytest.mark.parametrize("layers", EACH)
def test_daemons_end_with_their_run(layers: Sequence[str]) -> None:
    program = """
        import os, time
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(0)
        time.sleep(0.3)
    """
    with Sandbox(textwrap.dedent(program), layers) as box:
        before = len(processes_with(box._folder))
        result = box.run("", 5.0)
        assert result.failure == ("exit status 1" if "seccomp" in layers else "")
        assert len(processes_with(box._folder)) == before > 0
    assert processes_with(box._folder) == []


@pytest.mark.parametrize("layers", EACH)
def test_closing_in_the_middle_leaves_nothing(layers: Sequence[str]) -> None:
    box = Sandbox("import time\nwhile True: time.sleep(0.1)", layers)
    folder = Path(box._folder)
    process = box._process
    assert process.stdin is not None
    process.stdin.write(b'{"input": "", "seconds": 1000}\n')
    process.stdin.flush()
    box._is_busy = True
    time.sleep(0.3)
    box.close()
    box.close()
    assert not folder.exists()
    assert processes_with(str(folder)) == []


@pytest.mark.parametrize("layers", EACH)
def test_no_zombie_stays_with_a_parent_that_adopts_orphans(layers: Sequence[str]) -> None:
    # As in a worker, in a process of its own: this one is not to adopt anything.
    code = f"""
        import os
        from dapo_megatron.rewards.jail import adopt_orphans
        from dapo_megatron.rewards.sandbox import Sandbox
        adopt_orphans()
        for is_busy in (False, True):
            with Sandbox("print(1)", {layers!r}) as box:
                assert box.run("", 5.0).output == "1\\n"
                box._is_busy = is_busy
        try: os.waitpid(-1, os.WNOHANG)
        except ChildProcessError: pass
        else: raise SystemExit("a child is left")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("layers", NO_PROCESSES)
@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import os; os.kill(os.getppid(), 9)",
        "import socket; socket.socket(socket.AF_UNIX)",
    ],
)
def test_no_process_can_be_started_nor_signalled(layers: Sequence[str], program: str) -> None:
    assert run(program, layers=layers).failure == "exit status 1"


# What reaches other processes or escapes a limit: numbers on (x86_64, aarch64), and arguments with
# which an ordinary user may call it.
RAW = {
    "kill": (62, 129, "(me, 0)"),
    "tgkill": (234, 131, "(me, me, 0)"),
    "rt_sigqueueinfo": (129, 138, "(me, 0, bytes(128))"),
    "rt_tgsigqueueinfo": (297, 240, "(me, me, 0, bytes(128))"),
    "pidfd_open": (434, 434, "(me, 0)"),
    "pidfd_getfd": (438, 438, "(-1, 0, 0)"),
    "prlimit64": (302, 261, "(os.getppid(), 7, None, bytearray(16))"),
    "kcmp": (312, 272, "(me, me, 0, 0, 0)"),
    "setpriority": (141, 140, "(0, 0, 5)"),
    "sched_setaffinity": (203, 122, "(0, 8, b'\\xff' * 8)"),
    "memfd_create": (319, 279, "(b'x', 0)"),
    "userfaultfd": (323, 282, "(1,)"),
    "F_SETOWN": (72, 25, "(0, 8, me)"),
    "F_SETSIG": (72, 25, "(0, 10, 0)"),
    "F_SETOWN_EX": (72, 25, "(0, 15, struct.pack('ii', 1, me))"),
    "FIOSETOWN": (16, 29, "(socket.socketpair()[0].fileno(), 0x8901, struct.pack('i', me))"),
    "SIOCSPGRP": (16, 29, "(socket.socketpair()[0].fileno(), 0x8902, struct.pack('i', me))"),
    "datagrams": (53, 199, "(1, 2, 0, bytes(8))"),
}
RAW_CALL = """
    import ctypes, os, socket, struct
    me = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_long(a) if isinstance(a, int) else bytes(a) if a else a for a in {arguments}]
    libc.syscall(ctypes.c_long({number}), *wide)
    raise SystemExit(ctypes.get_errno() == 1)
"""


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("layers", [*NO_PROCESSES, pytest.param(NONE, id="limits")])
def test_no_call_reaches_other_processes(layers: Sequence[str], name: str) -> None:
    *numbers, arguments = RAW[name]
    number = numbers[["x86_64", "aarch64"].index(platform.machine())]
    result = run(RAW_CALL.format(number=number, arguments=arguments), layers=layers)
    assert result.failure == ("exit status 1" if "seccomp" in layers else "")


@pytest.mark.parametrize("layers", NO_PROCESSES)
@pytest.mark.parametrize(
    "program",
    [
        "import resource as r; r.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))",
        "import asyncio; asyncio.run(asyncio.sleep(0.01))",
        "import signal; signal.alarm(100)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_GETFL)",
        "import threading as t; x = t.Thread(target=print); x.start(); x.join()",
    ],
)
def test_what_solutions_use_is_not_refused(layers: Sequence[str], program: str) -> None:
    assert run(program, layers=layers).failure == ""


def verdict(rules: bytes, machine: str, number: int, arguments: Sequence[int]) -> int:
    """What the kernel would return for the call: a classic BPF machine with one register."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", rules))
    value = at = 0
    while True:
        operation, if_so, if_not, operand = program[at]
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
            at += 1
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}
        at += 1 + (if_so if holds[operation] else if_not)


@pytest.mark.parametrize(("column", "machine"), list(enumerate(["x86_64", "aarch64"])))
@given(st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6), st.integers(0, 500))
def test_the_filter_decides_alike_on_both_machines(
    column: int, machine: str, arguments: list[int], number: int
) -> None:
    rules = seccomp.assemble(machine)
    first, second = (argument % 2**32 for argument in arguments[:2])
    refused = {pair[column] for pair in seccomp.REFUSED}
    conditional = {
        (56, 220)[column]: not first & 0x10000,
        (302, 261)[column]: first != 0,
        (72, 25)[column]: second in (8, 10, 15),
        (16, 29)[column]: second in (0x8901, 0x8902),
        (53, 199)[column]: bool(second & 0xE),
    }
    for call in (number, *conditional):
        expected = 0x50001 if call in refused or conditional.get(call) else 0x7FFF0000
        expected = 0x50026 if call == 435 else expected
        assert verdict(rules, machine, call, arguments) == expected
    for second in (8, 10, 15, 0x8901, 0x8902):
        for call, known in (((72, 25)[column], second < 16), ((16, 29)[column], second > 16)):
            expected = 0x50001 if known else 0x7FFF0000
            assert verdict(rules, machine, call, [0, second]) == expected


def as_ordinary_user(code: str) -> str:
    """What the code prints in a process that is not root, whatever this one is."""
    root = Path(__file__).parents[2]
    before = f"""
        import os, platform, sys
        sys.path.insert(0, {str(root)!r})
        from dapo_megatron.rewards import jail, sandbox, seccomp
    """
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = {"user": 65534, "group": 65534, "extra_groups": []}
    # The interpreter of this run may lie in root's home: any other one serves as well.
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-c", textwrap.dedent(before)], cwd="/", check=True, **user)
            break
    else:
        pytest.skip("no Python that another user than root can start")
    done = subprocess.run(
        [python, "-c", textwrap.dedent(before) + textwrap.dedent(code)],
        env=os.environ | {"SECRET_TOKEN": "s3cr3t"},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        **user,
    )
    return str(done.stdout)


OPEN_PROC = """
    import os
    me = os.readlink("/proc/self")
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        for name, mode in (("mem", "r+b"), ("environ", "rb")):
            try: open(f"/proc/{pid}/{name}", mode)
            except OSError: continue
            if pid != me: print(pid, name)
"""


@pytest.mark.parametrize("layers", [EACH[0], pytest.param(jail.NEEDED, id="needed"), *EACH[2:]])
def test_memory_and_secrets_of_others_stay_theirs(layers: Sequence[str]) -> None:
    printed = as_ordinary_user(f"""
        with sandbox.Sandbox({textwrap.dedent(OPEN_PROC)!r}, {layers!r}) as box:
            print(os.getpid(), box._process.pid)
            print(box.run("", 20.0).output)
    """)
    this, box = printed.split()[:2]
    opened = set(printed.splitlines()[1:])
    if set(jail.NEEDED) <= set(layers):
        assert opened == {""}
    else:  # this is why they are needed; the jail hides itself all the same
        assert {f"{this} mem", f"{this} environ"} <= opened
        assert not {f"{box} mem", f"{box} environ"} & opened


def test_under_docker_s_defaults_nothing_runs() -> None:
    # They refuse unshare, and a filter may be added.
    printed = as_ordinary_user("""
        rules = seccomp.assemble(platform.machine(), refused=((272, 97),), conditions=())
        jail._give_up_privileges()
        jail.filter_system_calls(rules)
        try: print("accepted, but for", sandbox.lacking())
        except sandbox.ConfigError as error: print(error)
        with sandbox.Sandbox("print(1)", ("seccomp",)) as box: print(box.run("", 5.0).output)
    """)
    refused, output = printed.splitlines()[:2]
    assert refused.startswith("grader 'code': ")
    why = "unshare: Operation not permitted"
    assert f"user ({why}), pid ({why})" in refused
    assert "--security-opt seccomp=unconfined" in refused
    assert "docs/rewards.md" in refused
    assert output == "1"


@pytest.mark.parametrize("layers", EACH[:3])
def test_there_is_no_network(layers: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert run(program, layers=layers).failure == "exit status 1"


@pytest.mark.parametrize("layers", OWN_FILES)
def test_files_are_written_in_its_folder_alone(layers: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    program = f"""
        import os
        for path in ({str(tmp_path)!r} + "/new", {str(tmp_path)!r} + "/mine", "/dev/shm/new"):
            for act in (open, "w"), (os.remove,), (os.chmod, 0):
                try: act[0](path, *act[1:])
                except OSError: pass
                else: print("could change", path)
        try: open("/dev/null", "w")
        except OSError: pass
        else: print("could open a device")
        open(os.environ["TMPDIR"] + "/own", "w").write("x")
        print(os.listdir("."))
    """
    assert run(program, layers=layers) == Run("['own']\n", "")
    assert (tmp_path / "mine").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_its_folder_goes_however_deep() -> None:
    box = Sandbox("import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')", NONE)
    with box:
        assert box.run("", 10.0).failure == ""
    assert not Path(box._folder).exists()


def test_without_any_limit_on_processes_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking(Sandbox):
        def __init__(self, program: str) -> None:
            super().__init__(program, NONE)
            self.lacking = {"seccomp": "for a test"}

    monkeypatch.setattr(sandbox, "Sandbox", Lacking)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    sandbox.lacking.cache_clear()
    with pytest.raises(ConfigError, match=r"root.*seccomp.*for a test"):
        sandbox.lacking()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert sandbox.lacking() == {"seccomp": "for a test"}
    sandbox.lacking.cache_clear()


def test_what_the_sandbox_lacks_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "lacking", lambda: {"read-only files": "an old kernel"})
    with pool.GradingPool({"a": "code", "b": "code"}, workers=2, timeout_seconds=9.0):
        pass
    with pool.GradingPool({"a": "dapo_math"}, workers=1, timeout_seconds=9.0):
        pass
    (record,) = caplog.records
    assert "its sandbox lacks read-only files here (an old kernel)" in record.getMessage()


def test_a_limit_that_cannot_be_set_stops_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_memory_bytes", lambda: 2**70)
    assert run("print(1)") == Run("", "exit status 1")
