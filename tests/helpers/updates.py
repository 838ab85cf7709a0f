"""Make small updates of a policy, and save it as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_megatron.checkpoints.formats.weights_folder import copy_companions
from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.losses import loss_with

LOSS = loss_with()


def update(policy: Any, seed: int) -> float:
    """Update the policy on one random mini-batch. Return the gradient norm."""
    batch = random_batch((5, 40, 17, 9), vocab=90, seed=seed)
    return float(policy.update(batch, LOSS, 1e-3).grad_norm)


def save(policy: Any, exchange: Ranks, model: Path, folder: Path) -> Path:
    """Write each rank's part of a checkpoint and the model's config to `folder`. Collective."""
    if exchange.rank == 0:
        folder.mkdir(parents=True)
        copy_companions(model, folder)
    exchange.barrier()
    snapshot = policy.snapshot()
    snapshot.write(folder)
    snapshot.finish(folder, exchange)
    exchange.barrier()
    return folder
