"""Everything in which an engine on CUDA differs from one on CPU, and what vLLM needs of, or does
to, the process it shares with the policy.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm import LLM

    from dapo_megatron.config import EngineConfig

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def has_cuda() -> bool:
    """Whether engines run on a GPU."""
    return torch.cuda.is_available()


def prepare_environment(rank: int, local_rank: int) -> None:
    """Set what vLLM reads when it is imported. What the user has set stays as it is."""
    for name, value in {**_ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}.items():
        os.environ.setdefault(name, value)


def arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments of `vllm.LLM` about memory."""
    if has_cuda():
        return {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": True}
    # Given in bytes and with eager mode, vLLM takes this size as it is and needs no warm-up.
    return {"kv_cache_memory_bytes": config.kv_cache_gib << 30}


@contextmanager
def construction() -> Iterator[None]:
    """Around the making of an engine: the process's global state is afterwards as it was.

    vLLM seeds every generator, and on CPU replaces `torch.set_num_threads` by a function that
    only warns, two functions of `torch.accelerator`, and environment variables that processes
    started later would inherit.
    """
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
    environment = {name: os.environ.get(name) for name in names}
    functions = {
        (torch, "set_num_threads"): torch.set_num_threads,
        (torch.accelerator, "synchronize"): torch.accelerator.synchronize,
        (torch.accelerator, "empty_cache"): torch.accelerator.empty_cache,
    }
    num_threads = torch.get_num_threads()
    if not has_cuda():
        _name_shared_memory_after_job()
    try:
        with random_state():
            yield
    finally:
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for (module, name), function in functions.items():
            setattr(module, name, function)
        torch.set_num_threads(num_threads)


@contextmanager
def random_state() -> Iterator[None]:
    """Around vLLM's use of the global generators: the policy draws as if there were no engine.

    On CPU each sampling step draws from torch's global generator even when every request has its
    own seed, so that the ranks' generators would drift apart with the work of their engines.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if has_cuda() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _name_shared_memory_after_job() -> None:
    """Put the job's port into the name of the memory that CPU ranks of one engine share.

    Under `external_launcher` vLLM's name holds the ranks alone, so that two jobs on one machine
    would open each other's memory.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    job = os.environ.get("MASTER_PORT", str(os.getppid()))
    plain = _CPUSHMDistributed.make_group_name
    if not hasattr(plain, "job"):

        def named(communicator: Any) -> str:
            return f"{job}-{plain(communicator)}"

        named.job = job  # type: ignore[attr-defined]
        _CPUSHMDistributed.make_group_name = staticmethod(named)


def sleep(llm: LLM) -> bool:
    """Free weights and KV cache; True if weights were lost. vLLM cannot on CPU: nothing happens."""
    if has_cuda():
        llm.sleep(level=2)
    return has_cuda()


def wake(llm: LLM) -> None:
    """Allocate again what `sleep` freed."""
    if has_cuda():
        llm.wake_up()
