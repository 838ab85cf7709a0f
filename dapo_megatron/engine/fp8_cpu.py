"""FP8 linear layers on a CPU without AMX: weights and activations are quantised in blocks as on a
GPU, by vLLM's own code, and multiplied by plain torch. Slow; it is there so that all of a quantised
rollout can be run and tested without a GPU.

Shape letters: T tokens, I and O input and output features, G = ceil(I / 128), H = ceil(O / 128).
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)


class PlainBlockKernel(Fp8BlockScaledMMLinearKernel):
    """vLLM's kernel interface; sums are float32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere."""
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """A_TI times B_OI transposed; scales As_TG and Bs_HG."""
        rows, columns = self.weight_group_shape.row, self.weight_group_shape.col
        weight_OI = B.float() * _spread(_spread(Bs, rows, 0, B.shape[0]), columns, 1, B.shape[1])
        input_TI = A.float() * _spread(As, columns, 1, A.shape[1])
        return input_TI @ weight_OI.T


def _spread(scales: Tensor, times: int, dim: int, size: int) -> Tensor:
    """Each scale over the `times` elements that it belongs to, `size` in all."""
    return torch.repeat_interleave(scales, times, dim).narrow(dim, 0, size)
