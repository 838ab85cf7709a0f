"""Grader of programs: the program of the response must pass all tests of the problem.

A test is a stdin and the expected stdout, compared line by line without trailing blanks. The
program runs in a sandbox (sandbox.py, docs/rewards.md). A program that hangs, dies or exceeds its
memory is graded as wrong; its group does not abstain.
"""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dapo_megatron.files import parse_json
from dapo_megatron.rewards import sandbox
from dapo_megatron.types import Grade

SHARE_OF_LIMIT = 0.8
"""Share of the pool's time limit for all tests of one program, so that the grader answers before
the pool kills it."""

SLACK_BYTES = 2**20
"""Output beyond the expected one that is kept for the comparison. It can differ only in blanks."""

_FENCE = re.compile(
    r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)", re.DOTALL
)
"""A fence, maybe after the marker of a list, and what follows it."""
_LANGUAGE = re.compile(r"[{.]*\w[\w.+#-]*}?")
_PYTHON = re.compile(r"[{.\s]*i?py(?:thon)?[\d.]*(?![\w+-])", re.IGNORECASE)

_CALLS_FUNCTION = re.compile(
    r"""\\*" (?:
        # keys whose value names or calls the tested function, unless it is empty
        (?: (?:fn|func|function|method) (?:_?name|_?signature)? | signature | entry_?point
          | (?:challenge_)?test_list | assert_?case | assert(?:ion)?s? | is_call_based
        ) \\*" \s*+ : \s*+ (?! \\*" \s* (?:none|null)? \s* \\*" | null | nan | false | \[\] | \{\} )
        # other keys whose value shows it
      | (?: test | test_?code | unit_?tests? | check ) \\*" \s* : [^"]*" [^"]* \b(?:assert|def)\b
      | starter_code \\*" \s* : [^"]*" [^"]* class\ Solution
      | (?:test|call)?_?type \\*" \s* : [^"]*" [^"]* (?:fun|fn|call)
    )""",
    re.VERBOSE | re.IGNORECASE,
)
"""In JSON, which may contain JSON as text: a field of tests that call a function."""
_ARGUMENT = re.compile(
    r"[A-Za-z_]\w* = (?:[\[\"']|[^,\n]*,\s*[A-Za-z_]\w* = )|[A-Za-z_]\w*\(.*\)\s*$"
)
"""Arguments by name, as LeetCode writes them, or a call."""
_STDIN_ONLY = (
    "`code` runs programs that read stdin and write stdout; configure another grader for tests "
    "that call a function, or drop the row"
)


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
    """Return the last code block that is marked as Python, else the last unmarked one, else None.

    Blocks after the last `</think>` come first. The last block may be open. Blocks without a
    statement do not count.
    """
    for text in (response.rpartition("</think>")[2], response):
        blocks = [
            (info, textwrap.dedent(block))
            for info, block in _blocks(text)
            if any(line.strip()[:1] not in ("", "#") for line in block.split("\n"))
        ]
        marked = [program for info, program in blocks if _PYTHON.match(info)]
        if programs := marked or [program for info, program in blocks if not info]:
            return programs[-1]
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield what is behind the fence of each code block, and its text. The last may be open."""
    fence, info = "", ""
    lines: list[str] = []
    for line in text.split("\n"):
        match = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if match is None or not match[1].startswith(fence):
            lines.append(line)
            continue
        if fence:
            yield info, "\n".join(lines) + "\n"
        # A fence with a language starts the next block: the last one was never closed.
        starts = not fence or _LANGUAGE.fullmatch(match[2].strip())
        fence, info = (match[1], match[2].strip()) if starts else ("", "")
        lines = []
    if fence:
        yield info, "\n".join(lines) + "\n"


def read_tests(truth: str, extra: Mapping[str, Any]) -> list[ProgramTest]:
    """Return the tests in extra["extra_info"]["tests"] or, without that key, in the truth.

    Either may be JSON text or the value itself: {"inputs": [...], "outputs": [...]} or
    [{"input": ..., "output": ...}, ...]. Each input and output is a string or a list of lines.
    Raises ValueError if there are no tests, if they call a function instead of using stdin, if a
    text cannot be encoded as UTF-8, or if all outputs are empty, because a program that prints
    nothing would pass.
    """
    extra_info = extra.get("extra_info") or {}
    tests: Any = extra_info.get("tests") or truth
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError as error:
            raise ValueError(f"tests: not valid JSON ({error}); {_STDIN_ONLY}") from error
    cases = tests if isinstance(tests, list) else [tests]
    if not all(isinstance(case, Mapping) for case in cases):
        raise ValueError(f"tests: {tests!r:.60} is not in a supported form; {_STDIN_ONLY}")
    beside = [_without(extra_info, "tests")]
    beside += [_without(case, "input", "output", "inputs", "outputs") for case in cases]
    if match := _CALLS_FUNCTION.search(json.dumps(beside)):
        raise ValueError(f"tests: {match[0]!r:.60} shows that they call a function; {_STDIN_ONLY}")
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
    else:
        inputs = [test.get("input") for test in tests]
        outputs = [test.get("output") for test in tests]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError('tests: need {"inputs": [...], "outputs": [...]} with at least one test')
    if len(inputs) != len(outputs):
        raise ValueError(f"tests: {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = [
        ProgramTest(_text(stdin, f"input {number}"), _text(stdout, f"output {number}"))
        for number, (stdin, stdout) in enumerate(zip(inputs, outputs))
    ]
    if all(_ARGUMENT.match(pair.stdin) for pair in pairs):
        shown = f"the input {pairs[0].stdin!r:.60}"
        raise ValueError(f"tests: {shown} shows that they call a function; {_STDIN_ONLY}")
    if not any(pair.stdout.strip() for pair in pairs):
        raise ValueError(
            "tests: every output is empty: a program that does nothing would pass, and the policy "
            "would learn that; add a test with an output, or drop the row"
        )
    return pairs


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _passes(program: str, test: ProgramTest, deadline: float) -> bool:
    seconds_left = deadline - time.monotonic()
    if seconds_left <= 0:
        return False
    expected = test.stdout.encode()
    run = sandbox.run(program, test.stdin, seconds_left, len(expected) + SLACK_BYTES)
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
