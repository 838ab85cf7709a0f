"""Look up names and arguments of a library. A failure reports which of our files uses them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any


def find(path: str) -> Any:
    """Return the object at `package.module:Class.name`. Raise AssertionError if it is missing."""
    module, _, attributes = path.partition(":")
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise AssertionError(f"{path}: {error}") from error
    for name in filter(None, attributes.split(".")):
        if not hasattr(value, name) and not attributes.count("."):
            return _submodule(path, module, name)
        if not hasattr(value, name):
            raise AssertionError(f"{path}: {name} does not exist")
        value = getattr(value, name)
    return value


def _submodule(path: str, module: str, name: str) -> Any:
    try:
        return import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        raise AssertionError(f"{path}: {name} does not exist") from None


def check_name(path: str, user: str) -> None:
    """Check that a name exists. Raise AssertionError with its path and our file that uses it."""
    try:
        find(path)
    except AssertionError as error:
        raise AssertionError(f"{error}; {user} uses it") from None


def check_arguments(path: str, names: str, user: str) -> None:
    """Check that a function, class or dataclass accepts these arguments."""
    accepted = _arguments(find(path))
    missing = [name for name in names.split() if name not in accepted]
    assert not missing, f"{path} takes no {', '.join(missing)}; {user} passes it"


def _arguments(callee: Any) -> set[str]:
    if dataclasses.is_dataclass(callee):
        return {field.name for field in dataclasses.fields(callee)}
    return set(inspect.signature(callee).parameters)


PACKAGE = Path(__file__).resolve().parents[2] / "dapo_megatron"


def imports_of(library: str) -> dict[str, str]:
    """Return everything that dapo_megatron imports from a library: path of a name -> our file."""
    files: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                for name in node.names:
                    path = f"{node.module}:{name.name}"
                    files.setdefault(path, file.relative_to(PACKAGE).as_posix())
    return files
