"""The control channel between rank 0 and the leaders of replicas, on real sockets."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq
from psutil._ntuples import snicaddr

from dapo_megatron.cluster import address, admission, messages, numbered
from dapo_megatron.cluster.address import cluster_address
from dapo_megatron.cluster.collectives import EnginesChanged
from dapo_megatron.cluster.messages import Address, Hub, Introduction, Member, open_channel
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.types import ConfigError, RankError
from tests.helpers.ranks import run_ranks

PATIENCE_SECONDS = 300.0
"""Time limit for what must happen."""


@dataclass(frozen=True)
class Channel:
    """A hub and its members in this process; member 0 is local, the others use TCP."""

    hub: Hub
    members: list[Member]
    keys: list[tuple[bytes, bytes]]

    @property
    def address(self) -> Address:
        assert self.hub.address is not None
        return self.hub.address

    @property
    def host(self) -> str:
        return self.address.endpoint.rpartition(":")[0].removeprefix("tcp://").strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.endpoint.rpartition(":")[2])


def name_of(member: int) -> str:
    return f"replica {member} (rank {4 * member}, host h{member})"


@contextmanager
def channel(
    num_members: int, host: str = "127.0.0.1", *, absent: int | None = None
) -> Iterator[Channel]:
    """Open a channel. The member `absent` does not connect."""
    keys = [zmq.curve_keypair() for _ in range(num_members)]
    introductions = [Introduction(n, f"h{n}", keys[n][0].decode(), n) for n in range(num_members)]
    with ExitStack() as stack:
        hub = stack.enter_context(
            closing(Hub(introductions, [name_of(n) for n in range(num_members)], 0, host))
        )
        assert hub.address is not None
        members = [hub.connect_local()]
        for number in range(1, num_members):
            if number != absent:
                member = Member(hub.address, b"member %d" % number, keys[number])
                members.append(stack.enter_context(closing(member)))
        if absent is None:
            hub.wait_for_members()
        yield Channel(hub, members, keys)


def received_by_hub(hub: Hub, count: int) -> list[tuple[int, bytes]]:
    received: list[tuple[int, bytes]] = []
    wait_until(lambda: received.extend(hub.receive(0.1)) or len(received) >= count)
    return received


def received_by(member: Member, count: int) -> list[bytes]:
    received: list[bytes] = []
    wait_until(lambda: received.extend(member.receive(0.1)) or len(received) >= count)
    return received


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def raw_member(
    opened: Channel, number: int, routing_id: bytes | None = None
) -> Iterator[zmq.Socket[bytes]]:
    """Connect a plain socket with a member's key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.routing_id = routing_id or b"member %d" % number
        dealer.curve_publickey, dealer.curve_secretkey = opened.keys[number]
        dealer.curve_serverkey = opened.address.public_key.encode()
        dealer.connect(opened.address.endpoint)
        yield dealer


def frame(number: int, message: bytes = b"", kind: bytes = b"dmsg") -> bytes:
    return struct.pack("<4sQ", kind, number) + message


# ---------------------------------------------------------------------------- between ranks


def both_directions(rank: int, num_messages: int) -> list[tuple[int, bytes]]:
    hub, member = open_channel(Ranks(rank, 4, rank), rank, 4)
    assert member is not None
    for number in range(num_messages):
        member.send(b"%d from %d" % (number, rank))
    received: list[tuple[int, bytes]] = []
    if hub is not None:
        received = received_by_hub(hub, 4 * num_messages)
        for number in range(num_messages):
            for other in range(4):
                hub.send(other, b"%d to %d" % (number, other))
    orders = received_by(member, num_messages)
    assert orders == [b"%d to %d" % (number, rank) for number in range(num_messages)]
    member.close()
    if hub is not None:
        assert re.fullmatch(r"replica 3 \(rank 3, host \S+\)", hub.name(3))
        hub.close()
    return received


def test_messages_of_other_processes_arrive_in_order_in_both_directions() -> None:
    received = run_ranks(both_directions, 4, 2_000)[0]
    assert len(received) == 8_000
    for rank in range(4):
        from_rank = [message for member, message in received if member == rank]
        assert from_rank == [b"%d from %d" % (number, rank) for number in range(2_000)]


def leader_on_another_rank(rank: int) -> tuple[bool, bool, list[str]]:
    # Replicas of two ranks; the leaders are ranks 1 and 2, and the numbers are not in rank order.
    number = {1: 1, 2: 0}.get(rank)
    hub, member = open_channel(Ranks(rank, 3, rank), number, 2)
    names = []
    if hub is not None:
        names = [hub.name(0), hub.name(1)]
        for other in range(2):
            hub.send(other, b"%d" % other)
    if member is not None:
        assert received_by(member, 1) == [b"%d" % number]
    Ranks(rank, 3, rank).barrier()
    for end in (hub, member):
        if end is not None:
            end.close()
    return hub is not None, member is not None, names


def test_only_rank_0_has_a_hub_and_only_leaders_are_members() -> None:
    results = run_ranks(leader_on_another_rank, 3)
    assert [result[:2] for result in results] == [(True, False), (False, True), (False, True)]
    assert [name.partition(", host")[0] for name in results[0][2]] == [
        "replica 0 (rank 2",
        "replica 1 (rank 1",
    ]


def fail_to_open(rank: int, how: str) -> str:
    world, member = Ranks(rank, 2, rank), rank
    if how == "address":
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "198.51.100.7"}
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    elif how == "number":
        member = 0
    elif how == "absent" and rank == 1:
        messages.Member.__init__ = lambda *_: None  # type: ignore[method-assign]
        messages.Member.close = lambda *_: None  # type: ignore[method-assign]
    messages.OPEN_SECONDS = 0.5
    threads = threading.active_count()
    try:
        open_channel(world, member, 2)
    except (RankError, ConfigError) as error:
        assert threading.active_count() == threads
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("address", "ConfigError: MASTER_ADDR: 198.51.100.7: not an address of rank 0's machine"),
        ("number", "RankError: the ranks lead replicas [0, 0], not 0 to 1"),
        ("absent", "RankError: replica 1 (rank 1, host "),
    ],
)
def test_all_ranks_raise_the_error_of_a_channel_that_does_not_open(how: str, message: str) -> None:
    results = run_ranks(fail_to_open, 2, how)
    assert all(message in result for result in results), results
    assert results[0] == results[1]


def test_one_member_opens_no_port() -> None:
    hub, member = open_channel(Ranks(0, 1, 0), 0, 1)
    assert hub is not None and member is not None
    with closing(hub):
        assert hub.address is None
        assert listening() == []
        member.send(b"report")
        hub.send(0, b"order")
        assert received_by_hub(hub, 1) == [(0, b"report")]
        assert received_by(member, 1) == [b"order"]


# ------------------------------------------------------------------------ order and numbers


def test_messages_of_many_sizes_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "MAX_MESSAGE_BYTES", 2**24)
    rng = random.Random(2)
    sizes = [0, 1, 255, 256, 65_535, 65_536, numbered.MAX_MESSAGE_BYTES, 0]
    contents = [rng.randbytes(size) for size in sizes]
    with channel(2) as opened:
        for content in contents:
            for number, member in enumerate(opened.members):
                member.send(content)
                opened.hub.send(number, content)
        received = received_by_hub(opened.hub, 2 * len(sizes))
        for number, member in enumerate(opened.members):
            assert [content for sender, content in received if sender == number] == contents
            assert received_by(member, len(sizes)) == contents
            with pytest.raises(ValueError, match="16777217 bytes"):
                member.send(bytes(numbered.MAX_MESSAGE_BYTES + 1))
            member.send(b"after")
        assert sorted(received_by_hub(opened.hub, 2)) == [(0, b"after"), (1, b"after")]


def test_messages_that_arrive_before_all_are_connected_are_kept() -> None:
    with channel(2, absent=1) as opened:
        with raw_member(opened, 1) as raw:
            early = [b"%d" % number for number in range(2 * messages.MAX_BATCH)]
            for number, content in enumerate(early, start=1):
                raw.send(frame(number, content))
            raw.send(frame(len(early), kind=b"dcnt"))
            opened.hub.wait_for_members()
        assert received_by_hub(opened.hub, 1) == [(1, content) for content in early]


def test_receive_returns_at_most_a_batch_and_the_rest_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_BATCH", 3)
    with channel(1) as opened:
        for number in range(10):
            opened.members[0].send(b"%d" % number)
            opened.hub.send(0, b"%d" % number)
        assert [len(opened.hub.receive(1.0)) for _ in range(4)] == [3, 3, 3, 1]
        assert [len(opened.members[0].receive(1.0)) for _ in range(4)] == [3, 3, 3, 1]
        assert opened.hub.receive(0.0) == []
        assert opened.members[0].receive(0.01) == []


def test_a_duplicate_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with channel(2, absent=1) as opened, raw_member(opened, 1) as raw:
        for content in (frame(1, b"a"), frame(2, b"b"), frame(2, b"b"), frame(3, b"c")):
            raw.send(content)
        assert received_by_hub(opened.hub, 3) == [(1, b"a"), (1, b"b"), (1, b"c")]
        assert f"{name_of(1)}: dropped message 2, which it sent twice" in caplog.text


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([frame(1), frame(3)], "message 2 did not arrive"),
        ([frame(5)], "messages 1 to 4 did not arrive"),
        ([frame(1), frame(4, kind=b"dcnt")], "messages 2 to 4 did not arrive"),
        ([b""], "sent 0 bytes that are no message of this run"),
        ([b"dmsg\0\0\0"], "sent 7 bytes that are no message"),
        ([frame(1, kind=b"DMSG")], "sent 12 bytes that are no message"),
    ],
)
def test_missing_messages_and_invalid_frames_raise_an_error_with_the_member(
    frames: list[bytes], error: str
) -> None:
    with channel(2, absent=1) as opened, raw_member(opened, 1) as raw:
        for content in frames:
            raw.send(content)
        with pytest.raises(RankError, match=re.escape(f"{name_of(1)}: {error}")):
            received_by_hub(opened.hub, 9)
        # The others are not affected.
        opened.members[0].send(b"still here")
        assert received_by_hub(opened.hub, 1) == [(0, b"still here")]


def test_a_message_of_several_frames_raises_an_error_with_the_member() -> None:
    with channel(2, absent=1) as opened, raw_member(opened, 1) as raw:
        raw.send_multipart([frame(1), b"", b"more"])
        with pytest.raises(RankError, match=re.escape(f"{name_of(1)}: sent 0 bytes")):
            received_by_hub(opened.hub, 9)
        opened.members[0].send(b"aligned")
        assert received_by_hub(opened.hub, 1) == [(0, b"aligned")]


@pytest.mark.parametrize("routing_id", [b"member 2", b"member 0", b"replica 1"])
def test_a_member_cannot_speak_for_another(routing_id: bytes) -> None:
    with channel(3, absent=1) as opened:
        # Otherwise member 2 may connect after the false one and take its place.
        wait_until(lambda: opened.hub.receive(0.01) or opened.hub._peers[2].is_connected)
        with raw_member(opened, 1, routing_id) as raw:
            raw.send(frame(1, b"false"))
            with pytest.raises(
                RankError, match=re.escape(f"{name_of(1)}: sends as {routing_id!r}")
            ):
                received_by_hub(opened.hub, 9)


# ------------------------------------------------------------------------------- strangers


def plain_bytes(opened: Channel, source: str, content: bytes) -> None:
    """Connect, wait until the hub knows the address, and send."""
    assert opened.hub._admission is not None
    peers = opened.hub._admission._peers
    before = list(peers.values()).count(source)
    host, port = opened.host, opened.port
    with socket.create_connection((host, port), source_address=(source, 0)) as stranger:
        wait_until(lambda: list(peers.values()).count(source) > before)
        with suppress(ConnectionError):
            stranger.sendall(content)
            stranger.settimeout(PATIENCE_SECONDS)
            while stranger.recv(4096):
                pass
    wait_until(lambda: list(peers.values()).count(source) == before)


HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


def zmq_peer(port: int, source: str, opened: Channel | None) -> None:
    """Send from a ZeroMQ socket without CURVE, or with a key of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"member 1"
        if opened is not None:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = opened.address.public_key.encode()
        monitor = dealer.get_monitor_socket(HANDSHAKE_FAILED)
        dealer.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        dealer.send(frame(1, b"false"))
        assert monitor.poll(1000 * PATIENCE_SECONDS)
        monitor.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(23, b"\0") + bytes(32)
"""Greeting of ZMTP 3.0 with CURVE."""
STRANGERS: dict[str, Callable[[Channel, str], None]] = {
    "text": lambda opened, source: plain_bytes(opened, source, b"GET / HTTP/1.1\r\n\r\n" * 9),
    "noise": lambda opened, source: plain_bytes(
        opened, source, random.Random(3).randbytes(100_000)
    ),
    "false handshake": lambda opened, source: plain_bytes(
        opened, source, GREETING + b"\x04\x64" + bytes(100)
    ),
    "huge frame": lambda opened, source: plain_bytes(
        opened, source, GREETING + b"\x06" + (2**40).to_bytes(8, "big") + bytes(1000)
    ),
    "without CURVE": lambda opened, source: zmq_peer(opened.port, source, None),
    "foreign key": lambda opened, source: zmq_peer(opened.port, source, opened),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_refused_and_logged_by_address(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def is_logged(source: str) -> bool:
        """Connect once more, because a stranger that is refused at once has no address."""
        STRANGERS[kind](opened, source)
        for _ in range(50):
            if f"refused a connection from {source}" in caplog.text:
                return True
            time.sleep(0.01)
        return False

    with channel(2) as opened:
        wait_until(lambda: is_logged("127.0.0.3"))
        for _ in range(3):
            STRANGERS[kind](opened, "127.0.0.3")
        wait_until(lambda: is_logged("127.0.0.4"))
        assert caplog.text.count("127.0.0.3") == 1
        opened.members[1].send(b"report")
        opened.hub.send(1, b"order")
        assert received_by_hub(opened.hub, 1) == [(1, b"report")]
        assert received_by(opened.members[1], 1) == [b"order"]
        assert opened.hub.receive(0.0) == []


def test_a_stranger_that_leaves_at_once_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its address may be unknown by then."""
    with channel(2) as opened:
        with socket.create_connection(("127.0.0.1", opened.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        wait_until(lambda: "refused a connection from " in caplog.text)


def test_members_that_leave_are_not_logged_as_strangers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with channel(3) as opened:
        opened.members[1].close()
        wait_until(lambda: f"{name_of(1)}: its connection to rank 0 has ended" in caplog.text)
    assert "refused" not in caplog.text


def test_a_member_that_reaches_another_server_sends_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "LINGER_SECONDS", 0.0)
    keys, other = zmq.curve_keypair(), zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.curve_server, server.curve_secretkey = True, other[1]
        monitor = server.get_monitor_socket(HANDSHAKE_FAILED)
        server.bind("tcp://127.0.0.1:*")
        endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
        with closing(Member(Address(endpoint, keys[0].decode()), b"member 1", keys)):
            assert monitor.poll(1000 * PATIENCE_SECONDS)
            assert not server.poll(0)
        monitor.close()


def test_the_log_of_refusals_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = admission._RefusalLog()
    for number in range(100):
        log.add(f"192.0.2.{number}" if number else admission.UNKNOWN, "it has no key")
    assert len(caplog.records) == admission.MAX_LOGGED
    monkeypatch.setattr(admission, "LOG_SECONDS", 0.0)
    log.add("192.0.2.1", "it has no key")  # logged before
    log.add("192.0.2.99", "it has no key")
    assert len(caplog.records) == admission.MAX_LOGGED + 1
    assert "(90 other refusals were not logged)" in caplog.text


# ---------------------------------------------------------------------- broken connections


class Relay:
    """Forwards TCP connections to the hub, and can swallow bytes and break connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.swallows = False
        self.num_swallowed = 0
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def break_connections(self) -> None:
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with suppress(OSError):  # one end may have closed it
                end.shutdown(socket.SHUT_RDWR)

    def renew_connections(self) -> None:
        """Break connections, and wait for new ones. A message that is sent before its sender has
        noticed the break is lost."""
        before = self.num_connections
        self.break_connections()
        wait_until(lambda: self.num_connections > before)

    def close(self) -> None:
        self._listener.close()
        self.break_connections()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                self._pairs.append((client, server))
                self.num_connections += 1
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source:
            while block := source.recv(65536):
                if self.swallows:
                    self.num_swallowed += len(block)
                else:
                    target.sendall(block)


@contextmanager
def relayed(opened: Channel) -> Iterator[tuple[Relay, Member]]:
    """Connect member 1 through a relay."""
    with closing(Relay(opened.port)) as relay:
        address = Address(relay.endpoint, opened.address.public_key)
        with closing(Member(address, b"member 1", opened.keys[1])) as member:
            opened.hub.wait_for_members()
            opened.hub.send(1, b"first order")
            member.send(b"first report")
            assert received_by(member, 1) == [b"first order"]
            assert received_by_hub(opened.hub, 1) == [(1, b"first report")]
            yield relay, member


def test_a_connection_that_breaks_without_loss_is_replaced() -> None:
    with channel(2, absent=1) as opened, relayed(opened) as (relay, member):
        for number in range(3):
            relay.renew_connections()
            member.send(b"report %d" % number)
            assert received_by_hub(opened.hub, 1) == [(1, b"report %d" % number)]
            opened.hub.send(1, b"order %d" % number)
            assert received_by(member, 1) == [b"order %d" % number]


def test_a_lost_report_raises_an_error_even_if_none_follows() -> None:
    with channel(2, absent=1) as opened, relayed(opened) as (relay, member):
        relay.swallows = True
        member.send(b"lost")
        wait_until(lambda: relay.num_swallowed)
        relay.break_connections()
        relay.swallows = False
        with pytest.raises(RankError, match=re.escape(f"{name_of(1)}: message 2 did not arrive")):
            wait_until(lambda: member.receive(0.01) or opened.hub.receive(0.01))


def test_a_replica_whose_report_is_lost_is_lost_in_an_elastic_run() -> None:
    """So is one whose report cannot be read. What they send later is ignored."""
    with channel(3) as opened, raw_member(opened, 1) as first, raw_member(opened, 2) as second:
        driver = EngineDriver(
            opened.hub, 3, 8, deterministic=False, silence_seconds=900.0, is_elastic=True
        )
        driver.idle(lambda: True)
        first.send(frame(2, kind=b"dcnt"))  # what it sent while its node was cut off is gone
        wait_until(lambda: driver._receive() or driver.lost == {1})
        first.send(frame(3, b"late"))
        second.send(frame(1, b"no report"))
        wait_until(lambda: driver._receive() or driver.lost == {1, 2})
        with pytest.raises(EnginesChanged, match=re.escape(f"{name_of(1)}, {name_of(2)}: lost")):
            driver.raise_lost()


def test_a_member_knows_how_long_the_hub_is_gone() -> None:
    with channel(2) as opened:
        member = opened.members[1]
        member.receive(0.1)
        assert member.silence == 0.0
        opened.hub.close()
        wait_until(lambda: member.receive(0.01) or member.silence > 0.2)


def test_a_lost_order_raises_an_error_even_if_none_follows() -> None:
    with channel(2, absent=1) as opened, relayed(opened) as (relay, member):
        relay.swallows = True
        opened.hub.send(1, b"lost")
        opened.hub.send(1, b"lost too")
        wait_until(lambda: relay.num_swallowed)
        relay.break_connections()
        relay.swallows = False
        with pytest.raises(RankError, match=r"rank 0: messages? 2( to 3)? did not arrive"):
            wait_until(lambda: opened.hub.receive(0.01) or member.receive(0.01))


def test_a_message_to_a_member_that_is_gone_raises_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "RECONNECT_SECONDS", 0.2)
    with channel(2) as opened:
        opened.members[1].close()
        with pytest.raises(RankError, match=re.escape(f"{name_of(1)}: its connection is lost")):
            wait_until(lambda: opened.hub.send(1, b"order"))


# ------------------------------------------------------------- closing, threads, processes


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    process = psutil.Process()
    before = process.num_threads(), process.num_fds(), threading.active_count()
    for _ in range(3):
        with channel(3) as opened:
            opened.members[1].send(b"never received")
            opened.hub.send(2, b"never received")
        opened.hub.close()
        opened.members[2].close()
    assert (process.num_threads(), process.num_fds(), threading.active_count()) == before


UNDELIVERED = """
from dapo_megatron.cluster.messages import *
import zmq
keys = zmq.curve_keypair()
hub = Hub([Introduction(0, "h", keys[0].decode(), 0)], ["replica 0"], None, "127.0.0.1")
member = Member(hub.address, b"member 0", keys)
hub.wait_for_members()
nowhere = Member(Address("tcp://127.0.0.1:1", keys[0].decode()), b"member 0", keys)
nowhere.send(bytes(1000))
hub.send(0, bytes(1000))
"""


@pytest.mark.parametrize(
    "end",
    ["", "nowhere.close(); hub.close(); member.close()", "raise SystemExit", "del nowhere"],
)
def test_undelivered_messages_do_not_keep_a_process_from_ending(end: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNDELIVERED + end],
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_child_process_cannot_use_the_channel() -> None:
    with channel(2) as opened:
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (
                lambda: opened.hub.send(1, b"order"),
                lambda: opened.hub.receive(0.0),
                lambda: opened.members[1].send(b"report"),
            ):
                try:
                    use()
                except RuntimeError:
                    refused += 1
            opened.hub.close()
            opened.members[1].close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        opened.hub.send(1, b"order")
        assert received_by(opened.members[1], 1) == [b"order"]


def test_programs_that_are_started_do_not_inherit_sockets() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with channel(2):
        own = set(os.listdir("/proc/self/fd")) - before
        kept = [fd for fd in own if Path(f"/proc/self/fd/{fd}").exists()]
        assert len(kept) > 4
        assert all(fcntl.fcntl(int(fd), fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in kept)


def test_two_threads_cannot_use_an_end_at_once() -> None:
    with channel(1) as opened:
        is_running, ends = threading.Event(), threading.Event()

        def receive() -> None:
            while not ends.is_set():
                is_running.set()
                opened.hub.receive(0.2)

        thread = threading.Thread(target=receive)
        thread.start()
        is_running.wait()
        try:
            with pytest.raises(RuntimeError, match="two threads"):
                wait_until(lambda: opened.hub.send(0, b"order"))
        finally:
            ends.set()
            thread.join()


# ------------------------------------------------------------------------------- addresses


def listening() -> list[str]:
    """Return the addresses of this process's listening TCP sockets."""
    connections = psutil.Process().net_connections("tcp")
    return [entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN]


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))],
)
def test_the_hub_listens_only_on_its_address(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with channel(2, host) as opened:
        assert listening() == [host]
        opened.members[1].send(b"report")
        assert received_by_hub(opened.hub, 1) == [(1, b"report")]
        plain_bytes(opened, host, b"garbage" * 10)
        wait_until(lambda: f"refused a connection from {host} " in caplog.text)


TWO_MACHINES = {"LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1"),
        (TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "h1"}, "127.0.0.1"),
        (TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "lo,ib0"}, "127.0.0.1"),
        (TWO_MACHINES | {"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        (TWO_MACHINES | {"MASTER_ADDR": "localhost"}, "127.0.0.1|::1"),
    ],
)
def test_the_address_follows_from_the_environment(environ: dict[str, str], expected: str) -> None:
    assert cluster_address(4, environ) in expected.split("|")


def interface(*entries: tuple[int, str]) -> list[snicaddr]:
    return [snicaddr(family, text, None, None, None) for family, text in entries]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([(17, "02:fc:00:00:00:01"), (10, "fd00::2"), (2, "10.0.0.2")], "10.0.0.2"),
        ([(10, "fe80::fc:ff:fe00:1%ib0"), (10, "fd00::2")], "fd00::2"),
    ],
)
def test_an_interface_gives_its_address_preferably_of_ipv4(
    addresses: list[tuple[int, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"ib0": interface(*addresses)})
    assert cluster_address(4, TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "ib0"}) == expected


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({}, "MASTER_ADDR: not set: "),
        ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR: 0.0.0.0: not an address"),
        ({"MASTER_ADDR": "::"}, "MASTER_ADDR: ::: not an address"),
        ({"MASTER_ADDR": "198.51.100.7"}, "MASTER_ADDR: 198.51.100.7: not an address"),
        ({"MASTER_ADDR": "h1"}, "MASTER_ADDR: h1: not an address"),
        ({"GLOO_SOCKET_IFNAME": "none9"}, "GLOO_SOCKET_IFNAME: .* no network interface none9"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME: .* ib0 has no IP address"),
    ],
)
def test_without_an_address_for_other_machines_the_error_names_the_variable(
    environ: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    # As on machines whose /etc/hosts maps their own name to loopback.
    monkeypatch.setattr(
        address.socket,
        "getaddrinfo",
        lambda name, *a, **k: resolve("127.0.1.1" if name == "h1" else name, *a, **k),
    )
    only_link_local = interface((10, "fe80::fc:ff:fe00:1%ib0"))
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"ib0": only_link_local})
    with pytest.raises(ConfigError, match=f"^{error}.*GLOO_SOCKET_IFNAME"):
        cluster_address(4, TWO_MACHINES | environ)
