"""`report RUN_FOLDER...`: write the page, once or for as long as a run goes on."""

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

from dapo_megatron.cluster.attempt import check_owner
from dapo_megatron.files import write_text
from dapo_megatron.report.folder import MARKS, RunData, read_run
from dapo_megatron.report.page import Options, make_payload, render
from dapo_megatron.types import ConfigError, DapoError

NAME = "report.html"
LIMIT_SECONDS = 600.0
"""For a report that nobody waits for; a partial file that is older is nobody's."""

_WRITTEN = (*MARKS, "provenance.json", "plan.json", "samples", "samples/index", "timeline")


def report(folders: Sequence[Path], output: Path | None, options: Options) -> None:
    """Write the report of these runs and print where. `output`: by default report.html in the
    first folder. Raises ConfigError for a folder that is not a run's, or an output that cannot be
    written."""
    _write([read_run(folder) for folder in folders], _target(folders, output), options)


def report_of_ending(folder: Path, attempt: str) -> int:
    """Do as `report`, in a process that a run leaves to itself at its end, which has a limit of its
    own; the exit code. Another attempt that has taken the run's folder meanwhile gets no page of
    this one; `attempt` "" is whoever's."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    try:
        _write([read_run(folder)], folder / NAME, Options(), attempt)
    except DapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def watch(folders: Sequence[Path], output: Path | None, options: Options, every: float) -> None:
    """Do as `report` after each `every` seconds in which something changed, until no run goes on;
    then, or at Ctrl-C, once more without a page that loads itself again."""
    target = _target(folders, output)
    refreshed = replace(options, refresh_seconds=every)
    seen = None
    quiet = 0
    with suppress(KeyboardInterrupt):
        while True:
            runs = [read_run(folder) for folder in folders]
            # A start that seems cut short may only have been slow to say that it lives.
            quiet = quiet + 1 if all(run.state.has_ended for run in runs) else 0
            if quiet > 1 or (quiet and seen is None):
                break
            now = [(run.state.word, _stamps(run.path)) for run in runs]
            if now != seen:
                _write(runs, target, refreshed)
                seen = now
            time.sleep(every)
    _write([read_run(folder) for folder in folders], target, options)


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """A:B, A: or :B as first and last step. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    first, last = (
        (int(step) if step else None for step in match.groups()) if match else (None, None)
    )
    if first is last is None or (first is not None and last is not None and first > last):
        raise ConfigError(f"--steps: {text!r} is not FIRST:LAST; such as 10:20, 10: or :20")
    return first, last


def _target(folders: Sequence[Path], output: Path | None) -> Path:
    return output if output is not None else folders[0] / NAME


def _write(runs: Sequence[RunData], target: Path, options: Options, attempt: str = "") -> None:
    started = time.monotonic()
    _remove_partial(target)
    text = render(make_payload(runs, options))
    if attempt:
        check_owner(runs[0].path, attempt)
    try:
        write_text(target, text, durable=False)
    except OSError as error:
        raise ConfigError(
            f"--output: {target}: {error.strerror}; name a file in a folder that can be written"
        ) from error
    seconds = time.monotonic() - started
    print(f"report  {target}  ({len(text.encode()) / 1e6:.1f} MB, {seconds:.1f} s)", flush=True)


def _remove_partial(target: Path) -> None:
    """Remove what a report that was killed left."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LIMIT_SECONDS:
                path.unlink()


def _stamps(folder: Path) -> list[tuple[int, int] | None]:
    """Times and sizes that change when the run writes something."""
    stamps: list[tuple[int, int] | None] = []
    for name in _WRITTEN:
        stamps.append(None)
        with suppress(OSError):
            stat = (folder / name).stat()
            stamps[-1] = (stat.st_mtime_ns, stat.st_size)
    return stamps


if __name__ == "__main__":
    sys.exit(report_of_ending(Path(sys.argv[1]), sys.argv[2]))
