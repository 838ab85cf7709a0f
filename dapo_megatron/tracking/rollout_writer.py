"""Writer of recorded rollouts (rollout/record.py) and of the policy's values, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread

from dapo_megatron.rollout.record import StepRecord
from dapo_megatron.tracking.policy_files import policy_path, policy_row, write_policy
from dapo_megatron.types import SequenceDiagnostics

MAX_WAITING = 6
"""Maximum number of files that wait for the disk: about two steps. Then the next one blocks."""


class RolloutWriter:
    """Writes files of recorded rollouts in the background. Each rank has one, for its own files.

    An error of the disk is a warning: that file is missing. Any other error is raised by the next
    call of `flush` or `close`.

    run      the run's folder
    warn     called with each warning, in the thread of the writer
    """

    def __init__(
        self, run: Path, warn: Callable[[str], None], max_waiting: int = MAX_WAITING
    ) -> None:
        self._run = run
        self._warn = warn
        self._waiting: Queue[tuple[str, Callable[[], None]] | None] = Queue(max_waiting)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def record(self, step: int, record: StepRecord) -> None:
        """Write what a step collected."""
        self._put(f"samples of step {step}", partial(record.write, self._run / "samples", step))

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
        path = policy_path(self._run, step, index)
        rows = [
            policy_row(sequence, has_tokens=sequence.ticket in inspected) for sequence in sequences
        ]
        self._put(f"policy log-probs of step {step}", partial(write_policy, path, rows))

    def flush(self) -> None:
        """Wait until all files are on disk."""
        self._waiting.join()
        self._raise()

    def close(self) -> None:
        """Wait until all files are on disk, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _put(self, files: str, write: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name="rollout writer", daemon=True)
            self._thread.start()
        self._waiting.put((files, write))

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            files, write = task
            try:
                write()
            except OSError as error:
                self._warn(f"{files} were not written: {error}")
            except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
                self._error = self._error or error
            finally:
                del task, write  # they hold the rows, and the next task may be far away
                self._waiting.task_done()
        self._waiting.task_done()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
