"""Data of a group for the viewer: its texts, and the pieces and values of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.report.wording import significant
from dapo_megatron.segments import turns
from dapo_megatron.text import visible
from dapo_megatron.tracking.policy_files import PolicyRow
from dapo_megatron.types import Completion, Group

MAX_SHOWN = 2000
"""Maximum length of an answer or a truth in characters. Programs and tests may be far longer."""
_MAX_TEXT = 100_000
"""Maximum length in characters of a prompt, and of a completion without a tokenizer."""


def group_data(
    group: Group, policy: Mapping[int, PolicyRow], pieces: TokenPieces | None
) -> dict[str, Any]:
    """Return the data of a group. `policy` has the policy's values by sample. Tokens are indices
    into `ids` and `pieces`. Without a tokenizer, completions have a `text` instead."""
    indices: dict[tuple[int, str], int] = {}
    completions = [
        _completion(completion, policy.get(completion.sample), pieces, indices)
        for completion in group.completions
    ]
    gaps = [abs(gap) for data in completions for gap in data["gap"] or [] if gap is not None]
    special = pieces.special if pieces is not None else ()
    return {
        "prompt": _shown(group.prompt.text, _MAX_TEXT),
        "truth": _shown(group.prompt.truth) or "none: the grader needs none",
        "ids": [token for token, _ in indices],
        "pieces": [visible(piece) for _, piece in indices],
        "special": [index for (token, _), index in indices.items() if token in special],
        "largest_gap": max(gaps, default=0),
        "completions": completions,
    }


def _completion(
    completion: Completion,
    policy: PolicyRow | None,
    pieces: TokenPieces | None,
    indices: dict[tuple[int, str], int],
) -> dict[str, Any]:
    num, logprobs, grade = completion.num_tokens, completion.logprobs, completion.grade
    segments = completion.segments
    data: dict[str, Any] = {
        "sample": completion.sample,
        "correct": None if grade is None else grade.correct,
        "answer": "" if grade is None else _shown(grade.pred),
        "num_tokens": num,
        "logprob": _rounded(logprobs),
        "entropy": None,
        "gap": None,
        "version": versions_of(completion),
        "observed": [[start, end] for is_observed, start, end in turns(segments) if is_observed],
    }
    policy_logprobs, entropy = (policy.logprobs, policy.entropy) if policy else (None, None)
    if policy_logprobs is not None and len(policy_logprobs) == num:
        pairs = zip(logprobs, policy_logprobs, strict=False)
        data["gap"] = [significant(engine - own, 3) for engine, own in pairs]
    if entropy is not None and len(entropy) == num:
        data["entropy"] = _rounded(entropy)
    for values in filter(None, (data["logprob"], data["entropy"], data["gap"])):
        for start, end in data["observed"]:  # these tokens have no values
            values[start:end] = [None] * len(values[start:end])
    if pieces is None:
        data["text"] = _shown(completion.text, _MAX_TEXT)
    else:
        tokens = zip(completion.tokens, pieces.split(completion.tokens), strict=True)
        data["tokens"] = [indices.setdefault(token, len(indices)) for token in tokens]
    return data


def versions_of(completion: Completion) -> list[int | None]:
    """Return the version of the weights that sampled each token; None where none was sampled."""
    return [
        None if segment.is_observed else segment.version
        for segment in completion.segments
        for _ in range(min(segment.num_tokens, completion.num_tokens))
    ]


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [round(value, 3) if math.isfinite(value) else None for value in values]


def _shown(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return a text with hidden characters made visible, cut with a note if it is too long."""
    if len(text) > max_length:
        text = f"{text[:max_length]} … ({len(text) - max_length:,} more characters are not shown)"
    return visible(text)
