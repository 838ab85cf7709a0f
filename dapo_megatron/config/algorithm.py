"""Config sections of the algorithm: rollouts, objective, data, rewards, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from dapo_megatron.config.section import (
    Bounds,
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
"""A user-defined function, as module:function."""


class TurnsConfig(Section):
    """Limits of completions that talk to an environment (docs/environments.md). Each names the
    reason why a completion ended. rollout.max_response_tokens limits all turns and observations of
    a completion together."""

    max_turns: Count = 8
    """Largest number of the model's turns."""
    max_turn_tokens: Tokens | None = None
    """Largest number of tokens of one turn. null: only rollout.max_response_tokens."""
    max_calls: Count = 32
    """Largest number of calls of tools in all turns."""
    max_observation_tokens: Tokens = 1024
    """An answer of a tool or environment with more tokens is cut in its middle, with a mark."""
    call_seconds: Seconds = 10.0
    """Wall-clock limit of one call. At the limit the environment's process is killed, and its
    completion is sampled again. An agent may take as long between two calls of the model."""
    tool_parser: str = "auto"
    """vLLM's parser of tool calls. auto: one that reads what the model's chat template writes."""
    rewrites: Literal["branch", "refuse"] = "branch"
    """Answer to calls of an agent that do not repeat the conversation so far word for word. branch:
    the call starts a new sequence, which is trained with the same reward. refuse: it fails."""
    endpoint: Literal["loopback", "cluster"] = "loopback"
    """Address at which engine servers answer agents: of this machine only, or of the network
    interface of the cluster (GLOO_SOCKET_IFNAME), for agents that start programs elsewhere."""


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
    """True: the paper's algorithm. Groups are used strictly in ticket order, and no group is
    carried to the next step. False: groups still running, and finished groups beyond N, are
    carried."""
    dynamic_sampling: bool
    """Train only on mixed groups (eq. 11). False: train on every group."""
    lookahead: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.8
    """Number of mixed groups expected from the prompts in flight and from finished groups beyond
    those that the step needs, in units of prompts_per_step. By Little's law this is also the mean
    age, in versions, of the groups trained on (less if the engines have no room). Used only with
    on_policy false."""
    max_overtake: WholeNumber = 8
    """Number of steps in which later groups may be trained on while a group is still running. The
    next step waits for that group. 0: strictly in ticket order. Used only with on_policy false."""
    max_age: Count = 16
    """A finished but unused group expires when its oldest token is more than this many versions
    old. Must be more than max_overtake, so that no group is dropped for being slow. Used only with
    on_policy false."""
    max_staleness: WholeNumber | None = None
    """Maximum age of a trained token: number of versions between the weights that sampled it and
    those that train on it. If a token might become older, no prompts are issued, so that engines
    may wait, and running groups are not overtaken. Nothing is dropped. 0: only tokens of the
    current weights, without losing a group. null: lookahead and max_overtake bound the age. Used
    only with on_policy false."""
    max_prompts_per_step: Count | None = None
    """Largest number of prompts issued in one step. null: 30 times prompts_per_step (the paper's
    script: 10 batches of 3 times prompts_per_step)."""
    at_bound: Literal["train_partial", "wait", "fail"] = "train_partial"
    """Action if max_prompts_per_step prompts do not fill the step. train_partial: train on fewer
    groups (the loss is normalized by their tokens). wait: issue more prompts until the step is
    full. fail: stop the run."""
    expected_keep_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Initial estimate of the share of mixed groups, replaced by observed values."""
    deterministic: bool = False
    """Make decisions depend only on engine steps, never on the clock, and give each completion its
    own seed. A run on CPU then repeats and resumes bit for bit. Leave this off on a cluster,
    because each step waits for all replicas, gradings and environments, and vLLM samples more
    slowly."""
    turns: TurnsConfig = TurnsConfig()

    @property
    def samples_ahead(self) -> bool:
        """Whether engines on other GPUs sample on while the policy trains."""
        return not (self.on_policy or self.deterministic)


class OverlongConfig(Section):
    max_tokens: Tokens
    """L_max of eq. 13: response length at which the penalty reaches -1."""
    buffer_tokens: Tokens
    """L_cache of eq. 13: the penalty grows linearly over this many tokens below max_tokens."""
    penalty: bool
    """Add the soft overlong penalty to the reward."""
    filter: bool
    """Exclude truncated completions from the loss (section 3.4)."""
    filtered_in_mean: bool
    """Used with `filter`. True: truncated completions still count in their group's mean and verdict
    (as in the reference implementations). False: they are ignored completely."""


Objective = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "sapo", "none"]


class CorrectionConfig(Section):
    """Corrections of the mismatch between engine and policy, computed once per step from the ratio
    policy / engine of each token (docs/loss.md). A masked token or sequence has weight 0."""

    sequence_tis_cap: Positive | None = None
    """Weigh each sequence by the product of its tokens' ratios, capped at this value. null: no
    weight."""
    token_band: Bounds | None = None
    """Weigh each token by its ratio if that is within these bounds (IcePop). null: no weight."""
    outside_band: Literal["mask", "truncate"] = "mask"
    """Weight of a token outside token_band. mask: 0. truncate: the nearest bound."""
    sequence_mean: Bounds | None = None
    """Mask sequences whose geometric mean of the ratios is outside these bounds."""
    sequence_product: Bounds | None = None
    """Mask sequences whose product of the ratios is outside these bounds."""
    worst_token: Bounds | None = None
    """Mask sequences with any token whose ratio is outside these bounds (veto)."""
    void_turns: Literal["keep", "mask"] = "keep"
    """mask: completions whose last turn neither calls a tool nor has an answer, or was cut off, do
    not enter the loss (SimpleTIR, arXiv 2509.02479). They count for the mean and the verdict of
    their group."""
    measure: bool = False
    """Log correction/* even if nothing is corrected, to choose bounds from a run's ratios."""

    @property
    def corrects(self) -> bool:
        """Whether anything is weighed or masked by the ratios."""
        unset = CorrectionConfig(
            outside_band=self.outside_band, void_turns=self.void_turns, measure=self.measure
        )
        return self != unset

    @property
    def is_on(self) -> bool:
        """Whether the ratios are computed."""
        return self.corrects or self.measure


class KLConfig(Section):
    """Penalty on the KL divergence between the policy and a reference model (algo/kl.py). It needs
    the reference's weights in host memory, and a second log-prob pass per rollout step."""

    coefficient: NonNegative = 0.0
    """Factor of the KL estimate. 0: no penalty, and no reference is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate per token, where d = log policy - log reference. k1: d. k2: d^2 / 2.
    k3: exp(-d) - 1 + d, as in GRPO."""
    place: Literal["loss", "reward"] = "loss"
    """loss: add the estimate to the loss of each token. reward: subtract its sum over the response
    from the reward of the completion, before advantages are computed."""
    reference: str | None = None
    """Folder of the reference's weights: an HF folder, or a checkpoint in a format of this project.
    null: the weights that the run starts from (model.path)."""

    @property
    def is_on(self) -> bool:
        """Whether a reference is needed."""
        return self.coefficient > 0.0

    @property
    def is_in_loss(self) -> bool:
        """Whether the penalty is a term of the loss."""
        return self.is_on and self.place == "loss"


class DistillConfig(Section):
    """On-policy distillation: the reverse KL divergence to a teacher, KL(policy || teacher), on the
    policy's own samples, is added to the loss of each token. It needs the teacher's weights in host
    memory, on the GPU during its pass, and one forward pass of it per step."""

    teacher: str
    """Folder of the teacher, in a format that model.path may have. It may have another size and
    family, but needs the same tokenizer, and the policy's layout must fit it."""
    coefficient: Positive
    """Factor of the term."""
    top_k: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute the divergence from this many of the teacher's most likely tokens at each place, and
    one outcome for all others; exact if it is the size of the vocabulary. null: estimate it from
    the sampled token, as d^2 / 2 with d = log policy - log teacher, linear where |d| exceeds
    log_ratio_limit."""


class LossConfig(Section):
    objective: Objective = "dapo"
    """Loss of each token, a function of algo/objectives.py. All except dapo, cispo and none also
    fix `aggregation`; model_configs/objectives has an overlay for each. none: only `distill`, `kl`
    and the entropy bonus are trained."""
    clip_low: Positive
    clip_high: Positive
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e30)] | None
    """Upper bound of a token's loss at negative advantage, as a multiple of |advantage|. null: no
    bound."""
    aggregation: Literal["token", "prompt", "sequence", "constant"]
    """token: mean over all tokens of the mini-batch (DAPO). prompt: mean per prompt, then over
    prompts (eq. 8 as written). sequence: mean per completion, then over completions (GRPO).
    constant: sum per completion, divided by rollout.max_response_tokens, then mean over completions
    (Dr. GRPO)."""
    old_logprobs: Literal["policy", "engine"] = "policy"
    """Log-probs in the denominator of the ratio. policy: those of the policy before the step's
    first update, for which a forward pass is made. engine: those of the engine when it sampled. No
    pass is made, and the ratio also corrects the mismatch, within the clip range."""
    tis_cap: Positive | None
    """Cap of the truncated importance weight (policy / engine probability) of each token. null: no
    weight. `correction` has others."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    distill: DistillConfig | None = None
    """null: no teacher."""
    entropy_coefficient: NonNegative = 0.0
    """Subtract this multiple of the entropy from the loss of each token. 0: no bonus."""
    advantage_std: bool = True
    """Divide advantages by the standard deviation of their group's rewards. False: Dr. GRPO."""
    advantage_eps: NonNegative
    """Added to the standard deviation of a group's rewards. No effect without advantage_std."""
    log_ratio_limit: Annotated[float, Field(gt=0.0, le=80.0)] = 20.0
    """|log-ratio| is clamped to this value, so that exp does not overflow (e^88 in float32)."""
    tau_pos: Positive = 1.0
    """Temperature of SAPO's gate where the advantage is positive. Used only by objective sapo."""
    tau_neg: Positive = 1.05
    """Temperature of SAPO's gate elsewhere. Larger is stricter. Used only by objective sapo."""
    function: UserFunction | None = None
    """Your own loss as module:function, with the arguments of `dapo_loss` in algo/loss.py. null:
    `objective`. See docs/loss.md."""

    NUMBERS: ClassVar = ("clip_low", "clip_high", "dual_clip", "tis_cap", "log_ratio_limit")

    @property
    def numbers(self) -> dict[str, Any]:
        """Keyword arguments of the loss function."""
        return {name: getattr(self, name) for name in self.NUMBERS}

    @property
    def correction_numbers(self) -> dict[str, Any]:
        """Keyword arguments of `algo.correction.Correction`."""
        numbers = self.correction.model_dump(exclude={"measure", "void_turns"})
        return {**numbers, "tis_cap": self.tis_cap}

    @property
    def kl_numbers(self) -> dict[str, Any]:
        """Keyword arguments of `algo.kl.KL`."""
        return {
            "coefficient": self.kl.coefficient,
            "estimator": self.kl.estimator,
            "log_ratio_limit": self.log_ratio_limit,
        }


class TrainConfig(Section):
    rollout_steps: Count
    updates_per_step: Count
    """Mini-batches per rollout step. Each is one optimizer step."""
    max_tokens_per_microbatch: Count
    """Largest number of tokens, including padding, of one forward pass on one rank."""
    packing: bool = True
    """True: concatenate sequences into one row. False: one row per sequence, padded to the
    longest."""


class DataConfig(Section):
    train: Sources
    columns: Columns = Columns()
    """Columns of the sources that do not set `columns`."""
    shuffle: bool
    """Shuffle the prompts in each epoch, with the run's seed."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, also for evaluation.sets ({enable_thinking: false})."""


class EvaluationConfig(Section):
    every: WholeNumber = 0
    """Rollout steps between evaluations. The model is always evaluated before the first step and
    after the last one."""
    sets: Sources = ()
    columns: Columns = Columns()
    """Columns of the sets that do not set `columns`."""
    samples: Annotated[int, Field(ge=1, le=65_536)] = 4
    """Completions per problem (k). The paper's AIME results use 32, temperature 1, top_p 0.7."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_response_tokens: Tokens | None = None
    """Generation limit per completion, in tokens. null: rollout.max_response_tokens."""
    resamples: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """Bootstrap resamples of the problems, for the 95% confidence interval of each metric. 0: no
    interval."""


class RewardsConfig(Section):
    workers: Processes = 1
    """Grading processes per engine replica."""
    timeout_seconds: Seconds = 10.0
    """Timeout of one grading, in wall-clock seconds. At the timeout its worker is killed, and the
    group abstains."""
    memory_mib: Count = 2048
    """Memory limit (address space) of a grading process in MiB. A grading that needs more fails."""
    environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables that grading processes get besides PATH, HOME, LANG, LC_ALL,
    LC_CTYPE, TZ and LD_LIBRARY_PATH. List here the variable with an API token that your own grader
    needs."""
