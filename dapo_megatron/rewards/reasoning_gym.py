"""The scorers of the reasoning-gym package, each data set's own.

A scorer gives partial credit between 0 and 1; only full credit counts as correct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym as library  # the package; this module is dapo_megatron.rewards.reasoning_gym

from dapo_megatron.types import Grade


def grade(response: str, truth: str, extra: Mapping[str, Any]) -> Grade:
    """Score +1.0 if the data set's scorer gives full credit to the whole response, else -1.0.

    response: stripped and scored as it is, with nothing extracted from it; that is `pred`.
    truth: not read; scorers look at the entry, since many problems have several answers.
    extra: {"dataset": name, "entry": {"question", "answer", "metadata"}} and, for the few
    scorers that read their settings, "options" of the data set. JSON values.
    Raises KeyError without those keys, ValueError for an unknown data set.
    """
    scorer = _scorer(extra["dataset"], json.dumps(extra.get("options", {}), sort_keys=True))
    pred = response.strip()
    correct = bool(scorer(answer=pred, entry=extra["entry"]) == 1.0)
    return Grade(score=1.0 if correct else -1.0, correct=correct, pred=pred)


@lru_cache(maxsize=64)
def _scorer(dataset: str, options: str) -> Callable[..., float]:
    # Problems are generated when indexed; making the data set makes none.
    scorer: Callable[..., float] = library.create_dataset(
        dataset, **json.loads(options)
    ).score_answer
    return scorer
