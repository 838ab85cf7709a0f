"""Config -> parts: the only file that names Megatron and vLLM to the loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.checkpoints import Checkpoints
from dapo_megatron.checkpoints.formats import (
    HfWriter,
    Store,
    TensorInfo,
    copy_companions,
    open_store,
)
from dapo_megatron.checkpoints.formats.writer import blocks
from dapo_megatron.cluster.memory_meter import MemoryMeter
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.stop import Stop
from dapo_megatron.cluster.timeline import Timeline
from dapo_megatron.config import Config, PolicyConfig, TrainConfig
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.sources import load_source
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.model import hf_tensors, read_architecture
from dapo_megatron.plan.layout import row_multiple, sequence_multiple
from dapo_megatron.plan.saved import keep_plan
from dapo_megatron.protocols import Parts, Planner, Policy, RolloutEngine
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.rollout.replay import NoEngine, NoEvaluation, Replay, no_sync
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.tracking import RunRecorder, SilentRecorder
from dapo_megatron.types import ConfigError, Prompt, torch_dtype, whole

if TYPE_CHECKING:
    from dapo_megatron.run.context import Session


@dataclass
class Prompts:
    """The prompts of a run and what was left out of them."""

    train: list[Prompt]
    evaluation: dict[str, Sequence[Prompt]]
    notes: list[str]


@dataclass
class Core:
    """Policy, engine and graders: what training and evaluating have in common."""

    policy: Policy
    engine: RolloutEngine
    sync: WeightSync
    grading: GradingPool | None
    driver: EngineDriver

    def close(self) -> None:
        """End the grading processes."""
        if self.grading is not None:
            self.grading.close()


def load_prompts(config: Config) -> Prompts:
    """All prompts, held-out ones first: their problems are left out of training."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    limit = config.rollout.max_prompt_tokens
    notes: list[str] = []

    def load(source: Any, exclude: frozenset[str]) -> Sequence[Prompt]:
        loaded = load_source(source, tokenizer, limit, exclude=exclude)
        left_out = {
            "too long": loaded.num_dropped_long,
            "duplicates": loaded.num_duplicates,
            "held out": loaded.num_held_out,
        }
        counts = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        notes.append(
            f"{source.name}: {len(loaded.prompts)} prompts"
            + (f" ({counts} left out)" if counts else "")
        )
        return loaded.prompts

    evaluation = {source.name: load(source, frozenset()) for source in config.evaluation.sets}
    held_out = frozenset(prompt.text for prompts in evaluation.values() for prompt in prompts)
    train = [prompt for source in config.data.train for prompt in load(source, held_out)]
    return Prompts(train, evaluation, notes)


def planner(policy: PolicyConfig, train: TrainConfig) -> Planner:
    """How a batch is split into micro-batches that this layout can run."""
    return partial(
        plan_microbatches,
        # The bound is of one rank; those of a context-parallel group share each row.
        max_tokens=train.max_tokens_per_microbatch * policy.context_parallel,
        packed=train.packing,
        sequence_multiple=sequence_multiple(policy),
        row_multiple=row_multiple(policy),
        num_multiple=policy.pipeline_parallel if policy.virtual_pipeline_parallel else 1,
    )


def build_models(config: Config, ranks: Ranks) -> tuple[Policy, RolloutEngine, WeightSync]:
    """The engine first: it sizes its cache by what memory is free. It then sleeps, and the policy
    is there; the first sync gives the engine its turn. Collective."""
    from dapo_megatron.engine import device
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.policy.policy import MegatronPolicy

    device.check_environment(config.engine, os.environ)
    engine = VllmEngine(
        config,
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        is_empty=True,
    )
    engine.sleep()
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    sync = WeightSync(
        policy,
        engine,
        ranks,
        config.sync,
        vocab=policy.architecture.vocab,
        max_tokens=config.rollout.max_prompt_tokens,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)),
    )
    return policy, engine, sync


def build_core(config: Config, ranks: Ranks, stop: Stop | None = None) -> Core:
    """Models and graders. Collective."""
    policy, engine, sync = build_models(config, ranks)
    grading = None
    if engine.is_leader:
        sources = (*config.data.train, *config.evaluation.sets)
        grading = GradingPool(
            {source.name: source.grader for source in sources},
            config.rewards.workers,
            config.rewards.timeout_seconds,
            config.rewards.memory_mib,
            config.rewards.environment,
        )
    driver = EngineDriver(
        engine,
        grading,
        ranks,
        deterministic=config.rollout.deterministic,
        stop=lambda: (stop and stop.signal) or "",
    )
    return Core(policy, engine, sync, grading, driver)


def build_evaluator(config: Config, prompts: Prompts, core: Core) -> Evaluator:
    """Evaluation through the run's engines."""
    return Evaluator(
        config=config.evaluation,
        sets=prompts.evaluation,
        driver=core.driver,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
    )


def build_parts(
    session: Session, core: Core, prompts: Prompts, recorder: RunRecorder | SilentRecorder
) -> Parts:
    """What the loop works with."""
    config, ranks = session.config, session.ranks
    if ranks.rank == 0 and torch.cuda.is_available():
        _, gpu_bytes = torch.cuda.mem_get_info()
        keep_plan(config, session.folder.plan, recorder.note, ranks.world_size, gpu_bytes)
    timeline = Timeline(ranks, config.tracking.timeline_every, recorder.timeline)
    if core.engine.is_leader:
        engine = core.engine
        core.driver.on_running = timeline.follow(engine.replica, engine.max_sequences)
        where = f" in replica {engine.replica}" if engine.num_replicas > 1 else ""
        recorder.ask_requests(lambda: f"{timeline.requests} of {engine.max_sequences}{where}")
    return Parts(
        policy=core.policy,
        engine=core.engine,
        sync=core.sync,
        coordinator=Coordinator(
            config=config.rollout,
            overlong=config.overlong,
            stream=PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle),
            driver=core.driver,
            seed=config.seed,
        ),
        evaluator=build_evaluator(config, prompts, core),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, core.policy, session.folder, recorder),
        watch=session.watch,
        memory=MemoryMeter(ranks),
        timeline=timeline,
        stop=partial(session.stop.check, ranks),
    )


def build_replay(
    session: Session, recorder: RunRecorder | SilentRecorder, run_folder: Path
) -> Parts:
    """What the loop works with to train on the rollouts recorded in `run_folder`: a policy, and
    nothing else that is heavy. Collective."""
    from dapo_megatron.policy.policy import MegatronPolicy

    config, ranks = session.config, session.ranks
    policy = MegatronPolicy(config, ranks, planner(config.policy, config.train))
    return Parts(
        policy=policy,
        engine=NoEngine(),
        sync=no_sync,
        coordinator=Replay(run_folder),
        evaluator=NoEvaluation(),
        recorder=recorder,
        checkpoints=_checkpoints(config, ranks, policy, session.folder, recorder),
        watch=session.watch,
        memory=MemoryMeter(ranks),
        timeline=Timeline(ranks, config.tracking.timeline_every, recorder.timeline),
        stop=partial(session.stop.check, ranks),
    )


def _checkpoints(
    config: Config,
    ranks: Ranks,
    policy: Policy,
    folder: RunFolder,
    recorder: RunRecorder | SilentRecorder,
) -> Checkpoints:
    return Checkpoints(
        config,
        folder.checkpoints,
        ranks,
        background=ranks.second(),
        snapshot=policy.snapshot,
        attempt=folder.attempt,
        check_owner=folder.check_owner,
        note=recorder.note,
        published=recorder.checkpoint,
        export=HfExport(config) if config.checkpoint.export_hf else None,
        describe=partial(
            copy_companions,
            Path(config.model.path),
            dtype=torch_dtype(config.policy.precision),
        ),
        extra={"mlflow_run": recorder.run_id},
    )


class HfExport:
    """checkpoints.Export: a training checkpoint as an HF folder, made without the policy."""

    def __init__(self, config: Config) -> None:
        self._model = Path(config.model.path)
        self._ignore = config.model.ignore_fields
        self._dtype = torch_dtype(config.policy.precision)
        shapes = hf_tensors(read_architecture(config))
        self._infos = {name: TensorInfo(shape, self._dtype) for name, shape in shapes.items()}
        self.num_bytes = sum(info.nbytes for info in self._infos.values())

    def create(self, target: Path) -> None:
        """See checkpoints.Export."""
        HfWriter(target, self._infos).create()

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        """See checkpoints.Export."""
        store, writer = open_store(source, self._ignore), HfWriter(target, self._infos)
        for name in list(self._infos)[rank::num_ranks]:
            info = store.info(name)
            for box in blocks(whole(info.shape), info.dtype.itemsize):
                writer.write(name, store.read(name, box), box)

    def finish(self, target: Path) -> None:
        """See checkpoints.Export."""
        HfWriter(target, self._infos).finish(self._model, self._dtype)


def open_checkpoint(config: Config, checkpoint: Path) -> Store:
    """Weights for the model of the config. Raises ConfigError if they are of another model: with
    the same shapes, another rope would be wrong without a sign."""
    store = open_store(checkpoint, config.model.ignore_fields)
    wanted, found = (asdict(arch) for arch in (read_architecture(config), store.arch))
    if other := [name for name in wanted if wanted[name] != found[name]]:
        raise ConfigError(
            f"checkpoint: {checkpoint} is of another model than model.path: "
            + ", ".join(f"{name} {found[name]}, not {wanted[name]}" for name in other)
        )
    return store
