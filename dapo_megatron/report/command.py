"""`report RUN_FOLDER...`: writes the page once, or repeatedly while a run continues."""

from __future__ import annotations

import faulthandler
import glob
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dapo_megatron.cluster.ownership import check_entries
from dapo_megatron.files import write_text
from dapo_megatron.report.page import Options, make_payload, render
from dapo_megatron.report.run_data import MARKS, RunData, read_run
from dapo_megatron.types import ConfigError, DapoError

NAME = "report.html"
LIMIT_SECONDS = 600.0
"""Time limit of the process that writes a report after a run. Older partial files are garbage."""

_WRITTEN = (*MARKS, "provenance.json", "plan.json", "samples", "timeline")


def report(folders: Sequence[Path], output: Path | None, options: Options) -> None:
    """Write the report of these runs and print its path. `output` defaults to report.html in the
    first folder. Raises ConfigError if a folder is not a run's, or if the output cannot be
    written."""
    _write([read_run(folder) for folder in folders], _target(folders, output), options)


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


def watch(folders: Sequence[Path], output: Path | None, options: Options, every: float) -> None:
    """Write the report every `every` seconds if a run has changed, until all runs have ended. Then,
    or at Ctrl-C, write it a last time without automatic reload."""
    target = _target(folders, output)
    reloading = replace(options, refresh_seconds=every)
    written = None
    num_ended = 0
    with suppress(KeyboardInterrupt):
        while True:
            runs = [read_run(folder) for folder in folders]
            # Poll twice: a start that seems to have ended may only be late with its heartbeat.
            num_ended = num_ended + 1 if all(run.state.has_ended for run in runs) else 0
            if num_ended > 1 or (num_ended and written is None):
                break
            current = [(run.state.word, _stamps(run.path)) for run in runs]
            if current != written:
                _write(runs, target, reloading)
                written = current
            time.sleep(every)
    _write([read_run(folder) for folder in folders], target, options)


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """Parse "A:B", "A:" or ":B" as first and last step. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    first, last = (
        (int(step) if step else None for step in match.groups()) if match else (None, None)
    )
    if first is last is None or (first is not None and last is not None and first > last):
        raise ConfigError(f"--steps: {text!r} is not FIRST:LAST; write 10:20, 10: or :20")
    return first, last


def _target(folders: Sequence[Path], output: Path | None) -> Path:
    """Return `output`, else report.html in the first folder, or in the current folder if the first
    one may be of another user."""
    if output is not None:
        return output
    try:
        check_entries(folders[0], folders[0].resolve(), key="RUN_FOLDER")
    except ConfigError:
        return Path(NAME)
    return folders[0] / NAME


def _write(runs: Sequence[RunData], target: Path, options: Options) -> None:
    started = time.monotonic()
    _remove_partial(target)
    text = render(make_payload(runs, options))
    try:
        write_text(target, text, durable=False)
    except OSError as error:
        raise ConfigError(
            f"--output: {target}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    seconds = time.monotonic() - started
    print(f"report  {target}  ({len(text.encode()) / 1e6:.1f} MB, {seconds:.1f} s)", flush=True)


def _remove_partial(target: Path) -> None:
    """Remove partial files of reports that were killed."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LIMIT_SECONDS:
                path.unlink()


def _stamps(folder: Path) -> list[tuple[int, int] | None]:
    """Return modification times and sizes of the files that a run writes; None if missing."""
    stamps: list[tuple[int, int] | None] = []
    for name in _WRITTEN:
        stamps.append(None)
        with suppress(OSError):
            stat = (folder / name).stat()
            stamps[-1] = (stat.st_mtime_ns, stat.st_size)
    return stamps


if __name__ == "__main__":
    sys.exit(report_of_ending(Path(sys.argv[1])))
