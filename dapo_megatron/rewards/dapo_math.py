r"""Reference DAPO grader: the last "Answer:" line, normalized and compared as a string.

Identical to BytedTsinghua-SIA/DAPO `eval/math_dapo.py` and verl up to v0.9.0, including known
errors, so that rewards and AIME scores are comparable with published ones. Known errors: for 42,
the answers `42.` and `\(42\)` are wrong, as is `033` for 33; `4 2`, `1,2` (for 12) and any chain
that ends in `= truth` are right. `math_verify` is more lenient; do not mix the two in a run.
"""

from __future__ import annotations

import re
from functools import cache

from dapo_megatron.rewards.answers import refuse_solution
from dapo_megatron.types import Grade

INVALID = "[INVALID]"
"""Answer of a response without an "Answer:" line."""

TAIL = 300
"""Number of characters at the end of a response that are searched for the answer."""

_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REWRITES = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)

# Spaces are removed before these, so a unit is also deleted inside another word.
_DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    r"\ldots",
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)

_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # keep only the text between the first two dollars
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def grade(response: str, truth: str) -> Grade:
    """Score +1.0 if the normalized answer equals the normalized truth, else -1.0.

    response: decoded text without special tokens. `pred` is the normalized answer, or "[INVALID]"
    with `parsed` False. Never raises. The cost is bounded, because only the last 300 characters are
    read.
    """
    answers = _ANSWER.findall(response[-TAIL:])
    pred = normalize(answers[-1] if answers else INVALID)
    correct = pred == normalize(truth)
    return Grade(1.0 if correct else -1.0, correct, pred, parsed=pred != INVALID)


@cache  # data sets repeat truths
def check_truth(truth: str) -> None:
    """Raise ValueError if no answer, or an empty one, could equal the truth."""
    refuse_solution(truth)
    if not normalize(truth):
        raise ValueError(
            f"nothing is left of the truth {truth!r:.100} when it is normalized, so that an answer "
            "such as $ would be right; correct the row, or use another grader"
        )
    if grade("", truth).correct:
        raise ValueError(
            f"a response without an answer equals the truth {truth!r}; correct the row"
        )
    if not grade(f"Answer: {truth}", truth).correct:
        raise ValueError(
            f"no answer equals the truth {truth!r:.100}, because answers end with their line and "
            f"are read from the last {TAIL} characters; correct the row, or use another grader"
        )


def normalize(answer: str) -> str:
    """Normalize an answer as the reference does (from Minerva). The order of the steps matters."""
    answer = answer.split("=")[-1]
    for old, new in _REWRITES:
        answer = answer.replace(old, new)
    for expression in _DELETED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _PATTERNS:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
