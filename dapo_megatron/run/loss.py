"""The loss function of a run: the default or a user's, checked before the models are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.algo.kl import KL, Distillation
from dapo_megatron.algo.loss import no_loss, regularized_loss
from dapo_megatron.algo.objectives import OBJECTIVES
from dapo_megatron.config import Config, LossConfig
from dapo_megatron.protocols import LossFn
from dapo_megatron.rewards.registry import user_function
from dapo_megatron.rollout.metrics import METRICS_OF_AN_UPDATE
from dapo_megatron.types import ConfigError, LossOutput, MicroTokens


def loss_notes(config: Config) -> list[str]:
    """Return a note about the old log-probs of a run with one update per step."""
    if config.train.updates_per_step > 1 or config.loss.old_logprobs == "engine":
        return []
    if needed := config.needs_logprob_pass:
        return [f"old log-probs: of a pass before the update, needed by {', '.join(needed)}"]
    return ["old log-probs: of the update's own pass, because a step has one; no other is made"]


def loss_function(loss: LossConfig) -> LossFn:
    """Return the configured loss function, with its numbers bound: the objective, and outside it
    the KL penalty, the distillation and the entropy bonus, if any.

    Raises ConfigError as `objective` does.
    """
    kl = KL(**loss.kl_numbers) if loss.kl.is_in_loss else None
    distill = None
    if loss.distill is not None:
        distill = Distillation(loss.distill.coefficient, loss.log_ratio_limit)
    if kl is None and distill is None and not loss.entropy_coefficient:
        return objective(loss)
    return partial(
        regularized_loss,
        objective=objective(loss),
        entropy_coefficient=loss.entropy_coefficient,
        kl=kl,
        distill=distill,
    )


def objective(loss: LossConfig) -> LossFn:
    """Return the function of loss.objective or loss.function, with its numbers bound.

    A user-defined loss is tried on two tokens. Raises ConfigError naming loss.function if it cannot
    be imported or called, or does not return a valid LossOutput.
    """
    if loss.objective == "none":
        return no_loss
    if loss.function is None:
        numbers = dict(loss.numbers)
        if loss.objective == "sapo":
            numbers |= {"tau_pos": loss.tau_pos, "tau_neg": loss.tau_neg}
        return partial(OBJECTIVES[loss.objective], **numbers)
    try:
        function = partial(user_function(loss.function), **loss.numbers)
        _try_loss(function, has_reference=loss.kl.is_in_loss, has_teacher=loss.distill is not None)
    except ConfigError as error:
        raise ConfigError(f"loss.function: {loss.function}: {error}") from error
    return function


def _try_loss(function: Callable[..., Any], *, has_reference: bool, has_teacher: bool) -> None:
    ones = torch.ones(2)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = MicroTokens(
        old_logprobs=logprobs.detach(),
        advantages=ones,
        weights=ones,
        engine_logprobs=logprobs.detach(),
        mask=ones.bool(),
        entropy=ones,
        reference_logprobs=logprobs.detach() if has_reference else None,
        teacher_logprobs=logprobs.detach() if has_teacher else None,
    )
    try:
        output = function(logprobs, tokens)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"raised {error!r} when called with two tokens; it must accept (logprobs, tokens, *, "
            f"{', '.join(LossConfig.NUMBERS)})"
        ) from error
    if not isinstance(output, LossOutput) or not isinstance(output.sums, Mapping):
        raise ConfigError(
            f"returned {output!r:.60}; it must return a dapo_megatron.types.LossOutput"
        )
    if reserved := output.sums.keys() & METRICS_OF_AN_UPDATE:
        raise ConfigError(
            f"sums: {', '.join(sorted(reserved))} would hide a metric of the trainer; rename it"
        )
    for name, value in {"total": output.total, **output.sums}.items():
        if not isinstance(value, Tensor) or value.dim() or not value.isfinite():
            raise ConfigError(f"{name} is {value!r:.60}, not a finite scalar tensor")
        if value.requires_grad != (name == "total"):
            raise ConfigError(
                f"its {name}: total must require a gradient, and sums must not (use detach())"
            )
