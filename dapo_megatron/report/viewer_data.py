"""Data of a group for the viewer: its texts, and the pieces and values of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.report.wording import rounded, significant
from dapo_megatron.text import visible
from dapo_megatron.tracking.policy_files import PolicyRow
from dapo_megatron.types import Completion, Group

MAX_TOKENS = 32_768
"""Maximum number of tokens to show of a completion. The middle of a longer one is cut."""
MAX_SHOWN = 2000
"""Maximum length of an answer or a truth in characters. Programs and tests may be far longer."""
_MAX_PROMPT = 100_000
"""Maximum length of a prompt in characters."""
_CHARACTERS_PER_TOKEN = 4


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
    prompt = group.prompt
    gaps = [abs(gap) for data in completions for gap in data["gap"] or [] if gap is not None]
    return {
        "prompt": _shown(prompt.text, _MAX_PROMPT),
        "truth": _shown(prompt.truth) or "none: the grader needs none",
        "ids": [token for token, _ in indices],
        "pieces": [visible(piece) for _, piece in indices],
        "special": [
            index for (token, _), index in indices.items() if pieces and token in pieces.special
        ],
        "largest_gap": max(gaps, default=0),
        "completions": completions,
    }


def _completion(
    completion: Completion,
    policy: PolicyRow | None,
    pieces: TokenPieces | None,
    indices: dict[tuple[int, str], int],
) -> dict[str, Any]:
    num = completion.num_tokens
    num_cut = max(num - MAX_TOKENS, 0)
    first = MAX_TOKENS // 2 if num_cut else num

    def kept(values: Sequence[Any]) -> Sequence[Any]:
        return [*values[:first], *values[first + num_cut :]] if num_cut else values

    logprobs, grade = completion.logprobs, completion.grade
    policy_logprobs, entropy = (policy.logprobs, policy.entropy) if policy else (None, None)
    versions = [
        segment.version
        for segment in completion.segments
        for _ in range(min(segment.num_tokens, num))
    ]
    data: dict[str, Any] = {
        "sample": completion.sample,
        "correct": None if grade is None else grade.correct,
        "answer": "" if grade is None else _shown(grade.pred),
        "num_tokens": num,
        "cut": [first, num_cut] if num_cut else None,
        "logprob": [rounded(value, 3) for value in kept(logprobs)],
        "entropy": None,
        "gap": None,
        "version": kept(versions),
    }
    if policy_logprobs is not None and len(policy_logprobs) == num:
        data["gap"] = [
            significant(by_engine - by_policy, 3)
            for by_engine, by_policy in zip(kept(logprobs), kept(policy_logprobs))
        ]
    if entropy is not None and len(entropy) == num:
        data["entropy"] = [rounded(value, 3) for value in kept(entropy)]
    if pieces is None:
        data["text"] = _shown(completion.text, MAX_TOKENS * _CHARACTERS_PER_TOKEN)
    else:
        tokens = kept(completion.tokens)
        pairs = zip(tokens, pieces.split(tokens))
        data["tokens"] = [indices.setdefault(pair, len(indices)) for pair in pairs]
    return data


def _shown(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return a text with hidden characters made visible, cut with a note if it is too long."""
    if len(text) > max_length:
        text = f"{text[:max_length]} … ({len(text) - max_length:,} more characters are not shown)"
    return visible(text)
