"""Groups on their way: what is sampled and graded of each open ticket, and which are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.rollout.serialization import group_from_json, group_to_json
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt


@dataclass
class OpenGroup:
    """One prompt's completions so far. Of `num_samples`, each is missing, unfinished (carried from
    an earlier step), finished, or graded."""

    ticket: int
    prompt: Prompt
    num_samples: int
    completions: dict[int, Completion] = field(default_factory=dict)
    ungradable: set[int] = field(default_factory=set)
    """Samples whose grader hung, died or raised."""
    overtaken: int = 0
    """Steps that trained on later groups while this one was running."""
    is_ready: bool = False
    """Decided, and waiting to be trained on."""

    def to_sample(self) -> list[tuple[int, Completion | None]]:
        """(sample, what there is of it) of every completion that is not finished."""
        found = ((sample, self.completions.get(sample)) for sample in range(self.num_samples))
        return [
            (sample, so_far)
            for sample, so_far in found
            if so_far is None or so_far.finish is Finish.UNFINISHED
        ]

    @property
    def is_sampled(self) -> bool:
        """Whether every completion is finished."""
        return len(self.completions) == self.num_samples and all(
            c.finish is not Finish.UNFINISHED for c in self.completions.values()
        )

    def to_grade(self) -> list[Completion]:
        """Finished completions that no grader has answered for."""
        return [
            completion
            for sample, completion in self.completions.items()
            if completion.finish is not Finish.UNFINISHED
            and completion.grade is None
            and sample not in self.ungradable
        ]

    def set_grade(self, sample: int, grade: Grade | None) -> None:
        """A grader's answer, or None if it has none."""
        if grade is None:
            self.ungradable.add(sample)
        self.completions[sample] = replace(self.completions[sample], grade=grade)

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled its first token. Raises ValueError without tokens."""
        return min(completion.oldest_version for completion in self.completions.values())

    def group(self) -> Group:
        """As it is now."""
        completions = sorted(self.completions.values(), key=lambda c: c.sample)
        return Group(self.ticket, self.prompt, tuple(completions))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "group": group_to_json(self.group()),
            "num_samples": self.num_samples,
            "ungradable": sorted(self.ungradable),
            "overtaken": self.overtaken,
            "is_ready": self.is_ready,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OpenGroup:
        """The group that `to_json` was called on."""
        group = group_from_json(value["group"])
        return cls(
            ticket=group.ticket,
            prompt=group.prompt,
            num_samples=value["num_samples"],
            completions={completion.sample: completion for completion in group.completions},
            ungradable=set(value["ungradable"]),
            overtaken=value["overtaken"],
            is_ready=value["is_ready"],
        )


def commit(groups: Iterable[OpenGroup], wanted: int, max_overtake: int) -> list[OpenGroup] | None:
    """The first `wanted` mixed groups of `groups`, which come in ticket order; None if it is too
    early to say.

    A group that is still running is passed over in at most `max_overtake` steps; then whatever
    comes after it must wait. Nothing is dropped for being slow: that would prefer short answers.
    """
    chosen: list[OpenGroup] = []
    for group in groups:
        if group.is_ready:
            chosen.append(group)
            if len(chosen) == wanted:
                return chosen
        elif group.overtaken >= max_overtake:
            return None
    return None
