"""Delivery of a step's tokens from rank 0 to the ranks that train on them.

Rank 0 sends each sequence once to each data-parallel index that trains on it: to its first rank,
which broadcasts it to the other ranks of the index. Every rank knows the sizes of all messages from
the lengths. A message holds, for each sequence in the order of the step, its prompt tokens,
response tokens (int32), the engine's log-probs (float32) and, with router replay, its routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import (
    Completion,
    DapoError,
    Group,
    SequenceTokens,
    TrainingSequence,
)

_Number = TypeVar("_Number", bound=np.generic)
BYTES = 4
"""Bytes of a token, and of a log-prob."""
MAX_BROADCAST = 2**28
"""Bytes of a broadcast. A message of `Exchange` has at most 4 GiB."""


@dataclass(frozen=True, slots=True)
class RouteSize:
    """Size of the routes that travel with the tokens.

    bytes_per_token  of all layers; 0 if no routes travel
    dtype            of the number of an expert
    """

    bytes_per_token: int = 0
    dtype: str = "uint8"

    def num_bytes(self, sequence: TrainingSequence) -> int:
        """Return the bytes of a sequence's routes. The last token has none."""
        return self.bytes_per_token * (sequence.num_tokens - 1)


@dataclass(frozen=True)
class Delivery:
    """Delivery between the ranks with a policy.

    data_parallel  their data-parallel indices
    peers          the ranks of this rank's index; their first one is rank 0 of them
    routes         size of the routes that travel with the tokens
    """

    data_parallel: DataParallelRanks
    peers: Exchange
    routes: RouteSize = RouteSize()

    def __call__(
        self, sequences: Sequence[TrainingSequence], groups: Sequence[Group]
    ) -> dict[int, SequenceTokens]:
        """Return the tokens of the sequences that this rank trains on, by index. Collective.

        groups  on rank 0, the groups that have the sequences

        Raises DapoError on all ranks naming a completion without its routes.
        """
        owners = self.data_parallel.owners(sequences)
        exchange = self.data_parallel.exchange
        own = [i for i, owner in enumerate(owners) if owner == self.data_parallel.index]
        num_bytes = sum(self._num_bytes(sequences[index]) for index in own)
        parts = on_rank0(exchange, self._messages, sequences, owners, groups)
        message = exchange.scatter(parts, num_bytes if self.data_parallel.is_first else 0)
        del parts
        if self.peers.world_size > 1:
            message = self._broadcast(message, num_bytes)
        return self._read([(index, sequences[index]) for index in own], message)

    def _messages(
        self, sequences: Sequence[TrainingSequence], owners: Sequence[int], groups: Sequence[Group]
    ) -> list[bytearray]:
        """Return the message of rank 0 to each rank; empty ones except to first ranks."""
        known = {
            (group.ticket, completion.sample): (group.prompt, completion)
            for group in groups
            for completion in group.completions
        }
        spans: list[list[bytes | memoryview]] = [[] for _ in self.data_parallel.firsts]
        for sequence, owner in zip(sequences, owners, strict=True):
            prompt, completion = known[sequence.ticket, sequence.sample]
            branch = slice(sequence.start, sequence.start + sequence.response_tokens)
            spans[owner] += [
                np.array(prompt.tokens, np.int32).tobytes(),
                memoryview(completion.tokens)[branch].cast("B"),
                memoryview(completion.logprobs)[branch].cast("B"),
                self._routes_of(sequence, completion),
            ]
        parts = [bytearray() for _ in range(self.data_parallel.exchange.world_size)]
        for first, of_index in zip(self.data_parallel.firsts, spans, strict=True):
            parts[first] = bytearray().join(of_index)
        return parts

    def _routes_of(self, sequence: TrainingSequence, completion: Completion) -> bytes | memoryview:
        """Return the routes that travel with a sequence; empty without any."""
        if not self.routes.bytes_per_token:
            return b""
        routes = memoryview(completion.routes or b"")
        if routes.nbytes != self.routes.num_bytes(sequence):
            raise DapoError(
                f"{sequence}: {routes.nbytes} bytes of routes, but policy.router_replay engine "
                f"needs {self.routes.num_bytes(sequence)} for its {sequence.num_tokens - 1} tokens"
            )
        return routes

    def _broadcast(self, message: memoryview, num_bytes: int) -> memoryview:
        """Return the message of the first rank on all ranks of the index."""
        if self.data_parallel.is_first:
            for start in range(0, num_bytes, MAX_BROADCAST):
                self.peers.broadcast(bytes(message[start : start + MAX_BROADCAST]), bytes)
            return message
        received = bytearray()
        while len(received) < num_bytes:
            received += self.peers.broadcast(b"", bytes)
        return memoryview(received)

    def _num_bytes(self, sequence: TrainingSequence) -> int:
        """Return the size of a sequence in a message."""
        prompt, response = sequence.prompt_tokens, sequence.response_tokens
        return BYTES * (prompt + 2 * response) + self.routes.num_bytes(sequence)

    def _read(
        self, sequences: Sequence[tuple[int, TrainingSequence]], message: memoryview
    ) -> dict[int, SequenceTokens]:
        """Return the sequences of a received message, as views of it."""
        values = np.frombuffer(message, np.uint8)
        start = 0

        def take(number: int, dtype: type[_Number]) -> NDArray[_Number]:
            nonlocal start
            begin, start = start, start + np.dtype(dtype).itemsize * number
            return values[begin:start].view(dtype)

        tokens: dict[int, SequenceTokens] = {}
        for index, sequence in sequences:
            prompt = take(sequence.prompt_tokens, np.int32)
            response = take(sequence.response_tokens, np.int32)
            logprobs = take(sequence.response_tokens, np.float32)
            routes: NDArray[Any] | None = None
            if self.routes.bytes_per_token:
                dtype = np.dtype(self.routes.dtype)
                number = self.routes.num_bytes(sequence) // dtype.itemsize
                routes = take(number, dtype.type)
            tokens[index] = SequenceTokens(prompt, response, logprobs, routes)
        return tokens
