"""Group-relative advantage (arXiv 2503.14476, eq. 9).

The paper leaves three choices open, made here as in the reference implementation:
- The standard deviation is the sample standard deviation (ddof 1).
- `eps` is added to the standard deviation, not to the variance.
- A group of one has mean 0 and standard deviation 1, so its advantage is its reward.

Dr. GRPO (arXiv 2503.20783) does not divide by the standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# S completions, P distinct groups


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    *,
    eps: float = 1e-6,
    divide_by_std: bool = True,
) -> Tensor:
    """Return (reward - group mean) / (group std + eps) for each completion.

    rewards    float, S elements in any shape: shaped rewards, length penalty included
    group_ids  S integers, any values in any order; equal ids form a group
    eps        avoids division by 0: a group of equal rewards has advantage 0
    divide_by_std  False: return reward - group mean (Dr. GRPO)

    The result has the shape, dtype and device of `rewards` (the default float dtype for integer
    rewards) and no gradient. Sums are computed in float64.
    Raises ValueError if the counts differ or a reward is not finite.
    """
    ids = torch.as_tensor(group_ids, device=rewards.device).reshape(-1)
    rewards_S = rewards.detach().reshape(-1).double()
    if ids.numel() != rewards_S.numel():
        raise ValueError(f"{rewards_S.numel()} rewards, but {ids.numel()} group ids")
    if not bool(rewards_S.isfinite().all()):
        raise ValueError("a reward is not finite")

    _, group_S, size_P = torch.unique(ids, return_inverse=True, return_counts=True)
    zeros_P = rewards_S.new_zeros(size_P.numel())
    single_P = size_P == 1

    mean_P = zeros_P.index_add(0, group_S, rewards_S) / size_P
    centred_S = rewards_S - mean_P.masked_fill(single_P, 0.0)[group_S]
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    advantage_S: Tensor = centred_S
    if not divide_by_std:
        return advantage_S.reshape(rewards.shape).to(dtype)
    variance_P = zeros_P.index_add(0, group_S, centred_S**2) / (size_P - 1).clamp(min=1)
    std_P = variance_P.sqrt().masked_fill(single_P, 1.0)

    advantage_S = centred_S / (std_P[group_S] + eps)
    return advantage_S.reshape(rewards.shape).to(dtype)
