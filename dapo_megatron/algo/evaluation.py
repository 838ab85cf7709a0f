"""avg@k, pass@k and cons@k over a set of problems (arXiv 2503.14476, section 4 and figure 1).

The paper has as many samples per problem as k. With more, pass@k here is the unbiased estimate
of arXiv 2107.03374 (eq. 1). All three are means over problems, each in [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def avg_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Mean accuracy. `correct[i][j]`: is sample j of problem i correct.

    Problems weigh the same even if some have fewer samples. Raises ValueError if there is no
    problem, or one without samples.
    """
    _require_samples(correct)
    return math.fsum(sum(row) / len(row) for row in correct) / len(correct)


def pass_at_k(correct: Sequence[Sequence[bool]], *, k: int | None = None) -> float:
    """Probability that k samples of a problem hold a correct one.

    1 - C(n-c, k) / C(n, k) for n samples with c correct; any correct if n == k. `k` None: all
    samples of each problem. Raises ValueError if a problem has fewer than k samples, or k < 1.
    """
    _require_samples(correct)
    return math.fsum(_pass_at_k(row, len(row) if k is None else k) for row in correct) / len(
        correct
    )


def cons_at_k(correct: Sequence[Sequence[bool]], preds: Sequence[Sequence[str]]) -> float:
    """Accuracy of the majority vote over the samples' extracted answers.

    `preds[i][j]` is the answer that `correct[i][j]` judges; the most frequent one stands for its
    problem, in a tie the one that occurs first. Unreadable answers ("[INVALID]") vote too.
    The winner is judged as its first sample was, so a lenient grader stays lenient.
    Raises ValueError as `avg_at_k` does, or if the shapes differ.
    """
    _require_samples(correct)
    if [len(row) for row in correct] != [len(row) for row in preds]:
        raise ValueError("preds and correct differ in shape")
    won = 0
    for row, answers in zip(correct, preds, strict=True):
        winner, _ = Counter(answers).most_common(1)[0]  # insertion order breaks ties
        won += bool(row[answers.index(winner)])
    return won / len(correct)


def _pass_at_k(row: Sequence[bool], k: int) -> float:
    n, num_correct = len(row), sum(map(bool, row))
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    return 1.0 - math.comb(n - num_correct, k) / math.comb(n, k)


def _require_samples(correct: Sequence[Sequence[bool]]) -> None:
    if not correct or not all(correct):
        raise ValueError("need at least one problem, and a sample of each")
