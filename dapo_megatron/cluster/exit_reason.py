"""How an attempt ended, and why: one file, written by the first rank that knows.

When one rank dies, all others fail within seconds because it is gone. The first one's reason is the
reason; what only says "my neighbour went away" comes second.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "DAPO_MEGATRON_VERDICT"
"""Environment variable with the file's path; without it nothing is written."""
SECONDARY_SECONDS = 3.0
"""How long a rank that only lost another one lets the guilty rank speak first."""

_LOST = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Broken pipe"
    r"|ncclRemoteError|NCCL.*(abort|timeout)|collective operation timeout"
    r"|DistStoreError|DistNetworkError|wait timeout after",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say of a rank that is gone or does not come (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended."""

    code: int
    """Exit code, see attempt.py."""
    reason: str
    """One line."""
    text: str = ""
    """More of it, as a traceback."""


def is_secondary(reason: str) -> bool:
    """Whether it only says that another rank went away."""
    return bool(_LOST.search(reason))


def record(
    code: int, reason: str, text: str = "", *, environ: Mapping[str, str] = os.environ
) -> bool:
    """Say how this attempt ended; whether this was the first word. Never raises: it is called by
    ranks that are about to end, on disks that may be full."""
    if not environ.get(VARIABLE):
        return False
    path = Path(environ[VARIABLE])
    line = " ".join(reason.split())
    if is_secondary(line):
        if _appears(path, SECONDARY_SECONDS):
            return False
        line = f"lost its connection to another rank, which said nothing: killed? ({line[:300]})"
    with contextlib.suppress(OSError):
        return _write_first(path, f"{code} {line}\n{text}")
    return False


def read(path: Path) -> Verdict | None:
    """None where nobody wrote one: then every rank was killed, or ended well."""
    try:
        first, _, text = path.read_text(encoding="utf-8").partition("\n")
        code, _, reason = first.partition(" ")
        return Verdict(int(code), reason, text)
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
    except OSError:  # a file system without hard links: nearly as good
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
