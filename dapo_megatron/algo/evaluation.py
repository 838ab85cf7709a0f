"""avg@k, pass@k and cons@k over a set of problems (arXiv 2503.14476, section 4 and figure 1).

The paper has as many samples per problem as k. With more, pass@k here is the unbiased estimate
of arXiv 2107.03374 (eq. 1). All three are means over problems, each in [0, 1]: `*_per_problem` are
what the mean is of, and what the bootstrap draws from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

COVERAGE = 0.95
"""Of the intervals."""

Correct = Sequence[Sequence[bool]]
"""`correct[i][j]`: is sample j of problem i correct."""


def avg_at_k(correct: Correct) -> float:
    """Mean accuracy.

    Problems weigh the same even if some have fewer samples. Raises ValueError if there is no
    problem, or one without samples.
    """
    return _mean(avg_per_problem(correct))


def pass_at_k(correct: Correct, *, k: int | None = None) -> float:
    """Probability that k samples of a problem hold a correct one.

    1 - C(n-c, k) / C(n, k) for n samples with c correct; any correct if n == k. `k` None: all
    samples of each problem. Raises ValueError if a problem has fewer than k samples, or k < 1.
    """
    return _mean(pass_per_problem(correct, k=k))


def cons_at_k(correct: Correct, preds: Sequence[Sequence[str]]) -> float:
    """Accuracy of the majority vote over the samples' extracted answers.

    `preds[i][j]` is the answer that `correct[i][j]` judges; the most frequent one stands for its
    problem, in a tie the one that occurs first. Unreadable answers ("[INVALID]") vote too.
    The winner is judged as its first sample was, so a lenient grader stays lenient.
    Raises ValueError as `avg_at_k` does, or if the shapes differ.
    """
    return _mean(cons_per_problem(correct, preds))


def avg_per_problem(correct: Correct) -> list[float]:
    """Accuracy of each problem. Raises as `avg_at_k`."""
    _require_samples(correct)
    return [sum(map(bool, row)) / len(row) for row in correct]


def pass_per_problem(correct: Correct, *, k: int | None = None) -> list[float]:
    """pass@k of each problem. Raises as `pass_at_k`."""
    _require_samples(correct)
    return [_pass_at_k(row, len(row) if k is None else k) for row in correct]


def cons_per_problem(correct: Correct, preds: Sequence[Sequence[str]]) -> list[float]:
    """1 or 0 of each problem: is the majority's answer right. Raises as `cons_at_k`."""
    _require_samples(correct)
    if [len(row) for row in correct] != [len(row) for row in preds]:
        raise ValueError("preds and correct differ in shape")
    won = []
    for row, answers in zip(correct, preds, strict=True):
        winner, _ = Counter(answers).most_common(1)[0]  # insertion order breaks ties
        won.append(float(row[answers.index(winner)]))
    return won


def bootstrap_interval(
    per_problem: Sequence[float], *, resamples: int, seed: int
) -> tuple[float, float]:
    """95% percentile interval of the mean over problems, drawn with replacement.

    It says how far the figure would move with other problems of the kind, and other samples of
    each. Of few problems it is somewhat narrow (of 30 it covers about 93%, of 200, 95%). The same
    seed gives the same interval. Raises ValueError without a problem, or if resamples < 1.
    """
    if not per_problem or resamples < 1:
        raise ValueError(f"{resamples} resamples of {len(per_problem)} problems")
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(per_problem, dtype=torch.float64)
    drawn = torch.randint(len(values), (resamples, len(values)), generator=generator)
    tails = torch.tensor([(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], dtype=torch.float64)
    low, high = values[drawn].mean(dim=1).quantile(tails).tolist()
    return low, high


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _pass_at_k(row: Sequence[bool], k: int) -> float:
    n, num_correct = len(row), sum(map(bool, row))
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    return 1.0 - math.comb(n - num_correct, k) / math.comb(n, k)


def _require_samples(correct: Correct) -> None:
    if not correct or not all(correct):
        raise ValueError("need at least one problem, and a sample of each")
