"""Lengths and correctness of the G completions of each ticket, drawn or recorded.

A group depends on seed and ticket only, so every policy that collects groups meets the same groups.
Lengths are log-normal, cut at the response limit, or groups are drawn from a recorded run.

Shape letters: P prompts, G completions of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

import numpy as np

from dapo_megatron.rollout.record import recorded_steps, summaries

BLOCK = 256
"""Number of tickets that are drawn together."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Number of tokens and correctness of each completion of a group."""

    lengths: tuple[int, ...]
    correct: tuple[bool, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether dynamic sampling keeps the group."""
        return any(self.correct) and not all(self.correct)

    @property
    def mean_length(self) -> float:
        """Tokens per completion."""
        return sum(self.lengths) / len(self.lengths)


class Workload(Protocol):
    """Source of answers."""

    def group(self, ticket: int) -> Answers:
        """Return the group of a ticket."""
        ...


@dataclass
class LogNormal:
    """Log-normal lengths with mean `mean` after the cut at `cap`, and Beta-distributed pass rates.

    The logarithm of a length has standard deviation `sigma`. A share `between` of its variance is
    between prompts, the rest between completions of a prompt. Pass rates of prompts are Beta(a, a),
    with the `a` at which a share `keep_rate` of the groups is mixed.
    """

    mean: float
    keep_rate: float
    samples: int = 16
    cap: int = 20_480
    sigma: float = 1.0
    between: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._mu = location(self.mean, self.sigma, self.cap)
        self._a = concentration(self.keep_rate, self.samples)
        self._blocks: dict[int, list[Answers]] = {}

    def group(self, ticket: int) -> Answers:
        """Return the group of a ticket."""
        block, place = divmod(ticket, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][place]

    def _draw(self, block: int) -> list[Answers]:
        rng = np.random.default_rng([self.seed, block])
        shape = (BLOCK, self.samples)
        normal_P1 = rng.standard_normal((BLOCK, 1))
        normal_PG = rng.standard_normal(shape)
        normal_PG = math.sqrt(self.between) * normal_P1 + math.sqrt(1 - self.between) * normal_PG
        lengths_PG = np.exp(self._mu + self.sigma * normal_PG).round().clip(1, self.cap).astype(int)
        correct_PG = rng.random(shape) < rng.beta(self._a, self._a, (BLOCK, 1))
        return [
            Answers(tuple(lengths), tuple(correct))
            for lengths, correct in zip(lengths_PG.tolist(), correct_PG.tolist())
        ]


@dataclass
class Recorded:
    """Groups of a recorded run, drawn with replacement."""

    groups: list[Answers]
    seed: int = 0

    @property
    def mean(self) -> float:
        """Tokens per completion."""
        return fmean(group.mean_length for group in self.groups)

    @property
    def keep_rate(self) -> float:
        """Share of mixed groups."""
        return fmean(group.is_mixed for group in self.groups)

    def group(self, ticket: int) -> Answers:
        """Return the group of a ticket."""
        rng = np.random.default_rng([self.seed, ticket])
        return self.groups[int(rng.integers(len(self.groups)))]


def read_recorded(folder: Path) -> list[Answers]:
    """Read the groups of a run's samples/ (rollout/record.py), without their tokens.

    Groups with an ungraded completion are left out. Do not use an on-policy run: it drops groups
    that are still running, so long answers are too rare.

    Raises ValueError if no group is left, or if their numbers of completions differ.
    """
    groups = []
    for step in recorded_steps(folder).values():
        for _, group in summaries(step).groupby("ticket"):
            if group["correct"].notna().all():
                groups.append(Answers(tuple(group["num_tokens"]), tuple(group["correct"])))
    if not groups:
        raise ValueError(f"{folder}: no step_* with a graded group; name a run's samples/")
    if len({len(group.lengths) for group in groups}) > 1:
        raise ValueError(f"{folder}: groups of different sizes; name the samples/ of one run")
    return groups


def location(mean: float, sigma: float, cap: int) -> float:
    """Return the mu of a log-normal x for which min(x, cap) has this mean, found by bisection.

    Raises ValueError if the mean is not between 1 and the cap.
    """
    if not 1 < mean < cap:
        raise ValueError(f"mean length {mean:g}: must be between 1 and the cap, {cap}")
    normal, top = NormalDist(), math.log(cap)

    def cut_mean(mu: float) -> float:
        below = math.exp(mu + sigma**2 / 2) * normal.cdf((top - mu - sigma**2) / sigma)
        return below + cap * (1 - normal.cdf((top - mu) / sigma))

    return _solve(cut_mean, mean, -10.0, 2 * top)


def concentration(keep_rate: float, samples: int) -> float:
    """Return the a at which a share `keep_rate` of groups is mixed.

    With pass rates from Beta(a, a), a group of G = `samples` completions is mixed with probability
    1 - 2 B(a, a + G) / B(a, a).

    Raises ValueError for a rate that no a gives.
    """
    highest = 1 - 2.0 ** (1 - samples)  # all pass rates are 1/2
    if not 0 < keep_rate < highest:
        raise ValueError(f"keep rate {keep_rate:g}: must be between 0 and {highest:g}")

    def mixed(log_a: float) -> float:
        a = math.exp(log_a)
        uniform = math.lgamma(a + samples) - math.lgamma(2 * a + samples)
        return 1 - 2 * math.exp(uniform + math.lgamma(2 * a) - math.lgamma(a))

    return math.exp(_solve(mixed, keep_rate, -20.0, 15.0))


def _solve(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
