"""The outcome of a graded group, and a check of carried completions."""

from __future__ import annotations

from collections.abc import Iterable

from dapo_megatron.algo.sampling import verdict
from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.batch import valid_completions
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import CheckpointError, Finish, Group, Outcome, Verdict


def judge(group: Group, config: RolloutConfig, overlong: OverlongConfig) -> Outcome | None:
    """Return the outcome of a graded group, or None if it can be trained on.

    Uses raw correctness, never the shaped reward (eq. 11; NVIDIA-NeMo/RL#2431).
    """
    completions = valid_completions(group, overlong)
    if len(completions) < 2:  # the mean of one reward is no baseline
        return Outcome.OVERLONG
    if config.dynamic_sampling:
        group_verdict = verdict([c.grade is not None and c.grade.correct for c in completions])
        if group_verdict is not Verdict.MIXED:
            return Outcome(group_verdict.value)
    if overlong.filter and all(c.finish.is_cut for c in completions):
        return Outcome.OVERLONG  # none of its tokens would enter the loss
    return None


def check_lengths(groups: Iterable[OpenGroup], limit: int) -> None:
    """Raise CheckpointError if a carried completion has already reached the length limit."""
    for group in groups:
        # An environment may still decide about a turn that reached it.
        most = limit if group.prompt.environment else limit - 1
        for completion in group.completions.values():
            if completion.finish is Finish.UNFINISHED and completion.longest_branch > most:
                raise CheckpointError(
                    f"rollout.max_response_tokens: {limit}, but ticket {group.ticket}, sample "
                    f"{completion.sample} of the checkpoint is unfinished with "
                    f"{completion.longest_branch} tokens; resume with the limit of the run that "
                    "saved the checkpoint"
                )
