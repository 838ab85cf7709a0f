"""The instructions that all prompts of a set share, taken off before problems are compared.

DAPO-Math-17k wraps every problem in the same 42 words. With them, two short problems that have
nothing in common would look alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

MIN_PROMPTS = 10
"""Fewer prompts may share words by chance: only the known frame is taken off them."""
DAPO_MATH = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
"""How prompts of DAPO-Math-17k and of AIME-2024 open and close."""


def fold(text: str) -> str:
    """Every run of whitespace as one space, none at the ends."""
    return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Frame:
    """The words with which all prompts of a set open and close."""

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()

    def strip(self, text: str) -> str:
        """The problem in a prompt of the set: folded, without the known frame and this one."""
        words = _without_known(text)
        first, last = len(self.opening), len(words) - len(self.closing)
        if first < last and (*words[:first], *words[last:]) == self.opening + self.closing:
            words = words[first:last]
        return " ".join(words)

    def to_json(self) -> dict[str, str]:
        """For the report, and for the prepared file itself."""
        return {"opens": " ".join(self.opening), "closes": " ".join(self.closing)}

    @classmethod
    def from_json(cls, value: Mapping[str, str]) -> Frame:
        """The reverse."""
        return cls(tuple(value["opens"].split()), tuple(value["closes"].split()))


def frame_of(texts: Iterable[str]) -> Frame:
    """What all `texts` share at their ends, in whole words; every one keeps a word at least."""
    opening: list[str] = []
    closing: list[str] = []
    shortest = num_texts = 0
    for num_texts, text in enumerate(texts, start=1):
        words = _without_known(text)
        if num_texts == 1:
            opening, closing, shortest = words, words[::-1], len(words)
        opening = _shared(opening, words)
        closing = _shared(closing, words[::-1])
        shortest = min(shortest, len(words))
    if num_texts < MIN_PROMPTS:
        return Frame()
    opening = opening[: max(0, shortest - 1)]
    closing = closing[: max(0, shortest - 1 - len(opening))]
    return Frame(tuple(opening), tuple(reversed(closing)))


def _shared(one: list[str], other: list[str]) -> list[str]:
    pairs = zip(one, other, strict=False)
    return [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _without_known(text: str) -> list[str]:
    folded = fold(text)
    opening, closing = DAPO_MATH
    if folded.startswith(opening) and folded.endswith(closing):
        inner = folded[len(opening) : len(folded) - len(closing)].split()
        return inner or folded.split()
    return folded.split()
