"""Run a function in several real processes that form one gloo world."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or took too long."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 400.0
) -> list[Any]:
    """`[fn(rank, *args) for each rank]`, each in a spawned process under torchrun's variables.

    `fn` must be importable (a module-level function); arguments and results are pickled.
    torch.distributed is initialized with gloo before `fn` is called. Raises RankFailed with the
    traceback of the first rank to fail, and ends the others.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    # Held here: a port that is only found free may be taken before rank 0 listens on it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, store.port, rank, world_size, fn, args),
                daemon=False,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        results = _collect(pipes, world_size, timeout)
        for process in processes:
            process.join(timeout=30.0)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


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
                raise RankFailed(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(world_size)]


def _rank_main(
    pipe: Connection,
    port: int,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there: no rank starts one
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
        pipe.send_bytes(pickle.dumps((True, fn(rank, *args))))
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
