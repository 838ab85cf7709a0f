"""Resolves the name of a grader in the config to a function.

Graders may be user code, so their results are converted to a Grade or refused here.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dapo_megatron.rewards import answers, dapo_math
from dapo_megatron.rewards.code import SHARE_OF_LIMIT, read_tests
from dapo_megatron.rewards.sandbox import check_sandbox
from dapo_megatron.types import ConfigError, Grade

MAX_SCORE = 1e6
"""Maximum absolute score. Rewards are float32, and advantages divide by the standard deviation of a
group: scores near the end of the float32 range would overflow to infinity."""
MAX_PRED = 4096
"""Maximum length of `Grade.pred` in characters. It goes to the trainer and into the samples."""

GraderFn = Callable[[str, str, Mapping[str, Any]], Grade]
"""(response, truth, prompt extra) -> Grade."""

RowCheck = Callable[[str, Mapping[str, Any]], object]
"""(truth, prompt extra) of a row. Raises ValueError with the reason if it can never be graded."""

_LIBRARIES = {
    "dapo_math": None,
    "math_verify": "math_verify",
    "reasoning_gym": "reasoning_gym",
    "code": None,
}
"""Built-in grader (a module of this package) -> the library that it needs."""

DENIED_DATASETS = frozenset(
    {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
)
"""Data sets of reasoning-gym whose scorers evaluate the answer, a formula, as code."""


def resolve(name: str, timeout_seconds: float = 10.0) -> GraderFn:
    """Return the grader `name`: dapo_math, math_verify, reasoning_gym, code, or `module:function`.
    Imports its library.

    A user function is called with (response, truth, extra), or with (response, truth) if it takes
    only these. It returns a Grade, a bool (score +1 / -1) or a number (the score; correct if above
    0). A coroutine function runs in an event loop of this process.

    timeout_seconds   the caller's limit of one grading; `code` ends its programs before that

    Raises ConfigError for an unknown name (with the nearest names), a module that cannot be
    imported, a missing function, an unsupported signature, or if `code` has no sandbox. The
    returned grader raises the exceptions of the function, and ValueError naming the grader if it
    returns something else, or a score beyond MAX_SCORE.
    """
    check_grader(name)
    if name not in _LIBRARIES:
        return _CheckedGrader(name, *_user_grader(name), {})
    grade = importlib.import_module(f"dapo_megatron.rewards.{name}").grade
    options = {"seconds": SHARE_OF_LIMIT * timeout_seconds} if name == "code" else {}
    return _CheckedGrader(name, grade, name in ("code", "reasoning_gym"), options)


def check_grader(name: str) -> None:
    """Raise the ConfigError that `resolve` would, without importing the library of a built-in
    grader."""
    if name not in _LIBRARIES:
        _user_grader(name)
    elif name == "code":
        check_sandbox()
    elif (library := _LIBRARIES[name]) and importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"grader {name!r}: the library {library!r} is not installed; install it, or configure "
            "another grader"
        )


def row_check(name: str) -> RowCheck | None:
    """Return the check that grader `name` applies to each row when data is loaded; None if it
    accepts any row. Imports no library."""
    return _ROW_CHECKS.get(name)


def _check_problem(truth: str, extra: Mapping[str, Any]) -> None:
    if "dataset" not in extra or "entry" not in extra:
        raise ValueError(
            "it grades problems of sources with `kind: reasoning_gym` only; configure another "
            "grader for the rows of a file"
        )


_ROW_CHECKS: Mapping[str, RowCheck] = {
    "code": read_tests,
    "dapo_math": lambda truth, extra: dapo_math.check_truth(truth),
    "math_verify": lambda truth, extra: answers.check_truth(truth),
    "reasoning_gym": _check_problem,
}


def is_built_in(name: str) -> bool:
    """Return whether a grader is one of this package."""
    return name in _LIBRARIES


def grader_names(grader: str | Mapping[str, str]) -> set[str]:
    """Return the names of a source's graders: one for all its rows, or one per data_source."""
    return {grader} if isinstance(grader, str) else set(grader.values())


def as_grade(result: Any) -> Grade:
    """Convert the result of a grader to a Grade of plain values, with `pred` cut to MAX_PRED
    characters. Raises TypeError, ValueError or OverflowError.

    A mapping has a `score` and may have `acc` (or `correct`) and `pred`, as in verl.
    """
    parts: tuple[Any, Any, Any, Any]
    match result:
        case Grade():
            parts = result.score, result.correct, result.pred, result.parsed
        case {"score": score, **others}:
            correct = others.get("acc", others.get("correct"))
            parts = score, correct, others.get("pred") or "", True
        case _:
            parts = result, None, "", True
    score, correct = (_plain(part) for part in parts[:2])
    if isinstance(score, bool):
        correct = score if correct is None else correct
        score = 1.0 if score else -1.0
    if not (isinstance(score, _NUMBER) and (correct is None or isinstance(correct, _NUMBER))):
        raise TypeError(
            "a grader must return a Grade, a bool, a number, or a mapping with a score, not "
            f"{result!r:.100}"
        )
    grade = Grade(
        float(score),
        score > 0 if correct is None else correct > 0,
        str(parts[2])[:MAX_PRED].encode(errors="replace").decode(),
        bool(parts[3]),
    )
    if not abs(grade.score) <= MAX_SCORE:  # false for NaN too
        raise ValueError(
            f"a score must be finite, from {-MAX_SCORE:,.0f} to {MAX_SCORE:,.0f}, not {grade.score}"
        )
    return grade


_NUMBER = (float, int)  # tuples, because `float | int` is built at each call
_PLAIN = (float, int, str, type(None))


def _plain(value: Any) -> Any:
    """Return a bool or number of another library as Python's: of numpy and torch (also arrays and
    tensors with one element), sympy, decimal and fractions. Other values are returned unchanged."""
    if isinstance(value, _PLAIN):
        return value
    if callable(getattr(value, "item", None)):
        return value.item()
    if getattr(value, "is_Boolean", False):
        return bool(value)
    return float(value) if hasattr(value, "__float__") else value


@dataclass(frozen=True, slots=True)
class _CheckedGrader:
    """A GraderFn whose result is a Grade."""

    name: str
    function: Callable[..., Any]
    takes_extra: bool
    options: Mapping[str, Any]

    def __call__(self, response: str, truth: str, extra: Mapping[str, Any]) -> Grade:
        others = (extra,) if self.takes_extra else ()
        result = self.function(response, truth, *others, **self.options)
        if inspect.iscoroutine(result):
            result = _event_loop().run(result)
        try:
            return as_grade(result)
        # RuntimeError: a tensor with several elements.
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"grader {self.name!r}: {error}") from error


@cache
def _event_loop() -> asyncio.Runner:
    """Return the event loop of this process. It is shared by all calls, so that connections that a
    grader keeps open stay usable."""
    return asyncio.Runner()


def user_function(name: str) -> Callable[..., Any]:
    """Import a user's function, named `module:function`. Raises ConfigError if the module cannot be
    imported or lacks the function (with the nearest names)."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError, TypeError) as error:
        raise ConfigError(f"module {module_name!r} cannot be imported ({error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        others = [name for name in dir(module) if name != function_name]
        near = difflib.get_close_matches(function_name, others, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"{module_name!r} has no function {function_name!r}{hint}")
    return function  # type: ignore[no-any-return]


def _user_grader(name: str) -> tuple[Callable[..., Any], bool]:
    """Return the function of a user's grader, and whether it takes the extra fields of a row."""
    if ":" not in name:
        near = difflib.get_close_matches(name, _LIBRARIES, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(
            f"grader {name!r}: unknown{hint} (known: {', '.join(_LIBRARIES)}, or module:function)"
        )
    try:
        function = user_function(name)
        return function, _takes_extra(function)
    except ConfigError as error:
        raise ConfigError(f"grader {name!r}: {error}") from error


_NOT_RESPONSES = {
    "truth", "ground_truth", "answer", "expected", "reference", "target", "data_source", "prompt",
    "question",
}  # fmt: skip
"""Parameter names that show that the first parameter is not the response."""


def _takes_extra(function: Callable[..., Any]) -> bool:
    """Return whether a grader takes (response, truth, extra); if not, it takes (response, truth).

    Raises ConfigError for another signature, with the signature to write.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = inspect.Signature()  # of a function in C
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A third argument with a default is one of the function's own, unless it is named extra.
    takes_extra = any(p.name == "extra" or p.default is p.empty for p in positional[2:])
    try:
        signature.bind(*[None] * (3 if takes_extra else 2))
        is_supported = len(positional) >= 2 and positional[0].name not in _NOT_RESPONSES
    except TypeError:
        is_supported = False
    if not is_supported:
        raise ConfigError(
            f"its arguments are {signature}; write it as `def grade(response, truth)` or "
            "`def grade(response, truth, extra)`, with a * before other arguments"
        )
    return takes_extra
