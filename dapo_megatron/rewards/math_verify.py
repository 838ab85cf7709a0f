r"""Lenient grader: the last box of the response equals the truth, as mathematics or as text.

Three readings, by the truth (docs/rewards.md has a table of examples):
- Plain numbers are compared exactly. A decimal also equals a value that rounds to it, from six
  decimal places on (`answers.rounds_to`).
- Text, such as words, orders of letters, dates and numbers in another base, is compared as text.
- All else is compared by the Math-Verify library, with the rule above for its numbers.

Without a box, the library looks for the answer. Its pitfalls, as of Math-Verify 0.9.0:
- The truth goes first: `verify(gold, target)` is not symmetric.
- Its time limits use SIGALRM, which fails outside the main thread, so they are off here. A power
  tower may then never return. Grade untrusted text in `GradingPool`, which kills hung workers.
- Without an anchor (dollars, "answer is") it takes the last number of the response, so repeating
  the problem may score.
- Errors of parsing or comparing are not raised; they count as "not equal".
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import math_verify as library  # the package; this module is dapo_megatron.rewards.math_verify
from sympy import Float, Integer, MatrixBase, Rational

from dapo_megatron.rewards import answers, units
from dapo_megatron.types import Grade

# The library warns once per process that its time limits are off.
logging.getLogger(library.__name__).setLevel(logging.ERROR)

MAX_DIGITS = 2000
"""Digits to which values are computed to find a difference. Those that need more are unequal."""

TAIL = 1000
"""Characters at the end of a response without a box whose notations are rewritten. More costs time,
and the answer is at the end."""


_DEFAULT = (library.LatexExtractionConfig(), library.ExprExtractionConfig())
_WITHOUT_UNITS = (
    library.LatexExtractionConfig(
        normalization_config=replace(_DEFAULT[0].normalization_config, units=False)
    ),
    library.ExprExtractionConfig(),
)
_VARIABLES = re.compile(r"(?<=[^A-Za-z\\])(?!(?:st|nd|rd|th)$)[A-Za-z]{1,2}$")
"""The end of a product of variables, which the library may take for a unit: `2ab`, `x + 3t`."""


MAX_BOX = 1000
"""Characters of an answer in a box. The library takes seconds for a box of 20,000 characters."""


class _Truth(NamedTuple):
    text: str
    word: str | None
    """Text to compare, None if it is mathematics. A single letter may be either."""
    values: int
    """How many values it lists."""


def grade(response: str, truth: str) -> Grade:
    r"""Score +1.0 if the answer in `response` equals `truth`, else -1.0.

    truth: plain or LaTeX, with or without `\boxed`. `pred` is the text of the answer, or "" with
    `parsed` False. Raises ValueError if no answer can equal the truth.
    """
    expected = _read_truth(truth)
    text = answers.final_text(response)
    box = answers.boxed(text, expected.values)
    if box is not None:
        pred = answers.clean(box)
        return _grade(_box_is_right(pred, expected), pred, parsed=bool(answers.as_text(pred)))
    text = text[:-TAIL] + answers.clean(text[-TAIL:])
    if expected.word:
        pred = answers.stated(text)
        if (correct := answers.as_text(pred) == expected.word) or len(expected.word) > 1:
            return _grade(correct, pred if correct else "", parsed=correct)
    parsed = library.parse(text, parsing_timeout=None)
    pred = next((item for item in reversed(parsed) if isinstance(item, str)), "")
    values: tuple[str, str] | None = text, expected.text
    if re.search("[A-Za-z]", expected.text):  # else it has no unit
        values = units.comparable(answers.stated(text).strip(" $*."), expected.text)
    correct = values is not None and not answers.has_base(pred) and _verify(values[1], parsed)
    return _grade(correct, pred, parsed=bool(parsed))


def _grade(correct: bool, pred: str, parsed: bool) -> Grade:
    return Grade(1.0 if correct else -1.0, correct, pred, parsed)


@lru_cache(maxsize=1024)  # the completions of a prompt share its truth
def _read_truth(truth: str) -> _Truth:
    answers.check_truth(truth)
    text = answers.clean(answers.boxed(truth) or truth).strip()
    number, word = answers.plain_number(text), answers.as_text(text)
    is_word = number is None and (answers.is_text(text) or (len(word) == 1 and word.isalpha()))
    return _Truth(text, word if is_word else None, answers.listed_values(text))


def _box_is_right(pred: str, truth: _Truth) -> bool:
    if pred == truth.text:
        return True
    if truth.word and (len(truth.word) > 1 or answers.as_text(pred) == truth.word):
        return answers.as_text(pred) == truth.word
    if answers.has_base(pred) or len(pred) > max(MAX_BOX, 2 * len(truth.text)):
        return False
    if (values := units.comparable(pred, truth.text)) is None:
        return False
    pred, expected = values
    number, true_number = answers.plain_number(pred), answers.plain_number(expected)
    if number and true_number:
        has_unit = len({number.unit, true_number.unit, ""}) <= 2
        return has_unit and answers.same_number(number, true_number)
    return _verify(expected, _parse(pred.rstrip(" .,;:")))


def _verify(truth: str, answer: list[Any]) -> bool:
    return bool(_comparison.verify(_parse_truth(truth), answer, timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
    config = _WITHOUT_UNITS if _VARIABLES.search(answer) else _DEFAULT
    return library.parse(rf"\boxed{{{answer}}}", config, parsing_timeout=None)  # type: ignore[no-any-return]


_parse_truth = lru_cache(maxsize=64)(_parse)


def _own_comparison() -> ModuleType:
    """Return a copy of the library's comparison that compares numbers as this module does.

    The library rounds to six decimal places, so all small numbers are equal. It is a copy because
    scorers of other packages use the library too.
    """
    spec = importlib.util.find_spec("math_verify.grader")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    in_library, symbolic = module.sympy_numeric_eq, module.sympy_symbolic_eq

    def numeric_eq(truth: Any, answer: Any, *precision: int) -> bool:
        integers = all(module.is_atomic_or_pct_atomic(x, Integer) for x in (truth, answer))
        if integers or isinstance(truth, MatrixBase) or isinstance(answer, MatrixBase):
            return bool(in_library(truth, answer, *precision))  # matrices element by element
        try:
            return _same_value(truth, answer)
        except Exception:  # noqa: BLE001 - as in the library: what sympy cannot evaluate raises
            return False  # anything, and may still be equal by simplification

    def symbolic_eq(truth: Any, answer: Any) -> bool:
        """Simplify only what has no numeric value, because numbers are compared already."""
        if not isinstance(truth, MatrixBase) and (truth - answer).evalf(2).is_Float:
            return False
        return bool(symbolic(truth, answer))

    vars(module).update(sympy_numeric_eq=numeric_eq, sympy_symbolic_eq=symbolic_eq)
    return module


def _same_value(truth: Any, answer: Any) -> bool:
    """Whether two expressions are equal, or one is a decimal that the other one rounds to."""
    exact = [x.xreplace({f: Rational(str(f)) for f in x.atoms(Float)}) for x in (truth, answer)]
    symbolic = exact[0] - exact[1]
    difference = symbolic.evalf(30, maxn=100 if symbolic.free_symbols else MAX_DIGITS)
    if difference.free_symbols:  # rounding errors of equal coefficients, below the smallest one
        sizes = [abs(number) for x in exact for number in x.evalf(30).atoms(Float)]
        small = {f: 0 for f in difference.atoms(Float) if abs(f) < min([1, *sizes]) / 10**20}
        return bool(difference.xreplace(small) == 0)
    if difference == 0:
        return True
    # Where all digits cancel, evalf returns a number of one bit of precision: a bound of the error,
    # which may be large.
    bound = Float("1e-30") * min(1, abs(exact[0].evalf(5)) or 1)
    if all(
        part == 0 or (getattr(part, "_prec", 53) == 1 and abs(part) < bound)
        for part in difference.as_real_imag()
    ):
        return True
    decimal = [x.has(Float) for x in (truth, answer)]
    if not (any(decimal) and difference.is_Float and exact[0].is_number):
        return False
    if abs(difference) * 1000 > abs(exact[0].evalf(5)):  # also keeps a tower from becoming digits
        return False
    values = [Fraction(str(x.evalf(60))) for x in exact]
    return any(
        is_decimal and answers.rounds_to(other, value, _places(value))
        for is_decimal, value, other in zip(decimal, values, values[::-1], strict=True)
    )


def _places(decimal: Fraction) -> int:
    """Return the decimal places of a parsed decimal; one zero at the end is unknown."""
    places = next((n for n in range(60) if (decimal * 10**n).denominator == 1), 0)
    return max(places, 6) if places >= 5 else places


_comparison = _own_comparison()
