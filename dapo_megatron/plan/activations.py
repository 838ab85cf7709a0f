"""Memory of a micro-batch: activations kept for the backward pass, and temporary memory.

Memory is counted module by module, per token of a rank's row. Counts for the local kernels follow
what autograd of torch 2.13 saves, and are checked against measured peaks
(tests/parity/test_plan_memory.py). Counts for Transformer Engine follow the source of its modules
and of Megatron-core 0.16.1, and are not measured. Expert-parallel ranks are assumed to receive as
many tokens as they send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.model import Architecture, Latent
from dapo_megatron.types import torch_dtype

Kernels = Literal["local", "transformer_engine"]

TILE_BYTES = 32 * 2**20
MIN_TILE_ENTRIES = 256
WIDE_TILE_ENTRIES = 4096
ERROR_BYTES = 256 * 2**20
"""Same value as in policy/vocab_parallel.py."""
NUM_TILES = 3
"""Tensors of the size of a tile of logits: the logits, their exponential, and the product."""
FLOAT32 = 4


@dataclass(frozen=True)
class Micro:
    """The largest micro-batch. `num_tokens` is per rank; `sequence_tokens` is the longest sequence,
    over all context-parallel ranks."""

    arch: Architecture
    policy: PolicyConfig
    kernels: Kernels
    num_tokens: int
    sequence_tokens: int
    on_gpu: bool

    @property
    def width(self) -> int:
        """Bytes per element in policy.precision."""
        return torch_dtype(self.policy.precision).itemsize

    @property
    def input_width(self) -> int:
        """Bytes per element of the input that a linear layer saves for its backward pass."""
        return 1 if self.policy.fp8 else self.width

    @property
    def exact_width(self) -> int:
        """Bytes per element of tensors that are at least float32."""
        return max(self.width, FLOAT32)

    @property
    def by_heads(self) -> int:
        """Number of ranks over which heads and columns are split."""
        return self.policy.tensor_parallel

    @property
    def by_tokens(self) -> int:
        """Number of ranks over which sequence parallelism splits tokens; 1 without it."""
        return self.policy.tensor_parallel if self.policy.sequence_parallel else 1


def micro_of(config: Config, arch: Architecture, kernels: Kernels, *, on_gpu: bool) -> Micro:
    """Return the largest micro-batch of a run."""
    bound = config.train.max_tokens_per_microbatch
    return Micro(arch, config.policy, kernels, bound, config.max_sequence_tokens, on_gpu)


# ------------------------------------------------------------------ kept for the backward pass


def kept_by_layer(micro: Micro, layer: int) -> float:
    """Return the bytes per token that a layer saves for backward. `layer` is its global index."""
    return _norms(micro, layer) + _attention(micro) + _mlp(micro, layer)


def kept_by_end(micro: Micro) -> float:
    """Return the bytes per token saved after the last layer: the final norm and the input of the
    output head. With sequence parallelism the gathered copy of that input is added."""
    hidden = micro.arch.hidden_size
    copies = 2 if micro.by_tokens > 1 else 1
    return _norm(micro, hidden / micro.by_tokens) + copies * micro.width * hidden


def layer_input(micro: Micro) -> float:
    """Return the bytes per token that a layer saves with full recomputation: its input."""
    return micro.width * micro.arch.hidden_size / micro.by_tokens


def rotation(micro: Micro) -> float:
    """Return the bytes per token of cosines and sines, which all layers share (policy/rope.py)."""
    return 2.0 * micro.width * micro.arch.rotary_dim


def _norm(micro: Micro, columns: float, heads: float = 1) -> float:
    """Return the bytes per token that one norm saves, without its output, which is counted as input
    of the next module.

    Torch's norm saves its input and the normalized input, both at least in float32, and one value
    per row. Transformer Engine's norm saves its input and one value per row.
    """
    row = FLOAT32 * heads
    if micro.kernels == "transformer_engine":
        return micro.width * columns + row
    return 2 * micro.exact_width * columns + row


def _norms(micro: Micro, layer: int) -> float:
    """Return the bytes per token that the two norms of a layer save, with their outputs."""
    hidden = micro.arch.hidden_size / micro.by_tokens
    before_mlp = micro.input_width
    if micro.arch.has_experts(layer):
        before_mlp = micro.exact_width  # the router's input
    return 2 * _norm(micro, hidden) + hidden * (micro.input_width + before_mlp)


def _attention(micro: Micro) -> float:
    """Return the bytes per token saved from the QKV projection to the input of the output
    projection."""
    arch, width, split = micro.arch, micro.width, micro.by_heads
    if arch.latent:
        return _latent_attention(micro, arch.latent)
    query, group = arch.query_rows / split, arch.group_rows / split
    heads, groups = arch.num_heads / split, max(arch.num_kv_heads / split, 1)
    projected = width * (query + 2 * group)
    kept = 0.0
    has_projected = arch.qk_norm and (
        micro.kernels == "transformer_engine" or micro.exact_width == width
    )
    if arch.qk_norm:
        kept += _norm(micro, query, heads) + _norm(micro, group, groups)
        # The keys are a view of the projection's output, so all of that output is kept alive.
        kept += projected - width * group if has_projected else 0
    if micro.kernels == "transformer_engine":
        kept += width * (2 * query + group) + (0 if has_projected else projected)
        kept += micro.input_width * query if micro.policy.fp8 else 0
        return kept + FLOAT32 * heads
    kept += width * query  # input of the output projection
    if micro.policy.recompute == "selective":
        return kept + width * (query + group) + (0 if has_projected else projected)
    # Queries and outputs, and the keys and values of all context-parallel ranks, repeated for each
    # head. With context parallelism there is also a mask of floating-point numbers.
    num_ranks = micro.policy.context_parallel
    mask = width * micro.sequence_tokens if num_ranks > 1 else 0
    return kept + width * (2 + 2 * num_ranks) * query + FLOAT32 * heads + mask


def _latent_attention(micro: Micro, latent: Latent) -> float:
    """Return the bytes per token that latent attention saves. Its values are narrower than its
    queries; torch's only kernel for this case saves the full matrix of scores."""
    arch, width, split = micro.arch, micro.width, micro.by_heads
    heads = arch.num_heads / split
    down = 0.0
    if latent.q_lora_rank:
        down += _norm(micro, latent.q_lora_rank) + width * latent.q_lora_rank
    narrow = micro.exact_width > width
    down += (0 if narrow else width * latent.qk_rope_head_dim) + width * latent.kv_lora_rank
    down += _norm(micro, latent.kv_lora_rank)
    kept = down / micro.by_tokens
    inside = micro.width * (2 * latent.qk_head_dim + latent.v_head_dim) + scores(micro)
    if micro.policy.recompute == "selective":
        inside = micro.width * (2 * latent.qk_head_dim + latent.v_head_dim)
    return kept + heads * inside + width * arch.value_columns / split


def scores(micro: Micro) -> float:
    """Return the bytes of a head's attention scores for one query; 0 for kernels that do not keep
    scores (all except latent attention)."""
    return micro.width * micro.sequence_tokens if micro.arch.latent else 0.0


def _mlp(micro: Micro, layer: int) -> float:
    """Return the bytes per token that an MLP saves: gate and up (one tensor), and the input of the
    second matmul (policy/activation.py)."""
    arch, width = micro.arch, micro.width
    if not arch.has_experts(layer):
        return (2 * width + micro.input_width) * arch.intermediate_size / micro.by_heads
    expert = (
        2 * width + micro.input_width
    ) * arch.moe_intermediate_size + micro.input_width * arch.hidden_size
    routed = arch.experts_per_token * (expert + 24) + (2 * FLOAT32 + 1) * arch.num_experts
    shared = (2 * width + micro.input_width) * arch.shared_intermediate_size / micro.by_heads
    return routed / micro.by_tokens + shared


# ------------------------------------------------------------------ temporary memory


def forward_of_layer(micro: Micro, layer: int) -> float:
    """Return the peak bytes per token of a layer's forward pass."""
    hidden, columns, routed = _sizes(micro, layer)
    heads = 2.5 * scores(micro) * micro.arch.num_heads / micro.by_heads
    return max(micro.width * (4 * columns + 4 * hidden + routed), heads + micro.width * 4 * hidden)


def backward_of_layer(micro: Micro, layer: int) -> float:
    """Return the peak bytes per token of activation gradients in a layer's backward pass, less the
    activations that it has freed by then."""
    hidden, columns, routed = _sizes(micro, layer)
    return micro.width * (4 * columns + 3 * hidden + routed)


def _sizes(micro: Micro, layer: int) -> tuple[float, float, float]:
    """Return elements per token and rank: of hidden states, of MLP columns outside of experts, and
    of tokens sent to experts and back."""
    arch = micro.arch
    hidden = arch.hidden_size / micro.by_tokens
    if arch.has_experts(layer):
        return (
            hidden,
            arch.shared_intermediate_size / micro.by_heads,
            2 * arch.experts_per_token * hidden,
        )
    return hidden, arch.intermediate_size / micro.by_heads, 0.0


def largest_gradient(micro: Micro, layer: int) -> float:
    """Return the bytes of the gradient of a layer's largest weight, before it is added to the
    gradient buffer."""
    arch = micro.arch
    columns = (
        arch.moe_intermediate_size
        if arch.has_experts(layer)
        else arch.intermediate_size / micro.by_heads
    )
    return micro.width * 2 * columns * arch.hidden_size


def head_rows(micro: Micro) -> int:
    """Return the number of vocabulary entries per rank."""
    return -(-micro.arch.vocab_size // micro.policy.tensor_parallel)


def _tile_entries(micro: Micro) -> int:
    entries = TILE_BYTES // (FLOAT32 * micro.num_tokens)
    if micro.on_gpu:
        entries = max(entries, min(WIDE_TILE_ENTRIES, ERROR_BYTES // (2 * micro.num_tokens)))
    return min(max(entries, MIN_TILE_ENTRIES), head_rows(micro))


def _tile_numbers(micro: Micro) -> int:
    """Return the number of logits in a tile. On a GPU a tile covers a block of tokens, on a CPU all
    tokens."""
    entries = _tile_entries(micro)
    tokens = micro.num_tokens
    if micro.on_gpu:
        tokens = min(tokens, max(TILE_BYTES // (FLOAT32 * entries), 1))
    return tokens * entries


def hidden_states_of_head(micro: Micro) -> float:
    """Return the bytes of hidden states during the head's forward pass without gradients: the last
    layer's output, the scored tokens, the copy gathered by sequence parallelism, and the inputs
    that a pipeline stage received for each of its chunks."""
    policy, num_bytes = micro.policy, micro.num_tokens * micro.width * micro.arch.hidden_size
    sent = (policy.virtual_pipeline_parallel or 1) if policy.pipeline_parallel > 1 else 0
    gathered = 1 if micro.by_tokens > 1 else 0
    return num_bytes * (1 + gathered + (1 + sent) / micro.by_tokens)


def forward_of_head(micro: Micro, *, backward: bool) -> float:
    """Return the peak bytes of the head's forward pass, without its input. If a backward pass
    follows, the exponential of the previous micro-batch is still in memory."""
    num_tiles = NUM_TILES + 1 if backward else NUM_TILES
    product = micro.width if micro.width < FLOAT32 and not micro.on_gpu else 0
    return _tile_numbers(micro) * (num_tiles * micro.exact_width + product)


def backward_of_head(micro: Micro) -> float:
    """Return the peak bytes of the head's backward pass, without its input: the gradient of a
    tile's logits for all tokens, a tile in float32, the gradient of the hidden states, their
    product with per-token factors, and the gradient of the head's weight."""
    narrow = micro.width < FLOAT32
    tile = micro.num_tokens * _tile_entries(micro) * micro.width
    tile += _tile_numbers(micro) * micro.exact_width * narrow
    hidden = (
        micro.num_tokens * micro.arch.hidden_size * (micro.width * (1 + narrow) + micro.exact_width)
    )
    return tile + hidden + head_rows(micro) * micro.arch.hidden_size * micro.width
