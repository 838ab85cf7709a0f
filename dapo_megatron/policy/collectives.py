"""Collectives that a group of one rank, or none, leaves out."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    """`tensor` reduced over `group`, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
