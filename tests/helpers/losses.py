"""The loss of a run, with fixed coefficients for tests."""

from __future__ import annotations

from functools import partial
from typing import Any

from dapo_megatron.algo.loss import dapo_loss
from dapo_megatron.protocols import LossFn

NUMBERS = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 10.0,
    "tis_cap": None,
    "log_ratio_limit": 20.0,
}


def loss_with(**numbers: Any) -> LossFn:
    """Return the loss, with some of NUMBERS replaced."""
    return partial(dapo_loss, **{**NUMBERS, **numbers})
