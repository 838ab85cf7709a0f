"""The exchange that brings tokens from the replicas that sampled them to the ranks that need them.

Each training sequence goes to the ranks of the data-parallel index that trains on it, and a carried
completion that another replica continues goes to the leader of that replica. Every rank knows the
sizes of all messages from the lengths. A message holds, for each sequence in the order of the step,
its prompt tokens, response tokens (int32), the engine's log-probs (float32) and, with router
replay, its routes. The same follows for each move, without its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.cluster.collectives import on_all_ranks
from dapo_megatron.protocols import DataParallel, Exchange
from dapo_megatron.rollout.messages import Move
from dapo_megatron.rollout.store import CompletionStore
from dapo_megatron.types import (
    Completion,
    CompletionSummary,
    DapoError,
    SequenceTokens,
    TrainingSequence,
    packed,
)

_Number = TypeVar("_Number", bound=np.generic)
BYTES = 4
"""Bytes of a token, and of a log-prob."""


@dataclass(frozen=True, slots=True)
class RouteSize:
    """Size of the routes that travel with the tokens.

    bytes_per_token  of all layers; 0 if no routes travel
    dtype            of the number of an expert
    """

    bytes_per_token: int = 0
    dtype: str = "uint8"

    def num_bytes(self, prompt_tokens: int, response_tokens: int) -> int:
        """Return the bytes of a sequence's routes. The last token has none."""
        return self.bytes_per_token * (prompt_tokens + response_tokens - 1)


@dataclass(frozen=True)
class TokenExchange:
    """Exchange between the leaders of replicas and the ranks that train.

    leaders   rank of each replica's leader
    store     completions held on this rank; empty except on a leader
    routes    size of the routes that travel with the tokens
    """

    exchange: Exchange
    data_parallel: DataParallel
    leaders: Sequence[int]
    store: CompletionStore
    routes: RouteSize = RouteSize()

    def __call__(
        self, sequences: Sequence[TrainingSequence], owners: Sequence[int], moves: Sequence[Move]
    ) -> dict[int, SequenceTokens]:
        """Return the tokens of the sequences that this rank trains on, by index, and store the
        completions that move here. Collective.

        `owners` are the data-parallel indices that train on each sequence. Raises DapoError naming
        a completion that this rank does not hold as announced.
        """
        shares = _shares(sequences, owners)
        own = self.exchange.rank
        sizes = [0] * self.exchange.world_size
        for replica, leader in enumerate(self.leaders):
            share = shares.get((replica, self.data_parallel.index), [])
            sizes[leader] = sum(self._num_bytes(sequences[index]) for index in share)
            sizes[leader] += sum(map(self._move_bytes, self._moves(moves, replica, own)))
        parts = on_all_ranks(self.exchange, lambda: self._outgoing(sequences, shares, moves))
        received = self.exchange.all_to_all(parts, sizes)
        tokens: dict[int, SequenceTokens] = {}
        for replica, leader in enumerate(self.leaders):
            message = _Message(received[leader], self.routes)
            for index in shares.get((replica, self.data_parallel.index), []):
                tokens[index] = message.sequence(sequences[index])
            for move in self._moves(moves, replica, own):
                completion = message.completion(move.summary, len(move.prompt.tokens))
                self.store.put(move.ticket, move.prompt, completion)
        return dict(sorted(tokens.items()))

    def _outgoing(
        self, sequences: Sequence[TrainingSequence], shares: _Shares, moves: Sequence[Move]
    ) -> list[bytearray]:
        """Return the message of this rank to each rank; empty ones if it leads no replica."""
        own = self.exchange.rank
        if own not in self.leaders:
            return [bytearray()] * self.exchange.world_size
        replica = self.leaders.index(own)
        # The ranks of one data-parallel index get the same sequences: one buffer for all of them.
        buffers = [
            self._pack(sequences, shares.get((replica, index), []))
            for index in range(self.data_parallel.size)
        ]
        parts = [
            buffers[index] if index >= 0 else bytearray() for index in self.data_parallel.indices
        ]
        for move in (move for move in moves if move.summary.replica == replica):
            completion = self.store.take(move.ticket, move.summary.sample)
            name = f"ticket {move.ticket}, sample {completion.sample}"
            _check(name, completion, move.summary)
            routes = self._routes_of(name, completion, len(move.prompt.tokens))
            target = self.leaders[move.target]
            # A new buffer, because several ranks may share the old one.
            parts[target] = bytearray().join(
                [parts[target], completion.tokens.tobytes(), completion.logprobs.tobytes(), *routes]
            )
        return parts

    def _pack(self, sequences: Sequence[TrainingSequence], share: Sequence[int]) -> bytearray:
        """Return the message with these sequences, which this rank holds. It is writable, because
        bytes would be copied once more to be sent."""
        spans: list[bytes | memoryview] = []
        for sequence in (sequences[index] for index in share):
            completion = self.store.get(sequence.ticket, sequence.sample)
            prompt = self.store.prompt(sequence.ticket)
            _check(str(sequence), completion, sequence)
            if len(prompt.tokens) != sequence.prompt_tokens:
                raise DapoError(
                    f"{sequence}: {len(prompt.tokens)} prompt tokens here, but the coordinator "
                    f"knows of {sequence.prompt_tokens}"
                )
            spans.append(np.array(prompt.tokens, np.int32).tobytes())
            spans += [memoryview(completion.tokens), memoryview(completion.logprobs)]
            spans += self._routes_of(str(sequence), completion, len(prompt.tokens))
        return bytearray().join(spans)

    def _routes_of(self, name: str, completion: Completion, prompt_tokens: int) -> list[memoryview]:
        """Return the routes that travel with a completion; empty without any. Raises DapoError if
        the completion lacks them."""
        if not self.routes.bytes_per_token:
            return []
        expected = self.routes.num_bytes(prompt_tokens, completion.num_tokens)
        routes = memoryview(completion.routes or b"")
        if routes.nbytes != expected:
            raise DapoError(
                f"{name}: {routes.nbytes} bytes of routes here, but policy.router_replay engine "
                f"needs {expected} for its {prompt_tokens + completion.num_tokens - 1} tokens"
            )
        return [routes]

    def _num_bytes(self, sequence: TrainingSequence) -> int:
        """Return the size of a sequence in a message."""
        prompt, response = sequence.prompt_tokens, sequence.response_tokens
        return BYTES * (prompt + 2 * response) + self.routes.num_bytes(prompt, response)

    def _move_bytes(self, move: Move) -> int:
        """Return the size of a move in a message."""
        prompt, response = len(move.prompt.tokens), move.summary.num_tokens
        return BYTES * 2 * response + self.routes.num_bytes(prompt, response)

    def _moves(self, moves: Sequence[Move], source: int, target: int) -> Iterator[Move]:
        """Yield the moves from replica `source` to the leader on rank `target`, in order."""
        for move in moves:
            if move.summary.replica == source and self.leaders[move.target] == target:
                yield move


_Shares = dict[tuple[int, int], list[int]]
"""(replica, data-parallel index) -> indices of the sequences that go from one to the other."""


def _shares(sequences: Sequence[TrainingSequence], owners: Sequence[int]) -> _Shares:
    shares: _Shares = {}
    for index, (sequence, owner) in enumerate(zip(sequences, owners, strict=True)):
        shares.setdefault((sequence.replica, owner), []).append(index)
    return shares


def _check(name: str, completion: Completion, known: TrainingSequence | CompletionSummary) -> None:
    """Raise DapoError if the coordinator knows of another number of tokens."""
    expected = known.response_tokens if isinstance(known, TrainingSequence) else known.num_tokens
    if not completion.num_tokens == len(completion.logprobs) == expected:
        raise DapoError(
            f"{name}: {completion.num_tokens} tokens and {len(completion.logprobs)} log-probs "
            f"here, but the coordinator knows of {expected} tokens"
        )


class _Message:
    """Reader of a received message. What it returns are views of the message, without copies."""

    def __init__(self, message: memoryview, routes: RouteSize) -> None:
        self._bytes = np.frombuffer(message, np.uint8)
        self._routes = routes
        self._start = 0

    def sequence(self, sequence: TrainingSequence) -> SequenceTokens:
        """Return the next sequence."""
        return SequenceTokens(
            prompt=self._next(sequence.prompt_tokens, np.int32),
            response=self._next(sequence.response_tokens, np.int32),
            logprobs=self._next(sequence.response_tokens, np.float32),
            routes=self._next_routes(sequence.prompt_tokens, sequence.response_tokens),
        )

    def completion(self, summary: CompletionSummary, prompt_tokens: int) -> Completion:
        """Return the next completion, an unfinished one."""
        tokens = self._next(summary.num_tokens, np.int32)
        logprobs = self._next(summary.num_tokens, np.float32)
        routes = self._next_routes(prompt_tokens, summary.num_tokens)
        return Completion(
            sample=summary.sample,
            tokens=packed(tokens),
            logprobs=packed(logprobs),
            text="",
            finish=summary.finish,
            segments=summary.segments,
            routes=None if routes is None else packed(routes),
        )

    def _next_routes(self, prompt_tokens: int, response_tokens: int) -> NDArray[Any] | None:
        if not self._routes.bytes_per_token:
            return None
        dtype = np.dtype(self._routes.dtype)
        num_bytes = self._routes.num_bytes(prompt_tokens, response_tokens)
        return self._next(num_bytes // dtype.itemsize, dtype.type)

    def _next(self, number: int, dtype: type[_Number]) -> NDArray[_Number]:
        stop = self._start + np.dtype(dtype).itemsize * number
        values: NDArray[_Number] = self._bytes[self._start : stop].view(dtype)
        self._start = stop
        return values
