"""Learning rate: linear warm-up, then constant (arXiv 2503.14476, section 4.1).

The paper only gives the length of the warm-up, 20 rollout steps. As in the reference
implementation, the rate is constant within a rollout step and proportional to the number of
completed steps. Step 1 therefore runs at a rate of 0 and only builds the optimizer's moments.
"""

from __future__ import annotations


def warmup_lr(rollout_step: int, *, lr: float, warmup_rollout_steps: int) -> float:
    """Return the learning rate of all updates of a rollout step.

    `rollout_step` counts from 1. `warmup_rollout_steps=0` disables the warm-up.
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
