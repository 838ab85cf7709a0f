"""Values of a config that are fine alone and not together. Features of how things are computed have
a table of their own, plan/compatibility/."""

from __future__ import annotations

from collections.abc import Iterable

from dapo_megatron.config import Config, refuse, source_file_name


def check_values(config: Config) -> None:
    """Refuse values that are fine alone and not together. Raises ConfigError naming all of them."""
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
            f"= {rollout.max_response_tokens}, so the penalty could never reach -1"
        )
    if rollout.max_age <= rollout.max_overtake:
        yield (
            f"rollout.max_age: {rollout.max_age} must be more than rollout.max_overtake = "
            f"{rollout.max_overtake}, or a group could expire for being slow"
        )
    if (bound := rollout.max_prompts_per_step or 0) and bound < rollout.prompts_per_step:
        yield (
            f"rollout.max_prompts_per_step: {bound} prompts can never make "
            f"rollout.prompts_per_step = {rollout.prompts_per_step} groups"
        )
    if overlong.filtered_in_mean and not overlong.filter:
        yield "overlong.filtered_in_mean: true without overlong.filter; nothing is filtered"
    if not config.data.train:
        yield "data.train: empty; there is nothing to train on"
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
            f"rollout.top_p: {rollout.top_p}; training samples must come from the whole "
            "distribution (1.0), or policy and engine log-probs do not describe the same one"
        )
    sources = (*config.data.train, *config.evaluation.sets)
    names = [source_file_name(source.name) for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.train / evaluation.sets: the name {name!r} is used twice"
