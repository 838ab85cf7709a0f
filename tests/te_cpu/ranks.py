"""Compute a batch with the policy, on ranks of their own: log-probs, gradients, one update."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.te_cpu import extension, stand_in

LENGTHS = (5, 40, 17, 9)
LARGER = 30_000
"""How many times larger the mini-batch is, of which this is a part, except in float32. Gradients
are then as small as in a run."""
SETTINGS: dict[str, Any] = {"policy__precision": "float32", "optimizer__eps": 1e-2}
"""With AdamW's usual eps, the first step has the same size for every gradient, also for those that
are only rounding errors."""


def compute(
    rank: int, world_size: int, kernels: str, cases: dict[str, tuple[Path, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return the results of each case: a model and overrides of the config."""
    warnings.simplefilter("ignore")
    if kernels == "transformer_engine":
        stand_in.install()
        stand_in.complete_device()
    from dapo_megatron.cluster.ranks import Ranks

    return {
        name: _compute(Ranks(rank, world_size, rank), kernels, folder, overrides)
        for name, (folder, overrides) in cases.items()
    }


def _compute(
    exchange: Any, kernels: str, folder: Path, overrides: dict[str, Any]
) -> dict[str, Any]:
    from tests.helpers.batches import random_batch
    from tests.helpers.losses import loss_with
    from tests.helpers.policies import build_policy

    settings = SETTINGS | {"policy__kernels": kernels} | overrides
    extension.calls.clear()
    policy, _ = build_policy(exchange, str(folder), settings)
    if policy.lora is not None:
        policy.lora.reset(1, 0.1)
    batch = random_batch(LENGTHS, vocab=90, seed=7 + policy.data_parallel_index)
    if settings.get("policy__router_replay") == "engine":
        batch = replace(batch, routes=_routes(len(batch.tokens), policy.architecture))
    before = policy.logprobs(batch)
    if settings["policy__precision"] != "float32":
        # Ratios of 1, as in the first update of a step. Otherwise rounding decides what is clipped.
        batch = replace(batch, old_logprobs=before.logprobs, loss_tokens=batch.loss_tokens * LARGER)
    loss, gradients = policy.gradients(batch, loss_with())
    stats = policy.update(batch, loss_with(), 0.01)
    weights = {name: weight.clone() for name, weight in policy.weights()}
    after = policy.logprobs(batch)
    restored = _restored(exchange, policy, batch) if settings.get("policy__offload") else {}
    scales = _scales(policy) if settings.get("policy__fp8") else {}
    policy.close()
    return {
        "before": before.logprobs,
        "entropy": before.entropy,
        "after": after.logprobs,
        "loss": loss,
        "gradients": gradients,
        "grad_norm": stats.grad_norm,
        "weights": weights,
        "scales": scales,
        "restored": restored,
        "calls": dict(extension.calls),
    }


def _routes(num_tokens: int, architecture: Any) -> Tensor:
    """Return random experts of each token, so that rounding does not choose other ones."""
    shape = num_tokens, architecture.num_layers, architecture.num_experts
    order = torch.rand(shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
    return order[..., :2].flatten(1).to(torch.uint8)


def _restored(exchange: Any, policy: Any, batch: Any) -> dict[str, Tensor]:
    """Return log-probs of the current weights after they were away: in host memory, as those of a
    reference, and in a checkpoint."""
    from tests.helpers.losses import loss_with
    from tests.parity.test_checkpoint import STEP, saver

    root = Path(exchange.broadcast(tempfile.mkdtemp() if exchange.rank == 0 else "", str))
    policy.keep_reference()
    checkpoints = saver(exchange, policy._config, policy, root)
    checkpoints.commit(STEP, {})()
    checkpoints.wait()
    policy.offload()
    policy.onload()
    onloaded = policy.logprobs(batch).logprobs
    policy.update(batch, loss_with(), 0.01)
    reference = policy.reference_logprobs(batch)
    policy.load(root / f"step_{STEP:06d}")
    loaded = policy.logprobs(batch).logprobs
    exchange.barrier()
    if exchange.rank == 0:
        shutil.rmtree(root)
    return {"onloaded": onloaded, "reference": reference, "loaded": loaded}


def _scales(policy: Any) -> dict[str, Tensor]:
    """Return what ranks must share: delayed scales, and weights that are only in FP8."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from tests.helpers.policies import named_parameters

    state = FP8GlobalStateManager.quantization_state
    shared = {
        f"{number} {key.split('_')[0]}": torch.cat([scale.flatten() for scale in scales])
        for number, (key, scales) in enumerate(state.global_scale_buffer.items())
    }
    for name, parameter in named_parameters(policy).items():
        if hasattr(parameter, "_fp8_dtype"):
            parts = parameter.get_metadata().items()
            shared |= {
                f"{name} {part}": value
                for part, value in parts
                # The padding of this one is not initialized.
                if torch.is_tensor(value) and part != "columnwise_scale_inv"
            }
    FP8GlobalStateManager.reset()
    return shared
