"""Lenient grader: mathematical equality as judged by the Math-Verify library.

It accepts the notations that a person would (`42.0`, `1/2` for `0.5`, a bare box), and some that a
person would not. Pitfalls, as of Math-Verify 0.9.0:
- The truth goes first: `verify(gold, target)` is not symmetric.
- Its time limits use SIGALRM, which fails outside the main thread, so they are off here. A power
  tower may then never return. Grade untrusted text in `GradingPool`, which kills hung workers.
- Without an anchor (box, dollars, "answer is") it takes the last number of the response, so
  repeating the problem may score.
- Errors of parsing or comparing are not raised; they count as "not equal".
"""

from __future__ import annotations

import logging

import math_verify as library  # the package; this module is dapo_megatron.rewards.math_verify

from dapo_megatron.types import Grade

# The library warns once per process that its time limits are off.
logging.getLogger(library.__name__).setLevel(logging.ERROR)


def grade(response: str, truth: str) -> Grade:
    r"""Score +1.0 if an expression in `response` equals `truth`, else -1.0.

    truth: plain or LaTeX, without `\boxed`. `pred` is the text of the parsed expression, or "" with
    `parsed` False. Raises ValueError if the truth contains no expression.
    """
    expected = library.parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"math_verify finds no expression in the truth {truth!r}")
    answer = library.parse(response, parsing_timeout=None)
    correct = bool(library.verify(expected, answer, timeout_seconds=None))
    pred = next((item for item in reversed(answer) if isinstance(item, str)), "")
    return Grade(1.0 if correct else -1.0, correct, pred, parsed=bool(answer))
