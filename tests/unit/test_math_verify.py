"""math_verify pays for equal values and texts only; rows that cannot be graded are refused."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config import FileSource
from dapo_megatron.data.prompts import load_source
from dapo_megatron.rewards import resolve
from dapo_megatron.rewards.answers import check_truth
from dapo_megatron.rewards.math_verify import grade
from dapo_megatron.types import DataError, Grade
from tests.helpers.words import Words

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = [json.loads(line) for line in (GOLDEN / "grading.jsonl").read_text().splitlines()]

# The lines after a `# kind`: a truth, == or !=, and what is in the box. Under "where the answer
# stands" it is the whole response, with ⏎ for the ends of its lines.
STANDS = "where the answer stands"
KINDS: dict[str, list[tuple[str, bool, str]]] = {}
for line in (GOLDEN / "equal_answers.txt").read_text().splitlines():
    if line.startswith("# "):
        KINDS[line[2:]] = []
    else:
        truth, sign, answer = re.split(r" (==|!=) ?", line)
        KINDS[list(KINDS)[-1]].append((truth, sign == "==", answer))


@pytest.mark.parametrize("kind", KINDS)
def test_only_equal_answers_are_right(kind: str) -> None:
    wrong = []
    for truth, equal, answer in KINDS[kind]:
        response = answer.replace("⏎", "\n") if kind == STANDS else f"so \\boxed{{{answer}}}."
        check_truth(truth)
        if grade(response, truth).correct != equal:
            wrong.append((truth, "should equal" if equal else "should not equal", answer))
    assert wrong == []
    assert len(KINDS[kind]) >= 15


def test_verdicts_differ_from_the_library_only_where_a_person_agrees() -> None:
    changed = {
        case["id"]: case["human_accept"]
        for case in RECORDED
        if grade(case["output"], case["ground_truth"]).correct != case["math_verify_0_9_0"]
    }
    assert changed == {"g012": True, "g107": True, "g132": True}  # 4.2e1, \fbox, wide digits


def test_it_is_lenient_and_returns_what_it_read() -> None:
    grader = resolve("math_verify")
    result = grader(r"so it is $\frac{2}{4}$", "0.5", {})
    assert (result.score, result.correct) == (1.0, True)
    assert "2" in result.pred
    assert grader("no number", "0.5", {}) == Grade(-1.0, False, "", parsed=False)
    assert grader(r"\boxed{ }", "0.5", {}) == Grade(-1.0, False, "", parsed=False)
    assert grader(r"\boxed{41} and \boxed{42}", "0.5", {}).pred == "42"
    assert grader("42", r"\frac{84}{2}", {}).correct  # LaTeX truth without dollars
    # The truth is the first argument: an interval answers an inequality, but not vice versa.
    assert grader(r"\boxed{(1,\infty)}", "x>1", {}).correct
    assert not grader(r"\boxed{x>1}", r"(1,\infty)", {}).correct
    with pytest.raises(ValueError, match="nothing is left of the truth"):
        grader("42", "", {})


# ------------------------------------------------------------------------ properties

INTEGERS = st.integers(1, 10**6)


def is_right(answer: str, truth: str) -> bool:
    return grade(rf"\boxed{{{answer}}}", truth).correct


@given(st.integers(1, 999), INTEGERS, st.booleans())
def test_a_fraction_equals_itself_in_every_notation(n: int, d: int, minus: bool) -> None:
    sign, value = "-" if minus else "", Fraction(n, d)
    forms = [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", rf"\dfrac{{{n}}}{{{d}}}", f"{n} / {d}"]
    if n > d > 1:
        forms += [f"{n // d} {n % d}/{d}", rf"{n // d}\frac{{{n % d}}}{{{d}}}"]
    if 10**6 % value.denominator == 0:
        forms += [f"{float(value):.6f}"]
    for truth in forms:
        for answer in forms:
            assert is_right(sign + answer, sign + truth), (truth, answer)
        assert not is_right(sign + answer, f"{sign}{n + 1}/{d}")
        assert not is_right(answer, f"-{truth}")


@given(st.integers(100, 9999), st.integers(-40, 40))
def test_a_decimal_equals_itself_in_every_notation(digits: int, exponent: int) -> None:
    first, rest = str(digits)[0], str(digits)[1:]
    positional = f"{Decimal(f'{first}.{rest}E{exponent}'):f}"
    forms = [
        *(positional, f"{first}.{rest}e{exponent}", f"{first}.{rest}E{exponent:+}"),
        *(
            rf"{first}.{rest} \times 10^{{{exponent}}}",
            rf"{digits} \cdot 10^{{{exponent - len(rest)}}}",
        ),
        f"{first}.{rest}×10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")),  # noqa: RUF001
        positional.translate(str.maketrans("0123456789.", "０１２３４５６７８９．")),  # noqa: RUF001
    ]
    for form in forms:
        assert is_right(form, forms[0])
        assert is_right(forms[0], form)
        assert grade(f"The answer is {form}.", forms[0]).correct


FRAMES = [
    "{}",
    "-{}",
    "({}, 1)",
    r"\{{{}, 2\}}",
    r"[{}, \infty)",
    "x = {}",
    r"{}\pi",
    r"\sqrt{{{}}}",
]
FRAMES += [r"{} \cdot x^2", r"\begin{{pmatrix}}{} \\ 1\end{{pmatrix}}", r"{}\%", r"{}\text{{ kg}}"]
RELATIVE = 1e-3
"""More than any rounding that counts as equal, also under the root."""


@settings(max_examples=60)
@given(
    st.integers(1000, 9999), st.integers(1000, 9999), st.integers(-40, 40), st.integers(-40, 40),
    st.sampled_from(FRAMES), st.booleans(),
)  # fmt: skip
def test_unequal_values_are_never_right(
    digits: int, others: int, exponent: int, other: int, frame: str, same_magnitude: bool
) -> None:
    other = exponent if same_magnitude else other
    truth, answer = Fraction(digits) * Fraction(10) ** exponent, others * Fraction(10) ** other
    forms = [r"{}\times 10^{{{}}}", "{}e{}", r"\frac{{{}}}{{10^{{{}}}}}"]
    for form, sign in zip(forms, (1, 1, -1), strict=True):
        text = frame.format(form.format(digits, sign * exponent))
        assert is_right(text, text)
        if abs(truth - answer) > RELATIVE * max(truth, answer):
            assert not is_right(frame.format(form.format(others, sign * other)), text)
            assert not is_right(frame.format("0"), text)


def decimal(number: int, places: int) -> str:
    """Return number / 10**places. (A library may change the precision of the module decimal.)"""
    whole, rest = divmod(number, 10**places)
    return f"{whole}.{rest:0{places}d}"


@given(st.integers(1, 10**6), st.integers(2, 10**4), st.integers(6, 20))
def test_only_rounding_to_six_or_more_places_counts(n: int, d: int, places: int) -> None:
    value = Fraction(n, d)
    rounded = decimal(round(value * 10**places), places)
    exact = Fraction(rounded) == value
    if exact or value >= Fraction(1, 100):
        assert is_right(rounded, f"{n}/{d}")
        assert is_right(f"{n}/{d}", rounded)
    off = decimal(round(value * 10**places) + 2, places)
    assert not is_right(off, f"{n}/{d}")
    short = decimal(round(value * 10**5), 5)
    assert is_right(short, f"{n}/{d}") == (Fraction(short) == value)


MISSING = {"nan", "null", "nat", "pi", "inf", "infinity", "infty"}
WORD = st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=10).filter(
    lambda word: word not in MISSING
)


@given(WORD | st.sampled_from(["lg", "ln", "sin", "arctan", "max"]), WORD, st.randoms())
def test_only_the_same_word_is_right(word: str, other: str, rng: random.Random) -> None:
    wraps = ["{}", r"\text{{{}}}", r"\textbf{{{}}}", "**{}**", "{}.", r"\mathrm{{{}}}", "${}$"]
    anagram = "".join(rng.sample(word, len(word)))
    for wrap in wraps:
        assert is_right(wrap.format(word), word)
        assert is_right(word.upper(), wrap.format(word))
        for wrong in (other, anagram, word[::-1]):
            assert is_right(wrap.format(wrong), word) == (wrong == word)


@given(st.integers(2, 9), st.integers(2, 9), INTEGERS, INTEGERS)
def test_a_number_in_a_base_is_its_digits_and_base(
    base: int, other: int, digits: int, others: int
) -> None:
    truth = f"{digits}_{base}"
    for form in (truth, f"{digits}_{{{base}}}", f"({digits})_{base}", rf"\text{{{digits}}}_{base}"):
        assert is_right(form, truth)
    assert is_right(f"{others}_{other}", truth) == ((others, other) == (digits, base))
    for wrong in (str(digits), f"{digits}{base}", f"{digits}_{{{base}{base}}}"):
        assert not is_right(wrong, truth)
        assert not is_right(truth, wrong)


PIECES = ["{", "}", "\\", "$", " ", "\n", "text", "frac", "boxed", ".", "5", "x", "=", ",", "units"]


@given(st.text(max_size=20) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_a_truth_that_passes_the_check_is_right_for_itself_and_nothing_is_not(truth: str) -> None:
    try:
        check_truth(truth)
    except ValueError:
        return
    assert is_right(truth, truth)
    assert not grade("", truth).correct
    assert not any(is_right(nothing, truth) for nothing in ("", " ", "$", r"\text{}", "."))


# ------------------------------------------------------------------------ rows

NOTHING = ["", " ", "$", "$$", '"', r"\$", r"\text{}", r"\boxed{}", r"\ ", r"\mbox{ }"]
REFUSED = {
    "math_verify": [
        *NOTHING, "}", "{", ".", ",", r"\frac{1}{2", "1}{2", r"\boxed{5", "so 5 * 3 = 15\n#### 15",
        "two\nlines", "because " * 20, "\u200b", "()", "?", "-", "=", "[]", "x =", "5/",
        "</think>5", "nan", "NaN", "null", "None", "N/A", r"\frac{1}", r"\frac{}{}", r"\sqrt{}",
        "1/0", r"\frac{1}{0}",
    ],
    "dapo_math": [
        *NOTHING, "units", r"\text{ cm}", "degrees", "x =", "[INVALID]", "two\nlines", "7" * 400,
        "an ", r"\dots", "km", r"\text{ m}", "so 5 * 3 = 15\n#### 15", "#### 15",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("grader", "truth"), [(grader, truth) for grader in REFUSED for truth in REFUSED[grader]]
)
def test_rows_without_a_right_answer_are_refused_by_line(
    grader: str, truth: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"

    def load(*truths: str) -> int:
        rows = [{"q": "How many?", "a": truth} for truth in truths]
        path.write_text("\n".join(map(json.dumps, rows)))
        columns = {"prompt": "q", "answer": "a"}
        source = FileSource.model_validate(
            {"kind": "jsonl", "name": "a", "path": str(path), "grader": grader, "columns": columns}
        )
        return len(load_source(source, Words(), 10).prompts)  # type: ignore[arg-type]

    assert load("7", "B", r"\frac{1}{2}", "yes", r"\{1,2\}") == 5
    with pytest.raises(DataError, match=re.escape(f"{path}, line 2, ")):
        load("7", truth)
