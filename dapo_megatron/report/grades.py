"""Grade, reward and advantage of a completion, explained in words and numbers.

Advantages are computed here without torch. A test compares them with algo/advantage.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dapo_megatron.algo.overlong import Reward, completion_reward
from dapo_megatron.report.folder import RunData
from dapo_megatron.rewards import dapo_math

MAX_SHOWN = 2000
"""Characters of an answer or a truth; a program, or the tests of one, may be far longer."""

MINUS = "\N{MINUS SIGN}"

_SAME_ADVANTAGE = 0.001
"""The run computes in float32."""

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
_FATES = {
    "trained": "The step trained on this group.",
    "all_correct": "Not trained on: all its completions are right, so none is better than another "
    "(dynamic sampling).",
    "all_wrong": "Not trained on: all its completions are wrong, so none is better than another "
    "(dynamic sampling).",
    "overlong": "Not trained on: without its truncated completions (overlong.filter) too few are "
    "left to compare.",
    "abstained": "Not trained on: a completion has no grade, for its grader hung, died or raised.",
    "expired": "Not trained on: it waited for longer than rollout.max_age, or the step was full "
    "and rollout.on_policy carries nothing over.",
}


@dataclass(frozen=True)
class Rules:
    """Config values that decide rewards and advantages; see config/algorithm.py."""

    penalty: bool
    max_tokens: int
    buffer_tokens: int
    filter: bool
    filtered_in_mean: bool
    eps: float

    @classmethod
    def of(cls, run: RunData) -> Rules:
        """A config without these keys (a damaged one) has no penalty and no filter."""
        max_tokens = run.count("overlong.max_tokens") or 0
        buffer_tokens = run.count("overlong.buffer_tokens") or 0
        eps = run.number("loss.advantage_eps")
        return cls(
            penalty=run.knob("overlong.penalty") is True and 0 < buffer_tokens < max_tokens,
            max_tokens=max_tokens,
            buffer_tokens=buffer_tokens,
            filter=run.knob("overlong.filter") is True,
            filtered_in_mean=run.knob("overlong.filtered_in_mean") is True,
            eps=1e-6 if eps is None else eps,
        )


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of a group and what they come to; by position of the completion in it."""

    rewards: list[Reward | None]
    """None without a grade."""
    counted: list[bool]
    """True if it enters the mean: with overlong.filter truncated ones may not."""
    mean: float | None
    """None if a counted completion has no grade, or none counts."""
    std: float | None
    advantages: list[float | None]


def group_rewards(completions: Sequence[Mapping[str, Any]], rules: Rules) -> GroupRewards:
    """Return what data.batch.assemble makes of a group (arXiv 2503.14476, eq. 9): advantage =
    (reward - mean) / (std + eps), std with ddof 1. A group of one has mean 0 and std 1."""
    rewards = [
        None
        if one["score"] is None
        else completion_reward(
            one["score"],
            len(one["tokens"]),
            penalty=rules.penalty,
            max_tokens=rules.max_tokens,
            buffer_tokens=rules.buffer_tokens,
        )
        for one in completions
    ]
    excludes = rules.filter and not rules.filtered_in_mean
    counted = [not (excludes and one["finish"] == "length") for one in completions]
    values = [reward for reward, counts in zip(rewards, counted) if counts]
    known = [value.total for value in values if value is not None]
    if not known or len(known) < len(values):
        return GroupRewards(rewards, counted, None, None, [None] * len(rewards))
    mean, std = 0.0, 1.0
    if len(known) > 1:
        mean, std = fmean(known), stdev(known)
    advantages = [
        (reward.total - mean) / (std + rules.eps)
        if counts and reward is not None and std + rules.eps
        else None
        for reward, counts in zip(rewards, counted)
    ]
    return GroupRewards(rewards, counted, mean, std, advantages)


def grader_of(run: RunData, group: Mapping[str, Any]) -> str | None:
    """The name of the grader of a group, by its source; None if the config does not tell."""
    for source in run.entries("data.train"):
        if source.get("name") == group["source"]:
            grader = source.get("grader", source.get("kind"))
            if isinstance(grader, dict):
                grader = grader.get(str((group.get("extra") or {}).get("data_source")))
            return grader if isinstance(grader, str) else None
    return None


def explain(
    grader: str | None,
    group: Mapping[str, Any],
    position: int,
    rewards: GroupRewards,
    rules: Rules,
    trained: float | None = None,
) -> list[tuple[str, str]]:
    """Explain the grade of the completion at `position`: (heading, sentences), as it happened.

    `trained` is the advantage that the run recorded, if it did: a run may have gone on with another
    config than the one that `rules` are of.
    """
    one = group["completions"][position]
    found = [("Grader", _looks_for(grader))]
    reward = rewards.rewards[position]
    if reward is None:
        found.append(("Verdict", "No grade: the grader hung, died or raised on it."))
    else:
        found.append(("Answer read", _answer(grader, one, group["truth"])))
        found.append(("Verdict", "Right." if one["correct"] else "Wrong."))
        found.append(("Reward", _reward(reward, len(one["tokens"]), rules)))
    found.append(("Advantage", _advantage(position, rewards, rules, trained)))
    fate = group["fate"]
    found.append(("Group", _FATES.get(fate, f"Its fate: {fate}.")))
    return found


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """A text, cut with a word about it if it is too long."""
    if len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters are not shown)"


def _looks_for(grader: str | None) -> str:
    if grader is None:
        return "The config names no grader for this data set."
    return _LOOKS_FOR.get(
        grader, f"{grader}, a function of this run's owner: its code says what it looks for."
    )


def _answer(grader: str | None, one: Mapping[str, Any], truth: str) -> str:
    pred = one["pred"] or ""
    if not one["parsed"]:
        return f"None found.{_missed(one['text']) if grader == 'dapo_math' else ''}"
    if grader == "code":
        return f"A program of {len(pred.splitlines())} lines."
    said = f"“{shown(pred, 300)}”"
    if grader == "dapo_math" and (normal := dapo_math.normalise(truth)) != truth:
        said += f", compared with the truth as normalised: “{shown(normal, 300)}”"
    return said if pred else "This grader does not tell what it read."


def _missed(text: str) -> str:
    """Locate an answer that dapo_math did not look at."""
    place = text.lower().rfind("answer:")
    if place < 0:
        return " Nowhere in the response is there an “Answer:”."
    return f" The last “Answer:” is {len(text) - place:,} characters before the end."


def _reward(reward: Reward, num_tokens: int, rules: Rules) -> str:
    if not rules.penalty:
        return f"{_figure(reward.score)}: the score alone (overlong.penalty is off)."
    free = rules.max_tokens - rules.buffer_tokens
    if reward.penalty == 0.0:
        return (
            f"{_figure(reward.score)}: the score; no length penalty, for {num_tokens:,} tokens are "
            f"no more than {free:,}."
        )
    return (
        f"{_figure(reward.score)} {MINUS} {-reward.penalty:.4g} = {_figure(reward.total)}: the "
        f"score, less the length penalty: {num_tokens:,} tokens are {num_tokens - free:,} "
        f"beyond {free:,}, of {rules.buffer_tokens:,} that take it to {MINUS}1."
    )


def _advantage(position: int, rewards: GroupRewards, rules: Rules, trained: float | None) -> str:
    computed = rewards.advantages[position]
    said = _formula(position, rewards, rules)
    if trained is None or (computed is not None and abs(trained - computed) < _SAME_ADVANTAGE):
        return said
    return f"The run recorded {_figure(trained)}. By the config as it is now: {said}"


def _formula(position: int, rewards: GroupRewards, rules: Rules) -> str:
    if not rewards.counted[position]:
        return "None: it was truncated, and overlong.filter leaves it out of its group."
    if rewards.mean is None or rewards.std is None:
        return "None: a completion of the group has no grade, so there is no mean to compare with."
    reward, value = rewards.rewards[position], rewards.advantages[position]
    if reward is None or value is None:
        return "None: all rewards of the group are equal."
    num = sum(rewards.counted)
    if num == 1:
        return f"{_figure(value)}: its reward, for it is alone in its group."
    return (
        f"({_figure(reward.total)} {MINUS} {_figure(rewards.mean, after=True)}) / "
        f"({_figure(rewards.std)} + {rules.eps:g}) = {_figure(value)}: its reward against mean and "
        f"standard deviation of {num} rewards."
    )


def _figure(value: float, *, after: bool = False) -> str:
    """Four digits; in parentheses `after` a sign, if it has one itself."""
    text = f"{value:.4g}".replace("-", MINUS, 1) if value < 0 else f"{value:.4g}"
    return f"({text})" if after and value < 0 else text
