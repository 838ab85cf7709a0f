"""Writer of recorded rollouts (rollout/record.py) and of the policy's values, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.rollout.record import StepRecord
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.policy_files import policy_path, policy_row, write_policy
from dapo_megatron.types import SequenceDiagnostics, TrainingSequence

MAX_WAITING = 6
"""Maximum number of files that wait for the disk: about two steps. Then the next one blocks."""


@dataclass(kw_only=True)
class RolloutWriter:
    """Writes files of recorded rollouts in the background. Each rank has one, for its own files.

    An error of the disk is a warning on `console`: that file is missing. Any other error is raised
    by a later call.

    run                the run's folder; None writes nothing
    inspected_groups   first groups of a step whose per-token policy log-probs are written
    """

    console: RunConsole
    run: Path | None = None
    inspected_groups: int = 0
    max_waiting: int = MAX_WAITING

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rollout writer")
        self._waiting: deque[tuple[str, Future[None]]] = deque()

    def record(self, step: int, record: StepRecord) -> None:
        """Write what a step collected."""
        if self.run is not None:
            self._put(f"samples of step {step}", record.write, self.run / "samples", step)

    def sequence_diagnostics(
        self,
        step: int,
        diagnostics: Iterable[SequenceDiagnostics],
        sequences: Sequence[TrainingSequence],
        data_parallel: DataParallelRanks,
    ) -> None:
        """Write the policy's values of the sequences that this data-parallel index trains on, on
        its first rank. `sequences` are those of all."""
        if data_parallel.is_first:
            tickets = dict.fromkeys(sequence.ticket for sequence in sequences)
            inspected = list(tickets)[: self.inspected_groups]
            self.policy(step, data_parallel.index, diagnostics, inspected)

    def policy(
        self,
        step: int,
        index: int,
        sequences: Iterable[SequenceDiagnostics],
        inspected: Collection[int],
    ) -> None:
        """Write the policy's values of the sequences that data-parallel rank `index` trained on.
        Values per token are written for the tickets in `inspected`, and copied before this method
        returns."""
        if self.run is None:
            return
        rows = [
            policy_row(sequence, has_tokens=sequence.ticket in inspected) for sequence in sequences
        ]
        path = policy_path(self.run, step, index)
        self._put(f"policy log-probs of step {step}", write_policy, path, rows)

    def flush(self) -> None:
        """Wait until all files are on disk."""
        while self._waiting:
            self._finish_first()

    def close(self) -> None:
        """Wait until all files are on disk, and end the thread."""
        self.flush()
        self._thread.shutdown()

    def _put(self, files: str, write: Callable[..., None], *arguments: Any) -> None:
        while len(self._waiting) >= self.max_waiting:
            self._finish_first()
        self._waiting.append((files, self._thread.submit(write, *arguments)))

    def _finish_first(self) -> None:
        files, future = self._waiting.popleft()
        try:
            future.result()
        except OSError as error:
            self.console.warn(f"{files} were not written: {error}")
