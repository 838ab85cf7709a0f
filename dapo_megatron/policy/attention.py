"""Attention for the local layer spec: torch's scaled-dot-product attention, causal.

Megatron's own local module builds the whole score matrix and refuses what Transformer Engine
alone may do; this one runs wherever torch does. Sequences are padded on the right, so a causal
mask is all that is needed: no real token ever sees padding.

Shape letters: Q tokens per row, B rows, N query heads and G key-value heads of this rank, D size
of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class CausalAttention(MegatronModule):
    """Core attention with the signature Megatron's SelfAttention expects."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("CausalAttention does not split sequences over ranks")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_QBND: Tensor,
        key_QBGD: Tensor,
        value_QBGD: Tensor,
        attention_mask: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """Attention output, [Q, B, N*D]."""
        repeats = query_QBND.shape[2] // key_QBGD.shape[2]
        if repeats > 1:
            key_QBGD = key_QBGD.repeat_interleave(repeats, dim=2)
            value_QBGD = value_QBGD.repeat_interleave(repeats, dim=2)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_QBND, key_QBGD, value_QBGD))
        out_BNQD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale
        )
        return out_BNQD.permute(2, 0, 1, 3).flatten(2)
