"""Training with engines, while those with ranks of their own may be lost and return.

When the engines change, all ranks leave the loop with EnginesChanged, form the next generation
(cluster/members.py), and enter the loop again, as a resumed run does. What a checkpoint would hold
is still in memory: policy and engines, the step in progress, and on rank 0 the coordinator's state
with the completions of open groups. The sync at the start of the loop gives an engine that joined
the weights. Without roles this happens once, and nothing changes.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dapo_megatron import loop
from dapo_megatron.checkpoints.saver import ABANDON_SECONDS
from dapo_megatron.cluster import exit_reason
from dapo_megatron.cluster.collectives import EngineJoins, EnginesChanged
from dapo_megatron.cluster.groups import notice_lost_nodes
from dapo_megatron.cluster.instruments import StepInstruments
from dapo_megatron.cluster.ranks import next_generation
from dapo_megatron.policy.device import backend
from dapo_megatron.protocols import Parts
from dapo_megatron.rollout.collector import EngineCollector
from dapo_megatron.rollout.coordinator import SavePoint
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.run.build import (
    Core,
    Prompts,
    build_core,
    build_instruments,
    build_parts,
)
from dapo_megatron.run.context import RunContext
from dapo_megatron.run.journal import add_journal
from dapo_megatron.run.loss import loss_function
from dapo_megatron.run.models import build_models
from dapo_megatron.run.other_weights import keep_reference
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import Phase, Stopped

GONE_SECONDS = 8.0
"""Time that an engine whose connection to rank 0 has ended has to come to the meeting: one that is
alive closes it shortly before."""


@dataclass
class ElasticTraining:
    """Training of one rank through all generations.

    resume    continues from a checkpoint, with the parts of the first generation
    progress  completed steps
    started   start of the run, as time.time()
    repeated  entries of the journal to train on again, by step
    """

    context: RunContext
    recorder: RunRecorder | RankRecorder
    prompts: Prompts
    resume: Callable[[Parts], None]
    progress: loop.Progress
    partial_step: PartialStep
    started: float
    repeated: dict[int, Path]
    _save_point: SavePoint | None = None
    """State of the coordinator of the last generation, on rank 0."""
    _lost: dict[int, float] = field(default_factory=dict)
    """Ranks that are or may be lost, on rank 0, with the time.monotonic() until which to wait."""
    _instruments: StepInstruments | None = None
    """Instruments of the last generation."""
    _is_ready: bool = False
    """Whether this rank has entered the loop before."""
    _is_unsaved: bool = False
    """Whether the last checkpoint of the last generation could not be written."""

    def run(self, conclude: Callable[[loop.Progress, StepInstruments], None]) -> None:
        """Train to the end, then call `conclude` on all ranks. Collective."""
        context = self.context
        loss_function(context.config.loss)  # its errors come before models are built
        models = build_models(context.config, context.ranks)
        if context.ranks.policy is not None:
            keep_reference(context.config, context.ranks.policy, models.policy)
        if context.ranks.by_role is not None:
            self._form_first_generation()
        with context.watchdog.phase(Phase.OTHER):
            while True:
                num_steps = self.progress.step
                try:
                    with build_core(context.config, context.ranks, models, context.stop) as core:
                        self._train(core, conclude)
                    return
                except EnginesChanged as change:
                    cause = str(change)
                if self.progress.step > num_steps:
                    context.ranks.engines_apart.note_progress()
                self.recorder.note(f"  {cause}")
                context.ranks.close()
                gc.collect()  # a group that something refers to stays open
                if models.engine.requests:
                    models.engine.interrupt()  # its new tokens are sampled again
                self._meet(cause)

    def _train(
        self, core: Core, conclude: Callable[[loop.Progress, StepInstruments], None]
    ) -> None:
        """Train in one generation."""
        context = self.context
        config, ranks = context.config, context.ranks
        if core.engines.worker is not None:
            context.watchdog.add_diagnostic("in flight", core.engines.worker.in_flight)
        instruments = build_instruments(config, ranks, self.recorder, context.watchdog)
        if self._instruments is not None:
            instruments.continue_from(self._instruments)
        self._instruments = instruments
        parts = build_parts(
            config,
            ranks,
            context.folder,
            core,
            self.prompts,
            recorder=self.recorder,
            instruments=instruments,
            check_stop=context.check,
        )
        collector = parts.collector
        if config.checkpoint.rollouts:
            # Ranks with only an engine do not know which steps are repeated.
            self.repeated = ranks.broadcast(self.repeated, dict[int, Path])
            add_journal(context, self.recorder, parts, self.repeated)
        if ranks.by_role is not None:
            notice_lost_nodes()  # last, when all connections are open
        if ranks.broadcast(self._is_ready, bool):
            assert isinstance(collector, EngineCollector)
            collector.adopt(self._save_point)
        elif ranks.by_role is not None and ranks.by_role.members.ending is not None:
            raise ranks.by_role.members.ending  # there is nothing new to save
        else:
            with context.watchdog.phase(Phase.START):
                self.resume(parts)
        self._follow()
        if not self._is_ready:
            context.stop.hold()
            if context.is_replaceable:
                exit_reason.forget()
        try:
            self._is_ready, self._save_point = True, None
            if ranks.broadcast(self._is_unsaved, bool):
                loop.save(config, parts, self.progress, self.partial_step, self.started)()
                self._is_unsaved = False
            loop.train(config, parts, self.progress, self.partial_step, started=self.started)
            with suppress(EnginesChanged):  # all steps are done and saved
                ranks.barrier()
        except EnginesChanged as change:
            assert isinstance(collector, EngineCollector)
            self._save_point = collector.save_point()
            self._end_generation(core, parts, change)
            raise
        conclude(self.progress, instruments)

    def _end_generation(self, core: Core, parts: Parts, change: EnginesChanged) -> None:
        """Keep whether the last checkpoint is unwritten, and which ranks may be lost."""
        # If an engine joins, no rank is lost, and a checkpoint is completed.
        patience = math.inf if isinstance(change, EngineJoins) else ABANDON_SECONDS
        with self.context.watchdog.phase(Phase.CHECKPOINT):
            self._is_unsaved = parts.checkpoints.is_unfinished(patience)
        if core.engines.driver is not None:
            replicas = self.context.ranks.engines_apart.replicas
            now = time.monotonic()
            self._lost = {
                rank: now + GONE_SECONDS - seconds
                for replica, seconds in core.engines.driver.seconds_gone().items()
                for rank in replicas[replica]
            }

    def _follow(self) -> None:
        """Go on from where the ranks with a policy are. Collective."""
        ranks = self.context.ranks
        self.progress = ranks.broadcast(self.progress, loop.Progress)
        is_open = ranks.broadcast(self.partial_step.sequences is not None, bool)
        if ranks.policy is None:
            self.partial_step.close()
            self.partial_step.sequences = [] if is_open else None

    def _form_first_generation(self) -> None:
        """Form the first generation of the run, or of this start of an engine."""
        members, config = self.context.ranks.engines_apart, self.context.config
        if self.context.ranks.policy is None:
            members.knock()
        else:
            # The numbers of a deterministic run depend on the engines.
            members.meet_all(None if config.rollout.deterministic else config.engine.min_replicas)
            if members.absent:
                ranks = ", ".join(map(str, sorted(members.absent)))
                self.recorder.note(
                    f"  starts without the engines of rank {ranks}, which join later"
                )
        if failure := self._form_generation():
            self._meet(failure)

    def _meet(self, cause: str) -> None:
        """Form the next generation with the ranks that are left and those that wait to join.
        `cause` is why the last one ended."""
        config = self.context.config
        while cause:
            self.context.ranks.engines_apart.meet(
                at_least=config.engine.min_replicas,
                wait_seconds=config.watchdog.start,
                lost=self._lost,
                cause=cause,
                check_stop=self._raise_stop,
            )
            self._lost = {}
            cause = self._form_generation()

    def _form_generation(self) -> str:
        """Make the groups of the generation. Return why this failed; empty if it did not."""
        with self.context.watchdog.phase(Phase.OTHER):
            try:
                self.context.ranks = next_generation(self.context.ranks, backend())
            except EnginesChanged as error:
                self.recorder.note(f"  {error}")
                return str(error)
        return ""

    def _raise_stop(self) -> None:
        if signal := self.context.stop.signal:
            raise Stopped(f"stopped by {signal} while it waited for engines")
