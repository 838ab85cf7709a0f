"""Open groups: which completions of a prompt are missing, unfinished, finished or graded; and what
happened to groups since the last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from dapo_megatron.types import CheckpointError, Completion, Finish, Grade, Group, Prompt

Completions = Mapping[tuple[int, int], Completion]
"""Completions by (ticket, sample)."""


@dataclass
class OpenGroup:
    """Completions of one prompt so far. Each of the `num_samples` completions is missing,
    unfinished (carried from an earlier step), finished, or graded."""

    ticket: int
    prompt: Prompt
    num_samples: int
    issued_version: int = 0
    """Version of the engines' weights when the ticket was issued. No token is older."""
    completions: dict[int, Completion] = field(default_factory=dict)
    ungradable: set[int] = field(default_factory=set)
    """Indices of samples that could not be graded: the grader hung, died or raised."""
    overtaken: int = 0
    """Number of steps that trained on a later group while this group was not ready."""
    is_ready: bool = False
    """Whether the group is decided and waits to be trained on."""

    def reset(self) -> None:
        """Forget all completions of an undecided group. `overtaken` counts on."""
        self.completions.clear()
        self.ungradable.clear()

    def to_sample(self) -> list[tuple[int, Completion | None]]:
        """Return (sample, completion so far or None) for every completion to be sampled."""
        so_far = ((sample, self.completions.get(sample)) for sample in range(self.num_samples))
        return [
            (sample, completion)
            for sample, completion in so_far
            if completion is None or completion.finish is Finish.UNFINISHED
        ]

    @property
    def is_sampled(self) -> bool:
        """Whether every completion is finished."""
        return len(self.completions) == self.num_samples and all(
            c.finish is not Finish.UNFINISHED for c in self.completions.values()
        )

    @property
    def is_decided(self) -> bool:
        """Whether every completion is finished and was graded or failed to be graded."""
        return self.is_sampled and not self.to_grade()

    def to_grade(self) -> list[Completion]:
        """Return the finished completions without a result from a grader."""
        return [
            completion
            for sample, completion in self.completions.items()
            if completion.finish is not Finish.UNFINISHED
            and completion.grade is None
            and sample not in self.ungradable
        ]

    def set_grade(self, sample: int, grade: Grade | None) -> None:
        """Record the result of a grader; None if the completion could not be graded."""
        if grade is None:
            self.ungradable.add(sample)
        self.completions[sample] = replace(self.completions[sample], grade=grade)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that sampled a token of the group.

        Raises ValueError if the group has no completions yet.
        """
        return min(completion.oldest_version for completion in self.completions.values())

    def group(self) -> Group:
        """Return the completions so far as an immutable `Group`."""
        completions = sorted(self.completions.values(), key=lambda c: c.sample)
        return Group(self.ticket, self.prompt, tuple(completions))

    def to_json(self) -> dict[str, Any]:
        """Return JSON-compatible state for a checkpoint, without completions: (sample, number of
        tokens) names each."""
        prompt = self.prompt
        return {
            "ticket": self.ticket,
            "source": prompt.source,
            "index": prompt.index,
            "prompt": prompt.text,
            "truth": prompt.truth,
            "extra": dict(prompt.extra),
            "environment": prompt.environment,
            "prompt_tokens": list(prompt.tokens),
            "num_samples": self.num_samples,
            "issued_version": self.issued_version,
            "completions": [[c.sample, c.num_tokens] for c in self.completions.values()],
            "ungradable": sorted(self.ungradable),
            "overtaken": self.overtaken,
            "is_ready": self.is_ready,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], known: Completions) -> OpenGroup:
        """Return the group that `to_json` serialized, with its completions among the `known` ones.
        Raises CheckpointError naming one that is not, or has another number of tokens."""
        completions = [_completion(known, value["ticket"], *item) for item in value["completions"]]
        return cls(
            ticket=value["ticket"],
            prompt=Prompt(
                source=value["source"],
                index=value["index"],
                tokens=tuple(value["prompt_tokens"]),
                text=value["prompt"],
                truth=value["truth"],
                extra=value["extra"],
                environment=value.get("environment", ""),
            ),
            num_samples=value["num_samples"],
            issued_version=value["issued_version"],
            completions={completion.sample: completion for completion in completions},
            ungradable=set(value["ungradable"]),
            overtaken=value["overtaken"],
            is_ready=value["is_ready"],
        )


def _completion(known: Completions, ticket: int, sample: int, num_tokens: int) -> Completion:
    """Return the completion that an item of `to_json` names."""
    completion = known.get((ticket, sample))
    num_known = 0 if completion is None else completion.num_tokens
    if completion is None or num_known != num_tokens:
        raise CheckpointError(
            f"ticket {ticket}, sample {sample} has {num_tokens} tokens in state.json, and "
            f"{num_known} in open.parquet; resume from another checkpoint"
        )
    return completion


@dataclass
class StepEvents:
    """Events since the end of the last step."""

    version: int = 0
    """Version of the weights that the step started from."""
    issued: int = 0
    decided: list[Group] = field(default_factory=list)
    gradings: Counter[tuple[str, str]] = field(default_factory=Counter)
    turn_counts: Counter[str] = field(default_factory=Counter)
    """See engine.messages.Report."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON-compatible state, without the version. Groups are named by their tickets."""
        return {
            "issued": self.issued,
            "decided": [group.ticket for group in self.decided],
            "gradings": [[*key, count] for key, count in self.gradings.items()],
            "turn_counts": dict(self.turn_counts),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], groups: Iterable[OpenGroup]) -> Self:
        """Return the events of `to_json`."""
        by_ticket = {group.ticket: group for group in groups}
        return cls(
            issued=state["issued"],
            decided=[by_ticket[ticket].group() for ticket in state["decided"]],
            gradings=Counter({(source, what): num for source, what, num in state["gradings"]}),
            turn_counts=Counter(state.get("turn_counts", {})),
        )
