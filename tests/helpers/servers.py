"""Play engine servers: sockets that send the messages of engine/messages.py, and an engine with
canned answers."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.curve import trust_rank0
from dapo_megatron.engine.messages import (
    Hello,
    Order,
    OrderKind,
    Report,
    Sampling,
)
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest
from tests.helpers.processes import PATIENCE_SECONDS
from tests.helpers.rollouts import MAX_TOKENS, Correct, Length, ScriptedDriver

SECRET = bytes(range(32))
VERSIONS = {"version of vllm": "1.2"}
MODEL = {"config.json": "c0ffee"}


def sampling(name: str = "use", *, is_seeded: bool = True) -> Sampling:
    """Return sampling parameters for responses of up to MAX_TOKENS tokens."""
    return Sampling(name, MAX_TOKENS, 1.0, 1.0, is_seeded)


def prompt(ticket: int) -> Prompt:
    return Prompt("sums", ticket, (1, 2), "3+4", "7")


@contextmanager
def opened_pool(num_replicas: int, **keys: Any) -> Iterator[Pool]:
    """Yield a pool on a free port of this machine."""
    settings = {"max_sequences": 8, "deterministic": False, "silence_seconds": 60.0, **keys}
    pool = Pool(
        "tcp://127.0.0.1:0", SECRET, {"seed": 5}, VERSIONS, MODEL,
        num_replicas=num_replicas, **settings,
    )  # fmt: skip
    try:
        yield pool
    finally:
        if not pool._router.closed:
            pool.close()


class PlayedServer:
    """Socket of a server, which the test plays."""

    def __init__(
        self, address: str, secret: bytes | None = SECRET, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        if secret is not None:
            trust_rank0(self._socket, secret)
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.connect(address)

    def hello(self, replica: int | None, facts: Mapping[str, str] = VERSIONS) -> None:
        self.send(hello=Hello(replica, f"process of {replica}", dict(facts)))

    def send(self, **report: Any) -> None:
        self.send_report(Report(**report))

    def send_report(self, report: Report) -> None:
        self._socket.send(encode(report))

    def send_bytes(self, message: bytes) -> None:
        self._socket.send(message)

    def orders(self, seconds: float = 0.0, number: int = 1) -> list[Order]:
        """Return the orders that have arrived, without pings. Wait up to `seconds` for `number`."""
        end = time.monotonic() + seconds
        orders: list[Order] = []
        while len(orders) < number and self._socket.poll(max(0.0, 1000 * (end - time.monotonic()))):
            while self._socket.poll(0):
                order = decode(self._socket.recv(), Order, "rank 0")
                orders += [order] if order.kind is not OrderKind.PING else []
        return orders

    def close(self) -> None:
        self._socket.close()


def wait_for(pool: Pool, condition: Callable[[], object]) -> None:
    """Let a pool handle messages until a condition holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        pool.wait(0.02)


def order_of(pool: Pool, server: PlayedServer) -> Order:
    """Return the next order to a server. Exactly one is on its way."""
    orders: list[Order] = []

    def arrived() -> bool:
        orders.extend(server.orders())
        return bool(orders)

    wait_for(pool, arrived)
    [order] = orders
    return order


def admitted(pool: Pool, replica: int) -> PlayedServer:
    """Return a server that is ready."""
    server = PlayedServer(pool.address)
    server.hello(replica)
    assert order_of(pool, server).kind is OrderKind.WELCOME
    server.send(ready=MODEL)
    wait_for(pool, lambda: replica in pool.ready)
    return server


def synced(pool: Pool, *replicas: int) -> list[PlayedServer]:
    """Return servers that have taken part in a sync."""
    servers = [admitted(pool, replica) for replica in replicas]
    pool.note_sync(replicas)
    return servers


@dataclass
class Script:
    """Responses that do not depend on the server, and when servers are lost.

    version   of the weights of all servers
    losses    number of times that a server may end its connection
    """

    correct: Correct
    length: Length
    seed: int = 0
    version: int = 0
    losses: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)
    faults: list[str] = field(default_factory=list)


class Player(threading.Thread):
    """Server of a replica that advances at random, ends its connection at random, and connects
    again."""

    def __init__(self, address: str, replica: int, script: Script) -> None:
        super().__init__(daemon=True)
        self._address, self._replica, self._script = address, replica, script
        self._rng = random.Random(f"{script.seed}/{replica}")

    def run(self) -> None:
        try:
            while not self._script.is_over.is_set():
                server = PlayedServer(self._address)
                try:
                    self._serve(server)
                finally:
                    server.close()
        except Exception as error:  # noqa: BLE001 - the test shows it
            self._script.faults.append(repr(error))

    def _serve(self, server: PlayedServer) -> None:
        """Serve until the connection is to end."""
        server.hello(self._replica)
        script, rng = self._script, self._rng
        replica = ScriptedDriver(
            script.correct, script.length, num_replicas=1, rng=rng, grade_at_once=False
        )
        while not script.is_over.is_set():
            for order in server.orders(0.005):
                if order.kind in (OrderKind.LEAVE, OrderKind.END):
                    return
                if order.kind is OrderKind.WELCOME:
                    server.send(ready=MODEL)
                if order.kind is OrderKind.SAMPLE:
                    if script.losses and rng.random() < 0.3:
                        script.losses -= 1
                        return
                    # Another replica may have sampled what is to be continued.
                    replica.reported |= {
                        (request.ticket, sample): so_far.segments if so_far else ()
                        for request in order.requests
                        for sample, so_far in request.samples
                    }
                    replica.version = script.version
                    replica.accept(order.requests)
                if order.kind is OrderKind.INTERRUPT:
                    [(_, report)] = replica.interrupt()
                    server.send_report(report)
            if replica.is_running:
                [(_, report)] = replica.advance([[]])
                server.send_report(report)


class CannedEngine:
    """Engine that finishes two requests per step, the newest first. Every response has one token
    more than the request, and the text of its sample in `texts`.

    holds  whether a request must not finish yet
    """

    def __init__(
        self, texts: Sequence[str], holds: Callable[[SampleRequest], bool] = lambda request: False
    ) -> None:
        self.requests: list[SampleRequest] = []
        self.num_steps = 0
        self._texts, self._holds = texts, holds

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.requests += requests

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        assert self.requests
        self.num_steps += 1
        done = [request for request in self.requests[::-1] if not self._holds(request)][:2]
        self.requests = [request for request in self.requests if request not in done]
        return [(request, self._answer(request, Finish.STOP)) for request in done]

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        waiting, self.requests = self.requests, []
        return [(request, self._answer(request, Finish.UNFINISHED)) for request in waiting]

    def _answer(self, request: SampleRequest, finish: Finish) -> Completion:
        so_far = request.so_far
        number = 1 if so_far is None else so_far.num_tokens + 1
        tokens, logprobs = array("i", [5] * number), array("f", [-0.5] * number)
        text = self._texts[request.sample]
        return Completion(request.sample, tokens, logprobs, text, finish, (Segment(0, number),))
