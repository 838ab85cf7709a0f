"""The shipped calculator computes what Python computes, and refuses everything else at once."""

from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.environments.calculator import MAX_LENGTH, Calculator

numbers = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str)
expressions = st.recursive(
    numbers,
    lambda parts: (
        st.tuples(parts, st.sampled_from([" + ", "-", " * ", "/"]), parts).map("".join)
        | parts.map("({})".format)
        | parts.map("-{}".format)
    ),
    max_leaves=12,
).filter(lambda text: len(text) <= MAX_LENGTH)


@given(expressions)
def test_results_are_those_of_python(expression: str) -> None:
    fractions = re.sub(r"[\d.]+", r"Fraction('\g<0>')", expression)
    try:
        expected = Fraction(eval(fractions))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            Calculator().calculate(expression)
        return
    result = Calculator().calculate(expression)
    if expected.denominator == 1:
        assert result == str(expected)
    else:
        assert float(result) == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not an expression"),
        ("12 *", "not an expression"),
        ("007", "not an expression"),
        ("9 ** 9 ** 9", "only numbers"),
        ("1 // 2", "only numbers"),
        ("...", "only numbers"),
        ("(1)(2)", "only numbers"),
        ("1e999", "only numbers"),
        ("True + 1j", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("\u0661 + 1", "only numbers"),
        ("9" * 10**6, "more than 200 characters"),
        ("(" * MAX_LENGTH, "not an expression"),
        ("-" * MAX_LENGTH, "not an expression"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_hostile_expressions_are_refused_fast(expression: str, message: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        Calculator().calculate(expression)
    assert time.process_time() - start < 0.5


def test_the_longest_expressions_are_computed() -> None:
    calculate = Calculator().calculate
    assert calculate("-" * 198 + "10") == "10"
    assert calculate("*".join(["9"] * 100)) == str(9**100)
    assert calculate("/".join(["9"] * 100)) == f"{9.0**-98:.12g}"
    assert calculate("9" * MAX_LENGTH) == "9" * MAX_LENGTH
    assert calculate("." + "0" * 198 + "1") == "1e-199"
