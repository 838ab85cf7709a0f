"""Fail on docstrings that begin with a fragment, and on names that do not say what they hold.

    python tools/check_language.py PATH...

`make lint` runs it. A docstring begins with a verb or a noun. A variable is called `path`, `group`
or `rule`, never `one`, `found` or `theirs`. docs/contributing.md has the rules.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(r"(Of|That|Whom?|Whose|What|Where|Likewise|As|Beside|But|And)\b")
VAGUE_NAMES = {"found", "one", "told", "said", "theirs", "ours", "mine"}


def problems(path: Path) -> Iterator[str]:
    """Yield `file:line: problem` for a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and FRAGMENT.match(text.strip()):
                first = text.strip().splitlines()[0]
                yield f"{path}:{node.lineno}: begins with a fragment: {first[:70]}"
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        if isinstance(node, ast.Name | ast.arg) and name in VAGUE_NAMES:
            yield f"{path}:{node.lineno}: does not say what it holds: {name}"


def python_files(path: Path) -> list[Path]:
    """Return the file itself, or all Python files below a folder."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def main(paths: list[str]) -> int:
    """Print the problems of the files and of all Python files below the folders. Return the exit
    code."""
    files = [file for path in paths for file in python_files(Path(path))]
    lines = [line for file in files for line in problems(file)]
    print("\n".join(lines) or f"language: {len(files)} files, no problem")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
