"""Checks for values of a config that contradict each other. Which features of policy and engine can
be combined is checked by plan/compatibility.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dapo_megatron.config import (
    ENVIRONMENT_GRADER,
    Config,
    KLConfig,
    LossConfig,
    RolloutConfig,
    Section,
    refuse,
    source_file_name,
)
from dapo_megatron.types import AGENT, VERIFIERS


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
    yield from _rollout_contradictions(rollout)
    if overlong.filtered_in_mean and not overlong.filter:
        yield (
            "overlong.filtered_in_mean: true has no effect without overlong.filter; set it to "
            "false, or set overlong.filter"
        )
    if not config.data.train:
        yield "data.train: empty; add a data set to train on"
    engine = config.engine
    if not engine.colocated and engine.replicas is None:
        yield "engine.replicas: null with engine.colocated false; set it to the number of engines"
    if engine.replicas is not None and engine.min_replicas > engine.replicas:
        yield (
            f"engine.min_replicas: {engine.min_replicas} must be at most engine.replicas = "
            f"{engine.replicas}"
        )
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    if sequences % config.train.updates_per_step:
        yield (
            f"train.updates_per_step: {config.train.updates_per_step} does not divide the "
            f"{sequences} sequences of a step (rollout.prompts_per_step x samples_per_prompt)"
        )
    yield from _loss_contradictions(config.loss)
    if config.policy.router_replay == "policy" and config.loss.old_logprobs == "engine":
        yield (
            "policy.router_replay: policy uses the experts of the pass for old log-probs, which "
            "loss.old_logprobs engine does not make; set it to off, or loss.old_logprobs to policy"
        )
    if config.tracking.record_routes and config.policy.router_replay != "engine":
        yield (
            "tracking.record_routes: needs policy.router_replay engine, because only then engines "
            "return routes; set it to false"
        )
    if rollout.top_p < 1.0:
        yield (
            f"rollout.top_p: {rollout.top_p} must be 1.0. Otherwise the engine's log-probs belong "
            "to a truncated distribution and cannot be compared with the policy's"
        )
    yield from _source_contradictions(config)


def _source_contradictions(config: Config) -> Iterable[str]:
    sources = (*config.data.train, *config.evaluation.sets)
    names = [source_file_name(source.name) for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.train / evaluation.sets: the name {name!r} is used twice; change one of them"
    for source in sources:
        if source.grader == ENVIRONMENT_GRADER and source.environment is None:
            yield (
                f"data.train / evaluation.sets: source {source.name!r} has grader: environment, "
                "but no environment; set it"
            )
        is_verifiers = (source.environment or "").startswith(VERIFIERS)
        if is_verifiers != (source.kind == "tasks"):
            yield (
                f"data.train / evaluation.sets: source {source.name!r}: an environment of "
                "verifiers brings its own tasks, and no other does; leave out path and kind"
            )
    has_agent = any(name.startswith((AGENT, VERIFIERS)) for name in config.environments)
    is_replayed = config.policy.router_replay == "engine"
    if has_agent and is_replayed and config.rollout.turns.rewrites == "branch":
        yield (
            "rollout.turns.rewrites: branch cannot be used with policy.router_replay engine, which "
            "records the routes of one branch; set it to refuse"
        )


def _rollout_contradictions(rollout: RolloutConfig) -> Iterable[str]:
    if rollout.max_age <= rollout.max_overtake:
        yield (
            f"rollout.max_age: {rollout.max_age} must be more than rollout.max_overtake = "
            f"{rollout.max_overtake}, because a group must not expire for being slow"
        )
    if rollout.max_staleness is not None and rollout.on_policy:
        yield (
            f"rollout.max_staleness: {rollout.max_staleness} has no effect with rollout.on_policy "
            "true, because all trained tokens are of the current weights; set it to null"
        )
    if (rollout.max_staleness or 0) > rollout.max_age:
        yield (
            f"rollout.max_staleness: {rollout.max_staleness} must be at most rollout.max_age = "
            f"{rollout.max_age}, because groups that old would expire; raise max_age"
        )
    if (bound := rollout.max_prompts_per_step or 0) and bound < rollout.prompts_per_step:
        yield (
            f"rollout.max_prompts_per_step: {bound} must be at least rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}"
        )


FIXED_BY_OBJECTIVE: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "sequence", "advantage_std": True},
    "dr_grpo": {"aggregation": "constant", "advantage_std": False},
    "gspo": {"aggregation": "sequence", "tis_cap": None, "correction.token_band": None},
    "cispo": {"dual_clip": None},
    "sapo": {"aggregation": "sequence", "dual_clip": None},
}
"""Keys of the loss section that an objective's definition fixes. GSPO's ratio is of a whole
sequence, so weights of single tokens have no meaning for it. CISPO and SAPO clip no loss."""


def _without_meaning(loss: LossConfig) -> Iterable[str]:
    """Yield combinations that would run, but not do what they promise."""
    terms = (loss.distill, loss.kl.is_in_loss, loss.entropy_coefficient)
    if loss.objective == "none" and not any(terms):
        yield "loss.objective: none, and no other term to train; set loss.distill"
    if loss.objective == "none" and loss.tis_cap is not None:
        yield "loss.tis_cap: weighs the objective only, and loss.objective is none; set it to null"
    if loss.kl.is_on and loss.kl.place == "reward" and loss.old_logprobs == "engine":
        yield (
            "loss.kl.place: reward needs the policy's old log-probs, but loss.old_logprobs is "
            "engine; set one of them otherwise"
        )
    correction = loss.correction
    if correction.outside_band == "truncate" and correction.token_band is None:
        yield "loss.correction.outside_band: truncate has no effect without token_band; set that"
    for key in ("token_band", "sequence_mean", "sequence_product", "worst_token"):
        bounds = getattr(correction, key)
        if bounds is not None and not bounds[0] <= 1.0 <= bounds[1]:
            yield (
                f"loss.correction.{key}: {bounds} excludes 1, the ratio of an engine that agrees "
                "with the policy"
            )


def _loss_contradictions(loss: LossConfig) -> Iterable[str]:
    if loss.clip_low > 1.0 or (loss.clip_low == 1.0 and loss.objective != "cispo"):
        yield f"loss.clip_low: {loss.clip_low} must be less than 1 (a ratio is positive)"
    values = {**dict(loss), "correction.token_band": loss.correction.token_band}
    for key, value in FIXED_BY_OBJECTIVE.get(loss.objective, {}).items():
        if values[key] != value:
            shown = {None: "null", True: "true", False: "false"}.get(value, value)
            yield (
                f"loss.{key}: {values[key]} contradicts loss.objective {loss.objective}, which "
                f"needs {shown}; use the overlay model_configs/objectives/{loss.objective}.yaml"
            )
    if loss.function is not None and loss.objective != "dapo":
        yield (
            f"loss.function: {loss.function} replaces loss.objective, which is {loss.objective}; "
            "remove one of them"
        )
    if loss.old_logprobs == "engine":
        corrections = {"loss.tis_cap": loss.tis_cap is not None} | {
            f"loss.correction.{key}": value not in (None, False)
            for key, value in dict(loss.correction).items()
            if key not in ("outside_band", "void_turns")
        }
        for key in (key for key, is_set in corrections.items() if is_set):
            yield (
                f"{key}: contradicts loss.old_logprobs engine: the ratio of the loss is already "
                f"that of policy and engine; set it to {'false' if 'measure' in key else 'null'}"
            )
    if not loss.kl.is_on and (unused := _differing(loss.kl, KLConfig())):
        yield (
            f"{', '.join(f'loss.kl.{key}' for key in unused)}: no effect with loss.kl.coefficient "
            "0; set loss.kl.coefficient (0.001), or remove the key"
        )
    yield from _without_meaning(loss)
    weights = {
        "loss.tis_cap": loss.tis_cap,
        "loss.correction.sequence_tis_cap": loss.correction.sequence_tis_cap,
        "loss.correction.token_band": loss.correction.token_band,
    }
    in_use = [key for key, value in weights.items() if value is not None]
    if len(in_use) > 1:
        yield (
            f"{', '.join(in_use)}: each weighs tokens by the ratio policy / engine; set all except "
            "one to null"
        )


def _differing(section: Section, other: Section) -> list[str]:
    """Return the keys whose values differ."""
    return [key for key, value in section if getattr(other, key) != value]
