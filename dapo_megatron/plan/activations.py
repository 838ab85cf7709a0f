"""Memory of a micro-batch: activations kept for the backward pass, and temporary memory.

Memory is counted module by module, per token of a rank's row. Counts for the local kernels follow
what autograd of torch 2.13 saves, and are checked against measured peaks
(tests/parity/test_plan_memory.py). Counts for Transformer Engine 2.20 are checked against its own
Python on tensors without values (tests/te_cpu/test_memory.py). Expert-parallel ranks are assumed to
receive as many tokens as they send.
"""

from __future__ import annotations

from math import ceil
from operator import itemgetter

from dapo_megatron.model import Delta, Latent
from dapo_megatron.plan import MemoryItem
from dapo_megatron.plan.stage import FLOAT32, Stage

TILE_BYTES = 32 * 2**20
MIN_TILE_ENTRIES = 256
WIDE_TILE_ENTRIES = 4096
ERROR_BYTES = 256 * 2**20
"""Same value as in policy/vocab_parallel.py."""
CHUNK = 64
"""Same value as in policy/delta.py."""
NUM_TILES = 3
"""Tensors of the size of a tile of logits: the logits, their exponential, and the product."""


# ------------------------------------------------------------------ kept for the backward pass


def kept(stage: Stage) -> MemoryItem:
    """Return the activations that forward passes save for backward, at their maximum."""
    waiting = _waiting_layers(stage)
    layers = [stage.layers[index % len(stage.layers)] for index in range(waiting)]
    if stage.policy.recompute == "full":
        per_token = len(layers) * _layer_input(stage)
        how = f"inputs of {len(layers)} layers"
    else:
        per_token = sum(kept_by_layer(stage, layer) for layer in layers)
        how = f"{len(layers)} layers x {per_token / len(layers):,.0f} bytes"
    micro_batches = ceil(waiting / len(stage.layers))
    # Cosines and sines, which all layers share (policy/rope.py).
    per_token += micro_batches * 2.0 * stage.width * stage.arch.rotary_dim
    per_token += _rows(stage)
    num_bytes = 0
    if stage.is_last:
        # The head keeps the exponential of a tile of logits until the next micro-batch.
        num_bytes = _tile_numbers(stage) * stage.exact_width
    num_bytes += ceil(stage.num_tokens * per_token)
    return MemoryItem("activations", num_bytes, f"{stage.num_tokens:,} tokens: {how}")


def _waiting_layers(stage: Stage) -> int:
    """Return the number of layers whose activations a stage holds at the same time, over all
    micro-batches between forward and backward (Megatron's schedules.py: warm-up of 1F1B, and of the
    interleaved schedule)."""
    policy, layers_of_chunk = stage.policy, len(stage.chunks[0])
    behind = policy.pipeline_parallel - stage.number - 1
    num_chunks = policy.virtual_pipeline_parallel or 1
    if num_chunks == 1:
        return (behind + 1) * layers_of_chunk
    return (2 * behind + (num_chunks - 1) * policy.pipeline_parallel + 1) * layers_of_chunk


def kept_by_layer(stage: Stage, layer: int) -> float:
    """Return the bytes per token that a layer saves for backward. `layer` is its global index."""
    delta = stage.arch.delta if stage.arch.has_delta(layer) else None
    mixer = _delta_net(stage, delta) if delta else _attention(stage)
    return _norms(stage, layer) + mixer + _mlp(stage, layer)


def _kept_by_end(stage: Stage) -> float:
    """Return the bytes per token saved after the last layer, which are free when the backward pass
    of that layer starts: the final norm and the input of the output head. With sequence parallelism
    the gathered copy of that input is added."""
    hidden = stage.arch.hidden_size
    copies = 2 if stage.by_tokens > 1 else 1
    return _norm(stage, hidden / stage.by_tokens) + copies * stage.width * hidden


def _rows(stage: Stage) -> float:
    """Return the bytes per token of rows (policy/rows.py), with values of the head and the loss, of
    two micro-batches: one is made while the other is computed."""
    routes = 0.0
    if stage.policy.router_replay != "off":
        layers = sum(map(stage.arch.has_experts, stage.layers))
        # In rows int16, and int32 for the routers, which keep those of the micro-batch before.
        routes = 10.0 * layers * stage.arch.experts_per_token
    return 2 * 130.0 + routes


def _layer_input(stage: Stage) -> float:
    """Return the bytes per token that a layer saves with full recomputation: its input."""
    return stage.width * stage.arch.hidden_size / stage.by_tokens


def _norm(stage: Stage, columns: float, heads: float = 1) -> float:
    """Return the bytes per token that one norm saves, without its output, which is counted as input
    of the next module.

    Torch's norm saves its input and, for the gradient of its weight, the normalized input, both at
    least in float32, and one value per row. Transformer Engine's norm saves its input and one value
    per row.
    """
    row = FLOAT32 * heads
    if stage.kernels == "transformer_engine":
        return stage.width * columns + row
    return (1 if stage.is_frozen else 2) * stage.exact_width * columns + row


def _norms(stage: Stage, layer: int) -> float:
    """Return the bytes per token that the two norms of a layer save, with their outputs where the
    next module saves them. Adapters of fused layers save the input of the norm instead."""
    hidden = stage.arch.hidden_size / stage.by_tokens
    fused = stage.kernels == "transformer_engine"
    before_attention = before_mlp = 0 if fused and stage.is_frozen else stage.input_width
    if stage.arch.has_experts(layer):
        before_mlp = stage.exact_width  # the router's input
        if stage.is_frozen:  # only that of shared experts
            before_mlp = stage.input_width if stage.arch.shared_intermediate_size else 0
    return 2 * _norm(stage, hidden) + hidden * (before_attention + before_mlp)


def _attention(stage: Stage) -> float:
    """Return the bytes per token saved from the QKV projection to the input of the output
    projection."""
    arch, width, split = stage.arch, stage.width, stage.policy.tensor_parallel
    if arch.latent:
        return _latent_attention(stage, arch.latent)
    query, group = arch.query_rows / split, arch.group_rows / split
    heads, groups = arch.num_heads / split, max(arch.num_kv_heads / split, 1)
    projected = width * (query + 2 * group)
    kept = 0.0
    if arch.qk_norm:
        kept += _norm(stage, query, heads) + _norm(stage, group, groups)
    if stage.kernels == "transformer_engine":
        # Norms, rotation and attention copy their inputs out of the projection's output.
        kept += width * (2 * query + 2 * group)
        kept += stage.input_width * query if stage.policy.fp8 else 0
        return kept + FLOAT32 * heads
    # Torch's norm keeps the keys, a view of the projection's output, and so all of that output.
    has_projected = arch.qk_norm and stage.exact_width == width
    kept += projected - width * group if has_projected else 0
    kept += width * query  # input of the output projection
    if stage.policy.recompute == "selective":
        return kept + width * (query + group) + (0 if has_projected else projected)
    # Queries and outputs, and the keys and values of all context-parallel ranks, repeated for each
    # head. With context parallelism there is also a mask of floating-point numbers.
    num_ranks = stage.policy.context_parallel
    mask = width * stage.config.max_sequence_tokens if num_ranks > 1 else 0
    return kept + width * (2 + 2 * num_ranks) * query + FLOAT32 * heads + mask


def _latent_attention(stage: Stage, latent: Latent) -> float:
    """Return the bytes per token that latent attention saves. Its values are narrower than its
    queries; torch's only kernel for this case saves the full matrix of scores."""
    arch, width, split = stage.arch, stage.width, stage.policy.tensor_parallel
    heads = arch.num_heads / split
    down = 0.0
    if latent.q_lora_rank:
        down += _norm(stage, latent.q_lora_rank) + width * latent.q_lora_rank
    narrow = stage.exact_width > width
    down += (0 if narrow else width * latent.qk_rope_head_dim) + width * latent.kv_lora_rank
    down += _norm(stage, latent.kv_lora_rank)
    kept = down / stage.by_tokens
    inside = width * (2 * latent.qk_head_dim + latent.v_head_dim)
    scores = 0.0 if stage.policy.recompute == "selective" else _scores(stage)
    return kept + heads * (inside + scores) + width * arch.value_columns / split


def _delta_net(stage: Stage, delta: Delta) -> float:
    """Return the bytes per token that a gated delta net in torch saves (policy/delta.py), of the
    tokens of all context-parallel ranks but for the norm. The kernels of flash-linear-attention
    save far less: no matrices of `CHUNK` x `CHUNK`, and fewer states."""
    heads = delta.value_heads / stage.policy.tensor_parallel
    channels = (2 * delta.key_rows + delta.value_rows) / stage.policy.tensor_parallel
    keys, values = delta.key_dim, delta.value_dim
    convolution, num_ranks = stage.width * 2 * channels, stage.policy.context_parallel
    rule = 8 * keys + 3 * values + 6 * CHUNK + keys * values / CHUNK
    computed = num_ranks * (convolution + stage.exact_width * heads * rule)
    return computed + heads * values * (4 * stage.exact_width + stage.width)


def _scores(stage: Stage) -> float:
    """Return the bytes of a head's attention scores for one query; 0 for kernels that do not keep
    scores (all except latent attention)."""
    return stage.width * stage.config.max_sequence_tokens if stage.arch.latent else 0.0


def _mlp(stage: Stage, layer: int) -> float:
    """Return the bytes per token that an MLP saves: gate and up (one tensor), and the input of the
    second matmul (policy/activation.py)."""
    arch, split = stage.arch, stage.policy.tensor_parallel
    column = 2 * stage.width + stage.input_width
    if not arch.has_experts(layer):
        return column * arch.intermediate_size / split
    expert = column * arch.moe_intermediate_size + stage.input_width * arch.hidden_size
    maps = 5 if stage.kernels == "transformer_engine" else 2  # weights, and numbers of rows
    routed = arch.experts_per_token * (expert + 24) + (maps * FLOAT32 + 1) * arch.num_experts
    return routed / stage.by_tokens + column * arch.shared_intermediate_size / split


# ------------------------------------------------------------------ temporary memory


def passing(stage: Stage, *, backward: bool) -> dict[str, MemoryItem]:
    """Return the temporary memory of a `layer` and, on the last stage, that of the output `head`.
    The two never occur at the same time."""
    of_layer = _backward_of_layer if backward else _forward_of_layer
    num_bytes = max(of_layer(stage, layer) for layer in stage.different_layers)
    how = "backward pass" if backward else "forward pass"
    parts = {"layer": MemoryItem("a layer at work", ceil(num_bytes), how)}
    if stage.is_last:
        parts["head"] = _head(stage, backward=backward)
    return parts


def _forward_of_layer(stage: Stage, layer: int) -> float:
    """Return the peak bytes of a layer's forward pass."""
    hidden, columns = _sizes(stage, layer)
    heads = 2.5 * _scores(stage) * stage.arch.num_heads / stage.policy.tensor_parallel
    of_mlp = stage.width * (4 * columns + 4 * hidden) + _routed(stage, layer, backward=False)
    return stage.num_tokens * (max(of_mlp, heads + stage.width * 4 * hidden) + _rows(stage))


def _backward_of_layer(stage: Stage, layer: int) -> float:
    """Return the peak bytes of a layer's backward pass: gradients of activations, less the
    activations that it has freed by then, and the activations that it computes again. Local kernels
    also have the gradient of its largest weight, before that is added to the gradient buffer."""
    hidden, columns = _sizes(stage, layer)
    fused = stage.kernels == "transformer_engine"
    per_token = stage.width * ((3 if fused else 4) * columns + 3 * hidden)
    per_token += _routed(stage, layer, backward=True)
    if stage.policy.recompute == "full":
        per_token += kept_by_layer(stage, layer) - _layer_input(stage)
    arch = stage.arch
    if stage.is_frozen:
        return stage.num_tokens * per_token
    tied = 0.0
    if arch.tie_word_embeddings and stage.is_last and stage.number == 0:
        # The gradient of the head waits for that of the embedding.
        tied = stage.width * _head_rows(stage) * arch.hidden_size
    if fused:
        return stage.num_tokens * per_token + tied
    width = arch.intermediate_size / stage.policy.tensor_parallel
    if arch.has_experts(layer):
        width = arch.moe_intermediate_size
    return stage.num_tokens * per_token + stage.width * 2 * width * arch.hidden_size + tied


def _sizes(stage: Stage, layer: int) -> tuple[float, float]:
    """Return elements per token and rank: of hidden states, and of MLP columns outside of
    experts."""
    arch, split = stage.arch, stage.policy.tensor_parallel
    has_experts = arch.has_experts(layer)
    columns = arch.shared_intermediate_size if has_experts else arch.intermediate_size
    return arch.hidden_size / stage.by_tokens, columns / split


def _routed(stage: Stage, layer: int, *, backward: bool) -> float:
    """Return the temporary bytes per token of what experts receive, compute and return."""
    arch = stage.arch
    if not arch.has_experts(layer):
        return 0.0
    rows = arch.experts_per_token / stage.by_tokens
    if stage.kernels == "local":  # one expert after another
        return rows * stage.width * 2 * arch.hidden_size
    if backward:  # gradients of rows: returned, sent, sorted, and of the experts' input
        return rows * stage.width * 4 * arch.hidden_size
    # All experts at once: sent, received and sorted rows; gate and up, SwiGLU, and its product with
    # the weight of the expert, first in float32.
    columns = (4 * stage.width + FLOAT32) * arch.moe_intermediate_size
    maps = (6 * FLOAT32 + 1) * arch.num_experts / stage.by_tokens
    return rows * (stage.width * 3 * arch.hidden_size + columns) + maps


def _head_rows(stage: Stage) -> int:
    """Return the number of vocabulary entries per rank."""
    return -(-stage.arch.vocab_size // stage.policy.tensor_parallel)


def _tile_entries(stage: Stage) -> int:
    entries = TILE_BYTES // (FLOAT32 * stage.num_tokens)
    if stage.on_gpu:
        entries = max(entries, min(WIDE_TILE_ENTRIES, ERROR_BYTES // (2 * stage.num_tokens)))
    return min(max(entries, MIN_TILE_ENTRIES), _head_rows(stage))


def _tile_numbers(stage: Stage) -> int:
    """Return the number of logits in a tile. On a GPU a tile covers a block of tokens, on a CPU all
    tokens."""
    entries = _tile_entries(stage)
    tokens = stage.num_tokens
    if stage.on_gpu:
        tokens = min(tokens, max(TILE_BYTES // (FLOAT32 * entries), 1))
    return tokens * entries


def _hidden_states_of_head(stage: Stage) -> float:
    """Return the bytes of hidden states during the head's forward pass without gradients: the last
    layer's output, the scored tokens, the copy gathered by sequence parallelism, and the inputs
    that a pipeline stage received for each of its chunks."""
    policy, num_bytes = stage.policy, stage.num_tokens * stage.width * stage.arch.hidden_size
    sent = (policy.virtual_pipeline_parallel or 1) if policy.pipeline_parallel > 1 else 0
    gathered = 1 if stage.by_tokens > 1 else 0
    return num_bytes * (1 + gathered + (1 + sent) / stage.by_tokens)


def _forward_of_head(stage: Stage) -> float:
    """Return the peak bytes of the head's forward pass, without its input."""
    product = stage.width if stage.width < FLOAT32 and not stage.on_gpu else 0
    return _tile_numbers(stage) * (NUM_TILES * stage.exact_width + product)


def _backward_of_head(stage: Stage) -> float:
    """Return the peak bytes of the head's backward pass, without its input: the gradient of a
    tile's logits for all tokens, a tile in float32, the gradient of the hidden states, their
    product with per-token factors, and the gradient of the head's weight."""
    narrow = stage.width < FLOAT32
    tile = stage.num_tokens * _tile_entries(stage) * stage.width
    tile += _tile_numbers(stage) * stage.exact_width * narrow
    hidden = (
        stage.num_tokens * stage.arch.hidden_size * (stage.width * (1 + narrow) + stage.exact_width)
    )
    trained = 0 if stage.is_frozen else _head_rows(stage) * stage.arch.hidden_size
    return tile + hidden + trained * stage.width


def _head(stage: Stage, *, backward: bool) -> MemoryItem:
    """Return the temporary memory of the output head, with its tiles of logits."""
    sizes = {"forward": _forward_of_head(stage)}
    hidden = _hidden_states_of_head(stage)
    if backward:
        sizes["backward"] = _backward_of_head(stage)
        hidden = stage.num_tokens * _kept_by_end(stage)
    name, num_bytes = max(sizes.items(), key=itemgetter(1))
    as_torch = ", counted as torch's" if stage.policy.logprob_head == "triton" else ""
    return MemoryItem(
        "logits, at the head", ceil(num_bytes + hidden), f"{name} pass of the output head{as_torch}"
    )
