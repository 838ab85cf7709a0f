"""Grade, reward and advantage of a completion, explained in words, as the run recorded them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_megatron.report.folder import RunData
from dapo_megatron.rewards import dapo_math
from dapo_megatron.types import Fate

MAX_SHOWN = 2000
"""Characters of an answer or a truth; a program, or the tests of one, may be far longer."""

MINUS = "\N{MINUS SIGN}"

_LOOKS_FOR = {
    "dapo_math": (
        f"dapo_math reads the last {dapo_math.TAIL} characters, takes what follows the last "
        "“Answer:” there, normalises it (spaces, units, dollars and boxes go) and compares "
        "it with the normalised truth as a string."
    ),
    "math_verify": (
        "math_verify takes an expression from the response (in a box, between dollars, after "
        "“answer is”; else the last number) and asks whether it equals the truth "
        "mathematically."
    ),
    "reasoning_gym": (
        "The scorer of the reasoning-gym data set reads the whole response, without blanks around "
        "it. Only full credit counts as correct."
    ),
    "code": (
        "code runs the last Python block of the response on every test of the problem: what it "
        "prints must be what is expected. All tests must pass, in time."
    ),
}
_ALIKE = "so none is better than another (dynamic sampling)."
_FATES: dict[str, str] = {
    Fate.TRAINED: "The step trained on this group.",
    Fate.ALL_CORRECT: f"Not trained on: all its completions are right, {_ALIKE}",
    Fate.ALL_WRONG: f"Not trained on: all its completions are wrong, {_ALIKE}",
    Fate.OVERLONG: "Not trained on: too few completions are left to compare without the truncated "
    "ones (overlong.filter).",
    Fate.ABSTAINED: "Not trained on: a completion has no grade. Its grader hung, died or raised.",
    Fate.EXPIRED: "Not trained on: it waited for longer than rollout.max_age, or the step was full "
    "and rollout.on_policy carries nothing over.",
}


def grader_of(run: RunData, group: Mapping[str, Any]) -> str | None:
    """Return the name of the grader of a group, by its source; None if the config has none."""
    for source in run.sources():
        if source.get("name") == group["source"]:
            grader = source.get("grader", source.get("kind"))
            if isinstance(grader, dict):
                grader = grader.get(str((group.get("extra") or {}).get("data_source")))
            return grader if isinstance(grader, str) else None
    return None


def explain(
    grader: str | None, group: Mapping[str, Any], position: int, advantage: float | None
) -> list[tuple[str, str]]:
    """Explain the grade of the completion at `position`: (heading, sentences).

    `advantage` is what the run recorded, None without a record.
    """
    completion = group["completions"][position]
    facts = [("Grader", _looks_for(grader))]
    if completion["score"] is None:
        facts.append(("Verdict", "No grade: the grader hung, died or raised on it."))
    else:
        facts.append(("Answer read", _answer(grader, completion, group["truth"])))
        facts.append(("Verdict", "Right." if completion["correct"] else "Wrong."))
        if (reward := completion.get("reward")) is not None:
            facts.append(("Reward", _reward(reward, completion)))
    fate = group["fate"]
    if fate == Fate.TRAINED:
        facts.append(("Advantage", _advantage(advantage)))
    facts.append(("Group", _FATES.get(fate, f"Its fate: {fate}.")))
    return facts


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Return a text, cut with a word about it if it is too long."""
    if len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters are not shown)"


def _looks_for(grader: str | None) -> str:
    if grader is None:
        return "The config names no grader for this data set."
    return _LOOKS_FOR.get(
        grader, f"{grader}, a function of this run's owner: its code says what it looks for."
    )


def _answer(grader: str | None, completion: Mapping[str, Any], truth: str) -> str:
    pred = completion["pred"] or ""
    if not completion["parsed"]:
        return f"None found.{_missed(completion['text']) if grader == 'dapo_math' else ''}"
    if grader == "code":
        return f"A program of {len(pred.splitlines())} lines."
    answer = f"“{shown(pred, 300)}”"
    if grader == "dapo_math" and (normal := dapo_math.normalise(truth)) != truth:
        answer += f", compared with the truth as normalised: “{shown(normal, 300)}”"
    return answer if pred else "This grader does not report what it read."


def _missed(text: str) -> str:
    """Locate an answer that dapo_math did not look at."""
    place = text.lower().rfind("answer:")
    if place < 0:
        return " Nowhere in the response is there an “Answer:”."
    return f" The last “Answer:” is {len(text) - place:,} characters before the end."


def _reward(reward: float, completion: Mapping[str, Any]) -> str:
    score, num_tokens = completion["score"], len(completion["tokens"])
    if reward == score:
        return f"{_figure(reward)}: the score, without a length penalty."
    return (
        f"{_figure(score)} {MINUS} {score - reward:.4g} = {_figure(reward)}: the score, less the "
        f"length penalty of {num_tokens:,} tokens (overlong.penalty)."
    )


def _advantage(advantage: float | None) -> str:
    if advantage is None:
        return (
            "None recorded. A truncated completion has none where overlong.filter leaves it out of "
            "its group."
        )
    return (
        f"{_figure(advantage)}: its reward less the mean of its group, over the standard deviation "
        "of its group."
    )


def _figure(value: float) -> str:
    return f"{value:.4g}".replace("-", MINUS, 1) if value < 0 else f"{value:.4g}"
