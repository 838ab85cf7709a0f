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


NESTED = "for x in 1, 2:\n    if x:\n        print(x)\n"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("no code", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\ntext\n```Python3\n  b\n\nc\n```\nend", "  b\n\nc\n"),
        ("```python\n```", None),
        ("```python\r\na\f\u2028b\r\n```", "a\f\u2028b\r\n"),
        ("in ``` a line ``` of text", None),
        ("```print(1)```\ntext", None),
        # Blocks that are not the program.
        *(
            (f"```python\na\n```\n```{info}\n3\n```", "a\n")
            for info in ("", "text", "output", "console", "bash", "sh", "json", "cpp", "pycon")
        ),
        *(
            (f"```{info}\n3\n```", None)
            for info in ("text", "output", "pytb", "python-repl", "pyx")
        ),
        ("```\na\n```\n```text\n3\n```", "a\n"),
        ("```python\na\n```\n```\n3", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        # Names of Python.
        *(
            (f"```{info}\na\n```\n```\n3\n```", "a\n")
            for info in (
                *("py", "py3", " python", "PYTHON", "python3.11", "{python}", "{.python}"),
                *("{.python .numberLines}", "ipython", "ipython3", "python title=x", "python:a.py"),
            )
        ),
        # Fences.
        ("~~~python\na\n~~~", "a\n"),
        ("~~~\na\n~~~\n~~~text\nb\n~~~", "a\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("````python\na\n```text\nb\n```\nc\n`````", "a\n```text\nb\n```\nc\n"),
        ("```python\na\n~~~\nb\n```", "a\n~~~\nb\n"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("~~~python\na\n```python\nb\n~~~", "a\n```python\nb\n"),
        ("```python\na\n```</answer>", "a\n"),
        ("~~~python\r\na\r\n~~~\r\n~~~\r\n3\r\n~~~\r\n", "a\r\n"),
        # Blocks in lists.
        ("    ```python\n    a\n    ```", "a\n"),
        ("1. So:\n\n   ```python\n   a\n     b\n   ```", "a\n  b\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("10. ```python\n    a\n\n    b\n    ```", "a\n\nb\n"),
        ("\t```python\n\ta\n\t\tb\n\t```", "a\n\tb\n"),
        ("    ```python\n\ta\n\t\tb\n    ```", "a\n\tb\n"),
        ("\t```python\n    a\n        b\n\t```", "a\n    b\n"),
        ("  ```python\na\n  b\n  ```", "a\n  b\n"),
        ("   ```python\r\n   a\r\n   ```", "a\r\n"),
        *(
            (textwrap.indent(f"```python\n{NESTED}```", blanks), NESTED)
            for blanks in ("", " ", "   ", "    ", "\t", "\t\t")
        ),
        # An open last block.
        ("```python\na\n```\n```python\nb", "b\n"),
        ("```\na", "a\n"),
        ("~~~~py\na\n~~~", "a\n~~~\n"),
        ("```python\na\n```\n```python\n", "a\n"),
        ("  ```python\n  a", "a\n"),
        ("```python\ndraft\nNo:\n```python\na\n```", "a\n"),
        ("```python\na\n```text\n3\n```", "a\n"),
        ("```python\n" * 5, None),
        ("```python\na\n```\n```python\n# Output\n```", "a\n"),
        ("```python\na\n```\n```python\n```", "a\n"),
        # Thoughts.
        ("<think>\n```python\na\n```\n</think>\n```\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\nThat is it.", "a\n"),
        ("<think>\n```python\na\n```\n</think>\n```text\n3\n```", "a\n"),
        ("<think>\n```python\na\n</think>\n```python\nb\n```", "b\n"),
        ("<think>```python\na\n</think>So:```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n</think>\n```py\nb\n```\n</think>\n```\nc\n```", "c\n"),
        ("```python\na\n``` </think>\n", "a\n"),
        ("</think>```python\na\n```", "a\n"),
        ("```python\nprint('</think>')\nb\n```", "print('</think>')\nb\n"),
    ],
)
def test_the_program_is_the_last_block_marked_as_python(response: str, program: str | None) -> None:
    assert last_program(response) == program


@given(
    st.text(alphabet="`\n py", max_size=200),
    st.text(alphabet="ab \t=", max_size=40).filter(str.strip),
)
def test_a_closed_block_is_found_after_any_text_without_code_fences(before: str, line: str) -> None:
    before = before.replace("```", "")
    assert last_program(f"{before}\n```python\n{line}\n```\n") == f"{line.lstrip()}\n"


def test_a_long_hostile_response_is_parsed_quickly() -> None:
    started = time.thread_time()  # CPU time, because the machine may be busy
    for response in (
        *("```python\n" * 200_000, "`" * 2_000_000, "```\n" * 300_001, "</think>" * 200_000),
        *(" " * 1_000_000 + "```x`", "```" + "`x" * 500_000, "```py\n</think>\n" * 100_000),
        *("```py\n" + "\n" * 1_000_000, "- " * 500_000 + "```", "1" * 1_000_000 + "~~~"),
    ):
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


IO = {"inputs": ["1"], "outputs": ["2"]}
CASE = {"input": "1", "output": "2"}

FUNCTION_CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    # the key in the message, the tests, what stands next to them
    ("fn_name", {"fn_name": "add", "inputs": [[1]], "outputs": [2]}, {}),
    ("fn_name", {"fn_name": "turn", "inputs": [["abc"]], "outputs": [["cba"]]}, {}),
    *((key, {**IO, key: "f"}, {}) for key in ("fn_name", "func_name", "function_name")),
    *((key, {**IO, key: "f"}, {}) for key in ("entry_point", "method_name", "funcName")),
    *((key, [CASE, {**CASE, key: "f"}], {}) for key in ("fn_name", "func_name", "entry_point")),
    ("type", {**IO, "type": "function_call"}, {}),
    ("type", [{"type": "stdin_stdout", **CASE}, {"type": "function_call", **CASE}], {}),
    ("type", [{**CASE, "type": "Functional"}], {}),
    ("testtype", [{**CASE, "testtype": "functional"}], {}),
    ("testtype", [{**CASE, "testtype": "interactive"}], {}),
    ("call_type", {**IO, "call_type": "fn"}, {}),
    ("func_name", [{**CASE, "metadata": {"func_name": "f"}}], {}),
    ("func_name", [{**CASE, "metadata": '{"func_name": "f"}'}], {}),
    ("func_name", {**IO, "metadata": {"func_name": "f"}}, {}),
    ("fn_name", {"language": "python", "test_cases": [{**CASE, "fn_name": "f"}]}, {}),
    ("assert_case", {**IO, "assert_case": ["assert f(1) == 2"]}, {}),
    ("test_list", {"test_list": ["assert f(1) == 2"], "test_setup_code": ""}, {}),
    ("test", {**IO, "test": "def check(candidate):\n    assert candidate(1) == 2"}, {}),
    ("assert f", ["assert f(1) == 2", "assert f(2) == 4"], {}),
    ("assert f", [CASE, "assert f(2) == 4"], {}),
    ("assert f", "assert f(1) == 2\nassert f(2) == 4", {}),
    ("assert f", "['assert f(1) == 2']", {}),
    ("def check", "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n", {}),
    ("class TestF", "import unittest\nclass TestF(unittest.TestCase): pass", {}),
    ("fn_name", IO, {"fn_name": "f"}),
    ("entry_point", IO, {"entry_point": "Solution().twoSum"}),
    ("func_name", IO, {"metadata": '{"func_name": "f"}'}),
    ("func_name", [CASE], {"metadata": {"func_name": "f"}}),
    ("test_list", IO, {"test_list": ["assert f(1) == 2"]}),
    ("testtype", IO, {"testtype": "functional"}),
    ("starter_code", IO, {"starter_code": "class Solution:\n    def f(self, a):"}),
    ("n = 5, k = 3", [{"input": "n = 5, k = 3", "output": "2"}], {}),
    ("f(1)", [{"input": "f(1)", "output": "2"}, {"input": "f(2, 3)", "output": "5"}], {}),
    ("fn_name", IO, {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [2]}'}),
    ("function_signature", IO, {"function_signature": "def f(x)"}),
    ("is_call_based", IO, {"is_call_based": True}),
    ("nums = ", [{"input": "nums = [3,3], target = 6", "output": "[0, 1]"}], {}),
]


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(("key", "tests", "beside"), FUNCTION_CALLS)
def test_tests_that_call_a_function_are_refused(
    key: str, tests: Any, beside: dict[str, Any], is_text: bool
) -> None:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    values = [(text, beside)] if is_text else [("", {**beside, "tests": tests})]
    for truth, extra_info in values:
        with pytest.raises(ValueError, match="call a function") as error:
            read_tests(truth, {"extra_info": extra_info})
        assert key in str(error.value)


@pytest.mark.parametrize("empty", [None, "", "None", "null", float("nan"), [], {}, " "])
@pytest.mark.parametrize("key", ["fn_name", "func_name", "entry_point", "metadata", "testtype"])
def test_empty_keys_of_function_calls_are_stdin_tests(key: str, empty: Any) -> None:
    for tests in ({**IO, key: empty}, [{**CASE, key: empty}, CASE]):
        extra_info = {"tests": tests, key: empty, "starter_code": "import sys\ndef main(): ..."}
        assert read_tests("", {"extra_info": extra_info})[0] == ProgramTest("1", "2")


def test_one_number_by_name_is_an_input_like_any_other() -> None:
    for stdin in ("x = 5", "n = 3\n", "y = -1"):
        assert read_tests("", {"extra_info": {"tests": [{**CASE, "input": stdin}]}})


@pytest.mark.parametrize(
    "keys",
    [
        *({"type": "stdin_stdout"}, {"type": "stdin"}, {"type": "hidden"}, {"type": 1}),
        *({"testtype": "stdin"}, {"call_type": "std"}, {"testtype": "STDIN_STDOUT"}),
        *({"metadata": "{}"}, {"metadata": "easy"}, {"metadata": {"source": "x"}}),
        *({"explanation": "fn_name"}, {"test": "public"}, {"fn_name": None, "type": "stdin"}),
    ],
)
def test_other_keys_are_stdin_tests(keys: dict[str, Any]) -> None:
    for tests in ({**IO, **keys}, [{**CASE, **keys}]):
        for truth, extra_info in ((json.dumps(tests), keys), ("", {"tests": tests, **keys})):
            assert read_tests(truth, {"extra_info": extra_info}) == [ProgramTest("1", "2")]


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
