"""Config -> parts: the only file that names Megatron, vLLM and MLflow to the loop."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.sources import load_source
from dapo_megatron.data.stream import PromptStream
from dapo_megatron.loop import Parts
from dapo_megatron.protocols import Policy, RolloutEngine, Tracker
from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rollout.coordinator import Collected, Coordinator
from dapo_megatron.rollout.driver import RolloutDriver
from dapo_megatron.rollout.evaluate import Evaluator
from dapo_megatron.run_folder import FolderCheckpoints, RunFolder, write_json
from dapo_megatron.tracking import (
    CompositeTracker,
    JsonlTracker,
    MlflowTracker,
    RunConsole,
    write_samples,
)
from dapo_megatron.types import Prompt, SyncReport


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
    grading: GradingPool | None
    driver: RolloutDriver

    def sync(self, version: int) -> SyncReport:
        """Policy weights into this rank's engine. Collective."""
        started = time.perf_counter()
        report = self.engine.receive(self.policy.weights(), version)
        # The engine's own clock leaves out the policy's part of the iteration's set-up.
        seconds = time.perf_counter() - started
        return SyncReport(report.version, report.num_tensors, report.num_bytes, seconds)

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
        notes.append(f"{source.name}: {len(loaded.prompts)} prompts" + (f" ({counts} left out)" if counts else ""))
        return loaded.prompts

    evaluation = {source.name: load(source, frozenset()) for source in config.evaluation.sets}
    held_out = frozenset(prompt.text for prompts in evaluation.values() for prompt in prompts)
    train = [prompt for source in config.data.train for prompt in load(source, held_out)]
    return Prompts(train, evaluation, notes)


def build_core(config: Config, ranks: Ranks) -> Core:
    """The engine first: it sizes its cache by what memory is free. Collective."""
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.policy.policy import MegatronPolicy

    engine = VllmEngine(
        config, rank=ranks.rank, world_size=ranks.world_size, local_rank=ranks.local_rank
    )
    plan = partial(plan_microbatches, max_tokens=config.train.max_tokens_per_microbatch)
    policy = MegatronPolicy(config, ranks, plan)
    grading = None
    if engine.is_leader:
        sources = (*config.data.train, *config.evaluation.sets)
        grading = GradingPool(
            {source.name: source.grader for source in sources},
            config.rewards.workers,
            config.rewards.timeout_seconds,
        )
    return Core(policy, engine, grading, RolloutDriver(engine, grading, ranks))


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
    config: Config, ranks: Ranks, core: Core, prompts: Prompts, folder: RunFolder, recorder: Any
) -> Parts:
    """What the loop works with."""
    return Parts(
        policy=core.policy,
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
        checkpoints=FolderCheckpoints(config, folder, ranks, core.policy),
    )


def build_tracker(config: Config, folder: RunFolder, console: RunConsole, step: int) -> RunTracker:
    """Rank 0's trackers, the local ones first; a continued run goes on in its own MLflow run."""
    jsonl = JsonlTracker(folder.metrics)
    jsonl.truncate_after(step if folder.is_continued else -1)
    trackers: list[Tracker] = [jsonl, console]
    mlflow = None
    if config.tracking.mlflow:
        mlflow = MlflowTracker(config, run_id=_mlflow_run(folder))
        write_json(folder.mlflow_run, {"run_id": mlflow.run_id})
        trackers.append(mlflow)
    return RunTracker(CompositeTracker(*trackers), mlflow.ui if mlflow else None)


@dataclass
class RunTracker:
    """The trackers of a run as one, and where to look at it."""

    tracker: Tracker
    ui: str | None


def _mlflow_run(folder: RunFolder) -> str | None:
    if not folder.is_continued or not folder.mlflow_run.exists():
        return None
    return str(json.loads(folder.mlflow_run.read_text(encoding="utf-8"))["run_id"])


@dataclass
class RankZeroRecorder:
    """loop.Recorder: metrics to the trackers, rollouts to samples/, progress to the console."""

    tracker: Tracker
    folder: RunFolder
    console: RunConsole
    keep_samples: bool
    num_devices: int

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, with the per-device throughput added."""
        speed = metrics.get("throughput/tokens_per_second")
        if speed is not None:
            per_device = {"throughput/tokens_per_second_per_device": speed / self.num_devices}
            metrics = {**metrics, **per_device}
        self.tracker.log(step, metrics)

    def samples(self, step: int, collected: Collected) -> None:
        """The step's rollouts, with what became of each group."""
        if self.keep_samples:
            path = write_samples(self.folder.samples, step, collected.seen)
            self.tracker.artifact(path, "samples")

    @contextmanager
    def progress(self, num_groups: int) -> Any:
        """A bar on the console; yields a function of the groups done."""
        with self.console.rollout_progress(num_groups) as bar:
            yield lambda done: bar.update(done)


class SilentRecorder:
    """loop.Recorder of every other rank."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def samples(self, step: int, collected: Collected) -> None:
        """Nothing."""

    def progress(self, num_groups: int) -> AbstractContextManager[Any]:
        """Nothing to watch."""
        return _nobody_watches()


@contextmanager
def _nobody_watches() -> Any:
    yield lambda done: None
