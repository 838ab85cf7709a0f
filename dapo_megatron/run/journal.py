"""Journal: the rollouts of each step, saved as soon as they are collected (checkpoint.rollouts).

Engines that sample while the policy trains are never the same twice. If such a run is killed, it
trains again on the journaled rollouts of the steps since its last checkpoint, in the same order,
and gets the same weights as before the kill. It samples again from the first step that the journal
lacks, with the groups that were open when the last journaled step was collected.

    journal/step_000012/state.json           sequences and metrics of step 12; the coordinator's
                                             state when it had collected them
    journal/step_000012/open_step_*.parquet  tokens of the sequences
    journal/step_000012/carried_*.parquet    completions of the groups that were open

An entry is written like a checkpoint, in the background, and is complete or does not exist.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dapo_megatron.checkpoints import CheckpointSaver, read_state, restoring
from dapo_megatron.checkpoints.folder import fault_of, oldest_recent, place_of, published
from dapo_megatron.cluster.collectives import on_all_ranks, on_rank0
from dapo_megatron.config import Config
from dapo_megatron.protocols import Collector, DataParallel, Exchange, Parts, Snapshot
from dapo_megatron.rollout.checkpoint_files import CARRIED, CompletionsSnapshot
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.run.context import RunContext
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import Rollouts

_MAY_CHANGE: dict[str, Any] = {
    "resume": True,
    **dict.fromkeys(("run", "evaluation", "checkpoint", "watchdog", "preflight", "tracking"), True),
    "train": {"rollout_steps"},
}
"""Keys that influence neither the rollouts nor the updates of a step."""


@dataclass
class Journal:
    """Collector that journals what the run's engines collect. Implements protocols.Collector.

    entries            entries of steps that the run has to repeat, by step
    facts              config and number of ranks with a policy, which an entry is only valid for
    oldest_checkpoint  returns the step of the oldest recent checkpoint; entries until then are
                       deleted
    """

    config: Config
    collector: Collector
    data_parallel: DataParallel
    exchange: Exchange
    saver: CheckpointSaver
    entries: dict[int, Path]
    facts: Mapping[str, Any]
    oldest_checkpoint: Callable[[], int]

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Rollouts:
        """Return the journaled rollouts of the step, or collect and journal them."""
        if (entry := self.entries.get(version + 1)) is not None:
            rollouts = self._journaled(entry, on_progress)
            del self.entries[version + 1]
            return rollouts
        rollouts = self.collector.collect(version, on_progress)
        self._save(version + 1, rollouts)
        return rollouts

    def state(self) -> dict[str, Any]:
        """See protocols.Collector."""
        return self.collector.state()

    def snapshot(self) -> Snapshot:
        """See protocols.Collector. Called before a run ends, so it waits for the last entry."""
        self.saver.settle()
        return self.collector.snapshot()

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """See protocols.Collector."""
        self.collector.restore(state, folder)

    def sampling_ahead(
        self, sampling: Callable[[int], AbstractContextManager[None]], version: int
    ) -> AbstractContextManager[None]:
        """Sample ahead as `sampling` does. Engines wait if the next step is repeated, too: nothing
        that they sampled would be kept."""
        return nullcontext() if self.entries else sampling(version)

    def _journaled(self, entry: Path, on_progress: Callable[[int], None]) -> Rollouts:
        state = on_all_ranks(self.exchange, lambda: read_state(entry))
        with restoring(entry):
            step = PartialStep.from_state(state["open_step"], self.config)
            on_all_ranks(self.exchange, lambda: step.load(entry, self.data_parallel))
            self.collector.restore(state["coordinator"], entry)
        on_progress(self.config.rollout.prompts_per_step)
        return Rollouts(step.sequences or [], step.tokens, step.metrics)

    def _save(self, number: int, rollouts: Rollouts) -> None:
        step = PartialStep()
        step.begin(rollouts)
        self.saver.stage()
        state = {
            "facts": self.facts,
            "open_step": step.state(self.config),
            "coordinator": self.collector.state(),
        }
        parts = (self.collector.snapshot(), step.snapshot(self.data_parallel))
        self.saver.commit(number, state, parts)()
        if self.exchange.rank == 0:
            oldest = self.oldest_checkpoint()
            _delete(path for old, path in published(self.saver.folder) if old <= oldest)


def facts_of(config: Config, num_ranks: int) -> dict[str, Any]:
    """Return what must not change between the attempt that journaled a step and one that trains on
    it again."""
    return {"ranks": num_ranks, "config": config.model_dump(mode="json", exclude=_MAY_CHANGE)}


def find_entries(context: RunContext) -> tuple[dict[int, Path], list[str]]:
    """Return the entries of the steps after the checkpoint that the run resumes from, by step,
    until the first that is missing, damaged or of another config; and notes for the user.
    Collective.

    Later entries are deleted, because the run samples their steps again. So are all of them without
    checkpoint.rollouts, or if the user chose the checkpoint.
    """
    config, ranks, journal = context.config, context.ranks, context.folder.journal
    source = context.resume_from
    step, is_open = place_of(source.name) if source else (0, False)
    first = step + 1 + is_open  # an open checkpoint has the rollouts of its step
    paths = ranks.broadcast(dict(published(journal)), dict[int, Path])
    is_used = config.checkpoint.rollouts and config.resume == "auto"
    facts = facts_of(config, ranks.world_size)
    entries: dict[int, Path] = {}
    notes: list[str] = []
    while is_used and (path := paths.get(first + len(entries))):
        fault = fault_of(path, ranks)
        if fault is None and not ranks.broadcast(read_state(path).get("facts") == facts, bool):
            fault = f"{path}: of another config or number of ranks"
        if fault is not None:
            notes.append(f"JOURNAL NOT USED after step {first + len(entries) - 1}: {fault}")
            break
        entries[first + len(entries)] = path
    if entries:
        notes.append(f"repeats steps {first} to {max(entries)} with their journaled rollouts")
    others = [p for number, p in paths.items() if not is_used or number >= first + len(entries)]
    on_rank0(ranks, lambda: _delete(others))
    return entries, notes


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def add_journal(
    context: RunContext,
    recorder: RunRecorder | RankRecorder,
    parts: Parts,
    entries: dict[int, Path],
) -> None:
    """Journal what the collector of `parts` collects, after repeating `entries`. Collective."""
    config, ranks, folder = context.config, context.ranks, context.folder
    all_kept = config.checkpoint.model_copy(update={"keep": 2**31, "keep_every": None})
    saver = CheckpointSaver(
        config.model_copy(update={"checkpoint": all_kept}),
        folder.journal,
        ranks,
        background=ranks.second(),
        snapshot=lambda: CompletionsSnapshot(CARRIED, 0, []),
        attempt=folder.attempt,
        check_owner=folder.check_owner,
        note=recorder.note,
        flush=recorder.flush,
    )
    journal = Journal(
        config,
        parts.collector,
        parts.data_parallel,
        ranks,
        saver,
        entries,
        facts_of(config, ranks.world_size),
        lambda: oldest_recent(folder.checkpoints, config.checkpoint.keep),
    )
    parts.collector = journal
    parts.sampling_ahead = partial(journal.sampling_ahead, parts.sampling_ahead)
