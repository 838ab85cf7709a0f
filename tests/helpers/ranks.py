"""Run a function in several processes that form one gloo world."""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dapo_megatron.cluster.launch import meeting_variables
from dapo_megatron.cluster.ranks import join
from tests.helpers.warm import take_environment, warm_context


class RankFailed(AssertionError):
    """A rank raised, died or took too long."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 400.0,
    context: BaseContext | None = None,
) -> list[Any]:
    """Return `[fn(rank, *args) for each rank]`. Each call runs in a new process with torchrun's
    variables.

    `fn` must be importable (a module-level function). Arguments and results are pickled. The ranks
    form a gloo process group before `fn` is called, like those of `launch`. Raise RankFailed with
    the traceback of the first rank to fail, and kill the others. `context` starts the processes
    (None: warm ones).
    """
    context = context or warm_context()
    processes, pipes = [], {}
    folder = TemporaryDirectory(prefix="dapo-ranks-")
    # Names of shared memory contain the port. Keep it bound, so that no other world gets the same.
    port = socket.create_server(("127.0.0.1", 0))
    meeting = {**meeting_variables(Path(folder.name)), "MASTER_PORT": str(port.getsockname()[1])}
    shared = {**os.environ, **meeting}
    try:
        for rank in range(world_size):
            parent_end, child_end = context.Pipe(duplex=False)
            process: Any = context.Process(  # type: ignore[attr-defined]
                target=_rank_main,
                args=(child_end, shared, rank, world_size, fn, args),
                daemon=False,
            )
            process.start()
            child_end.close()
            processes.append(process)
            pipes[parent_end] = rank
        results = _collect(pipes, world_size, timeout)
        for process in processes:
            process.join(timeout=30.0)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        port.close()
        folder.cleanup()


def _collect(pipes: dict[Connection, int], world_size: int, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < world_size:
        ready = wait(
            [pipe for pipe, rank in pipes.items() if rank not in results],
            timeout=deadline - time.monotonic(),
        )
        if not ready:
            silent = sorted(set(range(world_size)) - set(results))
            raise RankFailed(f"ranks {silent} gave no result in {timeout:.0f} s")
        for pipe in ready:
            rank = pipes[pipe]
            try:
                ok, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died without a traceback") from None
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(world_size)]


def _rank_main(
    pipe: Connection,
    shared: dict[str, str],
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    take_environment(shared | variables)
    import torch

    torch.set_num_threads(1)
    try:
        join("gloo")
        pipe.send_bytes(pickle.dumps((True, fn(rank, *args))))
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
