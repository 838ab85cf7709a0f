"""The lenient grader: mathematical equality as judged by the Math-Verify library.

It accepts what a person would (`42.0`, `1/2` for `0.5`, a bare box) and some of what one would
not. Traps, as of Math-Verify 0.9.0:
- The truth goes first: `verify(gold, target)` is not symmetric.
- Its own time limits use SIGALRM, which fails outside a main thread; they are off here. A power
  tower may then never return, so untrusted text belongs in `GradingPool`, which can kill.
- Without an anchor (box, dollars, "answer is") it takes the last number of the response, so
  repeating the problem may score.
- Failures to parse or to compare are answered with "not equal", not raised.
"""

from __future__ import annotations

import logging

import math_verify as library  # the package; this module is dapo_megatron.rewards.math_verify

from dapo_megatron.types import Grade

# It warns once per process that its time limits are off; see above.
logging.getLogger(library.__name__).setLevel(logging.ERROR)


def grade(response: str, truth: str) -> Grade:
    r"""Score +1.0 if an expression in `response` equals `truth`, else -1.0.

    truth: plain or LaTeX, without `\boxed`. `pred` is the text of the expression found, "" if
    there is none (not `parsed`). Raises ValueError if the truth itself holds no expression.
    """
    expected = library.parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"math_verify finds no expression in the truth {truth!r}")
    found = library.parse(response, parsing_timeout=None)
    correct = bool(library.verify(expected, found, timeout_seconds=None))
    pred = next((item for item in reversed(found) if isinstance(item, str)), "")
    return Grade(1.0 if correct else -1.0, correct, pred, parsed=bool(found))
