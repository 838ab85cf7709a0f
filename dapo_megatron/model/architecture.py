"""Sizes of a decoder, and which chunk of it a rank holds. Names are those of HF's config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) as HF's `rope_parameters` have it.

    `kind` is `default`, `linear` (all frequencies divided by `factor`), `llama3` (the low ones
    divided, those in between interpolated) or `yarn` (arXiv 2309.00071). Yarn interpolates between
    frequencies that turn `beta_slow` and `beta_fast` times over the original length. DeepSeek-V3
    also multiplies the scale of the softmax by (0.1 `mscale_all_dim` log `factor` + 1)^2.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) in sizes.

    Queries are made from `q_lora_rank` numbers per token (0: from the hidden state itself), keys
    and values from `kv_lora_rank`. Each head's query and key have `qk_nope_head_dim` columns
    without and `qk_rope_head_dim` with rope. The latter are the same in the keys of all heads.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def down_rows(self) -> int:
        """Rows of the projection to what keys and values are made from."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Columns of a head's query, and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_dim(self) -> int:
        """Columns of a head that are made from `kv_lora_rank` numbers: key, then value."""
        return self.qk_nope_head_dim + self.v_head_dim


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """How a router without an auxiliary loss picks experts (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2): the sigmoid of each is its weight, times `scale`; that plus a bias ranks it. The experts
    are in `n_group` equal groups, of which each token takes the best `topk_group`."""

    n_group: int
    topk_group: int
    scale: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder, from its HF config.json.

    With `latent` attention `num_kv_heads` is `num_heads`, and `head_dim` is what rope turns.

    `num_experts` is 0 for a dense model. Otherwise every layer except the first `num_dense_layers`
    routes each token to `experts_per_token` experts of `moe_intermediate_size` columns, whose
    weights sum to 1 with `normalize_topk`. Shared experts are one MLP of `shared_intermediate_size`
    columns (0: none). Routers take the softmax over all experts where `grouped_routing` is None.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    normalize_topk: bool = False
    num_dense_layers: int = 0
    shared_intermediate_size: int = 0
    grouped_routing: GroupedRouting | None = None
    latent: Latent | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted over the whole model, has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def mlp_columns(self, *, whole_experts: bool) -> dict[str, int]:
        """Return the MLP widths that tensor parallelism splits, by their names in config.json.

        `whole_experts`: each routed expert lies on one rank.
        """
        columns = {
            "intermediate_size": 0 if self.has_experts(0) else self.intermediate_size,
            "n_shared_experts x moe_intermediate_size": self.shared_intermediate_size,
            "moe_intermediate_size": 0 if whole_experts else self.moe_intermediate_size,
        }
        return {name: size for name, size in columns.items() if size}

    @property
    def value_columns(self) -> int:
        """Columns of the projection from what the heads put out."""
        return self.num_heads * (self.latent.v_head_dim if self.latent else self.head_dim)

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


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
