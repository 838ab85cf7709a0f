"""Fingerprints of tensors: 64 bits that do not depend on who holds which part.

The bits of each element, as an integer, times a weight of its place in the whole tensor, summed
modulo 2^64. Sums of parts add up to the sum of the whole, in any order. The weights are odd, so one
flipped bit changes the sum for certain: 2^k times an odd number is never 0 modulo 2^64. They look
random and belong to rows and columns, so what is swapped, shifted or repeated shows as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_megatron.types import Region

_CHUNK = 2**22
"""Elements turned into integers at once: 32 MiB."""
_MASK = 2**64 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers.
_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@torch.no_grad()
def fingerprint(value: Tensor, region: Region) -> int:
    """The part of a tensor's fingerprint that lies in `region`; `value` has the region's shape, and
    elements of 4 bytes at most.

    Numbers too small to be normal (1e-38 in bfloat16 and float32) count as 0, -0.0 too: kernels
    through which weights are read back take them for 0. Waits for the device.
    """
    dims = len(region.shape)
    weights = [
        _weights(dim, region.start[dim], region.shape[dim], value.device) for dim in range(dims)
    ]
    rows = value.reshape(region.shape[0], -1) if dims else value.reshape(1, 1)
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        if part.element_size() > 1:
            part = torch.where(part.abs() < torch.finfo(part.dtype).tiny, 0.0, part)
        sums = part.contiguous().view(_BITS[value.element_size()]).to(torch.int64)
        sums = sums.view(-1, *region.shape[1:])
        for dim in reversed(range(1, dims)):
            sums = (sums * weights[dim]).sum(-1)
        if dims:
            sums = sums * weights[0][first : first + step]
        total += sums.sum()
    return int(total) & _MASK


def add(*parts: int) -> int:
    """The fingerprint of what the parts make up together."""
    return sum(parts) & _MASK


def _weights(dim: int, first: int, size: int, device: torch.device) -> Tensor:
    """Odd 64-bit weights of the places first, first + 1, ... along a dimension."""
    mixed = torch.arange(first + 1, first + 1 + size, dtype=torch.int64, device=device)
    mixed = (mixed + (dim << 40)) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _MIX_1
    mixed = (mixed ^ (mixed >> 27)) * _MIX_2
    return (mixed ^ (mixed >> 31)) | 1
