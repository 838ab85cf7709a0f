"""Segments of a completion: which tokens were sampled, and which an environment wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENVIRONMENT = -1
"""Takes the place of the engine in segments that an environment wrote."""
BRANCH = -2
"""Takes the place of the engine in segments that start a new branch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_tokens` consecutive tokens of a completion, either sampled by weights of one version or
    observed.

    An environment writes observed tokens: they are read like a prompt, and not trained on. Their
    log-probs are 0, and their `version` is the one of the tokens before them. `engine` is the
    replica that sampled the tokens, as rank 0 knows it, or ENVIRONMENT, or BRANCH.

    An agent that rewrites the conversation so far starts a new branch: observed tokens that follow
    the prompt again, as if the completion had no tokens before them.
    """

    version: int
    num_tokens: int
    engine: int = 0

    @property
    def is_observed(self) -> bool:
        """Whether an environment wrote these tokens."""
        return self.engine in (ENVIRONMENT, BRANCH)


def branches(segments: Iterable[Segment]) -> list[tuple[int, tuple[Segment, ...]]]:
    """Return (first token, segments) of each branch. All but completions of agents have one, which
    begins with the first token."""
    parts: dict[int, tuple[Segment, ...]] = {}
    start = end = 0
    for segment in segments:
        if segment.engine == BRANCH:
            start = end
        parts[start] = (*parts.get(start, ()), segment)
        end += segment.num_tokens
    return list(parts.items())


def num_sampled(segments: Iterable[Segment]) -> int:
    """Return the number of tokens of these segments that were sampled."""
    return sum(segment.num_tokens for segment in segments if not segment.is_observed)


def is_sampled(segments: Iterable[Segment]) -> NDArray[np.bool_]:
    """Return for each token of these segments whether it was sampled."""
    import numpy as np

    parts = [(not segment.is_observed, segment.num_tokens) for segment in segments]
    kinds, lengths = zip(*parts) if parts else ((), ())
    return np.repeat(np.array(kinds, np.bool_), np.array(lengths, np.int64))


def turns(segments: Iterable[Segment]) -> Iterator[tuple[bool, int, int]]:
    """Yield (whether it was observed, first token, end) of each turn: of consecutive segments that
    were all sampled, or all observed."""
    end = 0
    for is_observed, parts in groupby(segments, lambda segment: segment.is_observed):
        start, end = end, end + sum(segment.num_tokens for segment in parts)
        yield is_observed, start, end
