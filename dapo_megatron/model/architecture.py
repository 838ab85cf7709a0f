"""A decoder in sizes, from its HF config.json; and where one chunk of it stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) as HF's `rope_parameters` have it.

    `kind` is `default`, `linear` (all frequencies divided by `factor`), `llama3` (the low ones
    divided, those in between interpolated) or `yarn` (arXiv 2309.00071: likewise, between those
    that turn `slow_turns` and `fast_turns` times over the original length; DeepSeek-V3 then
    multiplies the scale of the softmax by (0.1 `sharpening` log `factor` + 1)^2).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    sharpening: float = 0.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) in sizes.

    Queries are made from `query_rank` numbers per token (0: from the hidden state itself), keys and
    values from `rank`. Of each head's query and key, `plain_dim` columns know no position and
    `rope_dim` do, the latter the same in all heads' keys; its value has `value_dim`.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    @property
    def down_rows(self) -> int:
        """Rows of the projection to what keys and values are made from."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Columns of a head's query, and key."""
        return self.plain_dim + self.rope_dim

    @property
    def up_dim(self) -> int:
        """Columns of a head that are made from `rank` numbers: key, then value."""
        return self.plain_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a router without an auxiliary loss picks experts (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2): the sigmoid of each is its weight, times `scale`; that plus a bias ranks it. The experts
    are in `groups` equal groups, of which each token takes the best `groups_per_token`."""

    groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder, from its HF config.json.

    `num_groups` counts key-value heads; with `latent` attention as many as heads, and `head_dim` is
    what rope turns. `num_experts` is 0 for a dense model; else every layer but the first
    `num_dense_layers` routes each token to `experts_per_token` experts of `expert_ffn` columns,
    whose weights sum to 1 with `normalize_topk`, and through an MLP of `shared_ffn` columns, if not
    0. Routers take the softmax over all experts where `scoring` is None.
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
    num_dense_layers: int = 0
    shared_ffn: int = 0
    scoring: Scoring | None = None
    latent: Latent | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted over the whole model, has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def mlp_columns(self, *, whole_experts: bool) -> dict[str, int]:
        """Return the MLP widths that tensor parallelism splits, by their names in config.json.

        `whole_experts`: each routed expert lies on one rank.
        """
        columns = {
            "intermediate_size": 0 if self.has_experts(0) else self.ffn,
            "n_shared_experts x moe_intermediate_size": self.shared_ffn,
            "moe_intermediate_size": 0 if whole_experts else self.expert_ffn,
        }
        return {name: size for name, size in columns.items() if size}

    @property
    def value_columns(self) -> int:
        """Columns of the projection from what the heads put out."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

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
