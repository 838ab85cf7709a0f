"""Encryption and authentication of the sockets between rank 0 and engine servers.

Both sides derive their CURVE keys from the run's secret, so nobody who lacks the secret can connect
or read a message.
"""

from __future__ import annotations

import hmac

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

DOMAIN = b"dapo_megatron"
RANK0, ENGINE = b"dapo_megatron: rank 0", b"dapo_megatron: engine"


def key_pair(secret: bytes, owner: bytes) -> tuple[bytes, bytes]:
    """Return public and secret CURVE key of an `owner`, RANK0 or ENGINE, in Z85."""
    private = z85.encode(hmac.digest(secret, owner, "sha256"))
    return zmq.curve_public(private), private


class _KnowsEngines:
    """Tells libzmq which public keys may connect. See Authenticator.configure_curve_callback."""

    def __init__(self, secret: bytes) -> None:
        self._public, _ = key_pair(secret, ENGINE)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the peer has the key of this run's engines."""
        return hmac.compare_digest(key, self._public)


def admit_engines(context: zmq.Context, server: zmq.Socket, secret: bytes) -> ThreadAuthenticator:  # type: ignore[type-arg]
    """Admit only engines of this run to a socket that is not bound yet. Return the thread that
    does; stop it after the socket is closed. It logs who is refused."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN.decode(), _KnowsEngines(secret))
    server.zap_domain = DOMAIN
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else libzmq admits every key without the thread
    server.curve_publickey, server.curve_secretkey = key_pair(secret, RANK0)
    server.curve_server = True
    return authenticator


def trust_rank0(engine: zmq.Socket, secret: bytes) -> None:  # type: ignore[type-arg]
    """Let a socket of an engine, not connected yet, talk to rank 0 of this run only."""
    engine.curve_publickey, engine.curve_secretkey = key_pair(secret, ENGINE)
    engine.curve_serverkey, _ = key_pair(secret, RANK0)


def watch_connection(socket: zmq.Socket, seconds: float) -> zmq.Socket:  # type: ignore[type-arg]
    """Return a socket that gets a message when a connection of `socket` ends, also because the
    other process did not run for `seconds`. Call before it is bound or connected."""
    socket.heartbeat_ivl = int(100 * seconds)  # ms
    socket.heartbeat_timeout = socket.heartbeat_ttl = int(1000 * seconds)
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)


def end_watch(socket: zmq.Socket, monitor: zmq.Socket) -> None:  # type: ignore[type-arg]
    """End `watch_connection` before `socket` is closed. Otherwise libzmq's thread would wait for
    ever to send an event that nobody receives."""
    socket.disable_monitor()
    monitor.close(0)
