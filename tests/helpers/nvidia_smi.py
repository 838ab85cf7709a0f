"""Write a fake nvidia-smi for PATH that answers real queries with the values of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SOUND: dict[str, str] = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65.06",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_event_reasons.active": "0x0000000000000001",
}
"""Answers of an idle H100. Other fields are refused with the driver's error message."""

SCRIPT = """#!{python} -S
import sys
gpus, refuses, sleeps = {values!r}
if sleeps:
    import time
    time.sleep(sleeps)
query = next(word for word in sys.argv if word.startswith("--query-gpu="))
for row in gpus:
    answers = []
    for field in query.partition("=")[2].split(","):
        if field in refuses or field not in row:
            print(f'Field "{{field}}" is not a valid field to query.')
            sys.exit(2)
        answers.append(row[field])
    print(", ".join(answers))
"""


def install(
    folder: Path,
    gpus: list[dict[str, str]],
    *,
    refuses: tuple[str, ...] = (),
    sleeps_seconds: float = 0.0,
) -> Path:
    """Write `folder/nvidia-smi`. Each entry of `gpus` is a GPU, as changes to SOUND."""
    values: Any = ([{**SOUND, **gpu} for gpu in gpus], refuses, sleeps_seconds)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "nvidia-smi"
    script.write_text(SCRIPT.format(python=sys.executable, values=values), encoding="utf-8")
    script.chmod(0o755)
    return folder
