"""Decides which peers may connect to a ZeroMQ socket, and logs the addresses of those refused."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

DOMAIN = b"dapo_megatron"
LOG_SECONDS = 60.0
MAX_LOGGED = 10
"""Maximum number of refused peers that are logged in LOG_SECONDS."""
MAX_ADDRESSES = 10_000
"""Maximum number of addresses that are remembered as logged."""
UNKNOWN = "an unknown address"
_STOP = "inproc://admission.stop"


class Admission:
    """Thread that admits to a server's socket only the peers with known CURVE keys.

    Create it before the socket is bound. It answers ZAP, the protocol with which libzmq asks for
    permission when a peer has proved that it owns a key (RFC 27). libzmq itself refuses a peer that
    does not follow the protocol or uses no CURVE.

    members   CURVE public key in Z85 -> member number, the "User-Id" of the peer's messages
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: zmq.Socket[bytes],
        members: Mapping[str, int],
    ) -> None:
        self._members = dict(members)
        self._refusals = _RefusalLog()
        self._peers: dict[int, str] = {}
        """File descriptor of an accepted connection -> address of its peer."""
        self._known: dict[int, str] = {}
        """File descriptor of a member's connection -> name of the member."""
        self.ended: dict[str, float] = {}
        """Names of members whose last connection has ended -> when, as time.monotonic()."""
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        server.zap_domain = DOMAIN
        # Without a handler of the domain, libzmq would admit every key.
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stop_receiver = context.socket(zmq.PAIR)
        self._stop_receiver.bind(_STOP)
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(_STOP)
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def know(self, descriptor: int, name: str) -> None:
        """Note that a message of a member came from a connection. Any thread may call this."""
        self._known[descriptor] = name
        self.ended.pop(name, None)

    def close(self) -> None:
        """End the thread. Call it after the server's socket is closed. Idempotent."""
        if self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._monitor, self._stop_receiver):
            poller.register(source, zmq.POLLIN)
        while self._stop_receiver not in (ready := dict(poller.poll())):
            if self._zap in ready:
                self._answer()
            if self._monitor in ready:
                self._observe()
        for source in (self._zap, self._monitor, self._stop_receiver):
            source.close(0)

    def _answer(self) -> None:
        version, request, _, address, _, mechanism, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        member = self._members.get(key)
        if member is None:
            self._refusals.add(address.decode(), "it has no key of this run")
            answer = [b"400", b"unknown key", b""]
        else:
            answer = [b"200", b"", str(member).encode()]
        self._zap.send_multipart([version, request, *answer, b""])

    def _observe(self) -> None:
        """Log the end of a connection. libzmq ends the connection of a peer that it refuses."""
        message = recv_monitor_message(self._monitor)
        descriptor = int(message["value"])
        if message["event"] == zmq.EVENT_ACCEPTED:
            self._peers[descriptor] = _peer_address(descriptor)
            return
        address = self._peers.pop(descriptor, UNKNOWN)
        if name := self._known.pop(descriptor, None):
            logger.info("%s: its connection to rank 0 has ended", name)
            if name not in self._known.values():
                self.ended[name] = time.monotonic()
        else:
            self._refusals.add(address, "it did not prove that it belongs to this run")


def _peer_address(descriptor: int) -> str:
    """Return the IP address of a connection's peer.

    It is UNKNOWN if libzmq has already closed the connection. This can happen if a stranger's first
    bytes arrive together with its connection.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return UNKNOWN


class _RefusalLog:
    """Logs each address once, and a limited number of addresses per minute."""

    def __init__(self) -> None:
        self._addresses: set[str] = set()
        self._num_logged = 0
        self._num_skipped = 0
        self._since = time.monotonic()

    def add(self, address: str, why: str) -> None:
        if address in self._addresses:
            return
        now = time.monotonic()
        if now - self._since >= LOG_SECONDS:
            self._since, self._num_logged = now, 0
        if self._num_logged >= MAX_LOGGED:
            self._num_skipped += 1
            return
        if len(self._addresses) >= MAX_ADDRESSES:
            self._addresses.clear()
        if address != UNKNOWN:
            self._addresses.add(address)
        self._num_logged += 1
        logger.warning(
            "refused a connection from %s to the control channel: %s%s",
            address,
            why,
            f" ({self._num_skipped} other refusals were not logged)" if self._num_skipped else "",
        )
        self._num_skipped = 0
