"""`report RUN_FOLDER...`: writes the page."""

from __future__ import annotations

import faulthandler
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dapo_megatron.cluster.ownership import check_entries
from dapo_megatron.files import write_text
from dapo_megatron.report.page import Options, contents, render
from dapo_megatron.report.reading import read_run
from dapo_megatron.report.rollouts import Steps
from dapo_megatron.report.run_data import RunData
from dapo_megatron.types import ConfigError, DapoError

NAME = "report.html"
LIMIT_SECONDS = 600.0
"""Time limit of the process that writes a report after a run."""


def report(folders: Sequence[Path], output: Path | None, options: Options) -> None:
    """Write the report of these runs and print its path. `output` defaults to report.html in the
    first folder. Raises ConfigError if a folder is not a run's, or if the output cannot be
    written."""
    _write([read_run(folder) for folder in folders], output or _target(folders[0]), options)


def report_of_ending(folder: Path) -> int:
    """Write the report of a run that has ended, and return the exit code. Runs in a separate
    process that ends itself after LIMIT_SECONDS."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    try:
        _write([read_run(folder)], folder / NAME, Options())
    except DapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_steps(text: str | None) -> Steps:
    """Parse "A:B", "A:" or ":B" as first and last step. Raises ConfigError."""
    match = re.fullmatch(r"(\d*):(\d*)", text or ":")
    first, last = (int(step) if step else None for step in match.groups()) if match else (1, 0)
    is_empty = text is not None and first is last is None
    if is_empty or (first is not None and last is not None and first > last):
        raise ConfigError(f"--steps: {text!r} is not FIRST:LAST; write 10:20, 10: or :20")
    return first, last


def _target(folder: Path) -> Path:
    """Return report.html in the folder, or in the current folder if the run may be of another
    user."""
    try:
        check_entries(folder, folder.resolve(), key="RUN_FOLDER")
    except ConfigError:
        return Path(NAME)
    return folder / NAME


def _write(runs: Sequence[RunData], target: Path, options: Options) -> None:
    started = time.monotonic()
    text = render(contents(runs, options))
    try:
        write_text(target, text, durable=False)
    except OSError as error:
        raise ConfigError(
            f"--output: {target}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    seconds = time.monotonic() - started
    print(f"report  {target}  ({len(text.encode()) / 1e6:.1f} MB, {seconds:.1f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(report_of_ending(Path(sys.argv[1])))
