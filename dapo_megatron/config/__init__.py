"""The configuration: one frozen, typed tree. file.py reads it from YAML; consistency.py refuses
values that contradict each other.

Numbers of the objective have no default, except log_ratio_limit, so that the YAML of a run shows
the algorithm it ran (docs/decisions.md, 3). Settings that only affect speed or bookkeeping
have defaults. No heavy library is imported here, so that config errors are reported within a
second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dapo_megatron.config.algorithm import (
    CorrectionConfig,
    DataConfig,
    DistillConfig,
    EvaluationConfig,
    KLConfig,
    LossConfig,
    OverlongConfig,
    RewardsConfig,
    RolloutConfig,
    TrainConfig,
    TurnsConfig,
)
from dapo_megatron.config.computing import (
    EngineConfig,
    Fp8Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
)
from dapo_megatron.config.running import (
    CheckpointConfig,
    PreflightConfig,
    RunConfig,
    SyncConfig,
    TrackingConfig,
    WatchdogConfig,
)
from dapo_megatron.config.section import Section, Seed
from dapo_megatron.config.sources import (
    ENVIRONMENT_GRADER,
    Columns,
    DatasetsSource,
    FileSource,
    ReasoningGymSource,
    RowsSource,
    Source,
    TasksSource,
    source_file_name,
)
from dapo_megatron.types import ConfigError

__all__ = [
    "ENVIRONMENT_GRADER",
    "CheckpointConfig",
    "Columns",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "DatasetsSource",
    "DistillConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FileSource",
    "Fp8Config",
    "KLConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "PreflightConfig",
    "ReasoningGymSource",
    "RewardsConfig",
    "RolloutConfig",
    "RowsSource",
    "RunConfig",
    "Section",
    "Source",
    "SyncConfig",
    "TasksSource",
    "TrackingConfig",
    "TrainConfig",
    "TurnsConfig",
    "WatchdogConfig",
    "num_processes",
    "refuse",
    "source_file_name",
]


class Config(Section):
    """The configuration of a run."""

    seed: Seed
    resume: str = "never"
    """never: start from step 0 (an older run of this name is renamed to NAME.1, NAME.2, ...). auto:
    resume from the newest checkpoint in the run's folder, or start from step 0 if there is none.
    PATH: resume from that checkpoint."""
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
        """Largest number of tokens of prompt and response, over rollouts and evaluations."""
        longest = max(self.rollout.max_response_tokens, self.evaluation.max_response_tokens or 0)
        return self.rollout.max_prompt_tokens + longest

    @property
    def engine_tensor_parallel(self) -> int:
        """Ranks per engine."""
        return self.engine.tensor_parallel or self.policy.tensor_parallel

    @property
    def needs_logprob_pass(self) -> list[str]:
        """Settings for which the policy's old log-probs must be known before the update. If there
        are none, the pass of the step's only update gives them. Only with old_logprobs policy."""
        loss, fp8, updates = self.loss, self.policy.fp8, self.train.updates_per_step
        settings = {
            f"train.updates_per_step {updates}": updates > 1,
            "loss.correction": loss.correction.is_on,
            "loss.kl.place reward": loss.kl.is_on and not loss.kl.is_in_loss,
            "policy.router_replay policy": self.policy.router_replay == "policy",
            "policy.fp8.recipe delayed": fp8 is not None and fp8.recipe == "delayed",
        }
        return [setting for setting, is_used in settings.items() if is_used]

    @property
    def graders(self) -> dict[str, str | dict[str, str]]:
        """Grader of each source: its name, or data_source of a row -> its name. Without sources
        whose environment gives the rewards."""
        sources = (*self.data.train, *self.evaluation.sets)
        return {s.name: s.grader for s in sources if s.grader != ENVIRONMENT_GRADER}

    @property
    def environments(self) -> set[str]:
        """Names of all environments."""
        sources = (*self.data.train, *self.evaluation.sets)
        return {source.environment for source in sources if source.environment}

    @property
    def separate_gpus(self) -> int:
        """GPUs on which engines run beside the policy's."""
        if self.engine.colocated:
            return 0
        return (self.engine.replicas or 0) * self.engine_tensor_parallel

    def num_replicas(self, num_ranks: int) -> int:
        """Return the number of engines of a run whose policy has `num_ranks` ranks."""
        return self.engine.replicas or num_ranks // self.engine_tensor_parallel


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with one line per problem, if there are any."""
    lines = list(problems)
    if lines:
        raise ConfigError("\n".join(lines))


def num_processes(config: Config) -> int:
    """Return the number of the policy's ranks: WORLD_SIZE if a launcher has set it, else
    run.processes."""
    return int(os.environ.get("WORLD_SIZE", config.run.processes))
