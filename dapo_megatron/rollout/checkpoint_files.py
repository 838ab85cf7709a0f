"""Files of completions in a checkpoint, each written by one rank in the background.

carried_00000.parquet    completions of open groups (earlier versions: a file per engine)
open_step_00001.parquet  sequences that data-parallel index 1 trains on, and their old log-probs, of
                         a step that was stopped in the middle

state.json describes all of them. A run that resumes with other replicas, or in another layout,
reads them wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dapo_megatron.files import sha256
from dapo_megatron.rollout.completion_files import write_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.parquet import part_path

CARRIED, OPEN_STEP = "carried", "open_step"
_ROW_BYTES = 512
"""Rough size of a row without its tokens and texts."""


class CompletionsSnapshot:
    """The file of one rank. Implements protocols.Snapshot. Without rows no file is written.

    kind     CARRIED or OPEN_STEP
    number   data-parallel index; 0 for CARRIED
    """

    def __init__(self, kind: str, number: int, rows: Sequence[CompletionRow]) -> None:
        self.checksums: dict[str, str] = {}
        self._kind, self._number = kind, number
        self._rows = rows

    @property
    def num_bytes(self) -> int:
        """Size on disk in bytes, at most."""
        return sum(
            _ROW_BYTES
            + 16 * row.completion.num_tokens
            + 4 * (len(row.prompt.tokens) + len(row.prompt.text) + len(row.completion.text))
            + memoryview(row.completion.routes or b"").nbytes
            for row in self._rows
        )

    def write(self, folder: Path) -> None:
        """See protocols.Snapshot."""
        if not self._rows:
            return
        path = part_path(folder, self._kind, self._number)
        write_completions(path, self._rows)
        self.checksums[path.name] = sha256(path)
