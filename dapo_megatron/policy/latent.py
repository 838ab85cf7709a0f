"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): Megatron's, with the
down projections whole on every tensor-parallel rank.

Megatron's own layers cut them by rows and gather what they put out. Backward a gather hands each
rank its rows of the gradient, and of the rotary part of the key each rank has the gradient of its
own heads alone: nothing adds them up (megatron-core 0.16.1, multi_latent_attention.py,
get_query_key_value_tensors; on two ranks the gradient of that projection is then off by 22 %).
Transformer Engine's layers and vLLM hold them whole, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from dapo_megatron.policy.collectives import all_reduce


class DownProjection(MegatronModule):
    """A linear layer, whole on every rank. Every head reads the last `shared` columns of its output
    as they are; what reads the others adds up its gradients over tensor-parallel ranks itself."""

    def __init__(
        self, inputs: int, outputs: int, *, config: MLATransformerConfig, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.shared = 0
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Each rank then sees some tokens alone: their gradients are to be added.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[length, rows, hidden] to ([length, rows, outputs], no bias)."""
        out = torch.nn.functional.linear(hidden, self.weight)
        # Under sequence parallelism, gathering the tokens adds up the gradients.
        if self.shared and not self.config.sequence_parallel:
            latent, shared = out.split([out.shape[-1] - self.shared, self.shared], dim=-1)
            out = torch.cat([latent, _AddGradients.apply(shared)], dim=-1)  # type: ignore[no-untyped-call]
        return out, None


# Megatron takes this name, apart from its own cut layers, for a down projection.
multi_latent_attention.Linear = DownProjection
if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine the names of its layers are there, but of stand-ins that
    # `isinstance` refuses.
    multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):
    """Megatron's, over down projections of ours."""

    def __init__(
        self, config: MLATransformerConfig, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        submodules.linear_q_down_proj = submodules.linear_kv_down_proj = DownProjection
        super().__init__(config, submodules, *args, **kwargs)
        self.linear_kv_down_proj.shared = config.qk_pos_emb_head_dim


class _AddGradients(torch.autograd.Function):
    """The same; backward, the sum of the gradients over tensor-parallel ranks. (Megatron's function
    for this drops the sum of a gradient that is not contiguous, which a part of columns is not.)"""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(total, dist.ReduceOp.SUM, parallel_state.get_tensor_model_parallel_group())
        return total
