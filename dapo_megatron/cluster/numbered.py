"""Numbers of the messages between two ends of a connection, which show losses and duplicates."""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

from dapo_megatron.types import RankError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**30
"""Maximum size of a message. A completion with its routes may have many megabytes."""
_HEADER = struct.Struct("<4sQ")
_MESSAGE, _COUNT = b"dmsg", b"dcnt"
"""Kinds of frames: a message with its number, and the number of messages sent so far."""


def is_count(frame: bytes) -> bool:
    """Return whether a frame reports how many messages were sent."""
    return frame.startswith(_COUNT)


@dataclass(slots=True)
class Peer:
    """The other end of a connection, and the numbers of its messages."""

    name: str
    routing_id: bytes
    sent: int = 0
    """Number of the last message sent to it."""
    received: int = 0
    """Number of the last message received from it."""
    is_connected: bool = False

    def frame(self, message: bytes) -> bytes:
        """Return the next message with its header. The caller increments `sent` once it is sent."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes, at most {MAX_MESSAGE_BYTES}")
        return _HEADER.pack(_MESSAGE, self.sent + 1) + message

    def count(self) -> bytes:
        """Return the frame that reports how many messages were sent."""
        return _HEADER.pack(_COUNT, self.sent)

    def accept(self, frame: bytes) -> bytes | None:
        """Return the message of a frame from the peer, or None if it has none or is a duplicate.

        Raises RankError if messages are missing or the frame is invalid.
        """
        kind, number = _HEADER.unpack_from(frame) if len(frame) >= _HEADER.size else (b"", 0)
        if kind == _MESSAGE:
            if number == self.received + 1:
                self.received = number
                return frame[_HEADER.size :]
            if number > self.received:
                raise self._loss(number - 1)
            logger.warning("%s: dropped message %d, which it sent twice", self.name, number)
        elif kind == _COUNT:
            self.is_connected = True
            if number > self.received:
                raise self._loss(number)
        else:
            raise RankError(f"{self.name}: sent {len(frame)} bytes that are no message of this run")
        return None

    def _loss(self, last: int) -> RankError:
        first = self.received + 1
        numbers = f"message {first}" if first == last else f"messages {first} to {last}"
        return RankError(
            f"{self.name}: {numbers} did not arrive. Its connection to this rank probably broke. "
            "Resume the run from its last checkpoint"
        )
