"""Learning rate: linear warm-up, then constant (arXiv 2503.14476, section 4.1).

The paper warms up over 20 rollout steps and says no more. As in the reference implementation
the rate is one per rollout step, counted from the completed ones: step 1 runs at 0 and only
builds the optimizer's moments.
"""

from __future__ import annotations


def warmup_lr(rollout_step: int, *, lr: float, warmup_rollout_steps: int) -> float:
    """Learning rate of every update of a rollout step.

    rollout_step: counted from 1. warmup_rollout_steps: 0 for no warm-up.
    Raises ValueError for a step below 1 or a negative warm-up.
    """
    if rollout_step < 1 or warmup_rollout_steps < 0:
        raise ValueError(
            f"need rollout_step >= 1 and warmup_rollout_steps >= 0, got {rollout_step} and "
            f"{warmup_rollout_steps}"
        )
    if warmup_rollout_steps == 0:
        return lr
    return lr * min(1.0, (rollout_step - 1) / warmup_rollout_steps)
