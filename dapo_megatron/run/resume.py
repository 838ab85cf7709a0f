"""The starting point of a run: step 0 or a checkpoint, and the recorded steps that it trains on
again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_megatron.checkpoints.folder import LAST_READER, read_state, restoring, step_of
from dapo_megatron.config import Config, EvaluationConfig
from dapo_megatron.loop import Parts, Progress
from dapo_megatron.rollout import record
from dapo_megatron.run.context import RunContext
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.types import CheckpointError, DataError

FORMAT = 1
"""Format of the coordinator's state in a record."""
_MAY_CHANGE: dict[str, Any] = {
    "resume": True,
    **dict.fromkeys(("run", "checkpoint", "watchdog", "preflight", "tracking"), True),
    "evaluation": set(EvaluationConfig.model_fields) - {"sets"},  # not trained on
    "train": {"rollout_steps"},
}
"""Keys that influence neither the rollouts nor the updates of a step."""


@dataclass
class StartingPoint:
    """Starting point of a run.

    source    the checkpoint to resume from
    state     of the coordinator in it
    repeated  recorded steps after it, on rank 0
    notes     for the user
    """

    source: Path | None = None
    progress: Progress = field(default_factory=Progress)
    state: dict[str, Any] = field(default_factory=dict)
    repeated: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last_logged(self) -> int:
        """Last step with metrics; -1 if step 0 is logged again."""
        progress = self.progress
        step = progress.step - (progress.not_logged is not None)
        return step if step or progress.first_evaluation else -1

    @property
    def last_recorded(self) -> int:
        """Last step with rollouts that stay."""
        return max(self.progress.step, *self.repeated, 0)

    def restore(self, parts: Parts) -> None:
        """Load the checkpoint into policy and collector. Collective."""
        if self.source is not None:
            parts.policy.load(self.source)
            with restoring(self.source):
                parts.collector.restore(self.state, self.source)


def starting_point(context: RunContext, replay: Path | None) -> StartingPoint:
    """Return where a run, or a replay of the run folder `replay`, starts. Raises CheckpointError if
    the checkpoint cannot be continued."""
    start, source = StartingPoint(), context.resume_from
    if source is not None:
        state = read_state(source)
        start = StartingPoint(source, _progress(source, state, replay), state["coordinator"])
    if context.ranks.rank == 0 and replay is None:
        start.repeated, start.notes = repeated_steps(
            context.config, context.folder, context.ranks.world_size, source
        )
    return start


def _progress(source: Path, state: dict[str, Any], replay: Path | None) -> Progress:
    """Return what the state of a checkpoint records about completed steps."""
    with restoring(source):
        if "open_step" in state:
            raise CheckpointError(
                f"resume: {source} was saved by an earlier version. Continue with commit "
                f"{LAST_READER}, or export it there (tools/convert_checkpoint.py megatron-to-hf) "
                "and set model.path to the result"
            )
        if replay is None and "replay" in state["coordinator"]:
            raise CheckpointError(
                f"resume: {source} was saved by a replay, which has no prompt position and no "
                f"ledger. Continue with --replay {state['coordinator']['replay']}, or use the "
                "checkpoint as model.path"
            )
        progress = Progress(**state["progress"])
        if progress.not_logged is not None:  # its times belong to another start
            progress.not_logged = progress.not_logged[0], 0
        return progress


def facts_of(config: Config, num_ranks: int) -> dict[str, Any]:
    """Return what must not change between the attempt that recorded a step and one that trains on
    it again."""
    kept = config.model_dump(mode="json", exclude=_MAY_CHANGE)
    return {"format": FORMAT, "ranks": num_ranks, "config": kept}


def repeated_steps(
    config: Config, folder: RunFolder, num_ranks: int, resumed_from: Path | None
) -> tuple[dict[int, Path], list[str]]:
    """Return the recorded steps after the checkpoint to resume from that the run trains on again,
    and notes for the user. They end at the first that is missing or of another config. Without
    steps if the user chose the checkpoint."""
    first = step_of(resumed_from.name) + 1 if resumed_from else 1
    steps, notes = record.recorded_steps(folder.samples), []
    repeated: dict[int, Path] = {}
    while config.resume == "auto" and (path := steps.get(first + len(repeated))):
        try:
            is_same = record.read_state(path).get("facts") == facts_of(config, num_ranks)
            fault = "" if is_same else f"{path}: of another config or number of ranks"
        except DataError as error:
            fault = str(error)
        if fault:
            notes.append(f"step {first + len(repeated)} is sampled again: {fault}")
            break
        repeated[first + len(repeated)] = path
    if repeated:
        notes.append(f"trains again on what steps {first} to {max(repeated)} recorded")
    return repeated, notes
