"""The coordinator with many leaders: real sockets, and the product's leaders around idle engines.

Leaders are threads of a few processes. Their engines sample nothing and sleep, in real time: each
finishes as many completions per second as a real engine would.
"""

from __future__ import annotations

import gc
import heapq
import multiprocessing
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from data_plane_canned import MAX_TOKENS, Generator, ScriptedGrading
from data_plane_ranks import Setting, config_of, coordinator_of

from dapo_megatron.cluster.messages import Address, Hub, Introduction, Member
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.worker import Leader
from dapo_megatron.types import Completion, Finish, SampleRequest, Segment

CAPACITY = 9_000
"""Tokens per second of an engine, as in tools/lab/virtual_engines.py."""
MAX_SEQUENCES = 48
PROMPTS_PER_LEADER = 16
"""512 prompts per step at 32 leaders, as in docs/rollout.md. Larger clusters take larger steps."""
LOOKAHEAD = 16.0
"""More prompts than engines have room for, so that the coordinator's queue is never empty."""
STEP_SECONDS = 0.1
"""Seconds between two looks of a leader at its orders: an engine step, in which it cannot look."""
GRADE_SECONDS = 0.05
NUM_PROCESSES = 4
_LONGEST_TOKENS = array("i", bytes(4 * MAX_TOKENS))
_LONGEST_LOGPROBS = array("f", bytes(4 * MAX_TOKENS))


@dataclass(frozen=True)
class Scaling:
    """Figures at one number of leaders, over the measured steps. Seconds are of CPU time unless
    they are called wall."""

    leaders: int
    steps: int
    wall_seconds: float
    """Wall-clock time of collecting all steps."""
    thread_seconds: float
    """Seconds of the coordinator's thread."""
    process_seconds: float
    """Seconds of its process, with the threads of the sockets."""
    completions: int
    messages_received: int
    messages_sent: int
    bytes_received: int
    bytes_sent: int
    longest_wait: float
    """Longest wall-clock time that a free slot of an engine waited for its next request."""
    free_slots: float
    """Mean share of free slots. The coordinator's queue was never empty."""
    idle_seconds: float
    """Wall-clock time that an engine was without any request, summed over engines."""

    @property
    def share(self) -> float:
        """Share of a core that the coordinator and its sockets take while engines generate."""
        return self.process_seconds / self.wall_seconds


class IdleEngine:
    """Engine that finishes `CAPACITY` tokens per second and computes nothing."""

    def __init__(self, generator: Generator, replica: int, num_replicas: int) -> None:
        self.replica = replica
        self.num_replicas = num_replicas
        self.max_sequences = MAX_SEQUENCES
        self.version = 0
        self.wait_seconds: list[float] = []
        self.idle_seconds = 0.0
        self._generator = generator
        self._rate = CAPACITY / MAX_SEQUENCES
        self._requests: dict[tuple[int, int], SampleRequest] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._started: dict[tuple[int, int], float] = {}
        self._ends: list[tuple[float, tuple[int, int]]] = []
        self._free_since: deque[float] = deque()

    @property
    def requests(self) -> Collection[SampleRequest]:
        """See RolloutEngine."""
        return self._requests.values()

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See RolloutEngine."""
        now = time.monotonic()
        if requests and not self._requests and self._free_since:
            self.idle_seconds += now - self._free_since[-1]
        for request in requests:
            key = request.ticket, request.sample
            self._requests[key] = request
            self._queue.append(key)
        self._admit(now)

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """See RolloutEngine."""
        time.sleep(STEP_SECONDS)
        now, finished = time.monotonic(), []
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            length = self._generator.length(*key)
            finish = Finish.LENGTH if length == MAX_TOKENS else Finish.STOP
            finished.append((self._requests[key], self._completion(key, length, finish)))
            del self._requests[key], self._started[key]
            self._free_since.append(now)
        self._admit(now)
        return finished

    def _admit(self, now: float) -> None:
        """Start queued requests in free slots."""
        while self._queue and len(self._ends) < MAX_SEQUENCES:
            key = self._queue.popleft()
            if self._free_since:
                self.wait_seconds.append(now - self._free_since.popleft())
            request = self._requests[key]
            num_tokens = request.so_far.num_tokens if request.so_far else 0
            self._started[key] = now - num_tokens / self._rate
            length = min(self._generator.length(*key), request.max_tokens)
            heapq.heappush(self._ends, (self._started[key] + length / self._rate, key))

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        """See RolloutEngine."""
        now, unfinished = time.monotonic(), []
        for key, request in self._requests.items():
            so_far = request.so_far.num_tokens if request.so_far else 0
            most = self._generator.length(*key) - 1
            seconds = now - self._started.get(key, now)
            num_tokens = max(min(int(seconds * self._rate), most), so_far)
            if num_tokens:
                completion = self._completion(key, num_tokens, Finish.UNFINISHED)
                unfinished.append((request, completion))
        for items in (self._requests, self._queue, self._started, self._ends, self._free_since):
            items.clear()
        return unfinished

    def _completion(self, key: tuple[int, int], num_tokens: int, finish: Finish) -> Completion:
        before = self._requests[key].so_far
        new = num_tokens - (before.num_tokens if before else 0)
        segments = before.segments if before else ()
        if segments and segments[-1].version == self.version:
            new += segments[-1].num_tokens
            segments = segments[:-1]
        return Completion(
            sample=key[1],
            tokens=_LONGEST_TOKENS[:num_tokens],
            logprobs=_LONGEST_LOGPROBS[:num_tokens],
            text="",
            finish=finish,
            segments=(*segments, Segment(self.version, new)) if new else segments,
        )


def _lead(
    address: Address,
    keys: dict[int, tuple[bytes, bytes]],
    mean_tokens: float,
    seed: int,
    leaders: int,
    versions: Connection,
) -> None:
    """Run leaders in threads of this process. Send back their engines' waits."""
    sys.setswitchinterval(0.001)
    generator = Generator(mean_tokens, seed)
    engines, threads = [], []
    for number, pair in keys.items():
        engine = IdleEngine(generator, number, leaders)
        member = Member(address, b"member %d" % number, pair)
        grading: Any = ScriptedGrading(GRADE_SECONDS)
        leader = Leader(
            engine,  # type: ignore[arg-type]
            grading,
            member,
            Ranks(rank=0, world_size=1, local_rank=0),
            deterministic=False,
        )
        engines.append(engine)
        threads.append(threading.Thread(target=leader.serve, daemon=True))
    for thread in threads:
        thread.start()
    while (version := versions.recv()) is not None:
        for engine in engines:
            engine.version = version
            if version <= 1:  # the first step starts with empty engines
                engine.wait_seconds, engine.idle_seconds = [], 0.0
        versions.send(version)
    for thread in threads:
        thread.join()
    waits = [wait for engine in engines for wait in engine.wait_seconds]
    versions.send((waits, sum(engine.idle_seconds for engine in engines)))


def measure(setting: Setting, leaders: int, steps: int) -> Scaling:
    """Measure the coordinator with `leaders` leaders."""
    setting = Setting(
        prompts=PROMPTS_PER_LEADER * leaders, samples=setting.samples, seed=setting.seed,
        mean_tokens=setting.mean_tokens,
    )  # fmt: skip
    keys = {number: zmq.curve_keypair() for number in range(leaders)}
    introductions = [
        Introduction(number, "localhost", public.decode()) for number, (public, _) in keys.items()
    ]
    names = [f"replica {number}" for number in keys]
    hub = Hub(introductions, names, None, "127.0.0.1")
    assert hub.address is not None
    processes, pipes = [], []
    context = multiprocessing.get_context("spawn")
    for process in range(min(NUM_PROCESSES, leaders)):
        share = {n: pair for n, pair in keys.items() if n % NUM_PROCESSES == process}
        pipe, other = context.Pipe()
        arguments = (hub.address, share, setting.mean_tokens, setting.seed, leaders, other)
        processes.append(context.Process(target=_lead, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    hub.wait_for_members()
    gc.freeze()  # as cluster/imports.py does in a run
    counts = _counted(hub)
    driver = EngineDriver(hub, leaders, MAX_SEQUENCES, deterministic=False, silence_seconds=600)
    generator = Generator(setting.mean_tokens, setting.seed)
    config = config_of(setting)
    rollout = config.rollout.model_copy(update={"lookahead": LOOKAHEAD})
    config = config.model_copy(update={"rollout": rollout})
    coordinator = coordinator_of(config, driver, generator)
    completions = 0
    for version in range(steps + 1):
        for pipe in pipes:
            pipe.send(version)
        for pipe in pipes:
            pipe.recv()
        if version == 1:  # the first step fills the engines
            counts.clear()
            started = time.monotonic(), time.thread_time(), time.process_time()
            completions = 0
        collected = coordinator.collect(version, lambda num_ready: None)
        completions += sum(collected.gradings.values())
    ended = time.monotonic(), time.thread_time(), time.process_time()
    driver.end()
    wall, thread, process_seconds = (after - before for after, before in zip(ended, started))
    results = []
    for pipe in pipes:
        pipe.send(None)
        results.append(pipe.recv())
    for child in processes:
        child.join()
    hub.close()
    waits = np.array([wait for waits, _ in results for wait in waits])
    return Scaling(
        leaders=leaders,
        steps=steps,
        wall_seconds=wall,
        thread_seconds=thread,
        process_seconds=process_seconds,
        completions=completions,
        messages_received=counts["received"],
        messages_sent=counts["sent"],
        bytes_received=counts["bytes received"],
        bytes_sent=counts["bytes sent"],
        longest_wait=float(waits.max(initial=0.0)),
        free_slots=float(waits.sum()) / (wall * leaders * MAX_SEQUENCES),
        idle_seconds=sum(idle for _, idle in results),
    )


def _counted(hub: Hub) -> Counter[str]:
    """Count the hub's messages from now on."""
    counts: Counter[str] = Counter()
    send, receive = hub.send, hub.receive

    def counted_send(member: int, message: bytes) -> None:
        counts["sent"] += 1
        counts["bytes sent"] += len(message)
        send(member, message)

    def counted_receive(timeout_seconds: float) -> list[tuple[int, bytes]]:
        messages = receive(timeout_seconds)
        counts["received"] += len(messages)
        counts["bytes received"] += sum(len(message) for _, message in messages)
        return messages

    hub.send, hub.receive = counted_send, counted_receive  # type: ignore[method-assign]
    return counts
