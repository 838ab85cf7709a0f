"""The grader `reasoning_gym`: it scores as the package does, and no scorer runs text as code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import sympy
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from dapo_megatron.rewards import GradingPool
from dapo_megatron.rewards import reasoning_gym as grader
from dapo_megatron.rewards.expressions import (
    integer_value,
    parse_arithmetic,
    parse_expression,
)
from dapo_megatron.rewards.reasoning_gym import REPLACEMENTS, grade

NAMES = sorted(set(DATASETS) - {"composite"})  # combines other data sets

NOT_SOLVED = {
    # Their entries have no answer, or one that their own scorer rejects.
    *("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
}


@cache
def entry(dataset: str) -> dict[str, Any]:
    first_entry: dict[str, Any] = reasoning_gym.create_dataset(dataset, size=1, seed=1)[0]
    return first_entry


def score(dataset: str, answer: str) -> bool:
    return grade(answer, "", {"dataset": dataset, "entry": entry(dataset)}).correct


def test_every_data_set_accepts_its_own_answer_except_those_listed() -> None:
    solved = {name for name in NAMES if score(name, entry(name)["answer"] or "")}
    assert set(NAMES) - solved == NOT_SOLVED


SYMBOLIC = ("simple_integration", "intermediate_integration", "polynomial_multiplication")


def refused_own_answers(name: str, size: int, seed: int) -> list[str]:
    """Return the own answers of problems of a data set that are not right."""
    entries = list(reasoning_gym.create_dataset(name, size=size, seed=seed))
    return [
        item["answer"]
        for item in entries
        if not grade(item["answer"], "", {"dataset": name, "entry": item}).correct
    ]


@pytest.mark.parametrize("name", [*SYMBOLIC, "countdown", "puzzle24", "bitwise_arithmetic"])
def test_own_answers_are_correct_with_the_replaced_scorers(name: str) -> None:
    """Uses many entries, because sympy evaluates text itself if two forms differ syntactically."""
    wrong_answers = refused_own_answers(name, size=50, seed=7)
    # The generator cannot solve some integrals; an unsolved integral does not count as an answer.
    assert [answer for answer in wrong_answers if "Integral" not in answer] == []


EQUIVALENT = [
    ("sin(x)*cos(x)", "-cos(2*x)/4 + C"),
    ("sin(x)*cos(x)", "sin(x)**2/2"),
    ("2*x*exp(x**2)", "exp(x**2) + 3"),
    ("1/x", "log(3*x)"),
    ("cos(x)**2", "x/2 + sin(2*x)/4"),
    ("(x + 1)**2", "(x + 1)**3/3 + C"),
    ("1/(1 + x**2)", "atan(x) - 5"),
    ("exp(x)*sin(x)", "exp(x)*(sin(x) - cos(x))/2"),
    ("tan(x)", "-log(cos(x))"),
    ("sqrt(x)", "2*x**(3/2)/3"),
]


@pytest.mark.parametrize(("integrand", "answer"), EQUIVALENT)
def test_equivalent_antiderivatives_are_correct(integrand: str, answer: str) -> None:
    problem = {"metadata": {"variable": "x", "integrand": integrand}}
    for dataset in SYMBOLIC[:2]:
        extra = {"dataset": dataset, "entry": problem}
        assert grade(answer, "", extra).correct
        assert not grade(f"{answer} + x", "", extra).correct


GAME = {"dataset": "countdown", "entry": {"metadata": {"numbers": [10, 3, 2], "target": 8}}}


@pytest.mark.parametrize("answer", ["10 // 2 + 3", "(10 + 2*3) / 2", "10 % 3 + 7", "2**3"])
def test_all_arithmetic_operators_are_parsed(answer: str) -> None:
    used = [int(number) for number in re.findall(r"\d+", answer)]
    entry = {"metadata": {"numbers": used, "target": 8}}
    assert grade(answer, "", {"dataset": "countdown", "entry": entry}).correct


HIDDEN = [
    "0x8 + 0x0*(10+3+2)",  # numbers that the scorer's regular expression does not match
    "0b1000 + 0x0*(10+3+2)",
    "8e0 + 0e0*(10+3+2)",
    "1_0 - 0_2 + 0_0*(10+3+2)",
    "-I*I*(10+3+2) + E - E",
    "(I-I)*(10+3+2) - I*I*8",
    "exp(pi-pi) + (pi-pi)*(10+3+2)",
    "8 # 10 3 2",
    "8.0 + 0*(10 + 3 + 2)",
    "10 - 2 # 3",
    "(10 - 2 # 3\n)",
    "10 - 2 \\\n + 0 # 3",
    "10 - 2; 3",
    "10 - 2, 3",
    "10 - 2 if 1 else 3",
    "'' or 10 - 2 + 0*3",
    "\uff11\uff10 - 2 + 0*3",  # full-width digits
    "10 - 2 = 8 = 3 + 5",
    "10 - 2\u00a0+ 0*3",
]


@pytest.mark.parametrize("answer", HIDDEN)
def test_numbers_that_a_scorer_cannot_see_are_refused(answer: str) -> None:
    assert not grade(answer, "", GAME).correct
    with pytest.raises(ValueError, match=r"not arithmetic"):
        parse_arithmetic(answer)


@given(
    st.text("0123456789 +-*/%().#_eExXjI\\\n,;", max_size=12)
    | st.lists(st.sampled_from([*"017()+-*/%#. \n", "12", "//", "**", "1.5"])).map("".join)
)
def test_the_numbers_of_accepted_arithmetic_are_those_of_its_text(text: str) -> None:
    with suppress(ValueError, SyntaxError, TypeError, ZeroDivisionError, MemoryError):
        parse_arithmetic(text)
        nodes = ast.walk(ast.parse(text.strip(), mode="eval"))
        used = [node.value for node in nodes if isinstance(node, ast.Constant)]
        assert sorted(used) == sorted(map(int, re.findall(r"\b\d+\b", text)))
        assert not any(isinstance(node, ast.Name) for node in nodes)


# ------------------------------------------------------------------------ malformed answers

GUESSES = ["The answer is {}", "{} or 17", "17 or {}", "{0} {0}", "{0}\n{0}", "{}, 999", "{} xyz"]


def test_an_answer_among_other_text_or_guesses_is_wrong() -> None:
    paid = {
        (name, guess)
        for name in sorted(set(NAMES) - NOT_SOLVED)
        for item in reasoning_gym.create_dataset(name, size=3, seed=11)
        for guess in GUESSES
        if item["answer"]
        and grade(guess.format(item["answer"]), "", {"dataset": name, "entry": item}).correct
    }
    assert paid == set()


FORMS = sorted({*grader.FORMS, *grader.CONDITIONS})


@pytest.mark.parametrize("name", FORMS)
def test_conditions_accept_the_own_answers_of_many_problems(name: str) -> None:
    assert refused_own_answers(name, size=100, seed=5) == []


def test_integer_roots_and_other_spellings_stay_right() -> None:
    extra = {"dataset": "polynomial_equations", "entry": {"answer": "-2.0, 3.0"}}
    assert grade("3,-2", "", extra).correct
    assert not grade("3", "", extra).correct
    item = reasoning_gym.create_dataset("knights_knaves", size=1, seed=1)[0]
    extra = {"dataset": "knights_knaves", "entry": item}
    assert grade(item["answer"].replace(" and ", " "), "", extra).correct


CONSTANT_ANSWERS = [
    *("", "0", "1", "-1", "2", "0.0", "-0", "0j", "1e999", "nan", "inf", "-inf", "0/0", "1e-999"),
    *("None", "True", "False", "true", "false", "Yes", "No", "yes", "no", "A", "B", "x", "?"),
    *("[]", "{}", "()", "[[]]", "[0]", "[nan]", "[[nan]]", "[null]", "null", '""', '{"a": 1}'),
    *("nan+nanj", "nan + nani", "...", "-", "#", "*", ".*", "()*", "0 # 1", "1 2 3 4 5 6 7 8 9"),
    *("0\n0\n0", "impossible", "infeasible", "\x00", "\ud800", "\u0663", "(" * 300, "9" * 5000),
]


def test_no_constant_answer_is_right_for_most_problems_or_makes_a_data_set_abstain() -> None:
    """A policy would learn an answer that scores without reading the problem."""
    universal = {}
    for name in NAMES:
        entries = list(reasoning_gym.create_dataset(name, size=4, seed=11))
        for answer in CONSTANT_ANSWERS:
            correct = [
                item
                for item in entries
                if grade(answer, "", {"dataset": name, "entry": item}).correct
                and answer != item["answer"]
            ]
            if len(correct) > 1:
                universal[name, answer] = len(correct)
    assert universal == {}


def with_answer(answer: str | None, **metadata: Any) -> dict[str, Any]:
    return {"question": "", "answer": answer, "metadata": metadata}


CONDITIONED = [
    *(
        ("coin_flip", with_answer("0.3125"), answer)
        for answer in ("0.3125", "5/16", "0.31254", ".3125")
    ),
    ("complex_arithmetic", with_answer("-1.0", result=[-1.0, 0.0]), "-1"),
    ("complex_arithmetic", with_answer("3.0 - 7.0i", result=[3.0, -7.0]), "3 - 7i"),
    ("game_of_life_halting", with_answer("True"), "True"),
    ("game_of_life_halting", with_answer("False"), "False"),
    ("puzzle24", with_answer("8*3*1*1", numbers=[8, 3, 1, 1]), "8*3*1*1"),
    ("puzzle24", with_answer("8*3*1*1", numbers=[8, 3, 1, 1]), "(8 * 3) / (1 * 1)"),
    ("countdown", with_answer(None, numbers=[10, 3, 2], target=4), "10 - 3*2"),
]
UNFULFILLED = [
    *(
        ("coin_flip", with_answer("0.3125"), answer)
        for answer in (
            *(
                "0",
                "0.3",
                "0.31",
                "3",
                "0.31251234/1",
                "1/0",
                ".",
                "5/16/1",
                "1e999",
                "0.3125 ",
                "-0",
            ),
            *("1e999999999", "0.3125#", "0.3125 or 0.5", "0_0.3125", "nan", "\u0663"),
        )
        if answer.strip() != "0.3125"
    ),
    *(
        ("complex_arithmetic", with_answer("-1.0", result=[-1.0, 0.0]), answer)
        for answer in ("nan", "NaN", "nanj", "nan+nanj", "-nan", "(nan)", "inf", "1e999", "1e999i")
    ),
    *(
        ("game_of_life_halting", with_answer(truth), answer)
        for truth, answer in [("True", "False"), ("False", "True"), ("False", "x"), ("True", "1")]
    ),
    *(
        ("puzzle24", with_answer("8*3*1*1", numbers=[8, 3, 1, 1]), answer)
        for answer in (
            *("8*3 # 1 1", "6*4*1*1", "8*3*1", "8*3", "24", "8*3*1*1*1", "4*6*1*1", "8*3+1-1 # 1"),
            *("8.0*3*1*1", "8*3*1**1_1", "8*3*11", "8*3*1*1 = 24"),
        )
    ),
    *(
        ("countdown", with_answer(None, numbers=[10, 3, 2], target=8), answer)
        for answer in ("10-2 # 3", "10-2", "10.3 - 2", "8", "8 # 10 3 2", "10 - 2 or 3")
    ),
]


@pytest.mark.parametrize(("dataset", "item", "answer"), CONDITIONED)
def test_answers_that_solve_the_problem_are_right(
    dataset: str, item: dict[str, Any], answer: str
) -> None:
    assert grade(answer, "", {"dataset": dataset, "entry": item}).correct


@pytest.mark.parametrize(("dataset", "item", "answer"), UNFULFILLED)
def test_prefixes_comments_and_other_numbers_earn_nothing(
    dataset: str, item: dict[str, Any], answer: str
) -> None:
    assert not grade(answer, "", {"dataset": dataset, "entry": item}).correct


@pytest.mark.parametrize("name", ["simple_integration", "polynomial_multiplication"])
def test_an_expression_with_a_comment_is_wrong(name: str) -> None:
    assert not score(name, f"{entry(name)['answer']} # 1")


@pytest.mark.parametrize("name", ["prime_factorization", "boxnet", "coin_flip", "puzzle24"])
def test_an_entry_that_its_scorer_cannot_read_is_an_error(name: str) -> None:
    """A wrong answer would hide that no answer can be right."""
    with pytest.raises(KeyError):
        grade("[1]", "", {"dataset": name, "entry": {}})


def canaries(path: Path) -> list[str]:
    call = f"__import__('pathlib').Path({str(path)!r}).touch()"
    return [
        call,
        f"[{call}]",
        f"({call},)",
        f"{{{call}: 1}}",
        f"[x for x in [{call}]]",
        f"sin({call})",
        f"x + {call}",
        f"(lambda: {call})()",
        f"f'{{{call}}}'",
        f"1 if {call} else 2",
        f"[{entry('n_queens')['answer']!r}, {call}]",
    ]


def test_no_data_set_executes_an_answer(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in NAMES:
        for answer in canaries(canary):
            with suppress(Exception):  # an exception of a scorer is graded as "error"
                score(name, answer)
            assert not canary.exists(), (name, answer)


def poisoned(value: Any, text: str) -> Any:
    """Return `value` with every string in it replaced by `text`."""
    if isinstance(value, dict):
        return {key: poisoned(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(poisoned(item, text) for item in value)
    return text if isinstance(value, str) else value


def test_no_data_set_executes_text_of_an_entry(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in NAMES:
        for text in canaries(canary)[:2]:
            metadata = {"source_dataset": name, **poisoned(entry(name)["metadata"], text)}
            hostile = {"question": "", "answer": text, "metadata": metadata}
            for answer in ("[1, 2]", "x", text):
                try:
                    grade(answer, "", {"dataset": name, "entry": hostile})
                except Exception:  # noqa: BLE001 - as above
                    continue
            assert not canary.exists(), name


@pytest.mark.parametrize(
    "module",
    [
        "algebra.simple_integration",
        "algorithmic.spiral_matrix",
        "arithmetic.bitwise_arithmetic",
        "games.countdown",
    ],
)
def test_a_scorer_that_is_not_replaced_is_refused_before_any_code_runs(
    module: str, tmp_path: Path
) -> None:
    """A later version of the package may evaluate text somewhere else."""
    dataset = module.rpartition(".")[2]
    canary = tmp_path / "canary"
    code = f"""
import importlib, json, reasoning_gym
from dapo_megatron.rewards import reasoning_gym as grader
for name in grader.REPLACEMENTS[{module!r}]:
    vars(importlib.import_module("reasoning_gym." + {module!r}))[name] = {{
        "eval": eval, "parse_expr": __import__("sympy").parse_expr,
        "sympy": __import__("sympy"), "sp": __import__("sympy"),
    }}[name]
entry = json.loads({json.dumps(json.dumps(entry(dataset)))})
for answer in {canaries(canary)[:2]!r}:
    if {dataset!r} in ("bitwise_arithmetic", "number_sorting"):
        entry["answer"] = entry["metadata"]["problem"] = answer
    try: print(grader.grade("[1]" if {dataset!r} == "number_sorting" else answer, "",
                            {{"dataset": {dataset!r}, "entry": entry}}).correct)
    except RuntimeError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "True" not in done.stdout
    assert not canary.exists()


def test_an_answer_can_neither_read_the_target_nor_change_the_next_grading() -> None:
    """In the package, answers that read the caller's variables or change the process score 1."""
    numbers = entry("countdown")["metadata"]["numbers"]
    frame = "__import__('sys')._getframe(3).f_locals['entry']['metadata']['target']"
    hack = f"{frame}+len('')*({'+'.join(map(str, numbers))})"
    poison = (
        "[setattr(__import__('sys').modules['__main__'], '_grade', lambda *a: "
        "__import__('dapo_megatron.types', fromlist=['x']).Grade(1.0, True, 'hacked'))]"
    )
    tasks = [("countdown", hack), ("spiral_matrix", poison), ("spiral_matrix", "0 0 0")]
    with GradingPool({"gym": "reasoning_gym"}, workers=1, timeout_seconds=60.0) as pool:
        for number, (name, answer) in enumerate(tasks):
            pool.submit(number, "gym", answer, "", {"dataset": name, "entry": entry(name)})
        grades = []
        while pool.pending:
            grades += pool.collect(wait=True)
    assert [(grade.correct if grade else None) for _, grade, _ in grades] == [False] * 3


def test_all_replaced_functions_exist_in_the_package() -> None:
    for name, replacements in REPLACEMENTS.items():
        source = Path(sys.modules[f"reasoning_gym.{name}"].__file__ or "").read_text()
        for replaced in replacements:
            assert f"{replaced}." in source or f"{replaced}(" in source


# ------------------------------------------------------------------------ expressions

numbers = st.integers(0, 10**6).map(str) | st.sampled_from(["x", "y", "C", "pi", "2.5", "E"])
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(" ".join)
        | inner.map("({})".format)
        | inner.map("-{}".format)
        | st.tuples(inner.map("({})".format), st.integers(0, 4)).map(lambda p: f"{p[0]}**{p[1]}")
        | st.tuples(st.sampled_from(["sin", "exp", "sqrt", "log", "Abs"]), inner).map(
            lambda p: f"{p[0]}({p[1]})"
        )
    ),
    max_leaves=6,
)


@given(expressions)
def test_expressions_are_parsed_as_by_sympy(text: str) -> None:
    assert sympy.srepr(parse_expression(text)) == sympy.srepr(sympy.parse_expr(text))


def test_names_can_be_mapped_to_symbols() -> None:
    symbol = sympy.Symbol("x", real=True)
    assert parse_expression("E*x + C", {"x": symbol, "E": sympy.Symbol("E")}).free_symbols == {
        symbol,
        sympy.Symbol("E"),
        sympy.Symbol("C"),
    }


REFUSED = [
    *("", "2x", "x =", "x == 1", "a.b", "a[0]", "f(x)", "x if y else z", "[1]", "{1}", "'x'"),
    *("True", "None", "lambda: 1", "x and y", "sin(x=1)", "(1).real", "print(1)", "x := 1"),
    *("0xf", "1e3", "1_000", "2.5e-1", "0b1", "x + 0o7", "3j"),
    *("9**9**9", "2**99999", "(2**9999)**9999", "x" * 10_001, "(" * 5_000 + ")" * 5_000),
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_other_syntax_is_refused(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError, MemoryError, RecursionError)):
        parse_expression(text)


@given(st.text("0123456789abcxyz()+-*/.,'\"[]{}_ =!<>&|^~:@#$\\\n", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(
        ValueError, SyntaxError, MemoryError, TypeError, OverflowError, ZeroDivisionError
    ):
        parse_expression(text)


@given(st.integers(-(10**6), 10**6), st.integers(0, 9), st.integers(0, 10**6))
def test_integer_arithmetic_equals_python(left: int, distance: int, right: int) -> None:
    for text in (f"({left} << {distance}) - {right}", f"~({left} & {right}) | 3 ^ {right}"):
        assert integer_value(text) == eval(text)
    for text in ("1 << 10**9", "1 << 99999", "1 << -1", "x", "1.5", "2 ** 3", "True", "f(1)"):
        with pytest.raises(ValueError, match=r"shift|not part"):
            integer_value(text)


def test_the_guard_is_released_after_an_error() -> None:
    with pytest.raises(KeyError):
        grade("", "", {})
    assert grader._is_scoring is False
    assert eval("1 + 1") == 2
