"""Jaccard similarity of problems: sets of 5-character shingles, case folded.

Shingles are characters, because a fifth of DAPO-Math-17k is Chinese and has no spaces. MinHash
proposes pairs, and the similarity of the sets decides.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from zlib import crc32

import numpy as np

SHINGLE_CHARACTERS = 5
NUM_PERMUTATIONS = 128
RECALL = 0.995
"""Minimum probability that a pair exactly at the similarity threshold is compared."""

Sketch = tuple[Any, np.ndarray]
"""MinHash of a problem, and the sorted hashes of its shingles, [shingles], uint32."""


def sketch_of(problem: str) -> Sketch:
    """Return what `Index` needs to know of a problem."""
    text = problem.casefold()
    ends = range(SHINGLE_CHARACTERS, max(len(text), SHINGLE_CHARACTERS) + 1)
    shingles = (text[end - SHINGLE_CHARACTERS : end] for end in ends)
    hashes = sorted({crc32(shingle.encode("utf-8")) for shingle in shingles})
    signature = _empty_minhash().copy()
    signature.update_batch(hashes)
    return signature, np.array(hashes, np.uint32)


@cache
def _empty_minhash() -> Any:
    from datasketch import MinHash

    return MinHash(num_perm=NUM_PERMUTATIONS, hashfunc=int)


class Index:
    """Problems by key, searchable for the nearest: by bands of their MinHash."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._bands = MinHashLSH(num_perm=NUM_PERMUTATIONS, params=bands_of(threshold))
        self._hashes: dict[int, np.ndarray] = {}

    def add(self, key: int, sketch: Sketch) -> None:
        """Add a problem under a key."""
        self._bands.insert(key, sketch[0], check_duplication=False)
        self._hashes[key] = sketch[1]

    def nearest(self, sketch: Sketch) -> tuple[int, float] | None:
        """Return (key, similarity) of the nearest problem that reaches the threshold, or None.

        Of equally near problems it returns the first.
        """
        nearest: tuple[int, float] | None = None
        for key in sorted(self._bands.query(sketch[0])):
            similarity = jaccard(sketch[1], self._hashes[key])
            if similarity >= self._threshold and (nearest is None or similarity > nearest[1]):
                nearest = (key, similarity)
        return nearest


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """Return the Jaccard similarity of two sorted arrays without repeats, [shingles]."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def bands_of(threshold: float) -> tuple[int, int]:
    """Return (bands, rows per band) with the most rows that still reach RECALL at the threshold.

    A pair of similarity s agrees in one band of r rows with probability s^r, and in at least one of
    b bands with probability 1 - (1 - s^r)^b.
    """
    for rows in range(NUM_PERMUTATIONS // 2, 1, -1):
        bands = NUM_PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return NUM_PERMUTATIONS, 1
