"""Collects the training sequences of each step: decisions on rank 0, tokens where they are needed.

The coordinator on rank 0 chooses the groups and has their tokens. Every rank learns which sequences
the step trains on, and gets the tokens of those that it trains on (delivery.py). What a step
collected is recorded (record.py). After a kill, a step that was recorded is not sampled again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.config import Config
from dapo_megatron.data.batch import describe, reward
from dapo_megatron.protocols import Recorder
from dapo_megatron.rollout import record
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.metrics import rollout_metrics
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.rollout.record import OpenGroups, RecordedGroup, StepRecord
from dapo_megatron.types import (
    CheckpointError,
    Collected,
    Completion,
    DataError,
    Group,
    Outcome,
    Rollouts,
    TrainingSequence,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Result of a collection, which rank 0 sends to all ranks."""

    sequences: list[TrainingSequence]
    """The sequences that the step trains on."""
    metrics: dict[str, float]


def step_plan(config: Config, collected: Collected) -> StepPlan:
    """Return the plan of a step that trains on `collected.train`."""
    metrics = rollout_metrics(collected, config.overlong)
    return StepPlan(training_sequences(config, collected.train), metrics)


def training_sequences(config: Config, groups: Sequence[Group]) -> list[TrainingSequence]:
    """Return the sequences of a step that trains on `groups`."""
    return describe(
        groups,
        overlong=config.overlong,
        eps=config.loss.advantage_eps,
        divide_by_std=config.loss.advantage_std,
        mask_void=config.loss.correction.void_turns == "mask",
    )


@dataclass
class EngineCollector:
    """Source of rollouts from the engines. Implements protocols.Collector.

    coordinator  on rank 0
    facts        what a run must share to repeat a step that this one recorded
    repeated     on rank 0, folders of the next steps, which are not sampled again
    """

    config: Config
    coordinator: Coordinator | None
    engines: Engines
    delivery: Delivery
    recorder: Recorder
    facts: Mapping[str, Any] = field(default_factory=dict)
    repeated: dict[int, Path] = field(default_factory=dict)
    _train: list[Group] = field(default_factory=list)
    """Groups that the step trains on, on rank 0."""

    def collect(self, version: int) -> Rollouts:
        """See protocols.Collector. Raises as Coordinator.collect does, on every rank."""
        plan = self.engines.run(partial(self._plan, version), StepPlan)
        train, self._train = self._train, []
        started = time.perf_counter()
        tokens = self.delivery(plan.sequences, train)
        seconds = time.perf_counter() - started
        metrics = plan.metrics | {"time/exchange": seconds}
        return Rollouts(version, plan.sequences, tokens, metrics)

    def state(self) -> dict[str, Any]:
        """See protocols.Collector. Empty except on rank 0."""
        return {} if self.coordinator is None else self.coordinator.state()

    def snapshot(self) -> OpenGroups:
        """See protocols.Collector. Empty except on rank 0."""
        return OpenGroups([] if self.coordinator is None else self._open(self.coordinator))

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """See protocols.Collector. Raises CheckpointError naming a completion of the state that the
        file in `folder` lacks."""
        on_rank0(self.engines.exchange, self._restore, state, folder)

    def _plan(self, version: int, _pool: Pool) -> StepPlan:
        """Collect a step, on rank 0, or repeat it."""
        assert self.coordinator is not None
        if (folder := self.repeated.pop(version + 1, None)) is not None:
            try:
                return self._repeat(folder)
            except DataError as error:
                self.recorder.note(f"  step {version + 1} is sampled again: {error}")
                record.forget_after(folder.parent, version)
                self.repeated.clear()
        collected = self.coordinator.collect(version, self.recorder.groups)
        self._train = collected.train
        plan = step_plan(self.config, collected)
        ended = [self._recorded(group, outcome) for group, outcome in collected.ended]
        state = {
            "facts": self.facts,
            "metrics": plan.metrics,
            "coordinator": self.coordinator.state(),
        }
        self.recorder.record(
            version + 1, StepRecord(ended, self._open(self.coordinator, is_recorded=True), state)
        )
        return plan

    def _repeat(self, folder: Path) -> StepPlan:
        """Return the plan of a recorded step, and continue as it did. Raises DataError before
        anything is changed."""
        assert self.coordinator is not None
        record.check(folder)
        ended = list(record.read_groups(folder / record.COMPLETIONS))
        state, completions = record.read_state(folder), open_completions(self.config, folder)
        train = trained_groups(self.config, ended, folder)
        before = self.coordinator.save_point()
        try:
            self.coordinator.restore(state["coordinator"], completions)
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            self.coordinator.restore(*before)
            raise DataError(f"{folder}: its state cannot be restored ({error!r})") from error
        self._train = train
        return StepPlan(training_sequences(self.config, self._train), state["metrics"])

    def _open(self, coordinator: Coordinator, *, is_recorded: bool = False) -> list[RecordedGroup]:
        """Return the groups that the coordinator's state refers to."""
        groups = [group.group() for group in coordinator.known_groups()]
        if is_recorded and not self.config.tracking.record_routes:
            groups = list(map(_without_routes, groups))
        return [RecordedGroup(group) for group in groups if group.completions]

    def _recorded(self, group: Group, outcome: Outcome) -> RecordedGroup:
        """Return a group that ended, as it is recorded."""
        parts = [reward(completion, self.config.overlong) for completion in group.completions]
        rewards = [None if part is None else part.total for part in parts]
        if not self.config.tracking.record_routes:
            group = _without_routes(group)
        return RecordedGroup(group, outcome.value, rewards)

    def _restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Read the open groups of a checkpoint, and continue from its state."""
        assert self.coordinator is not None
        self.coordinator.restore(state, open_completions(self.config, folder))
        known = {"", *self.config.environments}
        for group in self.coordinator.known_groups():
            if group.prompt.environment not in known:
                raise CheckpointError(
                    f"{folder}: ticket {group.ticket} needs the environment "
                    f"{group.prompt.environment!r}, which data.train no longer names; add it, or "
                    "resume from another checkpoint"
                )


def trained_groups(config: Config, ended: Sequence[RecordedGroup], folder: Path) -> list[Group]:
    """Return the groups that a recorded step trained on. Raises DataError naming its `folder` if
    there are none, or if their routes are needed and missing."""
    groups = [item.group for item in ended if item.outcome == Outcome.TRAINED]
    if not groups:
        raise DataError(f"{folder}: no group was trained on in this step")
    return [
        replace(group, completions=tuple(_usable(config, group.completions, folder)))
        for group in groups
    ]


def open_completions(config: Config, folder: Path) -> dict[tuple[int, int], Completion]:
    """Return the completions of a folder's open groups by ticket and sample. Raises DataError if it
    is damaged, or if their routes are needed and missing."""
    completions = record.read_open(folder)
    usable = _usable(config, completions.values(), folder)
    return dict(zip(completions, usable, strict=True))


def _usable(config: Config, completions: Collection[Completion], folder: Path) -> list[Completion]:
    """Return completions with routes, if policy.router_replay needs them, or without. Raises
    DataError if they are missing."""
    if config.policy.router_replay != "engine":
        return [replace(completion, routes=None) for completion in completions]
    if any(completion.routes is None for completion in completions):
        raise DataError(
            f"{folder}: recorded without routes, which policy.router_replay engine needs. Set it "
            "to policy or off, or start where tracking.record_routes recorded them"
        )
    return list(completions)


def _without_routes(group: Group) -> Group:
    completions = (replace(completion, routes=None) for completion in group.completions)
    return replace(group, completions=tuple(completions))
