"""Exit code and reason of an attempt, in one file that the first failing rank writes.

When one rank dies, all others fail within seconds because they lose their connection to it. The
first rank's error is the reason to report. Ranks with a lost connection wait before they write.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dapo_megatron.files import read_file
from dapo_megatron.text import visible

VARIABLE = "DAPO_MEGATRON_VERDICT"
"""Environment variable with the file's path; if it is not set, nothing is written."""
SECONDARY_SECONDS = 3.0
"""How long a rank that lost a connection waits for the failed rank to write its reason first."""

_LOST = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Broken pipe"
    r"|ncclRemoteError|NCCL.*(abort|timeout)|collective operation timeout"
    r"|DistStoreError|DistNetworkError|wait timeout after",
    re.IGNORECASE,
)
"""Error messages of gloo, NCCL and torch's store for a lost or missing rank (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Exit code and reason of an attempt."""

    code: int
    """Exit code, see attempt.py."""
    reason: str
    """Reason in one line."""
    text: str = ""
    """Details, such as a traceback."""


def is_secondary(reason: str) -> bool:
    """Return whether `reason` only reports a lost connection to another rank."""
    return bool(_LOST.search(reason))


def record(
    code: int, reason: str, text: str = "", *, environ: Mapping[str, str] = os.environ
) -> bool:
    """Write how this attempt ended, unless another rank has written it. Return whether it did.

    Never raises OSError: it is called by ranks that are about to exit, on disks that may be full.
    """
    if not environ.get(VARIABLE):
        return False
    path = Path(environ[VARIABLE])
    line = " ".join(reason.split())
    if is_secondary(line):
        if _appears(path, SECONDARY_SECONDS):
            return False
        line = (
            "lost its connection to another rank, which reported no error and may have been "
            f"killed ({line[:300]})"
        )
    with contextlib.suppress(OSError):
        return _write_first(path, visible(f"{code} {line}\n{text}"))
    return False


def read(path: Path) -> ExitReason | None:
    """Return how the attempt ended, or None if there is no readable file.

    There is no file if every rank was killed or exited without an error.
    """
    try:
        first, _, text = read_file(path).decode().partition("\n")
        code, _, reason = first.partition(" ")
        return ExitReason(int(code), reason, text)
    except (OSError, ValueError):
        return None


def _write_first(path: Path, text: str) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links; this fallback is not atomic
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _appears(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
