"""A few groups in full, as small as they come: see rollouts.py for the form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_megatron.report.choosing import Pick
from dapo_megatron.report.folder import RunData
from dapo_megatron.report.grades import explain, grader_of, shown
from dapo_megatron.report.token_text import Pieces
from dapo_megatron.rollout.serialization import rounded, significant, summary

MAX_TOKENS = 32_768
"""Longest completion shown whole; the middle of a longer one is left out, with a mark."""
_MAX_PROMPT = 100_000
"""Characters."""
_CHARACTERS_PER_TOKEN = 4
_BYTES_PER_VALUE = 4
"""Approximate, in JSON."""
_IN_BOTH = ("sample", "finish", "score", "correct", "reward", "advantage")
"""Values in both the table and the completion in full."""


class Blob:
    """Groups are added; `to_json` is what the page opens."""

    def __init__(self, run: RunData, pieces: Pieces | None) -> None:
        self._run, self._pieces = run, pieces
        self._places: dict[tuple[int, str], int] = {}
        """Places of a token with its piece: one that ends inside a character has several."""
        self._counts: list[int] = []
        self._groups: dict[str, dict[str, Any]] = {}
        self.size = 0
        """Bytes of JSON, about."""

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def add(self, place: int, group: Mapping[str, Any], pick: Pick) -> list[dict[str, Any]]:
        """Add the group that is number `place` of the table; its rows of the table. Of one that
        cannot be shown it raises before anything is added."""
        grader = grader_of(self._run, group)
        rows, shown_ones = [], []
        for position, one in enumerate(group["completions"]):
            policy = group["policy"].get(one["sample"], {})
            advantage = policy.get("advantage")
            row = {
                **_row(place, group, one, policy, pick),
                "reward": rounded(one.get("reward")),
                "advantage": rounded(advantage),
            }
            rows.append(row)
            shown_ones.append(
                {
                    **{name: row[name] for name in _IN_BOTH},
                    "parsed": one["parsed"],
                    "pred": shown(one["pred"] or "") if one["score"] is not None else None,
                    "why": row["why"],
                    "grade": explain(grader, group, position, advantage),
                    **self._tokens(one, policy),
                }
            )
        decimals = _gap_decimals([one["gap"] for one in shown_ones if one["gap"]])
        for shown_one in shown_ones:
            shown_one["gap"] = shown_one["gap"] and _whole(shown_one["gap"], 10**decimals)
        body = {
            **{name: group[name] for name in ("ticket", "source", "fate", "verdict")},
            "step": pick.group.step,
            "gap_decimals": decimals,
            "prompt": shown(group["prompt"], _MAX_PROMPT),
            "truth": shown(group["truth"]),
            "completions": shown_ones,
        }
        for shown_one in shown_ones:
            self._keep(shown_one)
        self._groups[str(place)] = body
        return rows

    def to_json(self) -> dict[str, Any]:
        """Pieces and ids with the most frequent first, so that their numbers are short."""
        order = sorted(range(len(self._counts)), key=lambda place: -self._counts[place])
        new = {old: place for place, old in enumerate(order)}
        for group in self._groups.values():
            for one in group["completions"]:
                if "tokens" in one:
                    one["tokens"] = [new[old] for old in one["tokens"]]
        pairs = list(self._places)
        special = self._pieces.special if self._pieces else set()
        return {
            "ids": [pairs[old][0] for old in order],
            "pieces": [pairs[old][1] for old in order],
            "special": [new[old] for old, (token, _) in enumerate(pairs) if token in special],
            "groups": self._groups,
        }

    def _tokens(self, one: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
        """Values of each token. Gaps are not scaled yet: their unit is that of the group."""
        num = len(one["tokens"])
        cut = (MAX_TOKENS // 2, num - MAX_TOKENS) if num > MAX_TOKENS else None

        def kept(values: Sequence[Any]) -> Sequence[Any]:
            return values if cut is None else [*values[: cut[0]], *values[cut[0] + cut[1] :]]

        logprobs = kept(one["logprobs"])
        found: dict[str, Any] = {
            "num_tokens": num,
            "segments": one["segments"],
            "logprob": _whole(logprobs, 1000),
            "gap": None,
            "entropy": None,
        }
        if cut:
            found["cut"] = cut
        if self._pieces is None:
            found["text"] = shown(one["text"], MAX_TOKENS * _CHARACTERS_PER_TOKEN)
        else:
            tokens = kept(one["tokens"])
            found["tokens"] = list(zip(tokens, self._pieces.split(tokens)))
        if (of_policy := policy.get("logprobs")) is not None and len(of_policy) == num:
            found["gap"] = _differences(logprobs, kept(of_policy))
        if (entropy := policy.get("entropy")) is not None and len(entropy) == num:
            found["entropy"] = _whole(kept(entropy), 1000)
        return found

    def _keep(self, found: dict[str, Any]) -> None:
        """Number the tokens of a completion, (id, piece) so far, and count its size."""
        if "tokens" in found:
            found["tokens"] = self._numbered(found["tokens"])
        lists = [found[name] or [] for name in ("logprob", "gap", "entropy")]
        num_values = len(found.get("tokens", [])) + sum(map(len, lists))
        self.size += _BYTES_PER_VALUE * num_values + len(found.get("text", ""))

    def _numbered(self, pairs: Sequence[tuple[int, str]]) -> list[int]:
        places, counts = self._places, self._counts
        numbered = []
        for pair in pairs:
            place = places.get(pair)
            if place is None:
                place = places[pair] = len(counts)
                counts.append(0)
            counts[place] += 1
            numbered.append(place)
        return numbered


def _row(
    place: int,
    group: Mapping[str, Any],
    one: Mapping[str, Any],
    policy: Mapping[str, Any],
    pick: Pick,
) -> dict[str, Any]:
    """The row of a completion in the table, except reward and advantage."""
    brief = summary(pick.group.step, one)
    return {
        "step": pick.group.step,
        **{name: group[name] for name in ("ticket", "source", "fate", "verdict")},
        **{name: one[name] for name in ("sample", "correct", "score", "finish")},
        **{name: brief[name] for name in ("num_tokens", "age", "logprob_mean", "logprob_min")},
        "graded": "none" if one["score"] is None else "read" if one["parsed"] else "unread",
        "gap_max": significant(policy.get("gap_max")),
        "why": pick.why(one["sample"]),
        "group": place,
    }


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float | None]:
    try:
        return [one - other for one, other in zip(ours, theirs)]
    except TypeError:  # JSON has no infinity: null
        return [None if o is None or t is None else o - t for o, t in zip(ours, theirs)]


def _gap_decimals(gaps: Sequence[Sequence[float | None]]) -> int:
    """Decimals such that the largest has four digits: at least 4, so that a scale of colours goes
    up to 1, and at most the 6 that are recorded. On a CPU gaps are about 1e-6."""
    known = (abs(gap) for some in gaps for gap in some if gap is not None and math.isfinite(gap))
    largest = max(known, default=0.0)
    return min(max(3 - math.floor(math.log10(largest)), 4), 6) if largest else 4


def _whole(values: Sequence[float | None], scale: int) -> list[int | None]:
    """Whole numbers of 1/scale; None for what is not finite."""
    try:
        return [round(value * scale) for value in values]  # type: ignore[operator]
    except (TypeError, ValueError, OverflowError):
        return [
            None if value is None or not math.isfinite(value) else round(value * scale)
            for value in values
        ]
