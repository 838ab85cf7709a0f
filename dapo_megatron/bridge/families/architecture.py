"""A decoder in sizes, from its HF config.json; and where one chunk of it stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) as HF's `rope_parameters` have it.

    `kind` is `default`, `linear` (all frequencies divided by `factor`) or `llama3` (the low ones
    divided, those in between interpolated).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder, from its HF config.json.

    `num_groups` counts key-value heads. `num_experts` is 0 for a dense model; else every layer
    routes each token to `experts_per_token` experts of `expert_ffn` columns, whose weights sum to 1
    with `normalize_topk`.
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_topk: bool = False

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_groups * self.head_dim


@dataclass(frozen=True, slots=True)
class Place:
    """One model chunk of one rank: layers [first_layer, first_layer + num_layers) of the model.

    Experts are dealt out by expert parallelism alone and never cut: rank `ep_rank` holds the whole
    of experts [ep_rank * n, (ep_rank + 1) * n), n = num_experts / ep_size.
    """

    tp_rank: int
    tp_size: int
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    ep_rank: int = 0
    ep_size: int = 1
