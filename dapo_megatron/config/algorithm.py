"""What is learned from what, and how: rollouts, objective, data, rewards, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from dapo_megatron.config.section import (
    Count,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    Tokens,
    WholeNumber,
)
from dapo_megatron.config.sources import Columns, Sources


def _check_function_name(name: str) -> str:
    module, colon, function = name.partition(":")
    if colon and function.isidentifier() and all(map(str.isidentifier, module.split("."))):
        return name
    raise PydanticCustomError("function_name", "must be module:function, as my_losses:my_loss")


UserFunction = Annotated[str, AfterValidator(_check_function_name)]
"""A function of a user's own, as module:function."""


class RolloutConfig(Section):
    prompts_per_step: Count
    """Mixed groups to train on per rollout step (N)."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=65_536)]
    """Completions per prompt (G); at least 2, or no group can be mixed."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    max_prompt_tokens: Tokens
    """Longer prompts are dropped and counted."""
    max_response_tokens: Tokens
    """Generation limit per completion, in tokens, end-of-sequence included."""
    on_policy: bool
    """True: the paper's rule, strictly in ticket order and nothing carried to the next step.
    False: groups finished beyond N and groups still running are carried."""
    dynamic_sampling: bool
    """Train on mixed groups alone (eq. 11). False: on every group."""
    lookahead: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.8
    """Mixed groups expected of the prompts in flight (and waiting beyond the step's own), in units
    of prompts_per_step. By Little's law the mean age in versions of what is trained on is this, or
    less if the engines have no room; acts only with on_policy false."""
    max_overtake: WholeNumber = 8
    """Steps for which later groups may be trained on while a group is still running; then the step
    waits for it. 0: strictly in ticket order. Acts only with on_policy false."""
    max_age: Count = 16
    """Versions after which a finished group that waits its turn expires; a group is never dropped
    for being slow. More than max_overtake. Acts only with on_policy false."""
    max_prompts_per_step: Count | None = None
    """Prompts issued in one step, at most; null: 30 times prompts_per_step (as in the paper's
    script, 10 batches of 3 times as many)."""
    at_bound: Literal["train_partial", "wait", "fail"] = "train_partial"
    """What to do if that did not fill the step: train on fewer groups (the loss is normalised by
    their tokens), issue more until it is full, or stop the run."""
    expected_keep_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """First guess of the share of mixed groups; replaced by what is observed."""
    deterministic: bool = False
    """Let decisions depend on engine steps alone, never on the clock: a run on CPU then repeats,
    and resumes, bit by bit. Replicas and gradings are waited for; leave it off on a cluster."""


class OverlongConfig(Section):
    max_tokens: Tokens
    """L_max of eq. 13: response tokens at which the penalty reaches -1."""
    buffer_tokens: Tokens
    """L_cache of eq. 13: the penalty grows over this many tokens below max_tokens."""
    penalty: bool
    """Add the soft overlong penalty to the reward."""
    filter: bool
    """Keep truncated completions out of the loss (section 3.4)."""
    filtered_in_mean: bool
    """With `filter`: whether they still enter their group's mean and verdict (the reference
    implementations), or are as if never sampled."""


class LossConfig(Section):
    clip_low: Positive
    clip_high: Positive
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e30)] | None
    """Upper bound of the loss at negative advantage, as a multiple of it; null for none."""
    aggregation: Literal["token", "prompt", "sequence"]
    """token: mean over all tokens of the mini-batch (DAPO); prompt: mean per prompt, then over
    prompts (eq. 8 read literally); sequence: mean per completion, then over completions (GRPO)."""
    tis_cap: Positive | None
    """Cap of the truncated importance weight policy/engine; null for none."""
    advantage_eps: NonNegative
    """Added to the standard deviation of a group's rewards."""
    log_ratio_limit: Annotated[float, Field(gt=0.0, le=80.0)] = 20.0
    """|log-ratio| beyond which the ratio is constant. It keeps exp from overflowing (e^88 in
    float32)."""
    function: UserFunction | None = None
    """A loss of yours as module:function, called as algo/loss.py's `dapo_loss` is; null for that.
    See docs/loss.md."""

    NUMBERS: ClassVar = ("clip_low", "clip_high", "dual_clip", "tis_cap", "log_ratio_limit")

    @property
    def numbers(self) -> dict[str, Any]:
        """Keyword arguments of the loss function."""
        return {name: getattr(self, name) for name in self.NUMBERS}


class TrainConfig(Section):
    rollout_steps: Count
    updates_per_step: Count
    """Mini-batches, each one optimizer step, per rollout step."""
    max_tokens_per_microbatch: Count
    """Tokens (padding included) of one forward on one rank."""
    packing: bool = True
    """Sequences end to end in one row; false: one row each, padded to the longest."""


class DataConfig(Section):
    train: Sources
    columns: Columns = Columns()
    """Columns of the sources that name none of their own."""
    shuffle: bool
    """A fresh order per epoch, by seed."""


class EvaluationConfig(Section):
    every: WholeNumber = 0
    """Rollout steps between evaluations; before the first and after the last step always."""
    sets: Sources = ()
    columns: Columns = Columns()
    """Columns of the sets that name none of their own."""
    samples: Annotated[int, Field(ge=1, le=65_536)] = 4
    """Completions per problem (k). The paper's AIME figures: 32, temperature 1, top_p 0.7."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_response_tokens: Tokens | None = None
    """Generation limit per completion; null: that of rollouts."""
    resamples: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """Bootstrap resamples of the problems, for a 95% interval beside each figure; 0 for none."""


class RewardsConfig(Section):
    workers: Processes = 1
    """Grading processes per engine replica."""
    timeout_seconds: Seconds = 10.0
    """Wall-clock limit of one grading; then its worker is killed and the group abstains."""
    memory_mib: Count = 2048
    """Memory limit (address space) of a grading process; above, its grading fails."""
    environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables that grading processes get besides PATH, HOME, LANG, LC_ALL,
    LC_CTYPE, TZ and LD_LIBRARY_PATH. A grader of yours that needs a token names it here."""
