"""Writer of recorded rollouts (rollout/recorded.py), in a separate thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread

from dapo_megatron.files import write_text
from dapo_megatron.rollout.completion_files import write_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import completions_path, index_path, policy_path, step_folder
from dapo_megatron.rollout.sample_index import IndexedGroup, index_of
from dapo_megatron.tracking.policy_files import policy_row, write_policy
from dapo_megatron.types import SequenceDiagnostics

MAX_WAITING = 6
"""Maximum number of files that wait for the disk: about two steps. Then the next one blocks."""


class RolloutWriter:
    """Writes files of recorded rollouts in the background. Each rank has one, for its own files.

    An error of the disk is a warning: that file is missing. Any other error is raised by the next
    call of `flush` or `close`.

    folder   the run's samples/
    warn     called with each warning, in the thread of the writer
    """

    def __init__(
        self, folder: Path, warn: Callable[[str], None], max_waiting: int = MAX_WAITING
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._waiting: Queue[tuple[str, Callable[[], None]] | None] = Queue(max_waiting)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def completions(self, step: int, rows: Iterable[CompletionRow]) -> None:
        """Write the completions of groups that ended in `step`. `rows` are iterated in the
        background."""
        path = completions_path(step_folder(self._folder, step))
        self._put(f"samples of step {step}", partial(write_completions, path, rows))

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
        path = policy_path(step_folder(self._folder, step), index)
        rows = [
            policy_row(sequence, has_tokens=sequence.ticket in inspected) for sequence in sequences
        ]
        self._put(f"policy log-probs of step {step}", partial(write_policy, path, rows))

    def index(self, step: int, groups: Iterable[IndexedGroup]) -> None:
        """Write the index of all groups that ended in `step`. `groups` are iterated in the
        background."""
        path = index_path(step_folder(self._folder, step))

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(index_of(step, groups)))

        self._put(f"index entries of step {step}", write)

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
            self._thread = Thread(target=self._run, name="rollout writer", daemon=True)
            self._thread.start()
        self._waiting.put((files, write))

    def _run(self) -> None:
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
