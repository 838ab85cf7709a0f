"""Open groups, and the queue of requests for their unfinished completions.

An `OpenGroup` records which completions of a prompt are sampled and graded. The dispatcher creates
requests for the others, keeps them in one queue for all replicas, and records which replica got
which request. A request that was handed out is kept by the engine only.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo_megatron.rollout.driver import Driver, Events
from dapo_megatron.rollout.serialization import group_from_json, group_to_json
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt, SampleRequest


@dataclass
class OpenGroup:
    """Completions of one prompt so far. Each of the `num_samples` completions is missing,
    unfinished (carried from an earlier step), finished, or graded."""

    ticket: int
    prompt: Prompt
    num_samples: int
    completions: dict[int, Completion] = field(default_factory=dict)
    ungradable: set[int] = field(default_factory=set)
    """Indices of samples that could not be graded: the grader hung, died or raised."""
    overtaken: int = 0
    """Number of steps that trained on a later group while this group was not ready."""
    is_ready: bool = False
    """Whether the group is decided and waits to be trained on."""

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
        """Return JSON-compatible state for a checkpoint."""
        return {
            "group": group_to_json(self.group()),
            "num_samples": self.num_samples,
            "ungradable": sorted(self.ungradable),
            "overtaken": self.overtaken,
            "is_ready": self.is_ready,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OpenGroup:
        """Return the group that `to_json` serialized."""
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, with `num_samples` completions per prompt. `seed_name` separates the
    random numbers of different uses (training, each evaluation set). Unless `is_seeded`, requests
    use the engine's random numbers instead of their own."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed_name: str
    is_seeded: bool = True

    def request(
        self, ticket: int, prompt: Prompt, sample: int, so_far: Completion | None = None
    ) -> SampleRequest:
        """Return the request for completion `sample`, or for the rest of it after `so_far`."""
        num_tokens = 0 if so_far is None else len(so_far.tokens)
        seed = sample_seed(self.seed_name, ticket, sample, num_tokens) if self.is_seeded else None
        return SampleRequest(
            ticket=ticket,
            sample=sample,
            prompt=prompt,
            seed=seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            so_far=so_far,
        )


def sample_seed(seed_name: str, ticket: int, sample: int, num_tokens: int = 0) -> int:
    """Return a seed in [0, 2^62) that depends on the arguments only, not on layout, replica or
    time. A completion that continues after `num_tokens` tokens gets another seed than at its
    start."""
    digest = hashlib.blake2b(
        f"{seed_name}/{ticket}/{sample}/{num_tokens}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 2


class Dispatcher:
    """One queue of requests for all replicas, in ticket order. Every rank has the same queue."""

    def __init__(self, driver: Driver, sampling: Sampling) -> None:
        self._driver = driver
        self._sampling = sampling
        self._queue: list[tuple[int, int, SampleRequest]] = []
        self._replica_of: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        """Free engine capacity, in requests, minus the queue length; may be negative."""
        capacity = self._driver.max_sequences * self._driver.num_replicas
        return capacity - len(self._replica_of) - len(self._queue)

    def submit(self, group: OpenGroup) -> bool:
        """Queue requests for the unfinished completions of a group; lower tickets go first. Return
        whether there were any."""
        unfinished = group.to_sample()
        for sample, so_far in unfinished:
            request = self._sampling.request(group.ticket, group.prompt, sample, so_far)
            heapq.heappush(self._queue, (group.ticket, sample, request))
        return bool(unfinished)

    def advance(self, grade: Sequence[tuple[int, Prompt, Completion]] = ()) -> Events:
        """Fill the engines from the queue and run them until the next exchange."""
        events = self._driver.advance(self._hand_out(), grade, self._sampling.seed_name)
        for ticket, completion in events.sampled:
            del self._replica_of[ticket, completion.sample]
        return events

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Clear the queue and stop the engines. Return (ticket, unfinished completion) for each
        request of the engines that has tokens."""
        self._queue.clear()
        self._replica_of.clear()
        return self._driver.interrupt()

    def _hand_out(self) -> list[list[SampleRequest]]:
        """Take requests from the queue for each replica. A group goes to the replica with the most
        room. Its completions stay together if they fit, to share the prompt in the prefix
        cache."""
        requests: list[list[SampleRequest]] = [[] for _ in range(self._driver.num_replicas)]
        if not self._queue:
            return requests
        count = Counter(self._replica_of.values())
        running = [count[index] for index in range(self._driver.num_replicas)]
        last_ticket, replica = -1, 0
        while self._queue:
            if (ticket := self._queue[0][0]) != last_ticket or self._is_full(running[replica]):
                replica = min(range(len(running)), key=running.__getitem__)
                last_ticket = ticket
            if self._is_full(running[replica]):
                break
            _, sample, request = heapq.heappop(self._queue)
            requests[replica].append(request)
            self._replica_of[ticket, sample] = replica
            running[replica] += 1
        return requests

    def _is_full(self, num_running: int) -> bool:
        return num_running >= self._driver.max_sequences
