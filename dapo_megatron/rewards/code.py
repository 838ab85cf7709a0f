"""Grader of programs: the last Python block of the response must pass all tests of the problem.

A test is a stdin and the expected stdout, compared line by line without trailing blanks. The
program runs in a sandbox (sandbox.py, docs/rewards.md). A program that hangs, dies or exceeds its
memory is graded as wrong; its group does not abstain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_megatron.files import parse_json
from dapo_megatron.rewards import sandbox
from dapo_megatron.types import Grade

SHARE_OF_LIMIT = 0.8
"""Share of the pool's time limit for all tests of one program, so that the grader answers before
the pool kills it."""

_FENCE = "```"
_PYTHON = ("", "python", "python3", "py")


class ProgramTest(NamedTuple):
    """A test: the input on stdin and the expected output on stdout."""

    stdin: str
    stdout: str


def grade(response: str, truth: str, extra: Mapping[str, Any], seconds: float = 8.0) -> Grade:
    """Score +1.0 if the program passes every test, else -1.0. `pred` is the program.

    seconds: wall-clock limit of all tests together. `parsed` is False without a Python block.
    Raises ValueError if the problem's tests are invalid, SandboxError if no sandbox starts.
    """
    tests = read_tests(truth, extra)
    program = last_program(response)
    if program is None:
        return Grade(score=-1.0, correct=False, pred="", parsed=False)
    deadline = time.monotonic() + seconds
    correct = all(_passes(program, test, deadline) for test in tests)
    return Grade(score=1.0 if correct else -1.0, correct=correct, pred=program)


def last_program(response: str) -> str | None:
    """Return the last closed code block that is marked as Python or unmarked; None without one.

    The cost is linear in the length of the response.
    """
    program = None
    language, lines = "", None
    for line in response.split("\n"):
        stripped = line.strip()
        if not stripped.startswith(_FENCE):
            if lines is not None:
                lines.append(line)
        elif lines is None:
            language, lines = stripped.strip("`").strip().lower(), list[str]()
        elif stripped.strip("`") == "":
            if language in _PYTHON:
                program = "\n".join(lines) + "\n"
            lines = None
    return program


def read_tests(truth: str, extra: Mapping[str, Any]) -> list[ProgramTest]:
    """Return the tests in extra["extra_info"]["tests"] or, without that key, in the truth.

    Either may be JSON text or the value itself: {"inputs": [...], "outputs": [...]} or
    [{"input": ..., "output": ...}, ...]. Each input and output is a string or a list of lines.
    Raises ValueError if there are no tests, if they call a function instead of using stdin, if a
    text cannot be encoded as UTF-8, or if all outputs are empty, because a program that prints
    nothing would pass.
    """
    tests: Any = (extra.get("extra_info") or {}).get("tests") or truth
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError as error:
            raise ValueError(f"tests: not valid JSON: {error}") from error
    if isinstance(tests, Mapping):
        if tests.get("fn_name"):
            raise ValueError(
                f"tests: they call {tests['fn_name']!r:.60}; `code` runs stdin/stdout tests"
            )
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
    elif isinstance(tests, Sequence) and all(isinstance(test, Mapping) for test in tests):
        if any((test.get("testtype") or "stdin") != "stdin" for test in tests):
            raise ValueError("tests: some call a function; `code` runs stdin/stdout tests")
        inputs = [test.get("input") for test in tests]
        outputs = [test.get("output") for test in tests]
    else:
        inputs = outputs = None
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError('tests: need {"inputs": [...], "outputs": [...]} with at least one test')
    if len(inputs) != len(outputs):
        raise ValueError(f"tests: {len(inputs)} inputs and {len(outputs)} outputs")
    cases = [
        ProgramTest(_text(stdin, f"input {number}"), _text(stdout, f"output {number}"))
        for number, (stdin, stdout) in enumerate(zip(inputs, outputs))
    ]
    if not any(case.stdout.strip() for case in cases):
        raise ValueError(
            "tests: every output is empty: a program that does nothing would pass, and the policy "
            "would learn that; add a test with an output, or drop the row"
        )
    return cases


def _passes(program: str, test: ProgramTest, deadline: float) -> bool:
    seconds_left = deadline - time.monotonic()
    if seconds_left <= 0:
        return False
    expected = test.stdout.encode()
    # More output than this can differ only in trailing blanks: kill the program.
    run = sandbox.run(program, test.stdin, seconds_left, len(expected) + sandbox.OUTPUT_BYTES)
    return not run.failure and _lines(run.output) == _lines(expected)


def _lines(text: bytes) -> list[bytes]:
    """Split into lines without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


def _text(value: Any, name: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"tests: {name} must be a string or a list of lines, found {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"tests: {name} has half a character (a lone surrogate) at {error.start}, which no "
            "program can read or write; write the whole character"
        ) from error
    return value
