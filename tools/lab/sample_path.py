"""Count the files on the way from a prompt to a trained token.

A file is on the way if its code names a record that carries a sample (RECORDS), in a room through
which samples pass. Files that only record, report or check samples are not.

    python tools/lab/sample_path.py [FOLDER_OF_PACKAGE]
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDS = {
    *("Prompt", "GroupRequest", "SampleRequest", "Completion", "Group", "OpenGroup"),
    *("TrainingSequence", "SequenceTokens", "TokenBatch", "MicroTokens"),
    *("Order", "Report", "Returned", "Events", "StepEvents", "Collected", "StepPlan", "Rollouts"),
}
"""Types whose values hold a sample, or a part of it."""
ROOMS = ("", "algo", "data", "engine", "policy", "rewards", "rollout", "run", "bridge", "cluster")


def names_of(path: Path) -> set[str]:
    """Return the records that a file names in code that runs, without its type annotations' strings
    and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return used & RECORDS


def main() -> None:
    """Print a table of the files, and one line of JSON."""
    package = Path(sys.argv[1] if len(sys.argv) > 1 else "dapo_megatron")
    files: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parent.as_posix().partition("/")[0].replace(".", "")
        if room in ROOMS and (names := names_of(path)):
            files[path.relative_to(package).as_posix()] = names
    for name, names in files.items():
        print(f"{name:40} {', '.join(sorted(names))}")
    print(json.dumps({"files": len(files), "rooms": len({name.split("/")[0] for name in files})}))


if __name__ == "__main__":
    main()
