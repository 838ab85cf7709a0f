"""What a policy would answer: lengths and correctness of the G completions of each ticket.

A group is a function of seed and ticket alone, so every way of collecting groups meets the same
ones, and asking twice gives the same answer. Lengths are log-normal, cut at a cap as a response is
at its limit; or groups are drawn from a recorded run.

Shape letters: P prompts, G completions of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Protocol

import numpy as np

BLOCK = 256
"""Tickets drawn together."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One group: tokens of each completion, and which are correct."""

    lengths: tuple[int, ...]
    correct: tuple[bool, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether dynamic sampling keeps it."""
        return any(self.correct) and not all(self.correct)

    @property
    def mean_length(self) -> float:
        """Tokens per completion."""
        return sum(self.lengths) / len(self.lengths)


class Workload(Protocol):
    """Where answers come from."""

    def group(self, ticket: int) -> Answers:
        """The group of a ticket."""
        ...


@dataclass
class LogNormal:
    """Lengths of mean `mean` after the cut at `cap`; a share `between` of the variance of their
    logarithms is that of prompts, the rest of completions of one prompt. Pass rates of prompts are
    Beta(a, a), with the `a` at which a share `keep_rate` of groups is mixed."""

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
        """The group of a ticket."""
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
        """The group of a ticket."""
        rng = np.random.default_rng([self.seed, ticket])
        return self.groups[int(rng.integers(len(self.groups)))]


def read_recorded(folder: Path) -> list[Answers]:
    """Groups of a run's samples/step_*.jsonl (rollout/serialization.py); those with a completion
    without a grade are left out. An on-policy run drops what is still running, so its long answers
    are too few.

    Raises ValueError if none is left, or if their numbers of completions differ.
    """
    groups = []
    for path in sorted(folder.glob("step_*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                completions = json.loads(line)["completions"]
                lengths = tuple(len(one["tokens"]) for one in completions)
                correct = tuple(one["correct"] for one in completions)
                if None not in correct:
                    groups.append(Answers(lengths, correct))
    if not groups:
        raise ValueError(f"{folder}: no step_*.jsonl with a graded group; name a run's samples/")
    if len({len(group.lengths) for group in groups}) > 1:
        raise ValueError(f"{folder}: groups of different sizes; name the samples/ of one run")
    return groups


def location(mean: float, sigma: float, cap: int) -> float:
    """The mu of a log-normal of which min(x, cap) has this mean, in closed form but for a search.

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
    """The a at which groups of so many completions, with pass rates of Beta(a, a), are mixed with
    probability `keep_rate`: 1 - 2 B(a, a + G) / B(a, a).

    Raises ValueError for a rate that no a gives.
    """
    most = 1 - 2.0 ** (1 - samples)  # every pass rate one half
    if not 0 < keep_rate < most:
        raise ValueError(f"keep rate {keep_rate:g}: must be between 0 and {most:g}")

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
