"""A process group over gloo that behaves like NCCL's on a GPU, as far as callers can notice:
`python -m tests.helpers.nccl_like engine ...` runs an engine server with such groups.

- Collectives run on a "stream", a thread. `wait` without a timeout returns at once, and until the
  collective is done its output is garbage.
- The first collective makes the communicator, and blocks.
- The death of a member is no error. The collective lasts until `abort`, or until the group's
  timeout, when the watchdog thread aborts the communicator. `wait` with a timeout then raises.
- A thread that launches one more than QUEUED collectives waits.

(torch's ProcessGroupNCCL.hpp and .cpp, 2.13.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.bridge import group as bridge_group
from dapo_megatron.bridge import plan
from dapo_megatron.cluster.groups import make_group
from dapo_megatron.cluster.servers import Server

QUEUED = 1024
ROUND_BYTES = 100_000
"""Bytes of a round of a transfer, so that a tiny model takes several."""
GARBAGE = 0x7F


class NcclLikeServer(Server):
    """A server whose process runs this file."""

    def _start(self) -> None:
        self._command[1:3] = ["-m", __name__]
        super()._start()


class _Work:
    def __init__(self, done: Future[None], group: NcclLikeGroup) -> None:
        self._done, self._group = done, group

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            try:
                self._done.result(min(timeout, self._group.timeout).total_seconds())
            except TimeoutError:
                self._group.abort()
                raise RuntimeError("the watchdog thread aborted the communicator") from None
        return True


class NcclLikeGroup:
    """See the head of this file. `launching` is called before each collective, with its number."""

    launching: Callable[[int], None] = staticmethod(lambda number: None)

    def __init__(self, timeout: timedelta, connect: Callable[[], Any]) -> None:
        self.timeout, self._connect = timeout, connect
        self._gloo: Any = None
        self._number = 0
        self._room = threading.Semaphore(QUEUED)
        self._stream = ThreadPoolExecutor(1)
        self._is_aborted = threading.Event()

    def alltoall_base(
        self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]
    ) -> _Work:
        if self._is_aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        NcclLikeGroup.launching(self._number)
        self._number += 1
        self._gloo = self._gloo or self._connect()
        self._room.acquire()
        received.fill_(GARBAGE)
        return _Work(self._stream.submit(self._run, received, sent, arriving, leaving), self)

    def _run(self, received: Tensor, sent: Tensor, *splits: Sequence[int]) -> None:
        arrived = torch.empty_like(received)
        try:
            self._gloo.alltoall_base(arrived, sent, *splits).wait()
        except RuntimeError:  # a member is gone
            self._is_aborted.wait()
            raise
        finally:
            self._room.release()
        received.copy_(arrived)

    def abort(self) -> None:
        self._is_aborted.set()

    def __del__(self) -> None:
        self.abort()
        self._stream.shutdown(wait=False)


def make(
    host: Any,
    store: Any,
    purpose: str,
    members: Sequence[int],
    own: int,
    device: torch.device,
    timeout: timedelta,
    connect_timeout: timedelta,
) -> NcclLikeGroup:
    """Return a group; takes the place of `make_device_group`."""
    lasting = timedelta(hours=1)
    connect = partial(
        make_group, store, f"{purpose} like NCCL", members, own, lasting, connect_timeout
    )
    return NcclLikeGroup(timeout, connect)


def use() -> None:
    """Make syncs in this process use such groups."""
    bridge_group.make_device_group = make
    plan.make_plan.__kwdefaults__["bucket_bytes"] = ROUND_BYTES


if __name__ == "__main__":
    from dapo_megatron import __main__ as program
    from dapo_megatron.engine import device as engine_device

    engine_device.prepare_environment()
    use()
    program.main()
