"""torch's NCCL backend over gloo, as far as callers can notice:
`python -m tests.helpers.nccl_like engine ...` runs an engine server with it.

- Collectives run on a "stream", a thread. `wait` returns at once, and until the collective is done
  its output is garbage. In a group made with TORCH_NCCL_BLOCKING_WAIT=1 it blocks instead.
- The first collective makes the communicator. It blocks for ever if a member is gone, unless the
  group's options say that it must not.
- The death of a member is no error. The collective lasts until the group's timeout. Then a blocking
  `wait` aborts the communicator and raises. In other groups a watchdog thread ends the process.

(torch's ProcessGroupNCCL.hpp and .cpp.)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.bridge import group as bridge_group
from dapo_megatron.bridge import plan
from dapo_megatron.cluster import groups
from dapo_megatron.cluster.groups import make_group
from dapo_megatron.cluster.servers import Server

ROUND_BYTES = 100_000
"""Bytes of a round of a transfer, so that a tiny model takes several."""
GARBAGE = 0x7F
EXIT_CODE = 134
"""Exit code of a process that the watchdog thread has ended."""


class NcclLikeServer(Server):
    """A server whose process runs this file."""

    def _start(self) -> None:
        self._command[1:3] = ["-m", __name__]
        super()._start()


class _Work:
    def __init__(self, done: Future[None], group: NcclLikeGroup) -> None:
        self._done, self._group = done, group

    def wait(self) -> bool:
        if self._group.is_blocking:
            try:
                self._done.result(self._group.timeout.total_seconds())
            except TimeoutError:
                self._group.is_aborted.set()
                raise RuntimeError("the communicator was aborted after a timeout") from None
        return True


class NcclLikeGroup:
    """See the head of this file. `launching` is called before each collective, with its number."""

    launching: Callable[[int], None] = staticmethod(lambda number: None)

    class Options:
        """Options of torch's ProcessGroupNCCL."""

        def __init__(self) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.is_blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.timeout = options._timeout
        seconds = float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
        connect = timedelta(hours=1) if options.config.blocking else timedelta(seconds=seconds)
        self._connect = partial(
            make_group, store, "like NCCL", range(size), rank, timedelta(hours=1), connect
        )
        self._gloo: Any = None
        self._number = 0
        self._stream = ThreadPoolExecutor(1)
        self.is_aborted = threading.Event()

    def alltoall_base(
        self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]
    ) -> _Work:
        if self.is_aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        NcclLikeGroup.launching(self._number)
        self._number += 1
        self._gloo = self._gloo or self._connect()
        received.fill_(GARBAGE)
        return _Work(self._stream.submit(self._run, received, sent, arriving, leaving), self)

    def _run(self, received: Tensor, sent: Tensor, *splits: Sequence[int]) -> None:
        arrived = torch.empty_like(received)
        try:
            self._gloo.alltoall_base(arrived, sent, *splits).wait()
        except RuntimeError:  # a member is gone
            if not self.is_aborted.wait(2 * self.timeout.total_seconds()) and not self.is_blocking:
                os._exit(EXIT_CODE)
            raise
        received.copy_(arrived)

    def __del__(self) -> None:
        self.is_aborted.set()
        self._stream.shutdown(wait=False)


def make(host: Any, store: Any, purpose: str, members: Any, own: int, *rest: Any) -> Any:
    """Call `make_device_group` as on a GPU."""
    _, *timeouts = rest
    gpu: Any = SimpleNamespace(type="cuda")
    return groups.make_device_group(host, store, purpose, members, own, gpu, *timeouts)


def use() -> None:
    """Make syncs in this process use such groups."""
    torch.distributed.ProcessGroupNCCL = NcclLikeGroup
    wrapped = groups._wrapped
    groups._wrapped = lambda store, name, backend, *rest: (
        backend if isinstance(backend, NcclLikeGroup) else wrapped(store, name, backend, *rest)
    )
    bridge_group.make_device_group = make
    plan.make_plan.__kwdefaults__["bucket_bytes"] = ROUND_BYTES


if __name__ == "__main__":
    from dapo_megatron import __main__ as program
    from dapo_megatron.engine import device as engine_device

    engine_device.prepare_environment()
    use()
    program.main()
