"""Memory of an engine on each of its GPUs, and the sequences that fit its KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from dapo_megatron.config import Config
from dapo_megatron.model import Architecture, engine_slices
from dapo_megatron.plan import GIB, MemoryItem
from dapo_megatron.types import torch_dtype

SAMPLER_NUMBERS = 4482
"""Numbers of 4 bytes that vLLM's model runner V2 keeps per sequence for features of its sampler
(biases, stop tokens, bad words), besides those that grow with the vocabulary."""
BATCHED_TOKENS = 16_384
"""vLLM's default number of tokens per engine step, on GPUs of 70 GiB and more."""
GRAPHS_GIB = 1.0
"""Memory of CUDA graphs per rank (assumed)."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one rank of an engine.

    sampler         allocated in vLLM's memory pool of weights, and woken with them
    others          workspace, and routes if they are captured
    token_bytes     of the KV cache, per token
    state_bytes     of the KV cache, per sequence
    received_bytes  of the weights that a sync brings, before quantization
    """

    weights: MemoryItem
    sampler: MemoryItem
    cache: MemoryItem
    others: tuple[MemoryItem, ...]
    token_bytes: int
    state_bytes: int
    received_bytes: int

    @property
    def parts(self) -> tuple[MemoryItem, ...]:
        """All of it."""
        return self.weights, self.sampler, self.cache, *self.others

    def sequences(self, tokens: float) -> int:
        """Return how many sequences of `tokens` tokens the KV cache holds."""
        return int(self.cache.num_bytes // (self.token_bytes * tokens + self.state_bytes))


def engine_of(config: Config, arch: Architecture, memory_bytes: float | None) -> EngineMemory:
    """Estimate an engine on GPUs of `memory_bytes` each; None means no GPU."""
    size, dtype = config.engine_tensor_parallel, torch_dtype(config.policy.precision)
    weights, small = _weights(arch, size, dtype, config.engine.expert_parallel)
    how, received = f"over {size} ranks", weights
    if config.engine.quantization == "fp8":
        # Embedding, head and norms stay in `dtype`. Scales add only a thousandth.
        weights -= small - small // dtype.itemsize
        how += ", linear layers in FP8"
    token_bytes = cache_numbers(arch, size) * dtype.itemsize
    workspace = sampler = 0
    if memory_bytes is None:
        cache = int(config.engine.kv_cache_gib * GIB)
        rest = "engine.kv_cache_gib"
    else:
        workspace, sampler = _workspace(config, arch), sampler_bytes(config, arch)
        taken = weights + workspace + sampler
        cache = max(int(config.engine.memory_fraction * memory_bytes) - taken, 0)
        rest = f"engine.memory_fraction {config.engine.memory_fraction:g} less the rest"
    how_work = "a step of most tokens, logits, CUDA graphs: assumed"
    others = [MemoryItem("engine workspace", workspace, how_work)]
    if config.policy.router_replay == "engine":
        routes = cache // token_bytes * arch.route_bytes
        how_routes = "experts of each token in the cache: policy.router_replay"
        others.append(MemoryItem("engine routes", routes, how_routes))
    counts = "counts of each token per sequence, in vLLM's model runner V2"
    return EngineMemory(
        weights=MemoryItem("engine weights", weights, how),
        sampler=MemoryItem("engine sampler", sampler, counts),
        cache=MemoryItem("KV cache", cache, f"{rest}, {token_bytes:,} bytes a token"),
        others=tuple(others),
        token_bytes=token_bytes,
        state_bytes=state_bytes(arch, size, dtype),
        received_bytes=received,
    )


@lru_cache(maxsize=256)
def _weights(
    arch: Architecture, size: int, dtype: torch.dtype, expert_parallel: bool
) -> tuple[int, int]:
    """Return the bytes of a rank's weights, and how many of them are in linear layers."""
    slices = engine_slices(arch, 0, size, dtype, expert_parallel=expert_parallel)
    linear = (s for s in slices if s.name.endswith("_proj.weight") and len(s.global_shape) == 2)
    return sum(part.nbytes for part in slices), sum(part.nbytes for part in linear)


def _workspace(config: Config, arch: Architecture) -> int:
    """Estimate the peak that vLLM's profiling run measures before it sizes the KV cache: hidden
    states of a step, MLP columns of one layer, and float32 logits with probabilities and a copy."""
    size, engine = config.engine_tensor_parallel, config.engine
    tokens = engine.max_batched_tokens or max(BATCHED_TOKENS, engine.max_sequences)
    columns = 3 * max(
        arch.intermediate_size // size, arch.experts_per_token * arch.moe_intermediate_size
    )
    states = tokens * (6 * arch.hidden_size + columns) * 2
    logits = 3 * engine.max_sequences * arch.vocab_size * 4
    graphs = 0 if engine.enforce_eager else int(GRAPHS_GIB * GIB)
    return states + logits + graphs


def sampler_bytes(config: Config, arch: Architecture) -> int:
    """Return the bytes of the sampler's buffers in vLLM's model runner V2, which it allocates even
    if no request uses penalties or structured output."""
    if config.engine.model_runner == "v1":
        return 0
    # A count per token of the vocabulary, and two masks with a bit per token.
    vocab_numbers = arch.vocab_size + 2 * math.ceil(arch.vocab_size / 32)
    return 4 * config.engine.max_sequences * (vocab_numbers + SAMPLER_NUMBERS)


def cache_numbers(arch: Architecture, tensor_parallel: int) -> int:
    """Return the number of elements that a rank of an engine caches per token, over all layers.

    These are keys and values of its heads. With more ranks than key-value heads, each rank has a
    copy of one head. With latent attention it is the latent vector, which every rank holds (arXiv
    2405.04434, section 2.1.4).
    """
    if arch.latent:
        return arch.num_layers * arch.latent.down_rows
    heads = max(arch.num_kv_heads // tensor_parallel, 1)
    return len(arch.attention_layers) * 2 * heads * arch.head_dim


def state_bytes(arch: Architecture, tensor_parallel: int, dtype: torch.dtype) -> int:
    """Return the bytes that a rank of an engine caches per sequence: the states of gated delta nets
    in float32, and the tokens that their convolutions need."""
    if arch.delta is None:
        return 0
    delta, layers = arch.delta, arch.num_layers - len(arch.attention_layers)
    states = 4 * delta.key_dim * delta.value_rows
    tokens = dtype.itemsize * (delta.kernel - 1) * (2 * delta.key_rows + delta.value_rows)
    return layers * (states + tokens) // tensor_parallel
