"""The whole configuration: one frozen, typed tree. config_file.py reads it from YAML.

Numbers of the objective have no default: the YAML of a run shows the algorithm it ran
(docs/decisions.md, 3). Settings that change speed or bookkeeping alone do have one. Nothing heavy
is imported here, so that a mistake is refused in a second, before anything starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dapo_megatron.types import ConfigError

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """A node of the tree: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder is `run.directory/run.name`."""
    directory: str = "runs"
    """Where run folders are made."""
    processes: Count = 1
    """Ranks that `train` starts on this machine when no launcher has started them."""
    stop_seconds: Positive = 240.0
    """SIGUSR1 or SIGTERM: save and exit within this time; then exit, saved or not."""


class ModelConfig(Section):
    path: str
    """Folder with a checkpoint: config.json, safetensors, tokenizer; as HF saves it, or as
    tools/convert_checkpoint.py does."""
    ignore_fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Fields of config.json, unknown here, that you know to change nothing in the computation."""


class PolicyConfig(Section):
    tensor_parallel: Count = 1
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks by tokens."""
    pipeline_parallel: Count = 1
    virtual_pipeline_parallel: Annotated[int, Field(ge=2)] | None = None
    """Model chunks per pipeline stage (interleaved schedule); null for none."""
    first_stage_layers: Count | None = None
    last_stage_layers: Count | None = None
    """Layers of the first and last pipeline stage where they differ from the others."""
    context_parallel: Count = 1
    expert_parallel: Count = 1
    expert_tensor_parallel: Literal[1] | None = None
    """Experts are never cut by tensor parallelism: 1, or null for the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of attention, all."""
    moe_aux_loss: NonNegative = 0.0
    """Coefficient of the sequence-wise load-balancing loss of mixture-of-experts layers."""
    kernels: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation; `auto` takes Transformer Engine for bfloat16 on a GPU if installed."""
    precision: Literal["float32", "bfloat16", "float64"]
    """Of weights and activations in policy and engine; master weights are float32 at least.
    float64 is for `doctor layouts` alone: no engine has it."""


class EngineConfig(Section):
    tensor_parallel: Count | None = None
    """Ranks per engine; null: as policy.tensor_parallel. The other ranks form more replicas."""
    expert_parallel: bool = False
    """Cut a mixture of experts by expert over the ranks of an engine, not every expert by rows."""
    memory_fraction: Fraction = 0.7
    """Share of each GPU's memory for weights and KV cache. On CPU see kv_cache_gib."""
    kv_cache_gib: Positive = 1.0
    """KV cache per rank in GiB when there is no GPU."""
    max_sequences: Count = 256
    """Sequences running at once per engine."""
    enforce_eager: bool = True
    """No CUDA graphs (a quality loss with them is on record: verl issue 3660)."""


class RolloutConfig(Section):
    prompts_per_step: Count
    """Mixed groups to train on per rollout step (N)."""
    samples_per_prompt: Annotated[int, Field(ge=2)]
    """Completions per prompt (G); at least 2, or no group can be mixed."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    max_prompt_tokens: Count
    """Longer prompts are dropped and counted."""
    max_response_tokens: Count
    """Generation limit per completion, in tokens, end-of-sequence included."""
    on_policy: bool
    """True: the paper's rule, strictly in ticket order and nothing carried to the next step.
    False: groups finished beyond N and groups still running are carried."""
    dynamic_sampling: bool
    """Train on mixed groups alone (eq. 11). False: on every group."""
    lookahead: Annotated[float, Field(ge=1.0)] = 1.8
    """Mixed groups expected of the prompts in flight (and waiting beyond the step's own), in units
    of prompts_per_step. By Little's law the mean age in versions of what is trained on is this, or
    less if the engines have no room; acts only with on_policy false."""
    max_overtake: Annotated[int, Field(ge=0)] = 8
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
    max_tokens: Count
    """L_max of eq. 13: response tokens at which the penalty reaches -1."""
    buffer_tokens: Count
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
    dual_clip: Annotated[float, Field(gt=1.0)] | None
    """Upper bound of the loss at negative advantage, as a multiple of it; null for none."""
    aggregation: Literal["token", "prompt", "sequence"]
    """token: mean over all tokens of the mini-batch (DAPO); prompt: mean per prompt, then over
    prompts (eq. 8 read literally); sequence: mean per completion, then over completions (GRPO)."""
    tis_cap: Positive | None
    """Cap of the truncated importance weight policy/engine; null for none."""
    advantage_eps: NonNegative
    """Added to the standard deviation of a group's rewards."""


class OptimizerConfig(Section):
    lr: Positive
    warmup_rollout_steps: Annotated[int, Field(ge=0)]
    """lr of rollout step k (from 1) is lr * min(1, (k-1)/warmup); 0 for none."""
    weight_decay: NonNegative
    beta1: Beta
    beta2: Beta
    eps: Positive
    clip_grad: Positive
    """Largest norm of the whole gradient."""


class TrainConfig(Section):
    rollout_steps: Count
    updates_per_step: Count
    """Mini-batches, each one optimizer step, per rollout step."""
    max_tokens_per_microbatch: Count
    """Tokens (padding included) of one forward on one rank."""
    packing: bool = True
    """Sequences end to end in one row; false: one row each, padded to the longest."""


class ReasoningGymSource(Section):
    kind: Literal["reasoning_gym"]
    name: str
    """The name under which figures of this source appear."""
    dataset: str
    """Name of the data set inside the reasoning-gym package."""
    size: Count
    seed: int
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the data set (min_terms, max_digits, ...)."""
    grader: str = "reasoning_gym"


class FileSource(Section):
    kind: Literal["jsonl", "parquet"]
    name: str
    path: str
    """A file in the DAPO-Math schema (docs/data.md)."""
    grader: str | dict[str, str]
    """dapo_math, math_verify, code, or a function of yours as module:function; or a mapping from
    the rows' data_source to one of these."""
    limit: Count | None = None
    """Rows to read; null for all."""


Source = Annotated[ReasoningGymSource | FileSource, Field(discriminator="kind")]


class DataConfig(Section):
    train: Annotated[tuple[Source, ...], Field(strict=False)]
    shuffle: bool
    """A fresh order per epoch, by seed."""


class EvaluationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Rollout steps between evaluations; before the first and after the last step always."""
    sets: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    samples: Count = 4
    """Completions per problem (k). The paper's AIME figures: 32, temperature 1, top_p 0.7."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_response_tokens: Count | None = None
    """Generation limit per completion; null: that of rollouts."""
    resamples: Annotated[int, Field(ge=0)] = 1000
    """Bootstrap resamples of the problems, for a 95% interval beside each figure; 0 for none."""


class RewardsConfig(Section):
    workers: Count = 1
    """Grading processes per engine replica."""
    timeout_seconds: Positive = 10.0
    """Wall-clock limit of one grading; then its worker is killed and the group abstains."""
    memory_mib: Count = 2048
    """Memory limit (address space) of a grading process; above, its grading fails."""


class SyncConfig(Section):
    max_gap: Positive
    """Largest |log-prob by engine - by policy| allowed on a step's fresh tokens, and on fixed
    sequences after each sync; above, the run stops. About 1e-5 in float32; bfloat16 needs more."""
    fingerprint_every: Count | None = None
    """Syncs from one comparison of all weights in policy and engines to the next; null: 1 for
    models of up to 200 million parameters, else 10. The first after a start or resume always."""
    canary_tokens: Annotated[int, Field(ge=2)] = 32
    """Length of each of the fixed sequences."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Rollout steps between checkpoints; 0: only after the last step."""
    max_minutes: Positive | None = None
    """Save also when the last save began so long ago; null: by steps alone."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    keep_every: Count | None = None
    """Beside them, every checkpoint whose step is a multiple of this is kept; null: none."""
    export_hf: bool = False
    """Also write each checkpoint as an HF folder."""


class WatchdogConfig(Section):
    """Seconds without a sign of life, by phase: then every rank writes down where it is, the ranks
    that do not are named, and the job ends (so that Slurm can requeue it). Generation and
    evaluation give one at every exchange between replicas, the other phases at their begin and at
    every mini-batch."""

    start: Positive = 3600.0
    """Loading data, building engine and policy, the first sync."""
    generate: Positive = 900.0
    evaluate: Positive = 900.0
    logprobs: Positive = 1800.0
    update: Positive = 1800.0
    """Of one mini-batch."""
    sync: Positive = 900.0
    checkpoint: Positive = 3600.0
    """Waiting for the disk."""
    other: Positive = 900.0
    """Between these: books, metrics, samples, and waiting for a rank that is at them."""


class PreflightConfig(Section):
    """What `doctor nodes` asks of nodes and network. Floors are GB/s per GPU (nccl-tests' bus
    bandwidth, 1e9 bytes); null: told, not judged. Third parties publish 400 to 450 for all-reduce
    on H100 nodes with eight 400 Gb/s ports each; take your own cluster's figure, less 15%."""

    min_gbps_pair: NonNegative | None = None
    """From each GPU of one node to its counterpart on another; a 400 Gb/s port carries 50."""
    min_gbps_all_reduce: NonNegative | None = None
    min_gbps_all_to_all: NonNegative | None = None
    max_clock_skew_seconds: NonNegative = 1.0
    min_free_disk_gib: NonNegative = 2.0
    """Of run.directory; `slurm/submit.py --dry-run` tells the size of a checkpoint."""
    check_seconds: Positive = 30.0
    """Time limit of each look at a node: nvidia-smi, a disk, the others' files."""
    max_seconds: Positive = 240.0
    """Time limit of the whole; then nodes that said nothing are bad."""


class TrackingConfig(Section):
    mlflow: bool = True
    wait_seconds: NonNegative = 30.0
    """When a run has finished, wait so long for MLflow to take what is spooled (3 s at most when it
    failed or was stopped); the rest is sent at the next start, or by `track`."""
    experiment: str = "dapo_megatron"
    samples: bool = True
    """Write every rollout to samples/ and keep it as an artifact."""


class Config(Section):
    """A complete run."""

    seed: int
    resume: str = "never"
    """never: start afresh (an older run of this name is kept beside it as NAME.1, NAME.2, ...);
    auto: from the run folder's newest checkpoint, or its start; PATH: from that checkpoint."""
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig
    overlong: OverlongConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data: DataConfig
    rewards: RewardsConfig = RewardsConfig()
    sync: SyncConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    preflight: PreflightConfig = PreflightConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.directory) / self.run.name

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and response, in rollouts and evaluations."""
        longest = max(self.rollout.max_response_tokens, self.evaluation.max_response_tokens or 0)
        return self.rollout.max_prompt_tokens + longest

    @property
    def engine_tensor_parallel(self) -> int:
        """Ranks per engine."""
        return self.engine.tensor_parallel or self.policy.tensor_parallel


# ---------------------------------------------------------------------------- reading


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError if there is any problem, with a line for each."""
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))


def num_processes(config: Config) -> int:
    """Ranks of the run: the launcher's if there is one, else run.processes."""
    return int(os.environ.get("WORLD_SIZE", config.run.processes))


def read_model_config(config: Config) -> dict[str, Any]:
    """The model's HF config.json. Raises ConfigError naming `model.path`."""
    path = Path(config.model.path) / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.path: {path} cannot be read ({error.strerror}); "
            "name a folder with an HF checkpoint"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model.path: {path} does not hold a mapping")
    return loaded
