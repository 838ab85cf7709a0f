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
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from dapo_megatron.config import ReasoningGymSource
from dapo_megatron.data.prompts import load_source
from dapo_megatron.rewards import reasoning_gym as grader
from dapo_megatron.rewards.reasoning_gym import REPLACEMENTS, arithmetic, grade
from dapo_megatron.rewards.registry import DENIED_DATASETS
from dapo_megatron.types import ConfigError
from tests.helpers.words import Words

NAMES = sorted(set(DATASETS) - {"composite"} - DENIED_DATASETS)  # composite combines others

NOT_SOLVED = {
    # Their entries have no answer, or one that their own scorer rejects.
    *("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"),
}


@cache
def entry(dataset: str) -> dict[str, Any]:
    first_entry = reasoning_gym.create_dataset(dataset, size=1, seed=1)[0]
    as_sent: dict[str, Any] = json.loads(json.dumps(first_entry))  # on its way to a worker
    return as_sent


def score(dataset: str, answer: str) -> bool:
    return grade(answer, "", {"dataset": dataset, "entry": entry(dataset)}).correct


def test_every_data_set_accepts_its_own_answer_except_those_listed() -> None:
    solved = {name for name in NAMES if score(name, entry(name)["answer"] or "")}
    assert set(NAMES) - solved == NOT_SOLVED


@pytest.mark.parametrize("name", sorted(DENIED_DATASETS))
def test_data_sets_whose_answers_are_formulas_are_refused(name: str) -> None:
    source = ReasoningGymSource(kind="reasoning_gym", name="mine", dataset=name, size=2, seed=1)
    with pytest.raises(ConfigError, match=rf"'mine'.*{name} evaluates answers as code"):
        load_source(source, Words(), 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="evaluates answers as code"):
        grade("x", "", {"dataset": name, "entry": {}})


@given(
    st.text("0123456789 +-*/%().#_eExXjI\\\n,;", max_size=12)
    | st.lists(st.sampled_from([*"017()+-*/%#. \n", "12", "//", "**", "1.5"])).map("".join)
)
def test_the_numbers_of_accepted_arithmetic_are_those_of_its_text(text: str) -> None:
    with suppress(ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        value = arithmetic(text)
        nodes = ast.walk(ast.parse(text.strip(), mode="eval"))
        used = [node.value for node in nodes if isinstance(node, ast.Constant)]
        assert sorted(used) == sorted(map(int, re.findall(r"\b\d+\b", text)))
        assert float(value) == pytest.approx(eval(text.strip()))


# ------------------------------------------------------------------------ malformed answers

CONDITIONS = sorted(
    {
        *(*grader.FORMS, "advanced_geometry", "bitwise_arithmetic", "coin_flip", "countdown"),
        *("game_of_life_halting", "gsm_symbolic", "letter_jumble", "polynomial_equations"),
        *("puzzle24", "word_sorting", "arc_agi"),
    }
)


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_accept_the_own_answers_of_many_problems(name: str) -> None:
    for item in reasoning_gym.create_dataset(name, size=30, seed=5):
        assert grade(item["answer"], "", {"dataset": name, "entry": item}).correct


ANSWERS: list[tuple[str, str | None, dict[str, Any], list[str], list[str]]] = [
    # data set, the entry's answer and metadata, right answers, wrong ones
    ("coin_flip", "0.3125", {}, ["0.3125", "5/16", "0.31254", ".3125"],
     ["0", "0.3", "3", "0.31251234/1", "1/0", ".", "1e999", "-0", "0.3125#", "0.3125 or 0.5"]),
    ("complex_arithmetic", "-1.0", {"result": [-1.0, 0.0]}, ["-1"],
     ["nan", "nanj", "nan+nanj", "-nan", "inf", "1e999", "1e999i"]),
    ("complex_arithmetic", "3.0 - 7.0i", {"result": [3.0, -7.0]}, ["3 - 7i"], ["3 + 7i"]),
    ("game_of_life_halting", "True", {}, ["True"], ["False", "1"]),
    ("game_of_life_halting", "False", {}, ["False"], ["True", "x"]),
    ("puzzle24", "8*3*1*1", {"numbers": [8, 3, 1, 1]}, ["8*3*1*1", "(8 * 3) / (1 * 1)"],
     ["8*3 # 1 1", "6*4*1*1", "8*3", "24", "8*3*1*1*1", "8.0*3*1*1", "8*3*1**1_1", "8*3*1*1 = 24"]),
    ("countdown", None, {"numbers": [10, 3, 2], "target": 4}, ["10 - 3*2"], ["4"]),
    ("countdown", None, {"numbers": [10, 3, 2], "target": 8}, [],
     ["10-2 # 3", "10-2", "10.3 - 2", "8", "10 - 2 or 3", "0x8 + 0x0*(10+3+2)", "10 - 2, 3",
      "1_0 - 0_2 + 0_0*(10+3+2)", "-I*I*(10+3+2) + E - E", "(10 - 2 # 3\n)", "10 - 2; 3",
      "'' or 10 - 2 + 0*3", "\uff11\uff10 - 2 + 0*3", "10 - 2 = 8 = 3 + 5", "10 - 2**1 + 0*3"]),
    ("polynomial_equations", "-2.0, 3.0", {}, ["3,-2"], ["3"]),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "own", "metadata", "right", "wrong"), ANSWERS)
def test_only_answers_that_solve_the_problem_are_right(
    dataset: str, own: str | None, metadata: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """Prefixes, comments and other numbers earn nothing."""
    item = {"question": "", "answer": own, "metadata": metadata}
    paid = {a for a in right + wrong if grade(a, "", {"dataset": dataset, "entry": item}).correct}
    assert paid == set(right)


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


@pytest.mark.parametrize("name", ["prime_factorization", "boxnet", "coin_flip", "puzzle24"])
def test_an_entry_that_its_scorer_cannot_read_is_an_error(name: str) -> None:
    """A wrong answer would hide that no answer can be right."""
    with pytest.raises(KeyError):
        grade("[1]", "", {"dataset": name, "entry": {}})


def canaries(path: Path) -> list[str]:
    call = f"__import__('pathlib').Path({str(path)!r}).touch()"
    forms = ["{}", "[{}]", "({},)", "[x for x in [{}]]", "sin({})", "x + {}", "(lambda: {})()"]
    return [*(form.format(call) for form in forms), f"[{entry('n_queens')['answer']!r}, {call}]"]


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


def test_a_scorer_that_is_not_replaced_is_refused_before_any_code_runs(tmp_path: Path) -> None:
    """A later version of the package may evaluate text somewhere else."""
    canary = tmp_path / "canary"
    code = f"""
import importlib, sympy
from dapo_megatron.rewards import reasoning_gym as grader
originals = {{"eval": eval, "parse_expr": sympy.parse_expr}}
for name, entry in {[(name, entry(name)) for name in ("countdown", "spiral_matrix", "n_queens")]}:
    module = next(m for m in grader.REPLACEMENTS if m.endswith("." + name))
    module = importlib.import_module("reasoning_gym." + module)
    vars(module).update((key, value) for key, value in originals.items() if key in vars(module))
    for answer in {canaries(canary)[:2]!r}:
        try: print(grader.grade(answer, "", {{"dataset": name, "entry": entry}}).correct)
        except RuntimeError as error: print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"refused"}
    assert not canary.exists()


def test_all_replaced_functions_exist_in_the_package() -> None:
    for name, replacements in REPLACEMENTS.items():
        source = Path(sys.modules[f"reasoning_gym.{name}"].__file__ or "").read_text()
        for replaced in replacements:
            assert f"{replaced}." in source or f"{replaced}(" in source


def test_the_guard_is_released_after_an_error() -> None:
    with pytest.raises(KeyError):
        grade("", "", {})
    assert grader._is_scoring is False
    assert eval("1 + 1") == 2
