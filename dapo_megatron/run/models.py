"""Policy and engines of a run, and the sync between them. This is the only file that connects a run
to Megatron and to engine servers."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dapo_megatron.bridge.buckets import BucketSender
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.cluster.address import ENGINES, pool_endpoint
from dapo_megatron.cluster.processes import visible_gpus
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.scratch import socket_folder
from dapo_megatron.cluster.secret import run_secret
from dapo_megatron.cluster.servers import Server
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.config import Config, PolicyConfig, TrainConfig
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.engine.server import engine_facts, model_digests
from dapo_megatron.model import Groups, engine_groups, read_architecture
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.protocols import MicrobatchPlanner, Policy
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import ConfigError


@dataclass
class Models:
    """Policy and engines, and the sync between them."""

    policy: Policy
    engines: Engines
    sync: WeightSync


def planner(policy: PolicyConfig, train: TrainConfig) -> MicrobatchPlanner:
    """Return the function that splits a batch into micro-batches that this layout can run."""
    return partial(
        plan_microbatches,
        # The limit is per rank, and the ranks of a context-parallel group share each row.
        max_tokens=train.max_tokens_per_microbatch * policy.context_parallel,
        packed=train.packing,
        sequence_multiple=sequence_multiple(policy),
        row_multiple=row_multiple(policy),
        num_multiple=policy.pipeline_parallel if policy.virtual_pipeline_parallel else 1,
    )


def start_engines(
    config: Config,
    ranks: Ranks,
    *,
    logs: Path | None = None,
    start: str = "",
    stop: Stop | None = None,
) -> Engines:
    """Start the engines of a run on this machine, and let all others connect to rank 0. They build
    their models meanwhile; see `build_models`. Collective.

    logs   folder of the servers' logs; None: they write to this process's output
    start  name of what the run starts from, for the random numbers of requests without a seed
    """
    secret = run_secret(ranks.world_size) or secrets.token_bytes(32)
    pool = _pool(config, ranks, secret, start) if ranks.rank == 0 else None
    address, ranks_per_node = ranks.broadcast(pool.address if pool else "", str), _per_node(ranks)
    workers = _workers(config, ranks, ranks_per_node) if config.engine.colocated else None
    size = config.engine_tensor_parallel
    num_workers = config.num_replicas(ranks.world_size) * size
    servers = {}
    for replica in _own_replicas(config, ranks, workers):
        gpus = _gpus_after(ranks.world_size, replica, size)
        if workers is not None:
            gpus = [rank % ranks_per_node for rank in workers[replica]]
        servers[replica] = Server(
            replica,
            address,
            secret,
            _devices(gpus),
            None if logs is None else logs / f"engine_{replica}.log",
            threads=max(1, len(os.sched_getaffinity(0)) // num_workers),
        )
    device = torch.device("cuda", ranks.local_rank) if _has_cuda() else torch.device("cpu")
    sender = None
    if any(ranks.rank in group for group in workers or ()):
        sender = BucketSender(socket_folder(), device, config.engine.silence_seconds)
    return Engines(
        exchange=ranks,
        pool=pool,
        servers=servers,
        workers=workers,
        num_workers=size,
        sender=sender,
        host=address.removeprefix("tcp://").rpartition(":")[0],
        secret=secret,
        folder=socket_folder(),
        at_least=_least(config, ranks),
        start_seconds=config.watchdog.start,
        call_seconds=config.watchdog.sync,
        silence_seconds=config.engine.silence_seconds,
        device=device,
        stop=stop,
    )


def build_models(config: Config, ranks: Ranks, engines: Engines) -> Models:
    """Build the policy, and its sync with the engines. Collective.

    On a GPU all colocated engines are built before, because they need their share of it free. They
    see the memory of communicators, which are created first. Afterwards they sleep, and the policy
    has the accelerator until the first sync.
    """
    from dapo_megatron.policy.communicators import connect, connect_bridge

    connect(config)
    connect_bridge(ranks.world_size)
    if engines.pool is not None:
        engines.pool.wait(0.0)  # greets servers, which build their engines from now on
    if _has_cuda() and config.engine.colocated:
        engines.await_ready(config.num_replicas(ranks.world_size))
    policy = build_policy(config, ranks)
    return Models(policy, engines, _sync(config, ranks, policy, engines))


def build_policy(config: Config, ranks: Ranks) -> Policy:
    """Build this rank's policy. Collective."""
    from dapo_megatron.policy.policy import MegatronPolicy

    return MegatronPolicy(config, ranks, planner(config.policy, config.train))


def _sync(config: Config, ranks: Ranks, policy: Policy, engines: Engines) -> WeightSync:
    from dapo_megatron.policy.device import device

    return WeightSync(
        policy, engines, ranks, config.sync, ranks_per_node=_per_node(ranks), device=device()
    )


def _least(config: Config, ranks: Ranks) -> int:
    """Return the number of engines that a sync needs. The numbers of a deterministic run depend on
    all."""
    if config.rollout.deterministic:
        return config.num_replicas(ranks.world_size)
    return config.engine.min_replicas


def _pool(config: Config, ranks: Ranks, secret: bytes, start: str) -> Pool:
    return Pool(
        pool_endpoint(ranks.world_size),
        secret,
        config.model_dump(mode="json"),
        engine_facts(),
        model_digests(config.model.path),
        num_replicas=config.num_replicas(ranks.world_size),
        max_sequences=config.engine.max_sequences,
        deterministic=config.rollout.deterministic,
        silence_seconds=config.engine.silence_seconds,
        seed=config.seed,
        start=start,
    )


def _workers(config: Config, ranks: Ranks, ranks_per_node: int) -> Groups:
    """Return the ranks with which each colocated engine shares GPUs. Raises ConfigError for an
    engine on several nodes."""
    groups = engine_groups(config, read_architecture(config), ranks.world_size, ranks_per_node)
    if any(len({rank // ranks_per_node for rank in group}) > 1 for group in groups):
        raise ConfigError(
            f"engine.tensor_parallel: {config.engine.tensor_parallel}: an engine's GPUs have to be "
            f"in one node, and a node has {ranks_per_node} ranks"
        )
    return groups


def _own_replicas(config: Config, ranks: Ranks, workers: Groups | None) -> list[int]:
    """Return the engines that this rank starts: those whose first worker shares its GPU, or on rank
    0 all on other GPUs, unless others start them."""
    if workers is not None:
        return [replica for replica, group in enumerate(workers) if group[0] == ranks.rank]
    is_here = ranks.rank == 0 and ENGINES not in os.environ
    return list(range(config.num_replicas(ranks.world_size))) if is_here else []


def _gpus_after(num_ranks: int, replica: int, size: int) -> list[int]:
    """Return the GPUs of an engine of `size` workers, after the trainers' GPUs."""
    start = num_ranks + replica * size
    return list(range(start, start + size))


def _devices(gpus: list[int]) -> str | None:
    """Return the GPUs that an engine sees, of those that this process sees; None without GPUs."""
    if not _has_cuda():
        return None
    names = visible_gpus() or list(map(str, range(torch.cuda.device_count())))
    return ",".join(names[gpu] for gpu in gpus)


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _per_node(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
