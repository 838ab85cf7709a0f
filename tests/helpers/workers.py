"""Start the engine workers of a rank with a real channel and canned engines."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from typing import Any

from dapo_megatron.cluster.messages import open_channel
from dapo_megatron.rollout.driver import QUEUED_SHARE, EngineDriver
from dapo_megatron.rollout.messages import Sampling
from dapo_megatron.rollout.worker import Follower, Leader

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest, Segment

PATIENCE_SECONDS = 120.0
"""Time after which `wait_until` gives up. Only a failing test waits so long."""
Call = tuple[str, list[tuple[int, int]]]
"""Name of a method of the engine, and (ticket, sample) of its requests."""


def sampling(name: str, *, is_seeded: bool = True) -> Sampling:
    """Return sampling parameters for responses of up to 8 tokens."""
    return Sampling(name, 8, 1.0, 1.0, is_seeded)


def prompt(ticket: int, **extra: Any) -> Prompt:
    return Prompt("sums", ticket, (1, 2), "3+4", "7", extra)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds. Raises AssertionError naming `what` after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.002)


class CannedEngine:
    """Engine that finishes two requests per step, the newest first. Every response has one token
    more than the request.

    answers   (ticket, sample) -> text of the response; 7 if missing
    holds     whether a request must not finish yet
    """

    version = 0

    def __init__(
        self,
        rank: int,
        num_replicas: int = 1,
        ranks_per_replica: int = 1,
        *,
        max_sequences: int = 5,
        answers: dict[tuple[int, int], str] | None = None,
        holds: Callable[[SampleRequest], bool] = lambda request: False,
    ) -> None:
        self.replica = rank // ranks_per_replica
        self.num_replicas = num_replicas
        self.is_leader = rank % ranks_per_replica == 0
        self.max_sequences = max_sequences
        self.requests: list[SampleRequest] = []
        self.submitted: list[SampleRequest] = []
        self.calls: list[Call] = []
        """Every call, with the keys of its requests."""
        self._answers = answers or {}
        self._holds = holds

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.calls.append(("submit", _keys(requests)))
        self.submitted += requests
        self.requests += requests
        # In a timed run, a few more are queued.
        limit = self.max_sequences + math.ceil(self.max_sequences / QUEUED_SHARE)
        assert len(self.requests) <= limit

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        self.calls.append(("step", _keys(self.requests)))
        done = [request for request in self.requests[::-1] if not self._holds(request)][:2]
        self.requests = [request for request in self.requests if request not in done]
        return [(request, self._answer(request, Finish.STOP)) for request in done]

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        self.calls.append(("interrupt", _keys(self.requests)))
        waiting, self.requests = self.requests, []
        return [(request, self._answer(request, Finish.UNFINISHED)) for request in waiting]

    def _answer(self, request: SampleRequest, finish: Finish) -> Completion:
        text = self._answers.get((request.ticket, request.sample), "7")
        if (so_far := request.so_far) is None:
            return Completion(request.sample, (5,), (-0.5,), text, finish, (Segment(0, 1),))  # type: ignore[arg-type]
        return replace(
            so_far,
            tokens=[*so_far.tokens, 5],
            logprobs=[*so_far.logprobs, -0.5],
            finish=finish,
            segments=(Segment(0, so_far.num_tokens + 1),),
            text=text,
        )


def _keys(requests: Sequence[SampleRequest]) -> list[tuple[int, int]]:
    return [(request.ticket, request.sample) for request in requests]


class InstantGrading:
    """Grading pool that grades everything as right when it is asked for results. It starts no
    processes. If it must not wait, it has none yet."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.submitted: list[tuple[object, ...]] = []
        self.last_errors: dict[str, str] = {}
        self._is_slow = is_slow
        self._keys: list[Any] = []

    @property
    def pending(self) -> int:
        return len(self._keys)

    def submit(self, key: Any, *arguments: object) -> None:
        self.submitted.append((key, *arguments))
        self._keys.append(key)

    def collect(self, wait: bool) -> list[Any]:
        from dapo_megatron.types import Grade

        if self._is_slow and not wait:
            return []
        keys, self._keys = self._keys[::-1], []  # the newest first
        return [(key, Grade(1.0, True, "7"), "graded") for key in keys]


@contextmanager
def strangers(endpoint: str) -> Iterator[list[bytes]]:
    """Connect to tcp://HOST:PORT again and again and send garbage, until the end of the block.
    Yield the list of what was sent."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZMTP 3.0 without a key
    messages = (b"GET / HTTP/1.0\r\n\r\n", bytes(200), greeting, bytes(range(256)) * 40)
    sent: list[bytes] = []
    is_over = threading.Event()

    def run() -> None:
        for message in cycle(messages):
            # The hub may close the connection at any time.
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(message)
                sent.append(message)
                link.settimeout(0.01)
                link.recv(1000)
            if is_over.is_set() and len(sent) >= len(messages):
                return

    thread = threading.Thread(target=run)
    thread.start()
    yield sent
    is_over.set()
    thread.join()


@contextmanager
def started(
    engine: Any,
    ranks: Ranks,
    grading: Any,
    *,
    deterministic: bool = False,
    silence_seconds: float = 300.0,
    stop: Callable[[], str] = lambda: "",
) -> Iterator[Engines]:
    """Connect the workers of all ranks as `build_core` does. Close the channel at the end, but as
    in `Core` not after an error. Collective. `grading` is used by leaders only."""
    replicas = ranks.all_gather(engine.replica, int)
    peers = ranks.subgroup([r for r, replica in enumerate(replicas) if replica == engine.replica])
    number = engine.replica if engine.is_leader else None
    hub, member = open_channel(ranks, number, engine.num_replicas)
    driver = None
    if hub is not None:
        driver = EngineDriver(
            hub,
            engine.num_replicas,
            engine.max_sequences,
            deterministic=deterministic,
            silence_seconds=silence_seconds,
        )
    worker: Leader | Follower
    if member is None:
        worker = Follower(engine, peers, stop=stop)
    else:
        worker = Leader(engine, grading, member, peers, deterministic=deterministic, stop=stop)
    yield Engines(worker, driver, ranks)
    for end in (member, hub):
        if end is not None:
            end.close()
