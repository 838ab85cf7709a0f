"""The rendezvous store of a job's ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from dapo_megatron.cluster.address import ENGINES
from dapo_megatron.cluster.join import is_one_machine
from dapo_megatron.cluster.secret import run_secret

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STORE = "DAPO_MEGATRON_STORE"
"""Environment variable with the path of the store file of ranks on one machine, see `launch`. Only
their user can open the file, whereas torch's TCPStore serves all keys to anyone who connects."""


def open_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the rendezvous store of this job's ranks.

    If all ranks are on one machine, other machines can connect neither to the store nor to gloo.
    Raises ConfigError if this rank has no secret.
    """
    from torch._C._distributed_c10d import FileStore, HashStore
    from torch.distributed.rendezvous import rendezvous

    run_secret(world_size)
    store: Store
    is_local = is_one_machine(world_size)
    if is_local and ENGINES not in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size == 1:
        store = HashStore()
    elif is_local and STORE in os.environ:
        store = FileStore(os.environ[STORE], world_size)
    elif is_local and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _loopback_store(int(os.environ["MASTER_PORT"]), rank, world_size, timeout)
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _loopback_store(port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a TCPStore that rank 0 serves on loopback. By default it listens on all interfaces."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    listener = None
    if rank == 0:
        try:
            listener = socket.create_server(("127.0.0.1", port)).detach()
        except OSError as error:
            raise DistNetworkError(f"MASTER_PORT {port}: {error.strerror}") from error
    return TCPStore("127.0.0.1", port, world_size, rank == 0, timeout, master_listen_fd=listener)
