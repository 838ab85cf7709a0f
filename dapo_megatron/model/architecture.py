"""Sizes of a decoder, and the position of a rank's model chunk in it. Names of sizes follow HF's
config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), as in HF's `rope_parameters`.

    `kind` is one of:
    - `default`
    - `linear`: all frequencies are divided by `factor`
    - `llama3`: low frequencies are divided, middle ones interpolated
    - `yarn` (arXiv 2309.00071): interpolates between the frequencies that make `beta_slow` and
      `beta_fast` rotations over the original context length

    Only the first `partial_rotary_factor` of a head's columns rotate. With yarn, cosines and sines
    are multiplied by `attention_scaling`, and latent attention also multiplies the softmax scale by
    m(`mscale_all_dim`)^2, m(x) = 0.1 x log `factor` + 1.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    partial_rotary_factor: float = 1.0

    @property
    def attention_scaling(self) -> float:
        """Factor of cosines and sines: `attention_factor`, or m(`mscale`) / m(`mscale_all_dim`), or
        m(1)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1).

    Queries are projected up from a latent of size `q_lora_rank` (0: directly from the hidden
    state), keys and values from a latent of size `kv_lora_rank`. Each head's query and key have
    `qk_nope_head_dim` columns without rope and `qk_rope_head_dim` columns with rope. The rope
    columns of the keys are shared by all heads.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def down_rows(self) -> int:
        """Rows of the down projection for keys and values: the latent and the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_dim(self) -> int:
        """Size of a head's up projection from the key-value latent: key without rope, then
        value."""
        return self.qk_nope_head_dim + self.v_head_dim


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of gated delta nets (arXiv 2412.06464), which replace the attention of all layers but
    every `interval`-th.

    Queries and keys have `key_heads` heads of `key_dim` columns, values `value_heads` heads of
    `value_dim`. Consecutive value heads share a key head. A causal convolution over `kernel` tokens
    precedes the recurrence.
    """

    interval: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_rows(self) -> int:
        """Rows of each of the query and key projections."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Rows of each of the value and gate projections."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """Routing without an auxiliary loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Experts are ranked by the sigmoid of their logit plus a bias. The weight of a chosen expert is
    the sigmoid without the bias, times `scale`. Experts form `n_group` equal groups, and a token
    can choose experts from the best `topk_group` groups only.
    """

    n_group: int
    topk_group: int
    scale: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder, from its HF config.json.

    With `latent` attention, `num_kv_heads` equals `num_heads`, and `head_dim` is the number of rope
    columns.

    `num_experts` is 0 for a dense model. Otherwise every layer except the first `num_dense_layers`
    routes each token to `experts_per_token` experts of size `moe_intermediate_size`, whose weights
    sum to 1 if `normalize_topk`. Shared experts are one MLP of size `shared_intermediate_size`
    (0: none). If `grouped_routing` is None, routers use the softmax over all experts.

    With `delta`, the other layers' attention has an output gate, norms other than those inside the
    gated delta nets multiply by 1 + weight, and the output of shared experts has a gate.
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
    delta: Delta | None = None

    def has_delta(self, layer: int) -> bool:
        """Return whether a layer, by its index in the whole model, has a gated delta net."""
        return self.delta is not None and (layer + 1) % self.delta.interval > 0

    @property
    def only_local(self) -> bool:
        """Whether the policy is built only from Megatron's own layers, not Transformer Engine's."""
        return self.latent is not None or self.delta is not None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention."""
        return tuple(n for n in range(self.num_layers) if not self.has_delta(n))

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, by its index in the whole model, has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(filter(self.has_experts, range(self.num_layers)))

    @property
    def route_dtype(self) -> str:
        """Smallest integer dtype for the number of an expert."""
        return "uint8" if self.num_experts <= 256 else "int16"

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's route: its experts in each layer that has some."""
        of_expert = {"uint8": 1, "int16": 2}[self.route_dtype]
        return of_expert * len(self.expert_layers) * self.experts_per_token

    def mlp_columns(self, *, whole_experts: bool) -> dict[str, int]:
        """Return the MLP sizes that tensor parallelism shards, by their names in config.json.

        `whole_experts` means that tensor parallelism does not shard routed experts.
        """
        columns = {
            "intermediate_size": 0 if self.has_experts(0) else self.intermediate_size,
            "n_shared_experts x moe_intermediate_size": self.shared_intermediate_size,
            "moe_intermediate_size": 0 if whole_experts else self.moe_intermediate_size,
        }
        return {name: size for name, size in columns.items() if size}

    @property
    def value_columns(self) -> int:
        """Columns of the attention output projection."""
        return self.num_heads * (self.latent.v_head_dim if self.latent else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Columns of each query and key head that rotary position embedding rotates."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> int:
        """Rows of each of the key and value projections."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Position of one model chunk of one rank, with layers [first_layer, first_layer + num_layers).

    Experts are distributed by expert parallelism only and are never sharded: rank `ep_rank` holds
    the complete experts [ep_rank * n, (ep_rank + 1) * n), n = num_experts / ep_size.
    """

    tp_rank: int
    tp_size: int
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    ep_rank: int = 0
    ep_size: int = 1
