"""What a run will take of each GPU's memory, and of the disk: an estimate from config.json alone.

Weights, gradients and optimizer are counted parameter by parameter, as the policy holds them;
activations are a rough bound (within half to twice of what the tiny models take); and nothing is
counted for CUDA itself, NCCL's buffers, fragmentation and vLLM's own workspace: 2 to 5 GiB.
No model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from rich.console import Console
from rich.table import Table

from dapo_megatron.bridge.families import (
    Architecture,
    Place,
    engine_pieces,
    layout_of,
    read_architecture,
)
from dapo_megatron.config import Config, PolicyConfig
from dapo_megatron.layout import data_parallel, stage_layers

GIB = 2**30
MOMENTS = 2
"""Of AdamW, per parameter."""
TILE_BYTES = 32 * 2**20
MIN_TILE_ENTRIES = 256
"""As in policy/vocab_parallel.py."""
NUM_TILES = 3
"""A tile of logits lives as the product, in float32, and as its exponential."""

ALWAYS, TRAINING, GENERATING, DISK = "always", "training", "generating", "disk"


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the memory of a GPU, or of the disk; `when` it is taken: always, training,
    generating, disk. `how`: the numbers it is made of, for people."""

    part: str
    size_bytes: int
    when: str
    how: str

    @property
    def gib(self) -> float:
        """Its size in GiB."""
        return self.size_bytes / GIB


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rows of the fullest pipeline stage; `sequences` of full length fit an engine's KV cache."""

    rows: tuple[Row, ...]
    gpu_memory_gib: float
    sequences: int

    def gib(self, *when: str) -> float:
        """Sum of the rows taken at these times."""
        return sum(row.gib for row in self.rows if row.when in when)

    @property
    def training_gib(self) -> float:
        """Of each GPU while the policy trains (the engine sleeps)."""
        return self.gib(ALWAYS, TRAINING)

    @property
    def generating_gib(self) -> float:
        """Of each GPU while the engine generates (the policy stays)."""
        return self.gib(ALWAYS, GENERATING)

    def problems(self) -> Iterator[str]:
        """What will not fit, and the key to turn."""
        room = self.gpu_memory_gib
        if self.training_gib > room:
            yield (
                f"training takes {self.training_gib:.1f} of {room:.0f} GiB: more processes, more "
                "policy.tensor_parallel or pipeline_parallel, policy.recompute=full, or fewer "
                "train.max_tokens_per_microbatch"
            )
        if self.generating_gib > room:
            left = max(room - self.gib(ALWAYS), 0.0) / room
            yield (
                f"generating takes {self.generating_gib:.1f} of {room:.0f} GiB: the policy leaves "
                f"engine.memory_fraction {left:.2f} at most"
            )
        if self.sequences < 1:
            yield (
                "the KV cache cannot hold one sequence of full length: more "
                "engine.memory_fraction or engine.tensor_parallel, or shorter responses"
            )

    def render(self, console: Console) -> None:
        """Print the table, the two sums, and what will not fit."""
        table = Table("part", "GiB", "when", "how", title="memory of a GPU (estimate)")
        for row in self.rows:
            table.add_row(row.part, f"{row.gib:.2f}", row.when, row.how)
        console.print(table)
        console.print(
            f"training {self.training_gib:.1f} GiB, generating {self.generating_gib:.1f} GiB of "
            f"{self.gpu_memory_gib:.0f} GiB, without CUDA's and NCCL's own 2 to 5 GiB"
        )
        for problem in self.problems():
            console.print(f"does not fit: {problem}", style="bold red", highlight=False)


def estimate(config: Config, world_size: int, *, gpu_memory_gib: float = 80.0) -> Estimate:
    """What `world_size` processes, one per GPU of `gpu_memory_gib`, take each.

    The layout must fit the processes (layout.check_layout). Raises ConfigError on a config.json
    that is not understood.
    """
    arch = read_architecture(config)
    num_stages = config.policy.pipeline_parallel
    stages = [list(_of_policy(config, arch, world_size, stage)) for stage in range(num_stages)]
    engine, sequences = _of_engine(config, arch, gpu_memory_gib)
    files = [_size(stage, WEIGHTS, OPTIMIZER) for stage in stages]
    copies = world_size // num_stages
    disk = (
        Row("checkpoint, a rank's part", max(files), DISK, "its weights and optimizer"),
        Row("checkpoint", copies * sum(files), DISK, f"{world_size} ranks, each what it holds"),
    )
    fullest = max(stages, key=_size)
    return Estimate((*fullest, *engine, *disk), gpu_memory_gib, sequences)


def _size(rows: Sequence[Row], *parts: str) -> int:
    """Bytes of these parts, or of all."""
    return sum(row.size_bytes for row in rows if not parts or row.part in parts)


# ------------------------------------------------------------------------------- policy

WEIGHTS, GRADIENTS, OPTIMIZER = "policy weights", "gradients", "optimizer"


def _of_policy(config: Config, arch: Architecture, world_size: int, stage: int) -> Iterator[Row]:
    """Rows of a rank of one pipeline stage."""
    policy = config.policy
    dense, of_experts = _num_parameters(arch, policy, stage)
    width = getattr(torch, policy.precision).itemsize
    wide = max(width, 4)
    # Megatron's distributed optimizer shares out each parameter over the ranks that hold a copy;
    # experts, never cut by tensor parallelism, have world / (pipeline * expert) copies.
    copies = data_parallel(policy, world_size) * policy.context_parallel
    copies_of_experts = world_size // (policy.pipeline_parallel * policy.expert_parallel)
    # In float32 the policy's own weights are the main ones.
    per_parameter = wide * (MOMENTS + (width < wide))
    optimizer = ceil(dense * per_parameter / copies)
    optimizer += ceil(of_experts * per_parameter / copies_of_experts)
    total = dense + of_experts
    experts = f" ({of_experts:,} of experts)" if of_experts else ""
    shares = f"{copies}" + (f" ranks, experts' over {copies_of_experts}" if of_experts else "")
    main = "main weights and " if width < wide else ""
    yield Row(WEIGHTS, total * width, ALWAYS, f"{total:,} parameters{experts} of {width} bytes")
    yield Row(GRADIENTS, total * wide, ALWAYS, f"{wide} bytes each")
    yield Row(
        OPTIMIZER, optimizer, ALWAYS, f"{main}moments, {per_parameter} bytes each over {shares}"
    )
    yield _activations(config, arch, stage)
    if stage == policy.pipeline_parallel - 1:
        yield _head(config, arch)


def _num_parameters(arch: Architecture, policy: PolicyConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank of this stage: those all its expert-parallel ranks share, and those of
    its experts."""
    dense = of_experts = 0
    chunks = stage_layers(policy, arch.num_layers)[stage]
    for number, layers in enumerate(chunks):
        place = Place(
            tp_rank=0,
            tp_size=policy.tensor_parallel,
            first_layer=layers.start,
            num_layers=len(layers),
            has_embedding=stage == 0 and number == 0,
            has_head=stage == policy.pipeline_parallel - 1 and number == len(chunks) - 1,
            ep_size=policy.expert_parallel,
        )
        for name, slot in layout_of(arch, place).items():
            if ".mlp.experts." in name:
                of_experts += prod(slot.shape)
            else:
                dense += prod(slot.shape)
    return dense, of_experts


def _activations(config: Config, arch: Architecture, stage: int) -> Row:
    """What the forward passes keep for the backward passes, roughly.

    Korthikanti et al., arXiv 2205.05198, section 4, counted again for RMSNorm, rope, grouped heads
    and gated MLPs, without dropout and with attention that keeps no scores (so `selective` saves
    nothing more): inputs and outputs of the norms are cut by sequence parallelism alone, the rest
    by tensor parallelism. `full` (their section 5) keeps each layer's input, and all of one layer.
    """
    policy, num_tokens = config.policy, config.train.max_tokens_per_microbatch
    width = getattr(torch, policy.precision).itemsize
    chunks = stage_layers(policy, arch.num_layers)[stage]
    layers = [layer for chunk in chunks for layer in chunk]
    waiting = _layers_waiting(policy, stage, len(chunks[0]))
    numbers = max(_numbers_kept(arch, policy, layer) for layer in layers)
    inputs = arch.hidden // (policy.tensor_parallel if policy.sequence_parallel else 1)
    if policy.recompute == "full":
        kept = waiting * inputs + numbers
        how = f"inputs of {waiting} layers and all of one: recompute full"
    else:
        kept = waiting * numbers
        how = f"{waiting} layers x {numbers:,} numbers"
    how = f"rough: {num_tokens:,} tokens x ({how}) x {width} bytes"
    return Row("activations", num_tokens * kept * width, TRAINING, how)


def _layers_waiting(policy: PolicyConfig, stage: int, layers_of_chunk: int) -> int:
    """Layers whose activations a stage holds at once: those of the micro-batches that have gone
    forward and not back (Megatron's schedules.py: the warm-up of 1F1B, and of interleaving)."""
    behind = policy.pipeline_parallel - stage - 1
    num_chunks = policy.virtual_pipeline_parallel or 1
    if num_chunks == 1:
        return (behind + 1) * layers_of_chunk
    return (2 * behind + (num_chunks - 1) * policy.pipeline_parallel + 1) * layers_of_chunk


def _numbers_kept(arch: Architecture, policy: PolicyConfig, layer: int) -> int:
    """Per token, of one layer."""
    cut = policy.tensor_parallel
    by_tokens = cut if policy.sequence_parallel else 1
    query, value = arch.query_rows, arch.group_rows
    # As projected, and as rope leaves them; normed in between.
    turns = 3 if arch.qk_norm else 2
    attention = turns * (query + value) + value + query  # the last: what goes into the projection
    if arch.latent:
        latent = arch.latent
        attention = arch.num_heads * (2 * latent.query_dim + latent.up_dim + latent.query_dim)
        attention += arch.value_columns + cut * 2 * (latent.query_rank + latent.down_rows)
    # Gate, up, silu of gate, product: of all columns a token goes through.
    if arch.has_experts(layer):
        mlp = 4 * (arch.experts_per_token * arch.expert_ffn + arch.shared_ffn)
        mlp += 2 * arch.experts_per_token * arch.hidden  # sent to the experts, and back
    else:
        mlp = 4 * arch.ffn
    return 4 * arch.hidden // by_tokens + (attention + mlp) // cut


def _head(config: Config, arch: Architecture) -> Row:
    """The head never makes whole logits (policy/vocab_parallel.py)."""
    num_tokens = config.train.max_tokens_per_microbatch
    width = getattr(torch, config.policy.precision).itemsize
    rows = -(-arch.vocab // config.policy.tensor_parallel)
    entries = min(max(TILE_BYTES // (4 * num_tokens), MIN_TILE_ENTRIES), rows)
    tiles = NUM_TILES * num_tokens * entries * 4
    hidden = num_tokens * arch.hidden * (2 * width + 4)
    gradient = rows * arch.hidden * width
    how = (
        f"{NUM_TILES} tiles of {entries:,} entries, hidden states and their gradient, "
        f"gradient of {rows:,} rows"
    )
    return Row("logits", tiles + hidden + gradient, TRAINING, how)


# ------------------------------------------------------------------------------- engine


def _of_engine(
    config: Config, arch: Architecture, gpu_memory_gib: float
) -> tuple[tuple[Row, Row], int]:
    """Rows of an engine's rank, and how many sequences of full length its cache holds."""
    size = config.engine_tensor_parallel
    dtype = getattr(torch, config.policy.precision)
    pieces = engine_pieces(arch, 0, size, dtype, expert_parallel=config.engine.expert_parallel)
    weights = sum(piece.nbytes for piece in pieces)
    fraction = config.engine.memory_fraction
    cache = max(int(fraction * gpu_memory_gib * GIB) - weights, 0)
    per_token = cache_numbers(arch, size) * dtype.itemsize
    sequences = cache // (per_token * config.max_sequence_tokens)
    how = (
        f"engine.memory_fraction {fraction:g} less the weights, {per_token:,} bytes a token: "
        f"{sequences:,} sequences of {config.max_sequence_tokens:,} tokens"
    )
    rows = (
        Row("engine weights", weights, GENERATING, f"over {size} ranks; dropped while it sleeps"),
        Row("KV cache", cache, GENERATING, how),
    )
    return rows, sequences


def cache_numbers(arch: Architecture, tensor_parallel: int) -> int:
    """Numbers that a rank of an engine keeps per token, over all layers: keys and values of its
    heads (at least one: more ranks than heads copy them); of latent attention what both are made
    from, the same on every rank (arXiv 2405.04434, section 2.1.4)."""
    if arch.latent:
        return arch.num_layers * arch.latent.down_rows
    heads = max(arch.num_groups // tensor_parallel, 1)
    return arch.num_layers * 2 * heads * arch.head_dim
