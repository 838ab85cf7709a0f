"""Compute a batch with the policy, on ranks of their own: log-probs, gradients, one update."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tests.te_cpu import extension, stand_in

LENGTHS = (5, 40, 17, 9)


def compute(
    rank: int, world_size: int, kernels: str, cases: dict[str, tuple[Path, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return the results of each case: a model and overrides of the config."""
    warnings.simplefilter("ignore")
    if kernels == "transformer_engine":
        stand_in.install()
        stand_in.complete_device()
    return {
        name: _compute(rank, world_size, kernels, folder, overrides)
        for name, (folder, overrides) in cases.items()
    }


def _compute(
    rank: int, world_size: int, kernels: str, folder: Path, overrides: dict[str, Any]
) -> dict[str, Any]:
    from dapo_megatron.cluster.ranks import Ranks
    from tests.helpers.batches import random_batch
    from tests.helpers.losses import loss_with
    from tests.helpers.policies import build_policy

    settings = {"policy__precision": "float32", "policy__kernels": kernels, **overrides}
    extension.calls.clear()
    policy, _ = build_policy(Ranks(rank, world_size, rank), str(folder), settings)
    batch = random_batch(LENGTHS, vocab=90, seed=7 + policy.data_parallel_index)
    before = policy.logprobs(batch)
    loss, gradients = policy.gradients(batch, loss_with())
    stats = policy.update(batch, loss_with(), 1e-3)
    after = policy.logprobs(batch)
    policy.close()
    return {
        "before": before.logprobs,
        "entropy": before.entropy,
        "after": after.logprobs,
        "loss": loss,
        "gradients": gradients,
        "grad_norm": stats.grad_norm,
        "calls": dict(extension.calls),
    }
