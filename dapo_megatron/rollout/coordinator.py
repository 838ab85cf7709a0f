"""Dynamic sampling, first form: rounds of prompts until a step has its N mixed groups.

A round is sized by the observed share of mixed groups. Groups are taken in ticket order; mixed
ones beyond N are carried to the next step (or, with `on_policy`, expire: the paper's rule, and its
algorithm 1 discards them too). Every ticket's fate is in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_megatron.algo.sampling import verdict
from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.rollout.codec import group_from_json, group_to_json
from dapo_megatron.rollout.driver import RolloutDriver, Sampling
from dapo_megatron.rollout.ledger import Fate, Ledger
from dapo_megatron.types import DapoError, Finish, Group, Verdict


@dataclass
class KeepRate:
    """The share of groups that are mixed: a mean that forgets, with the configured guess as
    prior. Half of what was seen before counts as one step goes by."""

    prior: float
    prior_weight: float
    kept: float = 0.0
    issued: float = 0.0

    @property
    def value(self) -> float:
        """The forecast."""
        return (self.kept + self.prior * self.prior_weight) / (self.issued + self.prior_weight)

    def observe(self, kept: int, issued: int) -> None:
        """Take in one step."""
        self.kept = self.kept / 2 + kept
        self.issued = self.issued / 2 + issued

    def prompts_for(self, num_groups: int) -> int:
        """Prompts that should give `num_groups` mixed groups; at most four times as many, so that
        a rate near zero is found out in bounded rounds."""
        return min(math.ceil(num_groups / self.value), 4 * num_groups)


@dataclass(frozen=True, slots=True)
class Collected:
    """What a rollout step trains on, and what it saw."""

    train: list[Group]
    seen: list[tuple[Group, Fate]]
    """Groups issued in this step with their fate so far, in ticket order."""
    counts: dict[str, int]
    """The ledger's books of this step."""
    rounds: int
    grade_seconds: float
    """Waited for grading after the last token."""
    abstentions: dict[str, int]
    """Completions of this step without a grade, by cause."""

    @property
    def to_measure(self) -> list[Group]:
        """Groups on which engine and policy are compared: those trained on, then the fresh ones
        that a later step will train on, when their weights are gone."""
        return self.train + [group for group, fate in self.seen if fate is Fate.CARRIED]


@dataclass
class Coordinator:
    """Collects the groups of one step after another. The same on every rank."""

    config: RolloutConfig
    overlong: OverlongConfig
    stream: PromptStream
    driver: RolloutDriver
    seed: int
    ledger: Ledger = field(default_factory=Ledger)
    carried: list[Group] = field(default_factory=list)
    keep_rate: KeepRate = field(init=False)

    def __post_init__(self) -> None:
        self.keep_rate = KeepRate(self.config.expected_keep_rate, self.config.prompts_per_step)

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        """The groups for one step, sampled by weights `version` or carried from before.

        Raises DapoError if the bound is reached with nothing to train on, or, with
        at_bound `fail`, with too little.
        """
        wanted = self.config.prompts_per_step
        mixed = self._take_carried(version)
        seen: list[tuple[Group, Fate]] = []
        rounds, graded_before = 0, self.driver.grade_seconds
        abstained_before = self.driver.abstentions.copy()
        while len(mixed) < wanted and rounds < self.config.max_rounds:
            rounds += 1
            for group in self._round(wanted - len(mixed), len(mixed), on_progress):
                fate = self._judge(group)
                seen.append((group, fate))
                if fate is Fate.CARRIED:
                    mixed.append(group)
                else:
                    self.ledger.settle(group.ticket, fate)
        self._check_filled(len(mixed), rounds)
        self.keep_rate.observe(sum(fate is Fate.CARRIED for _, fate in seen), len(seen))
        train, beyond = mixed[:wanted], mixed[wanted:]
        fates = {group.ticket: Fate.TRAINED for group in train}
        leftover = Fate.EXPIRED if self.config.on_policy else Fate.CARRIED
        fates |= {group.ticket: leftover for group in beyond}
        for ticket, fate in fates.items():
            self.ledger.settle(ticket, fate)
        self.carried = [] if self.config.on_policy else beyond
        return Collected(
            train=train,
            seen=[(group, fates.get(group.ticket, fate)) for group, fate in seen],
            counts=self.ledger.close_step(),
            rounds=rounds,
            grade_seconds=self.driver.grade_seconds - graded_before,
            abstentions=dict(self.driver.abstentions - abstained_before),
        )

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, taken between steps."""
        return {
            "position": self.stream.position,
            "ledger": self.ledger.state(),
            "carried": [group_to_json(group) for group in self.carried],
            "keep_rate": [self.keep_rate.kept, self.keep_rate.issued],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.stream.seek(state["position"])
        self.ledger = Ledger.from_state(state["ledger"])
        self.carried = [group_from_json(group) for group in state["carried"]]
        self.keep_rate.kept, self.keep_rate.issued = state["keep_rate"]

    def _round(self, needed: int, have: int, on_progress: Callable[[int], None]) -> list[Group]:
        num_prompts = self.keep_rate.prompts_for(needed) if self.config.dynamic_sampling else needed
        tickets = list(
            zip(self.ledger.issue(num_prompts), self.stream.take(num_prompts), strict=True)
        )
        sampling = Sampling(
            num_samples=self.config.samples_per_prompt,
            max_tokens=self.config.max_response_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            seed_name=f"{self.seed}/train",
        )
        share = needed / num_prompts
        return self.driver.run(
            tickets, sampling, lambda done: on_progress(have + int(done * share))
        )

    def _take_carried(self, version: int) -> list[Group]:
        """Carried groups that are young enough, in ticket order; the others expire."""
        fresh = []
        for group in self.carried:
            oldest = min(completion.version for completion in group.completions)
            if version - oldest > self.config.max_age:
                self.ledger.settle(group.ticket, Fate.EXPIRED)
            else:
                fresh.append(group)
        return fresh

    def _judge(self, group: Group) -> Fate:
        """A final fate, or CARRIED for a group that can be trained on. On raw correctness, never
        on the shaped reward (eq. 11; NVIDIA-NeMo/RL#2431)."""
        correct = [c.grade.correct for c in group.completions if c.grade is not None]
        if len(correct) < 2:  # a mean of one is no baseline
            return Fate.UNGRADED
        if self.config.dynamic_sampling:
            said = verdict(correct)
            if said is not Verdict.MIXED:
                return Fate(said.value)
        if self.overlong.filter and all(
            c.finish is Finish.LENGTH for c in group.completions if c.grade is not None
        ):
            return Fate.OVERLONG
        return Fate.CARRIED

    def _check_filled(self, found: int, rounds: int) -> None:
        wanted = self.config.prompts_per_step
        if found >= wanted or (found and self.config.at_bound == "train_partial"):
            return
        raise DapoError(
            f"dynamic sampling: {found} of {wanted} mixed groups after {rounds} rounds "
            f"(rollout.max_rounds). Ledger of the run: {dict(self.ledger.totals)}. If nearly all "
            "groups are all_wrong the data is too hard or the grader rejects the answer format; "
            "if all_correct, it is too easy"
        )
