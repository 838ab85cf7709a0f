"""Grader that uses the scorers of the reasoning-gym package, one per data set.

A scorer gives partial credit between 0 and 1; only full credit counts as correct.

Some scorers call `eval` or `sympy.parse_expr` on the answer, which would run code written by the
model. Three measures prevent that:
- The data sets in `registry.DENIED_DATASETS` are refused: their answers are formulas.
- In the modules of `REPLACEMENTS`, these functions are replaced by parsers that evaluate nothing.
- While code of the package runs here, an audit hook refuses to compile text. A data set that is not
  in a table, or a later version of the package, then fails before any code runs.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

import reasoning_gym as library  # the package; this module is dapo_megatron.rewards.reasoning_gym
import sympy.physics.units  # noqa: F401 - sympy.simplify imports it, which compiles text

from dapo_megatron.rewards.answers import value_of
from dapo_megatron.rewards.registry import DENIED_DATASETS
from dapo_megatron.types import Grade

MAX_CHARACTERS = 1000
"""Characters of an arithmetic expression."""


def arithmetic(text: str) -> Fraction:
    """Return the value of + - * / and parentheses on integers.

    Any other character is refused. Scorers of number games search the text for the numbers that an
    answer uses: they would miss those in `0xf` or `I*I`, read 1.5 as 1 and 5, and count those in a
    comment. Raises ValueError, SyntaxError or ZeroDivisionError.
    """
    if len(text) > MAX_CHARACTERS or not re.fullmatch(r"[0-9 \t\r\n+\-*/()]*", text):
        raise ValueError(f"not arithmetic on integers: {text[:100]!r}")
    return value_of(ast.parse(text.strip(), mode="eval").body)


REPLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "algorithmic.binary_matrix": {"eval": ast.literal_eval},
    "algorithmic.number_sorting": {"eval": ast.literal_eval},
    "algorithmic.spiral_matrix": {"eval": ast.literal_eval},
    "algorithmic.string_insertion": {"eval": ast.literal_eval},
    "games.countdown": {"parse_expr": arithmetic},
    "games.n_queens": {"eval": ast.literal_eval},
    "games.puzzle24": {"parse_expr": arithmetic},
}
"""Module of reasoning_gym -> name in it -> replacement."""

_STATEMENT = r"\w+ (?:is )?(?:an? )?\w+"

FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.IGNORECASE)
    for name, form in {
        "complex_arithmetic": r"[^n]*",  # nan
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
    ValueError for an unknown or denied data set, RuntimeError for a scorer that tries to run text
    as code, and the exception of a scorer that also fails on the entry's own answer.
    """
    pred = response.strip()
    dataset, entry = extra["dataset"], extra["entry"]
    if dataset in DENIED_DATASETS:
        raise ValueError(f"the scorer of {dataset} evaluates answers as code")
    with _no_text_compiled():
        scorer = _scorer(dataset, json.dumps(extra.get("options", {}), sort_keys=True))
        try:
            correct = _has_full_credit(pred, dataset, scorer, entry)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - scorers raise many types on text that they cannot read
            correct = False
            _has_full_credit(entry["answer"], dataset, scorer, entry)  # raises if its entry is bad
    if _refusals:  # scorers catch all exceptions and score the answer as wrong
        raise RuntimeError(_REFUSED.format(_refusals[0]))
    return Grade(score=1.0 if correct else -1.0, correct=correct, pred=pred)


def _has_full_credit(
    answer: str, dataset: str, scorer: Callable[..., float], entry: Mapping[str, Any]
) -> bool:
    if dataset in FORMS and not FORMS[dataset].fullmatch(answer):
        return False
    # Where the scorer gives full credit to answers that do not solve the problem: prefixes of a
    # number, other numbers, any text.
    match dataset:
        case "bitwise_arithmetic":  # the scorer evaluates the problem
            return int(answer, 0) == int(entry["answer"], 0)
        case "coin_flip":
            may_be_right = _is_near(answer, entry["answer"])
        case "advanced_geometry" | "polynomial_equations" | "word_sorting":
            may_be_right = answer.count(",") == entry["answer"].count(",")
        case "game_of_life_halting":
            may_be_right = answer == entry["answer"]
        case "gsm_symbolic" | "letter_jumble":
            may_be_right = answer.replace(",", "").lower() == entry["answer"].lower()
        case "puzzle24":
            used = sorted(map(int, re.findall(r"\d+", answer)))
            may_be_right = used == sorted(entry["metadata"]["numbers"])
        case "arc_agi" | "rearc":  # the scorer compares tuples
            output = tuple(tuple(row) for row in entry["metadata"]["output"])
            entry = {**entry, "metadata": {**entry["metadata"], "output": output}}
            may_be_right = True
        case _:
            may_be_right = True
    return may_be_right and bool(scorer(answer=answer, entry=entry) == 1.0)


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


for _module, _names in REPLACEMENTS.items():
    vars(importlib.import_module(f"{library.__name__}.{_module}")).update(_names)
sys.addaudithook(_refuse_to_compile)
