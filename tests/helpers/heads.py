"""Make inputs of the log-prob head, and compute it fused and with plain torch.

Shape letters: T tokens, H hidden size, V vocabulary entries (of one rank, where there are several).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.policy import vocab_parallel
from dapo_megatron.policy.vocab_parallel import linear_logprobs


@dataclass(frozen=True)
class Head:
    """Inputs of one head."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weight_of_logprob: Tensor
    temperature: float = 1.0
    weight_of_entropy: Tensor | None = None
    """None: the entropy has no gradient."""

    def to(self, dtype: torch.dtype) -> Head:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


@dataclass(frozen=True)
class HeadResult:
    """Values and gradients of a head."""

    logp: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def make_head(
    num_tokens: int,
    num_entries: int,
    *,
    hidden: int = 4,
    std: float = 1.0,
    seed: int = 0,
    num_targets: int | None = None,
) -> Head:
    """`num_targets`: targets of each token, as a second dimension; None: one."""
    shape = (num_tokens,) if num_targets is None else (num_tokens, num_targets)
    generator = torch.Generator().manual_seed(seed)
    doubles: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    return Head(
        hidden=torch.randn(num_tokens, hidden, **doubles),
        weight=torch.randn(num_entries, hidden, **doubles) * std,
        targets=torch.randint(num_entries, shape, generator=generator),
        weight_of_logprob=torch.randn(shape, **doubles),
    )


def with_entropy(head: Head, seed: int = 1) -> Head:
    """Return `head` with a gradient through the entropy."""
    generator = torch.Generator().manual_seed(seed)
    size = len(head.targets)
    return replace(
        head, weight_of_entropy=torch.randn(size, dtype=torch.float64, generator=generator)
    )


def backward(head: Head, logp: Tensor, entropy: Tensor) -> None:
    """Run the backward pass with the head's weights of log-probs and entropies."""
    values, gradients = [logp], [head.weight_of_logprob.to(logp.dtype)]
    if head.weight_of_entropy is not None:
        values.append(entropy)
        gradients.append(head.weight_of_entropy.to(entropy.dtype))
    torch.autograd.backward(values, gradients)


def plain(head: Head, dtype: torch.dtype = torch.float64) -> HeadResult:
    """Compute torch's log_softmax of all logits in `dtype`."""
    hidden = head.hidden.detach().clone().requires_grad_()
    weight = head.weight.detach().clone().requires_grad_()
    all_logp = ((hidden @ weight.t()).to(dtype) / head.temperature).log_softmax(-1)
    targets = head.targets if head.targets.dim() == 2 else head.targets[:, None]
    logp = all_logp.gather(1, targets).view(head.targets.shape)
    entropy = -(all_logp.exp() * all_logp).sum(-1)
    backward(head, logp, entropy)
    return outcome(logp, entropy, hidden, weight)


def fused_head(
    head: Head,
    *,
    first: int = 0,
    num: int | None = None,
    group: dist.ProcessGroup | None = None,
    by: vocab_parallel.Head = "torch",
) -> HeadResult:
    hidden = head.hidden.detach().clone().requires_grad_()
    weight = head.weight.detach().clone().requires_grad_()
    logp, entropy = linear_logprobs(
        hidden,
        weight,
        head.targets,
        temperature=head.temperature,
        first_entry=first,
        num_entries=len(weight) if num is None else num,
        group=group,
        head=by,
        entropy_gradient=head.weight_of_entropy is not None,
    )
    assert entropy.requires_grad == (head.weight_of_entropy is not None)
    backward(head, logp, entropy)
    return outcome(logp, entropy, hidden, weight)


def accumulated(
    head: Head, num: int, *, fused: bool, by: vocab_parallel.Head = "torch"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the hidden states and of the weight (`main_grad`) after two backward
    passes, accumulated as by Megatron's data-parallel wrapper."""
    hidden = head.hidden.detach().clone().requires_grad_()
    weight: Any = head.weight.detach().clone().requires_grad_()
    weight.main_grad = torch.zeros_like(
        weight, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    weight.grad_added_to_main_grad = False
    for _ in range(2):
        logp, entropy = linear_logprobs(
            hidden,
            weight,
            head.targets,
            temperature=head.temperature,
            first_entry=0,
            num_entries=num,
            group=None,
            head=by,
            gradient_accumulation_fusion=fused,
            entropy_gradient=head.weight_of_entropy is not None,
        )
        backward(head, logp, entropy)
        assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        assert weight.grad_added_to_main_grad == fused
        if not fused:
            weight.main_grad.add_(weight.grad)
        weight.grad = None
    assert hidden.grad is not None
    return hidden.grad, weight.main_grad


def outcome(logp: Tensor, entropy: Tensor, hidden: Tensor, weight: Tensor) -> HeadResult:
    assert hidden.grad is not None and weight.grad is not None
    return HeadResult(logp.detach(), entropy.detach(), hidden.grad, weight.grad)


def padded(head: Head, rows: int, value: float = 7.0) -> Head:
    """Return `head` with padding rows, which must not count although their logits are large."""
    return replace(head, weight=torch.nn.functional.pad(head.weight, (0, 0, 0, rows), value=value))


def assert_equal(actual: HeadResult, expected: HeadResult, tolerance: float) -> None:
    """Compare values and gradients, with the tolerance relative to the largest element if it is
    above 1."""
    for name in HeadResult.__dataclass_fields__:
        actual_value, expected_value = (
            getattr(actual, name).double(),
            getattr(expected, name).double(),
        )
        scale = max(1.0, float(expected_value.abs().max())) if expected_value.numel() else 1.0
        torch.testing.assert_close(
            actual_value,
            expected_value,
            rtol=0.0,
            atol=tolerance * scale,
            msg=lambda text, name=name: name + text,
        )


@contextmanager
def tiles_of(num_entries: int, num_tokens: int = 10**6) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_parallel, "_tile_shape", lambda _: (num_tokens, num_entries))
        yield
