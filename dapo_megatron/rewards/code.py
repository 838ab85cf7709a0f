"""Grader of programs: the program of the response must pass all tests of the problem.

A test is a stdin and the expected stdout, compared line by line without trailing blanks. The
program runs in a sandbox (sandbox.py, docs/rewards.md). A program that hangs, dies or exceeds its
memory is graded as wrong; its group does not abstain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dapo_megatron.files import parse_json
from dapo_megatron.rewards import sandbox
from dapo_megatron.types import Grade

SHARE_OF_LIMIT = 0.8
"""Share of the pool's time limit for all tests of one program, so that the grader answers before
the pool kills it."""

_FENCE = re.compile(r"([ \t]*)((?:[-*+]|\d{1,9}[.)])[ \t]+)?(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
"""Indentation, list marker, fence and info string."""
_PYTHON = re.compile(r"[{.\s]*i?py(?:thon)?[\d.]*(?![\w+-])", re.IGNORECASE)
_LANGUAGE = re.compile(r"[{.]*\w[\w.+#-]*}?$")
_TAB = 4
_THOUGHTS_END = "</think>"

_FUNCTION_KEYS = frozenset(
    {
        *("fnname", "funcname", "functionname", "methodname", "entrypoint", "assertcase"),
        *("testlist", "challengetestlist", "asserts", "assertions", "function", "func"),
        *("signature", "functionsignature", "fn", "iscallbased"),
    }
)
"""Keys whose value names or calls the tested function, in lower case without `_` and `-`."""
_CODE_KEYS = frozenset({"test", "testcode", "unittest", "unittests", "check"})
_CODE = re.compile(r"^[ \t]*(?:assert|def|class)\b|\bassert\b.*==|\bcandidate\(", re.MULTILINE)
_ARGUMENT = re.compile(
    r"[A-Za-z_]\w* = (?:([\[\"'])|[^,\n]*(,\s*[A-Za-z_]\w* = )|[\d-])|([A-Za-z_]\w*\(.*\)\s*$)"
)
"""Arguments by name, as LeetCode writes them, or a call. One number by name may be stdin."""
_TYPE_KEYS = frozenset({"testtype", "calltype"})
_STDIN_TYPES = frozenset({"stdin", "stdinstdout", "stdio", "std", "standardinput", "io"})
_FUNCTION_TYPES = frozenset(
    {
        *("function", "functional", "functioncall", "fn", "func", "fncall", "call", "callbased"),
        *("method", "assert", "asserts", "assertion", "unittest", "unittests", "pytest"),
    }
)
_EMPTY = frozenset({"", "none", "null", "nan", "false", "[]", "{}"})


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

    Blocks after the last `</think>` come first. The last block may be open. The cost is linear in
    the length of the response.
    """
    blocks: list[tuple[bool, str]] = []  # marked as Python?, program
    first_of_answer = 0
    block: _Block | None = None
    for line in response.split("\n"):
        before, end, after = line.rpartition(_THOUGHTS_END)
        # In a block the tag counts only at the start of a line: a program may print it.
        if end and (block is None or not before.strip(" \t`~")):
            _close(block, blocks, is_open=True)
            block, first_of_answer, line = None, len(blocks), after
        fence = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if block is None:
            block = fence and _Block(fence)
        elif fence is None or not block.ends_at(fence):
            block.lines.append(line)
        else:
            # A fence with a language starts the next block: the last one was never closed.
            starts = _LANGUAGE.match(fence[4].rstrip()) is not None
            _close(block, blocks, is_open=starts)
            block = _Block(fence) if starts else None
    _close(block, blocks, is_open=True)
    for candidates in (blocks[first_of_answer:], blocks):
        for is_marked in (True, False):
            programs = [program for marked, program in candidates if marked is is_marked]
            if programs:
                return programs[-1]
    return None


class _Block:
    """A code block of Markdown whose first line was read."""

    def __init__(self, fence: re.Match[str]) -> None:
        self.fence, self.info = fence[3], fence[4].strip()
        self.indent = len((fence[1] + (fence[2] or "")).expandtabs(_TAB))
        self.lines: list[str] = []

    def ends_at(self, fence: re.Match[str]) -> bool:
        """Return whether this fence closes the block, or can only be the start of the next one."""
        info = fence[4].rstrip()
        return (
            fence[2] is None
            and fence[3].startswith(self.fence)
            and (not info or info.startswith("<") or _LANGUAGE.match(info) is not None)
        )

    def program(self) -> str:
        """Return the text without the indentation of the fence, for example in a list."""
        code = (line for line in self.lines if line.strip() and not line.lstrip().startswith("#"))
        first = next(code, "").expandtabs(_TAB)
        width = min(self.indent, len(first) - len(first.lstrip(" ")))
        return "\n".join(_without_indent(line, width) for line in self.lines) + "\n"


def _close(block: _Block | None, blocks: list[tuple[bool, str]], is_open: bool = False) -> None:
    """Append the block if it may be the program."""
    if block is None or all(line.strip()[:1] in ("", "#") for line in block.lines):
        return  # no statement
    is_marked = _PYTHON.match(block.info) is not None
    if is_marked or not block.info:
        blocks.append((is_marked, block.program()))


def _without_indent(line: str, width: int) -> str:
    column = start = 0
    while column < width and line[start : start + 1] in (" ", "\t"):
        column += _TAB - column % _TAB if line[start] == "\t" else 1
        start += 1
    return line[start:]


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
    _refuse_function_calls(extra_info, tests)
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
    elif isinstance(tests, Sequence) and all(isinstance(test, Mapping) for test in tests):
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
    arguments = [_ARGUMENT.match(case.stdin) for case in cases]
    if all(arguments) and any(argument and any(argument.groups()) for argument in arguments):
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


def _refuse_function_calls(extra_info: Mapping[str, Any], tests: Any) -> None:
    """Raise ValueError if a key of the tests, or next to them, shows that they call a function."""
    nested = [tests]
    if isinstance(tests, Mapping):
        nested += [value for value in tests.values() if isinstance(value, list)]
    # An `inputs` list of texts has nothing to look at, and may be long.
    mappings = [extra_info, *(value for value in nested if isinstance(value, Mapping))]
    for values in nested:
        if isinstance(values, list):
            mappings += [value for value in values if isinstance(value, Mapping)]
    for mapping in mappings:
        _refuse_function_keys(mapping)
    if isinstance(tests, str):
        _refuse_code(tests)
    elif isinstance(tests, list):
        for test in tests:
            if isinstance(test, str):
                _refuse_code(test)


def _refuse_function_keys(mapping: Mapping[str, Any]) -> None:
    for key, value in mapping.items():
        name = str(key).lower().replace("_", "").replace("-", "")
        if name in ("metadata", "inputoutput"):
            with suppress(ValueError):  # other text
                value = parse_json(value) if isinstance(value, str) else value
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Mapping):
                    _refuse_function_keys(part)
            continue
        if name in _FUNCTION_KEYS:
            calls = str(value).strip().lower() not in _EMPTY
        elif name in _CODE_KEYS:
            calls = _CODE.search(str(value)) is not None
        elif name == "startercode":  # stdin problems have some too
            calls = "class Solution" in str(value)
        elif name == "type" or name in _TYPE_KEYS:
            kind = re.sub(r"[\W_]", "", str(value).lower())
            calls = kind in _FUNCTION_TYPES or (
                name in _TYPE_KEYS and kind not in _STDIN_TYPES | _EMPTY
            )
        else:
            continue
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
