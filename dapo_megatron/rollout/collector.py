"""Collects the training sequences of each step: decisions on rank 0, tokens where they are needed.

The coordinator on rank 0 chooses the groups by what replicas report about them. Then every rank
learns which sequences the step trains on, and one exchange brings the tokens of each from the
replica that sampled it to the ranks that train on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dapo_megatron.cluster.collectives import EnginesChanged, on_all_ranks, on_rank0
from dapo_megatron.config import Config
from dapo_megatron.data.batch import reward
from dapo_megatron.protocols import DataParallel, Recorder
from dapo_megatron.rollout.checkpoint_files import CARRIED, CompletionsSnapshot
from dapo_megatron.rollout.completion_files import read_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.exchange import TokenExchange
from dapo_megatron.rollout.holders import Inventory
from dapo_megatron.rollout.messages import StepPlan
from dapo_megatron.rollout.open_group import holder
from dapo_megatron.rollout.parquet import parts_among
from dapo_megatron.rollout.sample_index import verdict_of
from dapo_megatron.rollout.step_plan import step_plan
from dapo_megatron.rollout.store import CompletionStore
from dapo_megatron.types import CheckpointError, Rollouts, Stopped


@dataclass
class EngineCollector:
    """Source of rollouts from the engines. Implements protocols.Collector.

    replica   replica that this rank leads; None on other ranks
    store     completions that this rank holds; empty except on a leader
    """

    config: Config
    coordinator: Coordinator | None
    engines: Engines
    exchange_tokens: TokenExchange
    data_parallel: DataParallel
    recorder: Recorder
    replica: int | None
    store: CompletionStore

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Rollouts:
        """See protocols.Collector. Raises as Coordinator.collect does, on every rank. After
        EnginesChanged, what was collected can be collected again."""
        if self.config.rollout.deterministic:
            self.store.save_point()
        try:
            plan = self.engines.run(partial(self._plan, version, on_progress), StepPlan)
            self.store.forget_save_point()
            started = time.perf_counter()
            owners = self.data_parallel.owners(plan.sequences)
            tokens = self.exchange_tokens(plan.sequences, owners, plan.moves)
            if self.config.roles.are_separate:
                # An engine may have sent and received its part, although another was lost.
                self.engines.exchange.barrier()
        except Stopped:
            if self.config.rollout.deterministic:
                self.store.roll_back()
            raise
        except EnginesChanged:
            if self.coordinator is not None:
                self.coordinator.revert()
            raise
        if self.coordinator is not None:
            self.coordinator.confirm()
        seconds = time.perf_counter() - started
        if self.replica is not None:
            self.recorder.completions(version + 1, self.replica, self._close(plan))
        return Rollouts(plan.sequences, tokens, plan.metrics | {"time/exchange": seconds})

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, on rank 0 that of an earlier coordinator of this run, with what
        the replicas hold now. Groups of which a part is missing are sampled again. Collective."""
        exchange = self.engines.exchange
        own = (-1 if self.replica is None else self.replica, self.store.inventory())
        inventories = dict(exchange.all_gather(own, tuple[int, Inventory]))
        held: Held = []
        if self.coordinator is not None:
            self.coordinator.restore(state)
            replicas = range(len(self.exchange_tokens.leaders))
            self.coordinator.find_completions([inventories[replica] for replica in replicas])
            held = self.coordinator.held()
        held = exchange.broadcast(held, Held)
        self.store.keep({(ticket, sample) for ticket, sample, r, _ in held if r == self.replica})

    def state(self) -> dict[str, Any]:
        """See protocols.Collector. Empty except on rank 0."""
        return {} if self.coordinator is None else self.coordinator.state()

    def snapshot(self) -> CompletionsSnapshot:
        """See protocols.Collector."""
        return CompletionsSnapshot(CARRIED, self.replica or 0, self.store.rows())

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """See protocols.Collector. The number of replicas may have changed.

        Raises CheckpointError naming a completion of the state that the files in `folder` lack.
        """
        on_rank0(self.engines.exchange, lambda: self._restore(state))
        exchange, coordinator = self.engines.exchange, self.coordinator
        held = None if coordinator is None else coordinator.held()
        held = exchange.broadcast(held, Held | None)
        on_all_ranks(exchange, lambda: self._load(folder, cast(Held, held)))

    def _plan(
        self, version: int, on_progress: Callable[[int], None], _driver: EngineDriver
    ) -> StepPlan:
        """Collect a step, in the coordinator's thread on rank 0."""
        assert self.coordinator is not None
        collected = self.coordinator.collect(version, on_progress)
        self.recorder.ended(version + 1, collected.ended)
        closed = [
            (group.ticket, outcome, verdict_of(c.grade for c in group.completions))
            for group, outcome in collected.ended
        ]
        return step_plan(self.config, collected, closed, self.coordinator.rebalance())

    def _close(self, plan: StepPlan) -> list[CompletionRow]:
        """Remove the completions of closed tickets from the store, and return them as recorded."""
        rows = []
        for ticket, outcome, verdict in plan.closed:
            for row in self.store.close(ticket):
                parts = reward(row.completion, self.config.overlong)
                completion = row.completion
                if not self.config.tracking.record_routes:
                    completion = replace(completion, routes=None)
                rows.append(
                    replace(
                        row,
                        completion=completion,
                        outcome=outcome.value,
                        verdict=verdict,
                        reward=None if parts is None else parts.total,
                    )
                )
        return rows

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self.coordinator is not None
        self.coordinator.restore(state)

    def _load(self, folder: Path, held: Held) -> None:
        """Fill the store of a leader from a checkpoint."""
        if self.replica is None:
            return
        num_replicas = len(self.exchange_tokens.leaders)
        self.store.fill(
            self._with_routes(row, path)
            for number, path in parts_among(folder.iterdir(), CARRIED).items()
            if holder(number, num_replicas) == self.replica
            for row in read_completions(path)
        )
        for ticket, sample, replica, num_tokens in held:
            if replica == self.replica and self.store.num_tokens(ticket, sample) != num_tokens:
                raise CheckpointError(
                    f"{folder}: ticket {ticket}, sample {sample} has {num_tokens} tokens in "
                    f"state.json, and {self.store.num_tokens(ticket, sample)} in carried_*.parquet;"
                    " resume from another checkpoint"
                )

    def _with_routes(self, row: CompletionRow, path: Path) -> CompletionRow:
        """Return a row of a checkpoint with routes, if policy.router_replay needs them, or without.
        Raises CheckpointError if they are missing."""
        if self.config.policy.router_replay != "engine":
            return replace(row, completion=replace(row.completion, routes=None))
        if row.completion.routes is None:
            raise CheckpointError(
                f"{path}: ticket {row.ticket}, sample {row.completion.sample} was sampled without "
                "policy.router_replay engine, so its routes are not known. Resume without it, or "
                "start a new run with model.path set to the checkpoint"
            )
        return row


Held = list[tuple[int, int, int, int]]
"""(ticket, sample, replica, number of tokens) of every completion of an open group."""
