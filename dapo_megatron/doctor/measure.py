"""What one layout gives for the mini-batch, and how far that is from what another gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.policy.policy import MegatronPolicy
from dapo_megatron.protocols import LossFn
from dapo_megatron.types import TokenBatch

LEARNING_RATE = 1e-4
NUM_UPDATES = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probs of the mini-batch [T], as before an update; its loss and whole gradient by HF name;
    then of three updates the loss and gradient norm before each, and the weights after the last
    with how far they moved. Tensors are float64."""

    logprobs: Tensor
    loss: float
    gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    moved: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Differences:
    """Of two `Measured`, relative to the second; `gradient`, `weights` and `moved` are
    |a - b| / |b| (Euclidean) of the tensor where that is largest.

    tensor    HF name of the tensor that `gradient` is of
    logprobs  absolute, in nats, of the token where it is largest
    loss      absolute, of the first
    losses    absolute, the largest of three updates: it also sees copies of a weight that have
              drifted apart on some rank
    grad_norm relative, the largest of three updates: AdamW itself would not see its scale
    moved     |a - b| / how far b moved in three updates
    """

    gradient: float
    tensor: str
    logprobs: float
    loss: float
    losses: float
    grad_norm: float
    weights: float
    moved: float


def measure(policy: MegatronPolicy, mini: TokenBatch, loss: LossFn) -> Measured:
    """One gradient of the mini-batch, then three updates on it. Collective."""
    before = _kept(policy.weights())
    logprobs = policy.logprobs(mini).logprobs.double()
    value, gradients = policy.gradients(mini, loss)
    stats = [policy.update(mini, loss, LEARNING_RATE) for _ in range(NUM_UPDATES)]
    weights = _kept(policy.weights())
    return Measured(
        logprobs=logprobs,
        loss=value,
        gradients=_kept(gradients.items()),
        losses=[one.loss for one in stats],
        grad_norms=[one.grad_norm for one in stats],
        weights=weights,
        moved={name: weight - before[name] for name, weight in weights.items()},
    )


def _kept(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies: whoever hands tensors out may use their memory again."""
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors}


def compare(seen: Measured, wanted: Measured) -> Differences:
    """How far `seen` is from `wanted`."""
    gradients = distances(seen.gradients, wanted.gradients)
    weights = distances(seen.weights, wanted.weights)
    moved = distances(seen.moved, wanted.moved)
    tensor = max(gradients, key=lambda name: gradients[name])
    return Differences(
        gradient=gradients[tensor],
        tensor=tensor,
        logprobs=float((seen.logprobs - wanted.logprobs).abs().max()),
        loss=abs(seen.loss - wanted.loss),
        losses=max(abs(a - b) for a, b in zip(seen.losses, wanted.losses, strict=True)),
        grad_norm=max(
            abs(a - b) / b for a, b in zip(seen.grad_norms, wanted.grad_norms, strict=True)
        ),
        weights=max(weights.values()),
        moved=max(moved.values()),
    )


def distances(seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """|seen - wanted| / |wanted| of each tensor; where `wanted` is 0 (an expert that no token
    took), 0 or inf. A tensor that only one of them has is inf, and so is one with a nan."""
    found = {}
    for name in seen.keys() | wanted.keys():
        if name not in seen or name not in wanted or seen[name].shape != wanted[name].shape:
            found[name] = float("inf")
            continue
        difference = float((seen[name] - wanted[name]).norm())
        length = float(wanted[name].norm())
        if difference == 0.0:
            found[name] = 0.0
        elif difference < float("inf") and length > 0.0:
            found[name] = difference / length
        else:
            found[name] = float("inf")
    return found
