"""Environments `python` and `python_notebook`: what a call returns, its limits, and that nothing is
left of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dapo_megatron.environments.interface import load_environment
from dapo_megatron.environments.interpreter import MAX_TEXT, Python, PythonNotebook
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.process import Answer, Request
from dapo_megatron.rewards import sandbox
from dapo_megatron.types import ConfigError
from tests.helpers.sandboxes import needs_sandbox

LONG_SECONDS = 100.0
"""Limit of code that ends by itself, however loaded the machine is."""
SHORT_SECONDS = 5.0
"""Limit of code that does not end. On a loaded machine an interpreter still starts within it."""
BOTH = pytest.mark.parametrize("kind", [Python, PythonNotebook])


@pytest.fixture
def notebook() -> Iterator[PythonNotebook]:
    """A notebook whose process has started."""
    notebook = PythonNotebook(SHORT_SECONDS)
    notebook.code_interpreter("")
    yield notebook
    if notebook._interpreter is not None:
        notebook._interpreter.close()


def run(kind: type[Python], code: str, seconds: float = LONG_SECONDS) -> str:
    """Run code in an instance of its own."""
    instance = kind(seconds)
    try:
        return instance.code_interpreter(code)
    finally:
        if isinstance(instance, PythonNotebook) and instance._interpreter is not None:
            instance._interpreter.close()


# ------------------------------------------------------------------------ what a call returns

CALLS = {
    "print(6 * 7)": "42",
    "x = 6\nx * 7": "42",
    "print('a', end='')\nNone": "a",
    "```python\nprint(6 * 7)\n```": "42",
    "": "(no output)",
    "x = 1": "(no output)",
    "import sys\nprint('out')\nprint('error', file=sys.stderr)\nprint('out')": "out\nerror\nout",
    "import warnings\nwarnings.warn('a')": (
        "/tmp/call_1.py:2: UserWarning: a\n  warnings.warn('a')"
    ),
    "print(1)\ndef f(x):\n    return 1 / x\nf(0)": (
        "1\nTraceback (most recent call last):\n"
        '  File "/tmp/call_1.py", line 4, in <module>\n    f(0)\n'
        '  File "/tmp/call_1.py", line 3, in f\n    return 1 / x\n           ~~^~~\n'
        "ZeroDivisionError: division by zero"
    ),
    "x = (": (
        "  File \"/tmp/call_1.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed"
    ),
    "print(1)\nimport sys\nsys.exit(3)": "1\nSystemExit: 3",
    "exit()": "(no output)",
    "print('\\x00é')": "\0é",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(3)": "A(x=3)",
    "import pickle\nclass A: x = 3\npickle.loads(pickle.dumps(A())).x": "3",
    "if __name__ == '__main__': print(1)": "1",
    "import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x)": "x**2/2",
}


@needs_sandbox
@BOTH
@pytest.mark.parametrize("code", CALLS)
def test_a_call_returns_what_is_printed_or_raised(kind: type[Python], code: str) -> None:
    assert run(kind, code) == CALLS[code]


@needs_sandbox
def test_a_program_ends_with_its_threads_forgets_its_variables_and_can_be_repeated() -> None:
    python = Python(LONG_SECONDS)
    code = "import threading, time\nx = 1\ndef f(): time.sleep(0.3); print('late')\n"
    assert python.code_interpreter(code + "threading.Thread(target=f).start()") == "late"
    assert "NameError: name 'x' is not defined" in python.code_interpreter("x")
    assert len({python.code_interpreter("set('abcdefghij')") for _ in range(3)}) == 1


@needs_sandbox
def test_a_notebook_keeps_its_variables_until_its_process_ends(notebook: PythonNotebook) -> None:
    def text(code: str) -> str:
        return notebook.code_interpreter(code)

    assert text("def f(x): return x + y\ny = 1") == "(no output)"
    assert text("f(1)\n1 / 0").endswith("ZeroDivisionError: division by zero")
    assert text("f(1)") == "2"
    assert text("import sys, os\nsys.stdout.close()") == "(no output)"
    late = text("y = 2\nprint('before')\nwhile True: pass").splitlines()
    assert (late[0], late[-2:]) == (
        "before",
        ["KeyboardInterrupt", "stopped: it took longer than 4 s"],
    )
    assert text("f(1)") == "3"
    assert text("print('x'); os._exit(3)") == (
        "x\nexit status 3\nThe interpreter was restarted: all variables are lost."
    )
    assert text("f(1)").endswith("NameError: name 'f' is not defined")


@needs_sandbox
def test_threads_of_a_notebook_stand_still_between_calls(notebook: PythonNotebook) -> None:
    notebook.code_interpreter("""
import threading, time
times = []
def watch():
    while True:
        times.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
time.sleep(0.1)""")
    time.sleep(1.0)
    gap = notebook.code_interpreter("time.sleep(0.1)\nmax(b - a for a, b in zip(times, times[1:]))")
    assert float(gap) > 0.9


# ------------------------------------------------------------------------ limits

STUBBORN = """
import signal
print('before')
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True: pass
"""
LIMITED = {
    "import time\ntime.sleep(1000)": "KeyboardInterrupt\nstopped: it took longer than 4 s",
    STUBBORN: "^before\nstopped: it took longer than 4 s",
    "import threading, time\nthreading.Thread(target=time.sleep, args=[1000]).start()": "",
    "x = bytearray(2**40)": "MemoryError$",
    "x = []\nwhile True: x.append(bytes(2**24))": "MemoryError$",
    "while True: print('x' * 1000)": r"^x{500}.*\n\.\.\. \([0-9,]{10} characters\) \.\.\.\n"
    r".*OSError: \[Errno 27\] File too large$",
    "print('x' * 10**6)": r"^x+\n\.\.\. \([0-9,]+ characters\) \.\.\.\nx+$",
    "raise ValueError('x' * 10**6)": "^x+$",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded$",
    "import os\nwhile True: os.fork()": "Function not implemented$",
    f"open({__file__!r})": "FileNotFoundError",
    "open('/usr/x', 'w')": r"(Read-only file system|Permission denied): '/usr/x'$",
    "import ctypes\nctypes.string_at(0)": "killed by signal 11",
    "import os\nfor n in range(3, 9):\n  try: os.write(n, b'forged' * 100)\n"
    "  except OSError: pass": "^(forged)+",
    "import os\nos.closerange(0, 100)": "exit status",
    "raise ValueError('\\ud800')": r"ValueError: \?$",
    "x = '\ud800'": "SyntaxError: .unicode error",
    "x\0": "SyntaxError: source code string cannot contain null bytes",
    "input()": "EOFError",
}


@needs_sandbox
@BOTH
@pytest.mark.parametrize("code", LIMITED)
def test_code_beyond_a_limit_is_told_so(kind: type[Python], code: str) -> None:
    pattern = LIMITED[code]
    is_endless = "stopped" in pattern or not pattern
    text = run(kind, code, SHORT_SECONDS if is_endless else LONG_SECONDS)
    assert re.search(pattern, text, re.DOTALL), text
    assert len(text) < MAX_TEXT + 200


# ------------------------------------------------------------------------ in a pool


@needs_sandbox
def test_late_code_costs_no_instance_and_nothing_is_left_of_one() -> None:
    with EnvironmentPool({"python", "python_notebook"}, 5.0, 1024) as pool:

        def answer() -> Answer:
            while not (answers := pool.collect(1.0)):
                pass
            return answers[0][1]

        def ask(code: str) -> None:
            pool.ask(0, Request("call", tool="code_interpreter", arguments={"code": code}))

        nursery = psutil.Process(pool._nursery.pid)
        for name, described in pool.described.items():
            assert described.is_repeatable
            parameters = described.tools["code_interpreter"]["function"]["parameters"]
            assert set(parameters["properties"]) == {"code"}
            pool.start(0, name, {})
            assert answer() == Answer("ok")
            ask("x = 1\nwhile True: pass")
            assert answer().text.endswith("KeyboardInterrupt\nstopped: it took longer than 4 s")
            ask("x")
            assert (answer().text == "1") == (name == "python_notebook")
            ask("import resource\nresource.getrlimit(resource.RLIMIT_AS)[1] >> 20")
            assert answer() == Answer("ok", "1024")
            if name == "python":
                (instance,) = nursery.children()
                assert not instance.children()
            ask("while True: pass")
            deadline = time.monotonic() + 60
            # Listed before any of them ends: psutil misses the children of a process that ends
            # meanwhile.
            while len(processes := nursery.children(recursive=True)) < 4:
                assert time.monotonic() < deadline  # the instance, bwrap twice, the program
                time.sleep(0.02)
            pool.stop(0)
            assert not psutil.wait_procs(processes, timeout=60)[1]
        assert not os.listdir(pool._nursery.folder)
    assert not os.path.exists(pool._nursery.folder)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'pyhton': write module:Class, \{agent"):
        load_environment("pyhton")


def test_without_bubblewrap_the_environment_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.check_sandbox.cache_clear()
    message = r"environment 'python': program bwrap is not on.*apt-get install bubblewrap"
    with pytest.raises(ConfigError, match=message):
        load_environment("python")
    with pytest.raises(ConfigError, match=message):
        EnvironmentPool({"python"}, SHORT_SECONDS, 1024)
    sandbox.check_sandbox.cache_clear()
