"""Graders: dapo_math equals the reference grader; the others behave as the project relies on."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.rewards import resolve
from dapo_megatron.rewards.dapo_math import INVALID, grade
from dapo_megatron.rewards.pool import try_graders
from dapo_megatron.rewards.registry import check_grader
from dapo_megatron.types import ConfigError, DataError, Grade, Prompt

LINES = (Path(__file__).parents[1] / "golden" / "grading.jsonl").read_text(encoding="utf-8")
CASES = [json.loads(line) for line in LINES.splitlines()]

# ------------------------------------------------------------------------ dapo_math


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_dapo_math_equals_the_reference_grader(case: dict[str, Any]) -> None:
    pred = case["expected_pred"]
    expected = Grade(case["expected_score"], case["expected_correct"], pred, pred != INVALID)
    assert grade(case["output"], case["ground_truth"]) == expected


# Rules that the golden cases do not cover: (answer, prediction by the written rules).
RULES = [
    (r"x,\text{and} y", "x,y"),
    ("x^2 = y = 7", "7"),
    ("an apple a day", "appleday"),
    (r"3,\text{and} 4", "34"),
    (r"\mbox{7}", "7"),
    (r"\text{7}\text{8}", "78"),
    (r"\textbf{7}+\overline{8}", "7+8"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\frac12+\sqrt3", r"\frac{1}{2}+\sqrt{3}"),
    (r"$\frac1$", r"\frac{1}{}"),
    ("1,234,567", "1234567"),
    ("1,234.5", "1,234.5"),
    (r"42^{\circ}\;\dots\ldots", "42"),
    ("one $5$ two $6$", "5"),
    ("$5", "5"),
    ("units42digits", "42"),
    (r"5 \text{ m}", "5"),
]


@pytest.mark.parametrize(("answer", "pred"), RULES)
def test_dapo_math_follows_the_written_rules(answer: str, pred: str) -> None:
    assert grade(f"Answer: {answer}", "?").pred == pred
    assert grade(f"Answer: {answer}", answer).correct


def test_dapo_math_reads_only_the_last_300_characters() -> None:
    answer = "\nAnswer: 7\n"
    assert grade(answer + "x" * (301 - len(answer)), "7").correct
    assert grade(answer + "x" * (302 - len(answer)), "7").correct is False
    assert grade(answer + "x" * 300, "7").pred == INVALID


ALPHABET = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from(
            [
                "Answer",
                ":",
                " ",
                "\n",
                "$",
                "\\",
                "{",
                "}",
                "frac",
                "sqrt",
                "text",
                "boxed",
                "=",
                ",",
            ]
        )
        | st.characters(),
        max_size=120,
    ).map("".join),
)


@given(response=ALPHABET, truth=ALPHABET)
def test_dapo_math_never_raises(response: str, truth: str) -> None:
    result = grade(response, truth)
    assert result.score == (1.0 if result.correct else -1.0)


# ------------------------------------------------------------------------ registry


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_graders.py").write_text(
        "from dapo_megatron.types import Grade\n"
        "def returns(response, truth, extra): return extra['value']\n"
        "async def returns_later(response, truth, extra): return extra['value']\n"
        "def compares(response, truth, extra): return response == truth\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_graders"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, Grade(1.0, True, "")),
        (False, Grade(-1.0, False, "")),
        (0.25, Grade(0.25, True, "")),
        (0, Grade(0.0, False, "")),
        (Grade(-2.0, True, "x"), Grade(-2.0, True, "x")),
        (Grade(-2.0, False, "", parsed=False), Grade(-2.0, False, "", parsed=False)),
        (np.isclose(1.0, 1.0), Grade(1.0, True, "")),
        (np.bool_(False), Grade(-1.0, False, "")),
        (np.float32(0.5), Grade(0.5, True, "")),
        (np.int64(-1), Grade(-1.0, False, "")),
        (np.array(1.0), Grade(1.0, True, "")),
        (np.array([True]), Grade(1.0, True, "")),
        (torch.tensor(0.25), Grade(0.25, True, "")),
        (torch.tensor(False), Grade(-1.0, False, "")),
        (sympy.true, Grade(1.0, True, "")),
        (sympy.Eq(1, 2), Grade(-1.0, False, "")),
        (sympy.Rational(1, 2), Grade(0.5, True, "")),
        (Decimal("0.5"), Grade(0.5, True, "")),
        (Fraction(1, 4), Grade(0.25, True, "")),
        ({"score": 1.0}, Grade(1.0, True, "")),
        ({"score": -1, "acc": False, "pred": "7"}, Grade(-1.0, False, "7")),
        ({"score": 0.1, "acc": np.bool_(False), "pred": None}, Grade(0.1, False, "")),
        ({"score": True, "format": 3}, Grade(1.0, True, "")),
        ({"score": 0.2, "correct": 1.0}, Grade(0.2, True, "")),
        (Grade(np.float64(1.0), np.bool_(True), "x"), Grade(1.0, True, "x")),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("function", ["returns", "returns_later"])
def test_valid_results_of_a_user_grader_become_grades(
    user_module: str, function: str, value: Any, expected: Grade
) -> None:
    assert resolve(f"{user_module}:{function}")("r", "t", {"value": value}) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", ["1"], (1.0, "7"), {"reward": 1.0}, {"score": None}, 1j),
        *({"score": 1.0, "acc": "yes"}, np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])),
        *(Decimal("NaN"), {"score": float("inf")}, float("nan"), 1e39, 10**400),
        *(Grade(-1_000_000.1, False, ""), Grade("x", True, "")),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_invalid_results_of_a_user_grader_are_refused(user_module: str, value: Any) -> None:
    with pytest.raises(ValueError, match="grader 'my_graders:returns': "):
        resolve(f"{user_module}:returns")("r", "t", {"value": value})


def test_the_largest_scores_give_finite_advantages(user_module: str) -> None:
    grader = resolve(f"{user_module}:returns")
    scores = [grader("r", "t", {"value": score}).score for score in (1e6, -1e6, 1e6, 1.0)]
    rewards = torch.tensor(scores, dtype=torch.float32)
    assert group_advantage(rewards, [0] * 4).isfinite().all()


def test_a_prediction_is_truncated_and_valid_text(user_module: str) -> None:
    value = Grade(1.0, True, "\ud800" + "7" * 300_000_000)
    grade = resolve(f"{user_module}:returns")("r", "t", {"value": value})
    assert grade == Grade(1.0, True, "?" + "7" * 4095)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dapo_maths", "did you mean 'dapo_math'"),
        ("zzz", "known: dapo_math, math_verify, reasoning_gym, code, or module:function"),
        ("no_such_module:grade", "module 'no_such_module' cannot be imported"),
        ("my_broken:grade", "no_such_library_at_all"),
        ("my_graders:return", "no function 'return'; did you mean 'returns'"),
        ("my_graders:number", "no function 'number'"),
        (":grade", "cannot be imported"),
    ],
)
def test_a_bad_grader_name_is_refused(user_module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


ACCEPTED = {
    "two arguments": "response, truth",
    "other names": "text, gold",
    "positional only": "response, truth, /",
    "keywords besides": "response, truth, *, seconds=1, **more",
    "extra with a default": "response, truth, extra=None",
    "three with other names": "a, b, c",
    "four, one with a default": "response, truth, extra, seconds=1",
    "a third with a default": "response, truth, seconds=1",
}
REFUSED = {
    "one argument": "response",
    "no arguments": "",
    "four arguments": "data, response, truth, extra",
    "any number": "*arguments",
    "a required keyword": "response, truth, *, seconds",
    "the truth first": "truth, response",
    "the order of another library": "data_source, solution, truth",
}


def with_signature(folder: Path, parameters: str, body: str) -> str:
    """Write a grader into a new module; return its name."""
    name = f"grader_{len(list(folder.iterdir()))}_{abs(hash(parameters))}"
    (folder / f"{name}.py").write_text(f"def grade({parameters}):\n    {body}\n")
    return f"{name}:grade"


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_function_gets_as_many_arguments_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    values = "list(locals().values())"
    name = with_signature(tmp_path, ACCEPTED[case], f"return {values}[:2] == ['7', '7']")
    grader = resolve(name)
    assert grader("7", "7", {}).correct
    assert not grader("7", "8", {}).correct
    takes_extra = case in ("extra with a default", "three with other names")
    if takes_extra:
        name = with_signature(tmp_path, ACCEPTED[case], f"return {values}[2]['score']")
        assert resolve(name)("", "", {"score": 0.25}).score == 0.25


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_signatures_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = with_signature(tmp_path, REFUSED[case], "return True")
    for refuse in (check_grader, resolve):
        with pytest.raises(ConfigError, match=f"{name}.*write it as `def grade"):
            refuse(name)


# ------------------------------------------------------------------------ before a run


TRIED = {
    "returns text": ("return 'yes'", "must return a Grade, a bool, a number"),
    "returns nothing": ("pass", "not None"),
    "raises": ("return 1 / 0", "ZeroDivisionError"),
    "reads a field that rows lack": ("return extra['extra_info']['level'] > 1", "KeyError"),
    "wants a number": ("return int(response) == int(truth)", "ValueError"),
    "hangs": ("import time; time.sleep(60)", "timeout"),
    "exits": ("import os; os._exit(3)", "crash"),
    "uses all memory": ("x = bytearray(2**34)", "memory"),
    "an array of two": ("import numpy; return numpy.array([1, 2])", "array of size 1"),
    "not a number": ("return float('nan')", "must be finite"),
}


def test_each_grader_of_a_user_is_tried_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"def g{index}(response, truth, extra): {body}" for index, (body, _) in enumerate(
        [*TRIED.values(), ("return {'score': response == truth}", "")]
    )]  # fmt: skip
    (tmp_path / "tried_graders.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    extra = {"data_source": "a", "extra_info": {}}
    prompts = [Prompt("mine", row, (1,), "q", "x+1", extra) for row in (4, 5)]

    def try_grader(grader: str | dict[str, str]) -> None:
        try_graders({"mine": grader}, prompts, 10.0, 2048, ["PYTHONPATH"])

    for index, (name, (_, reason)) in enumerate(TRIED.items()):
        with pytest.raises(DataError) as refused:
            try_grader({"a": f"tried_graders:g{index}"})
        start = f"source 'mine', row 4: the grader 'tried_graders:g{index}' gave no grade"
        assert str(refused.value).startswith(start), name
        assert reason in str(refused.value), name
    try_grader(f"tried_graders:g{len(TRIED)}")
    try_grader("math_verify")
