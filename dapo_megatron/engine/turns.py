"""Turns between the model and the environments of completions, as an engine server sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from dapo_megatron.cluster.address import LOOPBACK
from dapo_megatron.config import Config
from dapo_megatron.engine.agent_turns import AgentTurns
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.engine.talks import Ended, Talks
from dapo_megatron.engine.tool_turns import ToolTurns
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.segments import turns
from dapo_megatron.types import Completion, Prompt, SampleRequest

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine


class Turns:
    """The completions of an engine server that talk to environments. Call it from one thread.

    host   address of the endpoint for agents
    """

    def __init__(
        self, config: Config, engine: VllmEngine, pool: EnvironmentPool, host: str = LOOPBACK
    ) -> None:
        self._engine, self._pool = engine, pool
        self._agents, self._tools = None, ToolTurns(config, engine, pool)
        if any(environment.is_agent for environment in pool.described.values()):
            self._agents = AgentTurns(config, engine, pool, host)
        self._all: list[Talks] = [self._tools, *([self._agents] if self._agents else [])]

    def close(self) -> None:
        """Kill all instances."""
        self._pool.close()

    def set_sampling(self, sampling: Sampling) -> None:
        """Set the sampling of the phase."""
        for talks in self._all:
            talks.sampling = sampling

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for their environment."""
        return sum(talks.num_waiting for talks in self._all)

    @property
    def last_errors(self) -> dict[str, str]:
        """Last failure of an environment, by data set."""
        return dict(chain.from_iterable(talks.last_errors.items() for talks in self._all))

    def begin(self, request: SampleRequest) -> None:
        """Begin a completion, or go on with one that rank 0 has sent."""
        self._of(request.prompt).begin(request)

    def take(self, request: SampleRequest, completion: Completion) -> None:
        """Take a completion whose turn has been sampled."""
        self._of(request.prompt).take(request, completion)

    def collect(self) -> tuple[list[SampleRequest], list[Ended]]:
        """Take the answers that have arrived. Return the requests to sample now, and the
        completions that have ended."""
        if self._agents:
            self._agents.take_calls()  # first, because a call ends the limit of an agent's time
        for key, answer in self._pool.collect():
            for talks in self._all:
                talks.collect(key, answer)  # type: ignore[arg-type]
        to_sample = list(chain.from_iterable(talks.to_sample for talks in self._all))
        for talks in self._all:
            talks.to_sample.clear()
        return to_sample, self._ended()

    def interrupt(
        self, sampled: Sequence[tuple[SampleRequest, Completion]]
    ) -> tuple[list[tuple[SampleRequest, Completion]], list[Ended]]:
        """End the phase, in which the engine has `sampled` these unfinished completions. Return all
        unfinished completions, and those that have ended."""
        unfinished = []
        for talks in self._all:
            own = [item for item in sampled if self._of(item[0].prompt) is talks]
            unfinished += talks.interrupt(own)
        return unfinished, self._ended()

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        counts: dict[str, float] = defaultdict(float)
        for talks in self._all:
            for name, number in talks.counts.items():
                counts[name] += number
            talks.counts.clear()
        return dict(counts)

    def spoken(self, prompt: Prompt, completion: Completion) -> list[dict[str, str]]:
        """Return who said what, as messages with the keys `role` and `content`."""
        role = self._pool.described[prompt.environment].role
        return [
            {
                "role": role if is_observed else "assistant",
                "content": self._engine.text(completion.tokens[start:end]),
            }
            for is_observed, start, end in turns(completion.segments)
        ]

    def _of(self, prompt: Prompt) -> Talks:
        is_agent = self._pool.described[prompt.environment].is_agent
        return self._agents if self._agents and is_agent else self._tools

    def _ended(self) -> list[Ended]:
        ended = list(chain.from_iterable(talks.ended for talks in self._all))
        for talks in self._all:
            talks.ended.clear()
        return ended
