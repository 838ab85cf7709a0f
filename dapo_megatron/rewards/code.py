"""Grader of programs: the program of the response must pass all tests of the problem.

A test is a stdin and the expected stdout, compared line by line without trailing blanks. The
program runs in a sandbox (sandbox.py, docs/rewards.md). A program that hangs, dies or exceeds its
memory is graded as wrong; its group does not abstain.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
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

_FUNCTION_KEYS = re.compile(
    r"(fn|func|function|method)(name|signature)?|signature|entrypoint|(challenge)?testlist|"
    r"assertcase|assert(ion)?s|iscallbased"
)
"""Keys whose value names or calls the tested function, in lower case without `_` and `-`."""
_CODE_KEYS = frozenset({"test", "testcode", "unittest", "unittests", "check"})
_CODE = re.compile(r"^[ \t]*(?:assert|def|class)\b|\bassert\b.*==|\bcandidate\(", re.MULTILINE)
_ARGUMENT = re.compile(
    r"[A-Za-z_]\w* = (?:[\[\"']|[^,\n]*,\s*[A-Za-z_]\w* = )|[A-Za-z_]\w*\(.*\)\s*$"
)
"""Arguments by name, as LeetCode writes them, or a call."""
_EMPTY = frozenset({"", "none", "null", "nan", "false", "[]", "{}"})
_STDIN_TYPES = frozenset({"stdin", "stdinstdout", "stdio", "std", "standardinput", "io"})


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
            _refuse_code(tests)
            raise ValueError(f"tests: not valid JSON: {error}") from error
    for mapping in (*_mappings(extra_info), *_mappings(tests)):
        _refuse_function_keys(mapping)
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
    elif isinstance(tests, list) and all(isinstance(test, Mapping) for test in tests):
        inputs = [test.get("input") for test in tests]
        outputs = [test.get("output") for test in tests]
    else:
        _refuse_code(str(tests))
        inputs = outputs = None
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError('tests: need {"inputs": [...], "outputs": [...]} with at least one test')
    if len(inputs) != len(outputs):
        raise ValueError(f"tests: {len(inputs)} inputs and {len(outputs)} outputs")
    cases = [
        ProgramTest(_text(stdin, f"input {number}"), _text(stdout, f"output {number}"))
        for number, (stdin, stdout) in enumerate(zip(inputs, outputs))
    ]
    if all(_ARGUMENT.match(case.stdin) for case in cases):
        raise ValueError(_CALLS.format(f"the input {cases[0].stdin!r:.60}"))
    if not any(case.stdout.strip() for case in cases):
        raise ValueError(
            "tests: every output is empty: a program that does nothing would pass, and the policy "
            "would learn that; add a test with an output, or drop the row"
        )
    return cases


_CALLS = (
    "tests: {} shows that they call a function; `code` runs programs that read stdin and write "
    "stdout: configure another grader for these rows, or drop them"
)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in the tests, which may be JSON text again under `metadata`."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from _mappings(item)
    elif isinstance(value, Mapping):
        yield value
        for key in ("tests", "test_cases", "metadata", "input_output"):
            item = value.get(key)
            with suppress(ValueError):  # other text
                item = parse_json(item) if isinstance(item, str) else item
            yield from _mappings(item)


def _refuse_function_keys(mapping: Mapping[str, Any]) -> None:
    """Raise ValueError if a key of the tests, or next to them, shows that they call a function."""
    for key, value in mapping.items():
        name = re.sub(r"[_-]", "", str(key).lower())
        text = str(value).strip()
        if text.lower() in _EMPTY:
            continue
        calls = bool(_FUNCTION_KEYS.fullmatch(name) or (name in _CODE_KEYS and _CODE.search(text)))
        if name == "startercode":  # stdin problems have some too
            calls = "class Solution" in text
        elif name in ("type", "testtype", "calltype"):
            kind = re.sub(r"[\W_]", "", text.lower())
            calls = kind not in _STDIN_TYPES and (name != "type" or "fun" in kind or "call" in kind)
        if calls:
            raise ValueError(_CALLS.format(f"`{key}` ({value!r:.60})"))


def _refuse_code(text: str) -> None:
    if match := _CODE.search(text):
        raise ValueError(_CALLS.format(f"the code {text[match.start() :].strip()!r:.60}"))


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
