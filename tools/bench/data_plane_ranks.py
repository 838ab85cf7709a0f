"""A rank of the data plane's benchmark: the product's own parts around a canned engine."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 - loaded before the memory of an idle start is measured
import torch
from data_plane_canned import (
    MAX_TOKENS,
    PROMPT_TOKENS,
    CannedEngine,
    Generator,
    ScriptedGrading,
)
from data_plane_meter import (
    BENCH,
    CHECKPOINT,
    RECORDING,
    Meter,
    MeteredCollector,
    MeteredDataParallel,
    MeteredDelivery,
    MeteredExchange,
    MeteredWriter,
)

from dapo_megatron.algo.mismatch import GapStatistics, check_gap, gap_statistics, merge
from dapo_megatron.checkpoints.saver import CheckpointSaver
from dapo_megatron.cluster.messages import open_channel
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.data.batch import assemble, diagnose, fresh_mask, split, tokens_in
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.rollout.worker import Follower, Leader
from dapo_megatron.tracking.recorder import RolloutRecorder
from dapo_megatron.types import LogProbs, SequenceTokens

REPOSITORY = Path(__file__).resolve().parents[2]
RAW_BYTES = 8
"""Bytes of a token and its log-prob."""
TOKEN_BYTES = 4
NUM_PROMPTS = 1_000
MAX_MICROBATCH_TOKENS = 24_576
INSPECTED_GROUPS = 8
IDLE_SECONDS = 5.0
"""Time over which the CPU time of idle ranks is measured."""


@dataclass(frozen=True)
class Setting:
    """Size of the benchmark."""

    processes: int = 16
    prompts: int = 512
    samples: int = 16
    mean_tokens: float = 5_000
    steps: int = 2
    """Measured steps, after one that fills the engines."""
    engine_ranks: int = 4
    tokens_per_turn: int = 64
    turn_seconds: float = 0.1
    """In a turn, an engine samples so many tokens of each running sequence, and takes so long."""
    updates: int = 16
    seed: int = 0

    @property
    def replicas(self) -> int:
        """Number of engines."""
        return self.processes // self.engine_ranks

    @property
    def max_sequences(self) -> int:
        """Sequences that an engine runs at once: all of a step run at once, on all engines."""
        return -(-self.prompts * self.samples // self.replicas)


@dataclass
class Figures:
    """Figures of one rank in one step. Seconds are of CPU time."""

    rank: int
    is_leader: bool
    seconds: dict[str, float]
    """Seconds that block the step, by part."""
    record_seconds: float
    checkpoint_seconds: float
    """Seconds of the threads that write recorded rollouts and the checkpoint."""
    bench_seconds: float
    """Seconds of the benchmark itself: canned completions, and figures."""
    idle_seconds: float
    """Seconds that threads of gloo and ZeroMQ take anyway, because they look for work 100 times a
    second. Not in `seconds`."""
    turns: int
    num_sequences: int
    num_tokens: int
    """Tokens of all sequences that the step trains on, prompts included."""
    own_bytes: int
    """Bytes of the sequences that this rank trains on."""
    received_bytes: int
    plan_bytes: int
    """Size of the step's plan, as broadcast; 0 except on rank 0."""
    raw_bytes: int
    """RAW_BYTES per token of the completions that rank 0 held before the step was closed, and of
    the sequences that the rank trains on. TOKEN_BYTES per token of the completions that the engine
    of another rank than a leader continued."""
    peak_bytes: int
    """Largest resident memory in the step, without that of an idle start."""
    state_bytes: int
    """Size of the coordinator's state in a checkpoint; 0 except on rank 0."""
    file_bytes: int
    """Size of the step's files in samples/ and of its checkpoint; 0 except on rank 0."""


class NoPolicy:
    """Snapshot of a policy without parameters. Implements protocols.Snapshot."""

    num_bytes = 0
    checksums: Mapping[str, str] = {}

    def write(self, folder: Path) -> None:
        """Do nothing."""


@dataclass
class Rank:
    """The parts of a rank."""

    setting: Setting
    config: Config
    ranks: Ranks
    engine: CannedEngine
    data_parallel: DataParallelRanks
    collector: MeteredCollector
    recorder: RolloutRecorder
    checkpoints: CheckpointSaver
    meter: Meter
    folder: Path
    idle_bytes: int = 0
    idle_share: float = 0.0
    """CPU seconds per second of an idle rank."""

    def warm_up(self, generator: Generator) -> None:
        """Run a tiny step, so that its libraries and code are loaded. Collective."""
        collector = self.collector
        coordinator, config = collector.coordinator, collector.config
        tiny = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 64}
        rollout = config.rollout.model_copy(update=tiny)
        collector.config = config.model_copy(update={"rollout": rollout})
        if coordinator is not None:
            driver = collector.engines.driver
            assert driver is not None
            collector.coordinator = coordinator_of(collector.config, driver, generator, 2)
        self.step(0)
        collector.coordinator, collector.config = coordinator, config

    def step(self, version: int) -> Figures:
        """Run one rollout step as `loop.train_steps` does, without a policy. Collective."""
        meter, step, partial_step = self.meter, version + 1, PartialStep()
        self.ranks.barrier()
        meter.reset()
        self.engine.version, self.engine.num_steps, self.engine.tokens_given = version, 0, 0
        gc.collect()
        forget_peak()
        started, started_at = time.process_time(), time.monotonic()
        with meter.part("collect"):
            partial_step.begin(self.collector.collect(version, lambda num_ready: None))
        sequences = partial_step.sequences or []
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        own_bytes = sum(map(_num_bytes, partial_step.tokens.values()))
        own_tokens = sum(sequences[index].num_tokens for index in partial_step.tokens)
        self._train(step, partial_step)
        partial_step.close()
        with meter.part("save"):
            state_bytes = self._save(step, partial_step)
        blocking = {name: meter.seconds[name] for name in meter.seconds}
        self.recorder.flush()
        self.checkpoints.wait()
        idle_seconds = self.idle_share * (time.monotonic() - started_at)
        total = time.process_time() - started - idle_seconds
        others = {name: meter.seconds[name] for name in (RECORDING, CHECKPOINT, BENCH)}
        parts = {name: value for name, value in blocking.items() if name not in others}
        parts["other threads"] = total - sum(parts.values()) - sum(others.values())
        return Figures(
            rank=self.ranks.rank,
            is_leader=self.engine.is_leader,
            seconds=parts,
            record_seconds=others[RECORDING],
            checkpoint_seconds=others[CHECKPOINT],
            bench_seconds=others[BENCH],
            idle_seconds=idle_seconds,
            turns=self.engine.num_steps,
            num_sequences=len(sequences),
            num_tokens=num_tokens,
            own_bytes=own_bytes,
            received_bytes=meter.received_bytes,
            plan_bytes=meter.plan_bytes,
            raw_bytes=RAW_BYTES * (meter.held_tokens + own_tokens)
            + TOKEN_BYTES * self.engine.tokens_given,
            peak_bytes=resident_bytes() - self.idle_bytes,
            state_bytes=state_bytes,
            file_bytes=0 if self.ranks.rank else _remove_files(self.folder),
        )

    def _train(self, step: int, partial_step: PartialStep) -> None:
        """Do what a step does before its updates."""
        meter, data_parallel = self.meter, self.data_parallel
        sequences = partial_step.sequences or []
        owners = data_parallel.owners(sequences)
        with meter.part("assemble"):
            batch = assemble(sequences, partial_step.tokens, owners)
            partial_step.tokens = tokens_in(sequences, batch)
        with meter.part(BENCH):  # a policy would return these
            old_logprobs = batch.engine_logprobs.clone()
        partial_step.old_logprobs = old_logprobs
        with meter.part("diagnose"):
            diagnostics = diagnose(sequences, batch, LogProbs(old_logprobs, old_logprobs))
            self.recorder.sequence_diagnostics(step, diagnostics, sequences, data_parallel)
        batch = replace(batch, old_logprobs=old_logprobs)
        with meter.part("mismatch"):
            own_gap = gap_statistics(batch, fresh_mask(sequences, batch, version=step - 1))
        gap = merge(data_parallel.all_gather(own_gap, GapStatistics))
        check_gap(gap, version=step - 1, max_gap=1.0, max_mean_gap=None)
        with meter.part("split"):
            split(batch, self.setting.updates, self.config.loss.aggregation)

    def _save(self, step: int, partial_step: PartialStep) -> int:
        """Save a checkpoint as `loop.save` does. Return the size of the coordinator's state."""
        state = {"open_step": None, "coordinator": self.collector.state()}
        snapshots = (self.collector.snapshot(), partial_step.snapshot(self.data_parallel))
        self.checkpoints.commit(step, state, snapshots)()
        with self.meter.part(BENCH):
            return 0 if self.ranks.rank else len(json.dumps(state))


def _num_bytes(tokens: SequenceTokens) -> int:
    return tokens.prompt.nbytes + tokens.response.nbytes + tokens.logprobs.nbytes


def _remove_files(folder: Path) -> int:
    """Delete the files of a step. Return their size."""
    paths = list(folder.rglob("*.parquet"))
    num_bytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    return num_bytes


# ---------------------------------------------------------------------------- building


def config_of(setting: Setting) -> Config:
    """Return the config of the benchmark's run."""
    return load_config(
        REPOSITORY / "model_configs" / "tiny_cpu.yaml",
        [
            f"model.path={REPOSITORY / 'model_configs' / 'tiny_qwen3'}",
            f"rollout.prompts_per_step={setting.prompts}",
            f"rollout.samples_per_prompt={setting.samples}",
            f"rollout.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollout.max_response_tokens={MAX_TOKENS}",
            f"overlong.max_tokens={MAX_TOKENS}",
            "rollout.expected_keep_rate=1",
            "rollout.on_policy=false",
            "rollout.deterministic=false",
            "loss.tis_cap=2.0",
            f"train.updates_per_step={setting.updates}",
            f"train.max_tokens_per_microbatch={MAX_MICROBATCH_TOKENS}",
            "checkpoint.keep=1",
        ],
    )


def coordinator_of(
    config: Config, driver: EngineDriver, generator: Generator, num_prompts: int = NUM_PROMPTS
) -> Coordinator:
    """Return a coordinator for rank 0, with so many different prompts."""
    prompts = [generator.prompt(index) for index in range(num_prompts)]
    stream = PromptStream(prompts, seed=0, shuffle=True)
    return Coordinator(config.rollout, config.overlong, stream, driver, seed=0)


def build(setting: Setting, folder: Path) -> Rank:
    """Build the parts of a rank. Collective."""
    config, meter, ranks = config_of(setting), Meter(), join("gloo")
    exchange = MeteredExchange(ranks, meter)
    replica, place = divmod(ranks.rank, setting.engine_ranks)
    generator = Generator(setting.mean_tokens, setting.seed)
    engine = CannedEngine(
        generator,
        replica,
        setting.replicas,
        not place,
        setting.max_sequences,
        setting.tokens_per_turn,
        setting.turn_seconds,
    )
    meter.measure(engine, submit=BENCH, step=BENCH, interrupt=BENCH)
    first = replica * setting.engine_ranks
    peers = ranks.subgroup(range(first, first + setting.engine_ranks))
    hub, member = open_channel(ranks, None if place else replica, setting.replicas)
    driver, coordinator = None, None
    if hub is not None:
        driver = EngineDriver(
            hub, setting.replicas, setting.max_sequences, deterministic=False, silence_seconds=900
        )
        coordinator = coordinator_of(config, driver, generator)
        meter.measure(coordinator, collect="coordinator", _interrupt="interrupt", state="save")
    worker: Leader | Follower = Follower(engine, peers)
    if member is not None:
        grading: Any = ScriptedGrading()
        meter.measure(grading, submit=BENCH, collect=BENCH)
        worker = Leader(engine, grading, member, peers, deterministic=False)
        meter.measure(worker, _interrupt="interrupt")
    meter.measure(worker, serve="turns")
    plan = partial(plan_microbatches, max_tokens=MAX_MICROBATCH_TOKENS)
    joined = MeteredDataParallel.join(exchange, ranks.rank, plan, setting.updates)
    data_parallel = replace(joined, meter=meter)
    writer = MeteredWriter(folder / "samples", warnings.warn)
    writer.meter = meter
    recorder = RolloutRecorder(writer, INSPECTED_GROUPS)
    collector = MeteredCollector(
        config=config,
        coordinator=coordinator,
        engines=Engines(worker, driver, exchange),
        delivery=MeteredDelivery(data_parallel, Ranks(0, 1, 0), meter=meter),
        recorder=recorder,
        meter=meter,
    )
    meter.measure(collector, _plan="describe")
    checkpoints = CheckpointSaver(
        config,
        folder / "checkpoints",
        ranks,
        background=ranks.second(),
        snapshot=NoPolicy,
        flush=recorder.flush,
    )
    meter.measure(checkpoints, _write=CHECKPOINT)
    return Rank(
        setting,
        config,
        ranks,
        engine,
        data_parallel,
        collector,
        recorder,
        checkpoints,
        meter,
        folder,
    )


def run(setting: Setting, folder: Path, result: Path) -> None:
    """Measure the steps on this rank. Rank 0 writes the figures of all ranks to `result`."""
    torch.set_num_threads(1)
    rank = build(setting, folder)
    rank.warm_up(Generator(setting.mean_tokens, setting.seed))
    gc.collect()
    gc.freeze()  # as cluster/imports.py does in a run
    rank.ranks.barrier()
    before = time.process_time()
    time.sleep(IDLE_SECONDS)
    rank.idle_share = (time.process_time() - before) / IDLE_SECONDS
    rank.idle_bytes = resident_bytes("VmRSS")
    rank.ranks.barrier()
    steps = []
    for version in range(1 + setting.steps):
        own = rank.step(version)
        figures = rank.ranks.all_gather(own, Figures)
        if version:
            steps.append([asdict(row) for row in figures])
    if rank.ranks.rank == 0:
        result.write_text(json.dumps({"idle_bytes": rank.idle_bytes, "steps": steps}))
    rank.ranks.barrier()
