"""The `code` grader: parsing of programs and tests, grading, and the limits of its sandbox."""

from __future__ import annotations

import json
import textwrap
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rewards.code import ProgramTest, grade, last_program, read_tests
from dapo_megatron.types import Grade
from tests.helpers.sandboxes import needs_sandbox

DOUBLE = json.dumps({"inputs": ["1\n", "21\n"], "outputs": ["2\n", "42\n"]})


def answer(program: str) -> str:
    return f"So I write:\n```python\n{textwrap.dedent(program)}\n```\nThat is it."


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
def test_the_last_closed_python_block_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


@given(st.text(alphabet="`\n py", max_size=200), st.text(alphabet="ab \t=", max_size=40))
def test_a_closed_block_is_found_after_any_text_without_code_fences(before: str, line: str) -> None:
    before = before.replace("```", "")
    assert last_program(f"{before}\n```python\n{line}\n```\n") == f"{line}\n"


def test_a_long_hostile_response_is_parsed_quickly() -> None:
    started = time.thread_time()  # CPU time, because the machine may be busy
    for response in ("```python\n" * 200_000, "`" * 2_000_000, "```\n" * 300_001):
        last_program(response)
    assert time.thread_time() - started < 5.0


TESTS = [ProgramTest("1\n", "2"), ProgramTest("a\nb", "c")]


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
def test_tests_are_read_in_the_formats_of_public_data_sets(truth: str, tests: Any) -> None:
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
        ('{"inputs": [1], "outputs": ["1"]}', "must be a string"),
        ('{"fn_name": "add", "inputs": [[1]], "outputs": [2]}', "they call 'add'"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "call a function"),
        (
            '{"inputs": ["1"], "outputs": [""]}',
            "every output is empty: a program that does nothing",
        ),
        ('{"inputs": ["", ""], "outputs": [" ", [" ", ""]]}', "every output is empty"),
        ('{"inputs": ["\\ud83d"], "outputs": ["1"]}', "input 0 has half a character"),
        ('{"inputs": ["1"], "outputs": ["\\udead"]}', "output 0 has half a character"),
        ("[" * 100_000, "not valid JSON: nested more than 64 deep"),
    ],
)
def test_unusable_tests_are_rejected(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade(answer("print(1)"), truth, {})


# ------------------------------------------------------------------------ grading

PROGRAMS = {
    "right": ("print(int(input()) * 2)", True),
    "trailing blanks": ("print(int(input()) * 2, '  \\n\\n')", True),
    "wrong on the second test": ("print(2)", False),
    "leading blank": ("print(' ', int(input()) * 2)", False),
    "reads sys.stdin.buffer": (
        "import sys\nfor x in sys.stdin.buffer.read().split(): sys.stdout.write(str(2*int(x)))",
        True,
    ),
    "opens stdin": ("print(2 * int(open('/dev/stdin').readline()))", True),
    "is a script": (
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()",
        True,
    ),
    "computes in a thread": (
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
    "syntax error": ("print(2 *", False),
    "too deep for the compiler": ("x = " + "(" * 5000 + ")" * 5000, False),
    "reads too much": ("input(); input()", False),
    "uses a file": ("open('x', 'w').write(str(2 * int(input())))\nprint(open('x').read())", True),
    # Python's normal exit runs: atexit handlers, threads and buffered output all complete.
    "writes at exit": (
        """
        import atexit, io, os, sys
        sys.stdout = io.StringIO()
        atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))
        print(2 * int(sys.stdin.readline()))
        """,
        True,
    ),
    "exits while a thread runs": (
        """
        import sys, threading, time
        threading.Thread(target=lambda: (time.sleep(0.05), print(2 * int(input())))).start()
        sys.exit()
        """,
        True,
    ),
    "uses __file__": ("import os\nos.path.dirname(__file__)\nprint(2 * int(input()))", True),
    "leaves its output open": ("import os\nos.fdopen(1, 'w').write(str(2 * int(input())))", True),
    "prints to the first stdout": (
        "import sys\nprint(2 * int(input()), file=sys.__stdout__)",
        True,
    ),
    "closes stdout": ("import sys\nprint(2 * int(input()))\nsys.stdout.close()", True),
    "opens stdout": ("open('/dev/stdout', 'w').write(str(2 * int(input())))", True),
    "prints when it is deleted": (
        "class A:\n    def __del__(self): print(2 * int(input()))\na = A()",
        True,
    ),
    "redirects stderr to /dev/null": (
        "import sys\nsys.stderr = open('/dev/null', 'w')\nprint(2 * int(input()))",
        True,
    ),
    "uses a package": ("import numpy\nprint(2 * int(numpy.array([int(input())])[0]))", True),
    # Output that is not valid text is compared as bytes, up to a maximum size.
    "prints 16 MiB": (
        "import os\nb = b'\\xff\\n' * 2**19\nfor _ in range(16): os.write(1, b)",
        False,
    ),
    "extends stdout by truncate": (
        "import os\nprint(2 * int(input()))\nos.ftruncate(1, 2**24)",
        False,
    ),
}


@needs_sandbox
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_must_pass_every_test(name: str) -> None:
    program, correct = PROGRAMS[name]
    program = textwrap.dedent(program)
    # Starting Python takes long on a busy machine.
    assert grade(answer(program), DOUBLE, {}, seconds=60.0) == Grade(
        1.0 if correct else -1.0,
        correct,
        program.rstrip("\n") + "\n" * program.endswith("\n") + "\n",
    )


def test_a_response_without_a_program_is_graded_as_unparsed() -> None:
    assert grade("I do not know.", DOUBLE, {}) == Grade(-1.0, False, "", parsed=False)


@needs_sandbox
def test_an_endless_program_is_wrong_after_the_time_limit() -> None:
    for program in ("while True: pass", "import time\ntime.sleep(1000)", "print(2)\ninput('')"):
        started = time.monotonic()
        assert not grade(answer(program), DOUBLE, {}, seconds=0.6).correct
        assert time.monotonic() - started < 60.0  # without the limit they would never end


@needs_sandbox
@pytest.mark.parametrize("wait", [0.0, 0.7])
def test_a_program_with_endless_output_is_wrong_after_the_time_limit(wait: float) -> None:
    program = f"""
        import os, time
        time.sleep({wait})
        while True: os.write(1, b"\\xff\\n" * 2**19)
    """
    started, cpu_started = time.monotonic(), time.process_time()
    assert not grade(answer(program), DOUBLE, {}, seconds=1.0).correct
    assert time.monotonic() - started < 60.0  # without the limit it would never end
    assert time.process_time() - cpu_started < 2.0  # the grader does not work through the flood
