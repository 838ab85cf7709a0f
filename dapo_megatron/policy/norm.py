"""RMS norm for the local layer spec: torch's, and allowed under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Megatron's wrapper of torch's norms refuses sequence parallelism because nothing would add up
    the gradients of its weight, of which each rank then sees some tokens alone. The mark does that.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Like `x`."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
