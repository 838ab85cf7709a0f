"""Data of one group for the viewer: its texts, and the pieces and values of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_megatron.report.token_text import Pieces
from dapo_megatron.report.wording import visible

MAX_TOKENS = 32_768
"""Longest completion shown whole; the middle of a longer one is left out, with a mark."""
MAX_SHOWN = 2000
"""Characters of an answer or a truth; a program, or the tests of one, may be far longer."""
_MAX_PROMPT = 100_000
"""Characters."""
_CHARACTERS_PER_TOKEN = 4


def group_data(
    group: Mapping[str, Any], policy: Mapping[int, Mapping[str, Any]], pieces: Pieces | None
) -> dict[str, Any]:
    """Return a group with the policy's values by sample. Tokens are places in `ids` and `pieces`;
    without a tokenizer completions have a `text` instead."""
    places: dict[tuple[int, str], int] = {}
    completions = [
        _completion(one, policy.get(one["sample"], {}), pieces, places)
        for one in group["completions"]
    ]
    gaps = [abs(gap) for one in completions for gap in one["gap"] or [] if gap is not None]
    return {
        "prompt": _shown(group["prompt"], _MAX_PROMPT),
        "truth": _shown(group["truth"]) or "none: the grader needs none",
        "ids": [token for token, _ in places],
        "pieces": [visible(piece) for _, piece in places],
        "special": [
            place for (token, _), place in places.items() if pieces and token in pieces.special
        ],
        "largest_gap": max(gaps, default=0),
        "completions": completions,
    }


def _completion(
    one: Mapping[str, Any],
    policy: Mapping[str, Any],
    pieces: Pieces | None,
    places: dict[tuple[int, str], int],
) -> dict[str, Any]:
    num = len(one["tokens"])
    num_cut = max(num - MAX_TOKENS, 0)
    first = MAX_TOKENS // 2 if num_cut else num

    def kept(values: Sequence[Any]) -> Sequence[Any]:
        return [*values[:first], *values[first + num_cut :]] if num_cut else values

    theirs, entropy = policy.get("logprobs"), policy.get("entropy")
    versions = [version for version, count in one["segments"] for _ in range(min(count, num))]
    data: dict[str, Any] = {
        "sample": one["sample"],
        "correct": one["correct"],
        "answer": _shown(one["pred"] or "") if one["score"] is not None else "",
        "num_tokens": num,
        "cut": [first, num_cut] if num_cut else None,
        "logprob": [_rounded(value) for value in kept(one["logprobs"])],
        "entropy": None,
        "gap": None,
        "version": kept(versions),
    }
    if theirs is not None and len(theirs) == num:
        pairs = zip(kept(one["logprobs"]), kept(theirs))
        data["gap"] = [None if other is None else _significant(own - other) for own, other in pairs]
    if entropy is not None and len(entropy) == num:
        data["entropy"] = [_rounded(value) for value in kept(entropy)]
    if pieces is None:
        data["text"] = _shown(one["text"], MAX_TOKENS * _CHARACTERS_PER_TOKEN)
    else:
        tokens = kept(one["tokens"])
        pairs_of_tokens = zip(tokens, pieces.split(tokens))
        data["tokens"] = [places.setdefault(pair, len(places)) for pair in pairs_of_tokens]
    return data


def _shown(text: str, most: int = MAX_SHOWN) -> str:
    """Return a text with all its characters visible, cut with a note if it is too long."""
    if len(text) > most:
        text = f"{text[:most]} … ({len(text) - most:,} more characters are not shown)"
    return visible(text)


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None and math.isfinite(value) else None


def _significant(value: float) -> float | None:
    """Return three digits, however small: a gap of 1e-6 is not 0."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
