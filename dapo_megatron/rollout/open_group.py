"""Open groups: which completions of a prompt are missing, unfinished, finished or graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.types import CompletionSummary, Finish, Grade, Group, Prompt, Segment

NOWHERE = -1
"""Number instead of a replica's for a completion whose tokens were lost with an engine."""


@dataclass
class OpenGroup:
    """Completions of one prompt so far. Each of the `num_samples` completions is missing,
    unfinished (carried from an earlier step), finished, or graded."""

    ticket: int
    prompt: Prompt
    num_samples: int
    issued_version: int = 0
    """Version of the engines' weights when the ticket was issued. No token is older."""
    completions: dict[int, CompletionSummary] = field(default_factory=dict)
    ungradable: set[int] = field(default_factory=set)
    """Indices of samples that could not be graded: the grader hung, died or raised."""
    overtaken: int = 0
    """Number of steps that trained on a later group while this group was not ready."""
    is_ready: bool = False
    """Whether the group is decided and waits to be trained on."""

    def reset(self) -> None:
        """Forget all completions, to sample the group again. `overtaken` counts on."""
        self.completions.clear()
        self.ungradable.clear()
        self.is_ready = False

    def to_sample(self) -> list[tuple[int, CompletionSummary | None]]:
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

    def to_grade(self) -> list[CompletionSummary]:
        """Return the finished completions without a result from a grader."""
        return [
            completion for sample, completion in self.completions.items() if self.awaits(sample)
        ]

    def awaits(self, sample: int) -> bool:
        """Return whether a completion is finished and has no result from a grader yet."""
        completion = self.completions.get(sample)
        return (
            completion is not None
            and completion.finish is not Finish.UNFINISHED
            and completion.grade is None
            and sample not in self.ungradable
        )

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
        """Return JSON-compatible state for a checkpoint. Tokens are in the files of replicas."""
        prompt = self.prompt
        return {
            "ticket": self.ticket,
            "source": prompt.source,
            "index": prompt.index,
            "prompt": prompt.text,
            "truth": prompt.truth,
            "extra": dict(prompt.extra),
            "prompt_tokens": list(prompt.tokens),
            "num_samples": self.num_samples,
            "issued_version": self.issued_version,
            "completions": [_to_json(completion) for completion in self.completions.values()],
            "ungradable": sorted(self.ungradable),
            "overtaken": self.overtaken,
            "is_ready": self.is_ready,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], num_replicas: int) -> OpenGroup:
        """Return the group that `to_json` serialized, in a run of `num_replicas` replicas."""
        completions = [_from_json(item, num_replicas) for item in value["completions"]]
        # Older checkpoints lack the version of the issue.
        oldest = min((completion.oldest_version for completion in completions), default=0)
        return cls(
            ticket=value["ticket"],
            prompt=Prompt(
                source=value["source"],
                index=value["index"],
                tokens=tuple(value["prompt_tokens"]),
                text=value["prompt"],
                truth=value["truth"],
                extra=value["extra"],
            ),
            num_samples=value["num_samples"],
            issued_version=value.get("issued_version", oldest),
            completions={completion.sample: completion for completion in completions},
            ungradable=set(value["ungradable"]),
            overtaken=value["overtaken"],
            is_ready=value["is_ready"],
        )


def holder(replica: int, num_replicas: int) -> int:
    """Return the replica that takes over the completions of `replica` when a run resumes with
    `num_replicas` replicas; NOWHERE if there is none."""
    return replica % num_replicas if num_replicas and replica != NOWHERE else NOWHERE


def _to_json(completion: CompletionSummary) -> list[Any]:
    """Return a completion as a list, because a checkpoint may have tens of thousands."""
    grade = completion.grade
    return [
        completion.sample,
        completion.replica,
        completion.num_tokens,
        completion.finish.value,
        [[segment.version, segment.num_tokens] for segment in completion.segments],
        completion.logprob_mean,
        completion.logprob_min,
        None if grade is None else [grade.score, grade.correct, grade.pred, grade.parsed],
    ]


def _from_json(value: list[Any], num_replicas: int) -> CompletionSummary:
    sample, replica, num_tokens, finish, segments, logprob_mean, logprob_min, grade = value
    return CompletionSummary(
        sample=sample,
        num_tokens=num_tokens,
        finish=Finish(finish),
        segments=tuple(Segment(*segment) for segment in segments),
        replica=holder(replica, num_replicas),
        logprob_mean=logprob_mean,
        logprob_min=logprob_min,
        grade=None if grade is None else Grade(*grade),
    )
