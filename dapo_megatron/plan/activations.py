"""Memory of a micro-batch: activations kept for the backward pass, and temporary memory.

Counted module by module: for the local kernels as torch 2.13's autograd keeps it, checked against
measured peaks (tests/parity/test_plan_memory.py); for Transformer Engine's from the source of its
modules and of Megatron-core 0.16.1, and not measured. What is counted is per token of a rank's
row; expert-parallel ranks are taken to receive as many tokens as they send.

Letters: w bytes of a number; H hidden, Q columns of queries, G of keys, F of an MLP on this rank.
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
"""Copies of a tile of logits: itself, its exponential, and their product."""
FLOAT32 = 4


@dataclass(frozen=True)
class Micro:
    """A micro-batch at its bound: `num_tokens` of this rank, in sequences of up to
    `sequence_tokens` over all context-parallel ranks."""

    arch: Architecture
    policy: PolicyConfig
    kernels: Kernels
    num_tokens: int
    sequence_tokens: int
    on_gpu: bool

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return torch_dtype(self.policy.precision).itemsize

    @property
    def input_width(self) -> int:
        """Bytes of a number that a linear layer keeps of its input."""
        return 1 if self.policy.fp8 else self.width

    @property
    def exact_width(self) -> int:
        """Bytes of a number that is never computed in bfloat16."""
        return max(self.width, FLOAT32)

    @property
    def by_heads(self) -> int:
        """Number of ranks that share heads and columns."""
        return self.policy.tensor_parallel

    @property
    def by_tokens(self) -> int:
        """Number of ranks that share, by tokens, what tensor parallelism cannot shard."""
        return self.policy.tensor_parallel if self.policy.sequence_parallel else 1


def micro_of(config: Config, arch: Architecture, kernels: Kernels, *, on_gpu: bool) -> Micro:
    """Return the largest micro-batch that a run may make."""
    bound = config.train.max_tokens_per_microbatch
    return Micro(arch, config.policy, kernels, bound, config.max_sequence_tokens, on_gpu)


# ------------------------------------------------------------------ kept for the backward pass


def kept_by_layer(micro: Micro, layer: int) -> float:
    """Return the bytes per token that one layer, counted over the model, keeps."""
    return _norms(micro, layer) + _attention(micro) + _mlp(micro, layer)


def kept_by_end(micro: Micro) -> float:
    """Return the bytes per token after the last layer: the last norm, and the hidden states that
    are scored, which sequence parallelism has gathered before."""
    hidden = micro.arch.hidden_size
    copies = 2 if micro.by_tokens > 1 else 1
    return _norm(micro, hidden / micro.by_tokens) + copies * micro.width * hidden


def layer_input(micro: Micro) -> float:
    """Return the bytes per token that a layer keeps when all of it is recomputed."""
    return micro.width * micro.arch.hidden_size / micro.by_tokens


def _norm(micro: Micro, columns: float, heads: float = 1) -> float:
    """Bytes per token of one norm, without its output, which counts for the next layer.

    Torch's on a CPU keeps its input and the normed input, both in float32 at least, and a number
    per row; Transformer Engine's its input and that number."""
    row = FLOAT32 * heads
    if micro.kernels == "transformer_engine":
        return micro.width * columns + row
    return 2 * micro.exact_width * columns + row


def _norms(micro: Micro, layer: int) -> float:
    """Bytes per token of the two norms of a layer, and their outputs."""
    hidden = micro.arch.hidden_size / micro.by_tokens
    before_mlp = micro.input_width
    if micro.arch.has_experts(layer):
        before_mlp = micro.exact_width  # what the router reads
    return 2 * _norm(micro, hidden) + hidden * (micro.input_width + before_mlp)


def _attention(micro: Micro) -> float:
    """Bytes per token from the projections to the input of the output projection."""
    arch, width, cut = micro.arch, micro.width, micro.by_heads
    if arch.latent:
        return _latent_attention(micro, arch.latent)
    query, group = arch.query_rows / cut, arch.group_rows / cut
    heads, groups = arch.num_heads / cut, max(arch.num_kv_heads / cut, 1)
    projected = width * (query + 2 * group)
    kept = 4.0 * arch.head_dim * width  # cosines and sines, for queries and for keys
    has_projected = arch.qk_norm and (
        micro.kernels == "transformer_engine" or micro.exact_width == width
    )
    if arch.qk_norm:
        kept += _norm(micro, query, heads) + _norm(micro, group, groups)
        # The keys' input is a part of what was projected, all of which then stays.
        kept += projected - width * group if has_projected else 0
    if micro.kernels == "transformer_engine":
        kept += width * (2 * query + group) + (0 if has_projected else projected)
        kept += micro.input_width * query if micro.policy.fp8 else 0
        return kept + FLOAT32 * heads
    kept += width * query  # what goes into the output projection
    if micro.policy.recompute == "selective":
        return kept + width * (query + group) + (0 if has_projected else projected)
    # Queries and outputs; keys and values, repeated for each head, of all context-parallel ranks;
    # these have a mask, as numbers.
    num_ranks = micro.policy.context_parallel
    mask = width * micro.sequence_tokens if num_ranks > 1 else 0
    return kept + width * (2 + 2 * num_ranks) * query + FLOAT32 * heads + mask


def _latent_attention(micro: Micro, latent: Latent) -> float:
    """Bytes per token of latent attention. Torch's only kernel for heads whose values are narrower
    than their queries keeps the full matrix of scores."""
    arch, width, cut = micro.arch, micro.width, micro.by_heads
    heads = arch.num_heads / cut
    down = 0.0
    if latent.q_lora_rank:
        down += _norm(micro, latent.q_lora_rank) + width * latent.q_lora_rank
    narrow = micro.exact_width > width
    down += (0 if narrow else width * latent.qk_rope_head_dim) + width * latent.kv_lora_rank
    down += _norm(micro, latent.kv_lora_rank)
    kept = down / micro.by_tokens + 4.0 * latent.qk_rope_head_dim * width
    inside = micro.width * (2 * latent.qk_head_dim + latent.v_head_dim) + scores(micro)
    if micro.policy.recompute == "selective":
        inside = micro.width * (2 * latent.qk_head_dim + latent.v_head_dim)
    return kept + heads * inside + width * arch.value_columns / cut


def scores(micro: Micro) -> float:
    """Return the bytes of a head's scores for one query, where they are held at all."""
    return micro.width * micro.sequence_tokens if micro.arch.latent else 0.0


def _mlp(micro: Micro, layer: int) -> float:
    """Return bytes per token: gate and up, side by side, and the input of the second matmul
    (policy/activation.py)."""
    arch, width = micro.arch, micro.width
    if not arch.has_experts(layer):
        return (2 * width + micro.input_width) * arch.intermediate_size / micro.by_heads
    expert = (
        2 * width + micro.input_width
    ) * arch.moe_intermediate_size + micro.input_width * arch.hidden_size
    routed = arch.experts_per_token * (expert + 24) + (2 * FLOAT32 + 1) * arch.num_experts
    shared = (2 * width + micro.input_width) * arch.shared_intermediate_size / micro.by_heads
    return routed / micro.by_tokens + shared


# ------------------------------------------------------------------ held for a while


def forward_of_layer(micro: Micro, layer: int) -> float:
    """Return the most bytes per token that a layer holds going forward, itself included."""
    hidden, columns, routed = _sizes(micro, layer)
    heads = 2.5 * scores(micro) * micro.arch.num_heads / micro.by_heads
    return max(micro.width * (4 * columns + 4 * hidden + routed), heads + micro.width * 4 * hidden)


def backward_of_layer(micro: Micro, layer: int) -> float:
    """Return the bytes per token of gradients in a layer, beyond what it frees meanwhile."""
    hidden, columns, routed = _sizes(micro, layer)
    return micro.width * (4 * columns + 3 * hidden + routed)


def _sizes(micro: Micro, layer: int) -> tuple[float, float, float]:
    """Return numbers per token and rank: hidden states, columns outside of experts, tokens as sent
    to experts and back."""
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
    """Return the bytes of the gradient of a layer's largest weight, before it joins the buffer."""
    arch = micro.arch
    columns = (
        arch.moe_intermediate_size
        if arch.has_experts(layer)
        else arch.intermediate_size / micro.by_heads
    )
    return micro.width * 2 * columns * arch.hidden_size


def head_rows(micro: Micro) -> int:
    """Return the number of vocabulary entries of a rank."""
    return -(-micro.arch.vocab_size // micro.policy.tensor_parallel)


def _tile_entries(micro: Micro) -> int:
    entries = TILE_BYTES // (FLOAT32 * micro.num_tokens)
    if micro.on_gpu:
        entries = max(entries, min(WIDE_TILE_ENTRIES, ERROR_BYTES // (2 * micro.num_tokens)))
    return min(max(entries, MIN_TILE_ENTRIES), head_rows(micro))


def _tile_numbers(micro: Micro) -> int:
    """Count the logits of a tile: on a GPU of a block of tokens, else of all."""
    entries = _tile_entries(micro)
    tokens = micro.num_tokens
    if micro.on_gpu:
        tokens = min(tokens, max(TILE_BYTES // (FLOAT32 * entries), 1))
    return tokens * entries


def hidden_states_of_head(micro: Micro) -> float:
    """Return the bytes of hidden states while the head goes forward and nothing is kept: the last,
    those of the tokens that are scored, those that sequence parallelism has gathered, and those
    that a pipeline stage received for each of its chunks."""
    policy, num_bytes = micro.policy, micro.num_tokens * micro.width * micro.arch.hidden_size
    sent = (policy.virtual_pipeline_parallel or 1) if policy.pipeline_parallel > 1 else 0
    gathered = 1 if micro.by_tokens > 1 else 0
    return num_bytes * (1 + gathered + (1 + sent) / micro.by_tokens)


def forward_of_head(micro: Micro, *, backward: bool) -> float:
    """Return the bytes that the head holds going forward, without its input; with `backward` to
    follow, the exponential of the micro-batch before is still there."""
    num_tiles = NUM_TILES + 1 if backward else NUM_TILES
    product = micro.width if micro.width < FLOAT32 and not micro.on_gpu else 0
    return _tile_numbers(micro) * (num_tiles * micro.exact_width + product)


def backward_of_head(micro: Micro) -> float:
    """Return the bytes that the head holds going backward, without its input: the errors of a
    tile's entries for all tokens, and a tile in float32; the gradient of the hidden states, and
    their product with the tokens' factors; the gradient of its weight."""
    narrow = micro.width < FLOAT32
    tile = micro.num_tokens * _tile_entries(micro) * micro.width
    tile += _tile_numbers(micro) * micro.exact_width * narrow
    hidden = (
        micro.num_tokens * micro.arch.hidden_size * (micro.width * (1 + narrow) + micro.exact_width)
    )
    return tile + hidden + head_rows(micro) * micro.arch.hidden_size * micro.width
