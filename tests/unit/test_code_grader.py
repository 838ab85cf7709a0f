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


OTHERS = ["", "text", "output", "console", "bash", "json", "cpp", "pycon", "python-repl", "pyx"]
MARKS = ["py", "py3", " python", "PYTHON", "python3.11", "{python}", "{.python .numberLines}"]
MARKS += ["ipython3", "python title=x", "python:a.py"]
LINES = st.lists(
    st.text("ab \t=\f\u2028'`", max_size=9).filter(lambda s: "```" not in s), min_size=1
)


@given(
    st.lists(st.sampled_from(OTHERS)), st.lists(st.sampled_from(OTHERS)), st.sampled_from(MARKS),
    st.sampled_from(["```", "````", "~~~"]), st.sampled_from(["", " ", "    ", "\t"]), LINES,
)  # fmt: skip
def test_the_block_marked_as_python_is_found_among_others(
    before: list[str], after: list[str], mark: str, fence: str, blanks: str, lines: list[str]
) -> None:
    """Whatever its fence, and with its indentation removed, as in lists."""
    block = textwrap.indent("\n".join(["a = 1", *lines]), blanks) + "\n"
    others = ["".join(f"```{info}\n3\n```\nThen\n" for info in infos) for infos in (before, after)]
    response = f"{others[0]}{blanks}{fence}{mark}\n{block}{blanks}{fence}\n{others[1]}"
    assert last_program(response) == textwrap.dedent(block)
    thoughts = "<think>\n```python\ndraft\n```\n</think>\n"
    assert last_program(thoughts + response) == textwrap.dedent(block)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        *((text, None) for text in ("no code", "in ``` a line ``` of text", "```print(1)```\nx")),
        *((f"```{info}\n3\n```", None) for info in OTHERS if info),
        ("```python\n" * 5, None),
        ("```\na\n```\n```text\n3\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("````python\na\n```text\nb\n```\nc\n`````", "a\n```text\nb\n```\nc\n"),
        ("~~~python\na\n```python\nb\n~~~", "a\n```python\nb\n"),
        ("```python\na\n```</answer>", "a\n"),
        ("   ```python\r\n   a\r\n   ```", "a\r\n"),
        ("10. ```python\n    a\n\n    b\n    ```", "a\n\nb\n"),
        # An open last block.
        ("```python\na\n```\n```python\nb", "b\n"),
        ("```python\na\n```\n```python\n", "a\n"),
        ("```python\ndraft\nNo:\n```python\na\n```", "a\n"),
        ("```python\na\n```\n```python\n# Output\n```", "a\n"),
        # Thoughts.
        ("<think>\n```python\na\n```\n</think>\n```\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\n```text\n3\n```", "a\n"),
        ("<think>\n```python\na\n</think>\n```python\nb\n```", "b\n"),
        ("```python\nprint('</think>')\nb\n```", "print('</think>')\nb\n"),
    ],
)
def test_the_program_is_the_last_block_marked_as_python(response: str, program: str | None) -> None:
    assert last_program(response) == program


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
        ("42", "not in a supported form"),
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
        ("[" * 100_000, "not valid JSON .nested more than 64 deep"),
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
    *((key, [CASE, {**CASE, key: "f"}], {}) for key in ("func_name", "entry_point", "funcName")),
    ("type", [{"type": "stdin_stdout", **CASE}, {"type": "function_call", **CASE}], {}),
    ("testtype", [{**CASE, "testtype": "functional"}], {}),
    ("call_type", {**IO, "call_type": "fn"}, {}),
    ("func_name", [{**CASE, "metadata": '{"func_name": "f"}'}], {}),
    ("fn_name", {"language": "python", "test_cases": [{**CASE, "fn_name": "f"}]}, {}),
    ("test_list", {"test_list": ["assert f(1) == 2"], "test_setup_code": ""}, {}),
    ("test", {**IO, "test": "def check(candidate):\n    assert candidate(1) == 2"}, {}),
    ("assert f", [CASE, "assert f(2) == 4"], {}),
    ("not valid JSON", "assert f(1) == 2\nassert f(2) == 4", {}),
    (
        "not valid JSON",
        "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n",
        {},
    ),
    ("entry_point", IO, {"entry_point": "Solution().twoSum"}),
    ("func_name", IO, {"metadata": '{"func_name": "f"}'}),
    ("starter_code", IO, {"starter_code": "class Solution:\n    def f(self, a):"}),
    ("f(1)", [{"input": "f(1)", "output": "2"}, {"input": "f(2, 3)", "output": "5"}], {}),
    ("fn_name", IO, {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [2]}'}),
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


@pytest.mark.parametrize(
    "keys",
    [
        *({"type": "stdin_stdout"}, {"type": "hidden"}, {"type": 1}, {"testtype": "STDIN_STDOUT"}),
        *(
            {"call_type": "std"},
            {"metadata": "{}"},
            {"metadata": "easy"},
            {"explanation": "fn_name"},
        ),
        *({"test": "public"}, {"starter_code": "import sys\ndef main(): ..."}),
        *({"fn_name": empty} for empty in (None, "", "None", "null", float("nan"), [], {}, " ")),
    ],
)
def test_other_and_empty_keys_are_stdin_tests(keys: dict[str, Any]) -> None:
    for tests in ({**IO, **keys}, [{**CASE, **keys}]):
        assert read_tests("", {"extra_info": {"tests": tests, **keys}}) == [ProgramTest("1", "2")]
    by_name = {"tests": [{**CASE, "input": "n = 3\n"}]}  # one number by name is an input
    assert read_tests("", {"extra_info": by_name})


# ------------------------------------------------------------------------ grading

PROGRAMS = {
    "right": ("print(int(input()) * 2)", True),
    "trailing blanks": ("print(int(input()) * 2, '  \\n\\n')", True),
    "wrong on the second test": ("print(2)", False),
    "leading blank": ("print(' ', int(input()) * 2)", False),
    "opens stdin": ("print(2 * int(open('/dev/stdin').readline()))", True),
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
    "exits with 1": ("import sys\nprint(2 * int(input()))\nsys.exit(1)", False),
    "too deep for the compiler": ("x = " + "(" * 5000 + ")" * 5000, False),
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
    "uses a file and a package": (
        "import numpy\nopen(__file__ + 'x', 'w').write(str(2 * int(input())))\n"
        "print(int(numpy.loadtxt(__file__ + 'x')))",
        True,
    ),
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
@pytest.mark.parametrize(
    "program", ["while True: pass", "print(2)\ninput('')\nimport time\ntime.sleep(1000)",
                "import os\nwhile True: os.write(1, b'\\xff\\n' * 2**19)"],
)  # fmt: skip
def test_an_endless_program_is_wrong_after_the_time_limit(program: str) -> None:
    cpu_started = time.process_time()
    assert not grade(answer(program), DOUBLE, {}, seconds=1.0).correct
    assert time.process_time() - cpu_started < 2.0  # the grader does not work through a flood
