"""Control channel between rank 0 (the hub) and the leaders of replicas (its members), over ZeroMQ.

Rank 0 binds a ROUTER socket to the cluster's interface (address.py), and each member connects a
DEALER socket to it. A member on rank 0 connects in memory, so a run without other members opens no
port. Each start has new CURVE keys, which encrypt and authenticate every message. Only the keys of
the members are admitted (admission.py). A key identifies its member, so a member cannot send in the
name of another.

No message is lost or delivered twice. Queues have no limit, so nothing is dropped when a receiver
is slow. The messages of each member are numbered from 1, and so are those to it. The receiver logs
and drops a number that it has seen, and raises RankError if a number is missing.

If a TCP connection breaks, libzmq connects again and sends the messages that it still has. Messages
that were on their way, or that the hub has not yet read, may be lost. So both sides then send how
many messages they have sent, and the other side raises RankError if some are missing, even if no
message follows. If none is missing, the run goes on.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import zmq
from zmq.utils.monitor import parse_monitor_message

from dapo_megatron.cluster.address import cluster_address
from dapo_megatron.cluster.admission import Admission
from dapo_megatron.cluster.collectives import EnginesChanged, on_rank0
from dapo_megatron.cluster.exclusive import Exclusive
from dapo_megatron.cluster.join import node_name
from dapo_megatron.cluster.numbered import MAX_MESSAGE_BYTES, Peer, is_count
from dapo_megatron.protocols import Exchange
from dapo_megatron.types import RankError

MAX_BATCH = 1_000
"""Maximum number of messages that `receive` returns."""
OPEN_SECONDS, ELASTIC_OPEN_SECONDS = 120.0, 30.0
"""Time limit for the members to connect, in a run that needs all and in one that does not."""
RECONNECT_SECONDS = 30.0
"""Default time that `Hub.send` waits for a member whose connection is broken."""
LINGER_SECONDS = 2.0
"""Maximum time that `close` waits until the last messages are sent."""

_INPROC = "inproc://hub"
_RENAMED = b"\0"
"""First byte of the id that libzmq gives to a connection which a newer one replaces. It still
delivers what it has received over it. The sender's key tells who it is."""
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
}
"""Firewalls forget connections that are idle during a long update."""
_Context = zmq.Context[zmq.Socket[bytes]]
_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Introduction:
    """A rank, as the others see it before they connect."""

    member: int | None
    host: str
    public_key: str
    rank: int
    """Number of the rank in the job."""


@dataclass(frozen=True, slots=True)
class Address:
    """The hub's address and the public key that proves to members that they reached the hub."""

    endpoint: str
    public_key: str


class Member:
    """A replica's end of the channel. One thread at a time may use it."""

    def __init__(
        self,
        address: Address,
        routing_id: bytes,
        keys: tuple[bytes, bytes] | None,
        context: _Context | None = None,
    ) -> None:
        """Connect to the hub. `context` is the hub's if it is in this process; it needs no
        `keys`."""
        self._own_context = _Context() if context is None else None
        context = context or self._own_context
        assert context is not None
        self._exclusive = Exclusive()
        self._hub = Peer("rank 0", b"")
        self._socket = _socket(context, zmq.DEALER, address.endpoint)
        self._socket.routing_id = routing_id
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
            self._socket.curve_serverkey = address.public_key.encode()
        self._ended: float | None = None
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address.endpoint)
        self._socket.send(self._hub.count())

    def send(self, message: bytes) -> None:
        """Send a message to the hub. Does not wait."""
        with self._exclusive():
            self._socket.send(self._hub.frame(message))
            self._hub.sent += 1

    def receive(self, timeout_seconds: float) -> list[bytes]:
        """Return the messages that have arrived. Waits for the first one until the timeout.

        Raises RankError if a message is lost.
        """
        messages: list[bytes] = []
        with self._exclusive():
            for timeout_ms in _timeouts(timeout_seconds):
                ready = dict(self._poller.poll(timeout_ms))
                if self._monitor in ready:
                    event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                    is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    self._ended = None if is_connected else time.monotonic()
                    if is_connected:
                        self._socket.send(self._hub.count())
                if self._socket in ready:
                    self._drain(messages)
                if messages:
                    break
        return messages

    @property
    def silence(self) -> float:
        """Seconds since the connection to the hub ended; 0.0 if there is one."""
        return 0.0 if self._ended is None else time.monotonic() - self._ended

    def close(self) -> None:
        """Close the connection. Idempotent. Waits at most LINGER_SECONDS."""
        if self._exclusive.is_forked():
            return
        self._monitor.close(0)
        self._socket.close(_linger_ms())
        if self._own_context is not None:
            self._own_context.term()

    def _drain(self, messages: list[bytes]) -> None:
        while len(messages) < MAX_BATCH:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := self._hub.accept(frame)) is not None:
                messages.append(message)


class Hub:
    """Rank 0's end of the channel. One thread at a time may use it.

    members   introductions of the members, by member number
    names     their names in errors, such as "replica 3 (rank 12, host n4)"
    local     number of the member in this process, or None
    host      IP address for the other members, or None if there are none
    """

    def __init__(
        self,
        members: Sequence[Introduction],
        names: Sequence[str],
        local: int | None,
        host: str | None,
    ) -> None:
        public_key, secret_key = zmq.curve_keypair()
        self._context = _Context()
        self._exclusive = Exclusive()
        self._peers = [Peer(name, _routing_id(number)) for number, name in enumerate(names)]
        self.local = local
        self._local_member: Member | None = None
        self.on_fault: Callable[[int, RankError], None] = _raise
        """Called with a member, and the error that a message of it is lost or invalid."""
        self._early: list[tuple[int, bytes]] = []
        """Messages that arrived while others were still connecting."""
        if local is not None:
            # A member of another process has a user id. The local one has an id that only this
            # process knows.
            self._peers[local].routing_id = b"local " + secrets.token_bytes(16)
        self._socket = _socket(self._context, zmq.ROUTER, host or "")
        self._socket.router_mandatory = True
        # After a broken connection, the new one takes the place of the old one at once.
        self._socket.router_handover = True
        self._socket.bind(_INPROC)
        self._admission: Admission | None = None
        self.address: Address | None = None
        if host is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret_key
            keys = {member.public_key: number for number, member in enumerate(members)}
            self._admission = Admission(self._context, self._socket, keys)
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.address = Address(endpoint, public_key.decode())
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def connect_local(self) -> Member:
        """Return the member that is in this process."""
        assert self.local is not None
        routing_id = self._peers[self.local].routing_id
        self._local_member = Member(Address(_INPROC, ""), routing_id, None, self._context)
        return self._local_member

    def wait_for_members(self, check_present: Callable[[], None] | None = None) -> None:
        """Wait until all members have connected. Raises RankError naming those that do not.

        With `check_present`, some may be lost: it is called once a second, and may raise
        EnginesChanged, which is also raised for those that do not connect.
        """
        opened = checked = time.monotonic()
        limit = OPEN_SECONDS if check_present is None else ELASTIC_OPEN_SECONDS
        while missing := [peer.name for peer in self._peers if not peer.is_connected]:
            seconds_left = opened + limit - time.monotonic()
            if check_present is not None and time.monotonic() > checked + 1.0:
                check_present()
                checked = time.monotonic()
            if seconds_left <= 0:
                others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
                endpoint = self.address.endpoint if self.address else _INPROC
                raise (RankError if check_present is None else EnginesChanged)(
                    f"{missing[0]}{others}: did not connect to rank 0 at {endpoint} within "
                    f"{limit:.0f} s. Does a firewall refuse connections between the nodes?"
                )
            self._early += self._receive(min(0.02, seconds_left))

    def name(self, member: int) -> str:
        """Return a member's name for errors, such as "replica 3 (rank 12, host n4)"."""
        return self._peers[member].name

    def silence(self, member: int) -> float:
        """Return the seconds since the connection of a member ended; 0.0 if it has one."""
        ended = None
        if self._admission is not None:
            ended = self._admission.ended.get(self._peers[member].name)
        return 0.0 if ended is None else time.monotonic() - ended

    def send(
        self, member: int, message: bytes, reconnect_seconds: float = RECONNECT_SECONDS
    ) -> None:
        """Send a message to a member. Waits only if the member's connection is broken.

        Raises RankError if it does not connect again within `reconnect_seconds`.
        """
        peer = self._peers[member]
        with self._exclusive():
            frame = peer.frame(message)
            deadline = None
            while not self._try_send(peer, frame):
                deadline = deadline or time.monotonic() + reconnect_seconds
                if time.monotonic() >= deadline:
                    raise RankError(f"{peer.name}: its connection is lost; see the log of its rank")
                time.sleep(0.05)
            peer.sent += 1

    def receive(self, timeout_seconds: float) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, with their members. Waits for the first one until
        the timeout.

        Raises RankError naming a member whose message is lost or invalid, unless `on_fault` does
        not.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        return self._receive(timeout_seconds)

    def close(self) -> None:
        """Close the channel and the local member. Idempotent. Waits at most LINGER_SECONDS."""
        if self._exclusive.is_forked():
            return
        if self._local_member is not None:
            self._local_member.close()
        self._socket.close(_linger_ms())
        if self._admission is not None:
            self._admission.close()
        self._context.term()

    def _receive(self, timeout_seconds: float) -> list[tuple[int, bytes]]:
        messages: list[tuple[int, bytes]] = []
        with self._exclusive():
            for timeout_ms in _timeouts(timeout_seconds):
                if self._poller.poll(timeout_ms):
                    self._drain(messages)
                if messages:
                    break
        return messages

    def _try_send(self, peer: Peer, frame: bytes) -> bool:
        try:
            self._socket.send(peer.routing_id, zmq.SNDMORE)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        self._socket.send(frame)
        return True

    def _drain(self, messages: list[tuple[int, bytes]]) -> None:
        socket = self._socket
        while len(messages) < MAX_BATCH:
            try:
                routing_id = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = socket.recv(copy=False)
            extra_frames = socket.recv_multipart() if frame.more else []
            member = self._member_of(frame, routing_id)
            peer, content = self._peers[member], frame.bytes
            if extra_frames:
                content = b""  # invalid
            try:
                message = peer.accept(content)
            except RankError as error:
                self.on_fault(member, error)
                continue
            if message is not None:
                messages.append((member, message))
            elif is_count(content):
                self._try_send(peer, peer.count())
                is_replaced = routing_id.startswith(_RENAMED)
                if self._admission is not None and member != self.local and not is_replaced:
                    self._admission.know(int(frame.get(zmq.SRCFD)), peer.name)

    def _member_of(self, frame: zmq.Frame, routing_id: bytes) -> int:
        """Return the member that sent a frame, by its key."""
        try:
            member = int(frame.get("User-Id"))
        except zmq.ZMQError:  # only a connection within this process has none
            member = self.local if self.local is not None else -1
        is_replaced = routing_id.startswith(_RENAMED)
        if member < 0 or not (is_replaced or self._peers[member].routing_id == routing_id):
            name = "a connection without a key" if member < 0 else self._peers[member].name
            raise RankError(f"{name}: sends as {routing_id!r}, which is another member")
        return member


def open_channel(
    exchange: Exchange,
    member: int | None,
    num_members: int,
    check_present: Callable[[], None] | None = None,
) -> tuple[Hub | None, Member | None]:
    """Connect rank 0 with the members. Collective.

    `member` is this rank's member number, or None. Returns the hub on rank 0, and the member on the
    ranks that have a number. The caller closes both. Raises ConfigError if rank 0 has no address
    for the others, and an error naming the members that did not connect (`wait_for_members`).
    """
    keys = zmq.curve_keypair()
    rank = int(os.environ.get("RANK", exchange.rank))
    introduction = Introduction(member, node_name(), keys[0].decode(), rank)
    introductions = exchange.all_gather(introduction, Introduction)
    ranks = _rank_of_member(introductions, num_members)

    def create_hub() -> Hub:
        others = [rank for rank in ranks if rank > 0]
        names = [
            f"replica {number} (rank {introductions[rank].rank}, host {introductions[rank].host})"
            for number, rank in enumerate(ranks)
        ]
        host = cluster_address(exchange.world_size) if others else None
        return Hub([introductions[rank] for rank in ranks], names, member, host)

    hub = on_rank0(exchange, create_hub)
    joined: Member | None = None
    try:
        address = exchange.broadcast(hub.address if hub else None, Address | None)
        if hub is not None and member is not None:
            joined = hub.connect_local()
        elif member is not None:
            assert address is not None
            joined = Member(address, _routing_id(member), keys)
        on_rank0(exchange, lambda: hub.wait_for_members(check_present) if hub else None)
    except BaseException:
        for end in (joined, hub):
            if end is not None:
                end.close()
        raise
    return hub, joined


def _raise(_: int, error: RankError) -> NoReturn:
    raise error


def _rank_of_member(introductions: Sequence[Introduction], num_members: int) -> list[int]:
    ranks = {entry.member: rank for rank, entry in enumerate(introductions)}
    numbers = [entry.member for entry in introductions if entry.member is not None]
    if sorted(numbers) != list(range(num_members)):
        raise RankError(f"the ranks lead replicas {sorted(numbers)}, not 0 to {num_members - 1}")
    return [ranks[number] for number in range(num_members)]


def _routing_id(member: int) -> bytes:
    return b"member %d" % member


def _socket(context: _Context, kind: int, endpoint: str) -> _Socket:
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = 0  # no limit
    # Also for a socket that is never closed, after an error: collecting its context would wait for
    # ever for messages to a rank that is gone.
    socket.linger = _linger_ms()
    socket.maxmsgsize = MAX_MESSAGE_BYTES + 1024
    socket.backlog = 4096  # all members connect at once
    socket.ipv6 = "[" in endpoint or "::" in endpoint
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    return socket


def _timeouts(seconds: float) -> Iterator[int]:
    """Yield the milliseconds until the deadline, at least once."""
    deadline = time.monotonic() + seconds
    yield math.ceil(1000 * seconds)
    while (seconds_left := deadline - time.monotonic()) > 0:
        yield math.ceil(1000 * seconds_left)


def _linger_ms() -> int:
    return int(1000 * LINGER_SECONDS)
