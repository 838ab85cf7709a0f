"""Checks for values of a config that contradict each other. Which features of policy and engine can
be combined is checked by plan/compatibility/."""

from __future__ import annotations

from collections.abc import Iterable

from dapo_megatron.config import Config, refuse, source_file_name


def check_values(config: Config) -> None:
    """Raise ConfigError listing all values that contradict each other."""
    refuse(_contradictions(config))


def _contradictions(config: Config) -> Iterable[str]:
    rollout, overlong = config.rollout, config.overlong
    if overlong.buffer_tokens >= overlong.max_tokens:
        yield (
            f"overlong.buffer_tokens: {overlong.buffer_tokens} must be less than "
            f"overlong.max_tokens = {overlong.max_tokens}"
        )
    if overlong.max_tokens > rollout.max_response_tokens:
        yield (
            f"overlong.max_tokens: {overlong.max_tokens} is more than rollout.max_response_tokens "
            f"= {rollout.max_response_tokens}, so the penalty can never reach -1"
        )
    if rollout.max_age <= rollout.max_overtake:
        yield (
            f"rollout.max_age: {rollout.max_age} must be more than rollout.max_overtake = "
            f"{rollout.max_overtake}, because a group must not expire for being slow"
        )
    if (bound := rollout.max_prompts_per_step or 0) and bound < rollout.prompts_per_step:
        yield (
            f"rollout.max_prompts_per_step: {bound} must be at least rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}"
        )
    if overlong.filtered_in_mean and not overlong.filter:
        yield (
            "overlong.filtered_in_mean: true has no effect without overlong.filter; set it to "
            "false, or set overlong.filter"
        )
    if not config.data.train:
        yield "data.train: empty; add a data set to train on"
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    if sequences % config.train.updates_per_step:
        yield (
            f"train.updates_per_step: {config.train.updates_per_step} does not divide the "
            f"{sequences} sequences of a step (rollout.prompts_per_step x samples_per_prompt)"
        )
    if config.loss.clip_low >= 1.0:
        yield f"loss.clip_low: {config.loss.clip_low} must be less than 1 (a ratio is positive)"
    if rollout.top_p < 1.0:
        yield (
            f"rollout.top_p: {rollout.top_p} must be 1.0. Otherwise the engine's log-probs belong "
            "to a truncated distribution and cannot be compared with the policy's"
        )
    sources = (*config.data.train, *config.evaluation.sets)
    names = [source_file_name(source.name) for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.train / evaluation.sets: the name {name!r} is used twice; change one of them"
