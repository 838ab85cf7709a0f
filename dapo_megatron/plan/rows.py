"""Multiples to which sequences and rows are padded.

Parallel layouts, FP8 and GPUs each require or prefer different lengths of rows. policy/rows.py
lays out the rows, data/packing.py counts their tokens.
"""

from __future__ import annotations

from math import lcm

from dapo_megatron.config import PolicyConfig

GPU_ROW_TOKENS = 512
"""Each GPU's share of a row is padded to a multiple of this many tokens."""


def sequence_multiple(policy: PolicyConfig) -> int:
    """Return the multiple, in tokens, to which each sequence is padded.

    With context parallelism of size n a sequence is split into 2n equal chunks. Rank r holds chunks
    r and 2n - 1 - r, so that all ranks have the same work under a causal mask.
    """
    return 2 * policy.context_parallel if policy.context_parallel > 1 else 1


def row_multiple(policy: PolicyConfig) -> int:
    """Return the multiple, in tokens, to which a whole row is padded. A row is split over
    the context-parallel ranks and, with `sequence_parallel`, also over the tensor-parallel ranks.
    The share of each rank must have a size that FP8 supports."""
    by_tokens = policy.tensor_parallel if policy.sequence_parallel else 1
    ranks = policy.context_parallel * by_tokens
    return lcm(sequence_multiple(policy), ranks * _fp8_multiple(policy, by_tokens))


def preferred_multiple(policy: PolicyConfig, *, on_gpu: bool) -> int:
    """Return the multiple, in tokens, to which a row is padded if the limit of a micro-batch has
    room for it.

    On a GPU this keeps the number of different shapes small. With a new shape in every micro-batch,
    torch's allocator fragments the memory, and kernels are selected again. On a CPU it would only
    cost time.
    """
    multiple = row_multiple(policy)
    return lcm(multiple, GPU_ROW_TOKENS * policy.context_parallel) if on_gpu else multiple


def _fp8_multiple(policy: PolicyConfig, by_tokens: int) -> int:
    """Return the multiple, in tokens, that a rank's share must have; 1 without FP8.

    FP8 matmuls need 16 (Transformer Engine, get_align_size_for_quantization). Ranks with partial
    blocks of 128 tokens would have to compute the blocks' scales again after the tensor-parallel
    all-gather (Float8BlockQuantizer).
    """
    if policy.fp8 is None:
        return 1
    return 128 if policy.fp8.recipe == "blockwise" and by_tokens > 1 else 16


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
