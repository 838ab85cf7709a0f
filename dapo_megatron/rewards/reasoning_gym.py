"""Grader that uses the scorers of the reasoning-gym package, one per data set.

A scorer gives partial credit between 0 and 1; only full credit counts as correct.

Some scorers call `eval` or `sympy.parse_expr` on the answer or on the entry, which would run code
written by the model or by the author of a data file. Two measures prevent that:
- In the modules of `REPLACEMENTS`, these functions are replaced by parsers that evaluate nothing.
- While code of the package runs here, an audit hook refuses to compile text. A data set that is not
  in the table, or a later version of the package, then fails before any code runs.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

import reasoning_gym as library  # the package; this module is dapo_megatron.rewards.reasoning_gym
import sympy
import sympy.physics.units  # sympy.simplify imports it, which compiles text: import it before

from dapo_megatron.rewards.expressions import (
    integer_value,
    parse_arithmetic,
    parse_expression,
)
from dapo_megatron.types import Grade

_SYMPY = types.ModuleType("sympy")
_SYMPY.__dict__.update(vars(sympy), parse_expr=parse_expression)

REPLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "algebra.intermediate_integration": {"sympy": _SYMPY},
    "algebra.polynomial_multiplication": {"sp": _SYMPY},
    "algebra.simple_integration": {"sympy": _SYMPY},
    "algorithmic.binary_matrix": {"eval": ast.literal_eval},
    "algorithmic.number_sorting": {"eval": ast.literal_eval},
    "algorithmic.spiral_matrix": {"eval": ast.literal_eval},
    "algorithmic.string_insertion": {"eval": ast.literal_eval},
    "arithmetic.bitwise_arithmetic": {"eval": integer_value},
    "games.countdown": {"parse_expr": parse_arithmetic},
    "games.n_queens": {"eval": ast.literal_eval},
    "games.puzzle24": {"parse_expr": parse_arithmetic},
}
"""Module of reasoning_gym -> name in it -> replacement."""


def _has_as_many_parts(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer has as many parts between commas as the entry's own."""
    own: str = entry["answer"]
    return answer.count(",") == own.count(",")


CONDITIONS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "advanced_geometry": _has_as_many_parts,
    "coin_flip": lambda answer, entry: _is_near(answer, entry["answer"]),
    "complex_arithmetic": lambda answer, entry: "n" not in answer.lower(),
    "gsm_symbolic": lambda answer, entry: answer.replace(",", "") == entry["answer"],
    "game_of_life_halting": lambda answer, entry: answer == entry["answer"],
    "letter_jumble": lambda answer, entry: answer.lower() == entry["answer"].lower(),
    "polynomial_equations": _has_as_many_parts,
    "puzzle24": lambda answer, entry: (
        sorted(map(int, re.findall(r"\d+", answer))) == sorted(entry["metadata"]["numbers"])
    ),
    "word_sorting": _has_as_many_parts,
}
"""Data set -> what an answer must fulfil besides the scorer, which here gives full credit to
answers that do not solve the problem: prefixes of a number, nan, any text, other numbers."""

_STATEMENT = r"\w+ (?:is )?(?:an? )?\w+"

FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.IGNORECASE)
    for name, form in {
        "fraction_simplification": (
            r"[$\s]*(?:\d+\s*/\s*\d+|\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\})[$\s]*"
        ),
        "kakurasu": r"[01\s]+",
        "knights_knaves": rf"{_STATEMENT}(?:(?:,? and |,\s*|\n\s*){_STATEMENT})*\.?",
        "quantum_lock": r"[A-C](?:[\s,→>-]*[A-C])*",
        "sokoban": r"[LURD]+",
        "survo": r"[\d\s]+",
        "time_intervals": r"-?\d+(?: days?)?|(?:-?\d+ days?, )?\d+(?::[\d.]+)+",
    }.items()
}
"""Data set -> the form of an answer, where the scorer picks an answer out of any text, so that a
list of guesses could be right."""

_MAY_COMPILE = frozenset(
    {
        *("ast", "importlib._bootstrap", "importlib._bootstrap_external"),
        *("collections", "dataclasses", "sympy.polys.monomials"),
    }
)
"""Modules that may compile text while a scorer runs. `ast` only parses. importlib compiles modules
that a scorer is the first to import. The others compile their own templates."""

_REFUSED = "{} tries to run text as code; the data set cannot be used here"
_is_scoring = False
_refusals: list[str] = []
"""Modules that tried to compile text since the scorer was called."""


def grade(response: str, truth: str, extra: Mapping[str, Any]) -> Grade:
    """Score +1.0 if the data set's scorer gives full credit to the whole response, else -1.0.

    response: stripped and scored as a whole; nothing is extracted. The result is `pred`.
    truth: not used; scorers read the entry, because many problems have several answers.
    extra: {"dataset": name, "entry": {"question", "answer", "metadata"}} as JSON values and, for
    the few scorers that read their settings, "options" of the data set.
    A scorer's exception on this answer makes it wrong. Raises KeyError without those keys,
    ValueError for an unknown data set, RuntimeError for a scorer that tries to run text as code,
    and the exception of a scorer that also fails on the entry's own answer.
    """
    pred = response.strip()
    dataset, entry = extra["dataset"], extra["entry"]
    with _no_text_compiled():
        scorer = _scorer(dataset, json.dumps(extra.get("options", {}), sort_keys=True))
        correct = _solves(pred, dataset, scorer, entry)
    if _refusals:  # scorers catch all exceptions and score the answer as wrong
        raise RuntimeError(_REFUSED.format(_refusals[0]))
    return Grade(score=1.0 if correct else -1.0, correct=correct, pred=pred)


def _solves(
    answer: str, dataset: str, scorer: Callable[..., float], entry: Mapping[str, Any]
) -> bool:
    def has_full_credit(answer: str) -> bool:
        if dataset in FORMS and not FORMS[dataset].fullmatch(answer):
            return False
        if dataset in CONDITIONS and not CONDITIONS[dataset](answer, entry):
            return False
        return bool(scorer(answer=answer, entry=entry) == 1.0)

    try:
        return has_full_credit(answer)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - scorers raise many types on text that they cannot read
        has_full_credit(entry["answer"])  # raises if the answer is not the cause
        return False


def _is_near(answer: str, expected: str) -> bool:
    """Return whether a decimal number or a fraction has the expected value to 1 part in 1000."""
    if not re.fullmatch(r"\d{1,100}/\d{1,100}|\d{0,100}\.?\d{0,100}([eE][+-]?\d{1,3})?", answer):
        return False
    try:
        return abs(Fraction(answer) - Fraction(expected)) <= Fraction(expected) / 1000
    except (ValueError, ZeroDivisionError):  # "." and "1/0"
        return False


@lru_cache(maxsize=64)
def _scorer(dataset: str, options: str) -> Callable[..., float]:
    # Creating the data set generates no problems; indexing does.
    scorer: Callable[..., float] = library.create_dataset(
        dataset, **json.loads(options)
    ).score_answer
    return scorer


@contextmanager
def _no_text_compiled() -> Iterator[None]:
    global _is_scoring
    _refusals.clear()
    _is_scoring = True
    try:
        yield
    finally:
        _is_scoring = False


def _refuse_to_compile(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: raise before `eval`, `exec` or `compile` turn text into code."""
    if not _is_scoring or event != "compile" or arguments[0] is None:
        return
    caller = sys._getframe(1).f_globals.get("__name__")
    if caller not in _MAY_COMPILE:
        _refusals.append(str(caller))
        raise RuntimeError(_REFUSED.format(caller))


def _replace_evaluation() -> None:
    for name, replacements in REPLACEMENTS.items():
        module = importlib.import_module(f"{library.__name__}.{name}")
        vars(module).update(replacements)


_replace_evaluation()
sys.addaudithook(_refuse_to_compile)
