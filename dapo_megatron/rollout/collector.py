"""Collects the training sequences of each step: decisions on rank 0, tokens where they are needed.

The coordinator on rank 0 chooses the groups and has their tokens. Every rank learns which sequences
the step trains on, and gets the tokens of those that it trains on (delivery.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dapo_megatron.cluster.collectives import on_rank0
from dapo_megatron.config import Config
from dapo_megatron.data.batch import reward
from dapo_megatron.protocols import Recorder
from dapo_megatron.rollout.checkpoint_files import CARRIED, CompletionsSnapshot
from dapo_megatron.rollout.completion_files import read_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.parquet import parts_among
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.rollout.sample_index import verdict_of
from dapo_megatron.rollout.step_plan import StepPlan, step_plan
from dapo_megatron.types import CheckpointError, Collected, Completion, Group, Outcome, Rollouts


@dataclass
class EngineCollector:
    """Source of rollouts from the engines. Implements protocols.Collector.

    coordinator  on rank 0
    """

    config: Config
    coordinator: Coordinator | None
    engines: Engines
    delivery: Delivery
    recorder: Recorder
    _collected: Collected | None = None
    """Groups that rank 0 has collected for the step."""

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Rollouts:
        """See protocols.Collector. Raises as Coordinator.collect does, on every rank."""
        plan = self.engines.run(partial(self._plan, version, on_progress), StepPlan)
        collected, self._collected = self._collected, None
        started = time.perf_counter()
        train = [] if collected is None else collected.train
        tokens = self.delivery(plan.sequences, train)
        seconds = time.perf_counter() - started
        if collected is not None:
            ended = [(self._recorded(group), outcome) for group, outcome in collected.ended]
            self.recorder.ended(version + 1, ended)
            self.recorder.completions(version + 1, self._rows(ended))
        return Rollouts(plan.sequences, tokens, plan.metrics | {"time/exchange": seconds})

    def state(self) -> dict[str, Any]:
        """See protocols.Collector. Empty except on rank 0."""
        return {} if self.coordinator is None else self.coordinator.state()

    def snapshot(self) -> CompletionsSnapshot:
        """See protocols.Collector. Empty except on rank 0."""
        groups = [] if self.coordinator is None else self.coordinator.known_groups()
        return CompletionsSnapshot(
            CARRIED,
            0,
            [
                CompletionRow(group.ticket, group.prompt, completion)
                for group in groups
                for completion in group.completions.values()
            ],
        )

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """See protocols.Collector. Raises CheckpointError naming a completion of the state that the
        files in `folder` lack."""
        on_rank0(self.engines.exchange, lambda: self._restore(state, folder))

    def _plan(self, version: int, on_progress: Callable[[int], None], _pool: Pool) -> StepPlan:
        """Collect a step, on rank 0."""
        assert self.coordinator is not None
        self._collected = self.coordinator.collect(version, on_progress)
        return step_plan(self.config, self._collected)

    def _recorded(self, group: Group) -> Group:
        """Return a group as it is recorded."""
        if self.config.tracking.record_routes:
            return group
        completions = (replace(completion, routes=None) for completion in group.completions)
        return replace(group, completions=tuple(completions))

    def _rows(self, ended: Sequence[tuple[Group, Outcome]]) -> list[CompletionRow]:
        """Return the completions of ended groups, as recorded."""
        rows = []
        for group, outcome in ended:
            verdict = verdict_of(completion.grade for completion in group.completions)
            for completion in group.completions:
                parts = reward(completion, self.config.overlong)
                rows.append(
                    CompletionRow(
                        group.ticket,
                        group.prompt,
                        completion,
                        outcome=outcome.value,
                        verdict=verdict,
                        reward=None if parts is None else parts.total,
                    )
                )
        return rows

    def _restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Read the completions of a checkpoint, and continue from its state."""
        assert self.coordinator is not None
        completions = {
            (row.ticket, row.completion.sample): self._with_routes(row, path)
            for path in parts_among(folder.iterdir(), CARRIED).values()
            for row in read_completions(path)
        }
        self.coordinator.restore(state, completions)

    def _with_routes(self, row: CompletionRow, path: Path) -> Completion:
        """Return the completion of a row with routes, if policy.router_replay needs them, or
        without. Raises CheckpointError if they are missing."""
        if self.config.policy.router_replay != "engine":
            return replace(row.completion, routes=None)
        if row.completion.routes is None:
            raise CheckpointError(
                f"{path}: ticket {row.ticket}, sample {row.completion.sample} was sampled without "
                "policy.router_replay engine, so its routes are not known. Resume without it, or "
                "start a new run with model.path set to the checkpoint"
            )
        return row.completion
