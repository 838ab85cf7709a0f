"""Tables of names: what a test of a giant looks up, and how a failure says who leans on it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any


def find(path: str) -> Any:
    """`package.module:Class.name`. Raises AssertionError saying how far the path leads."""
    module, _, attributes = path.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise AssertionError(f"{path}: {error}") from error
    for name in filter(None, attributes.split(".")):
        if not hasattr(found, name) and not attributes.count("."):
            return _submodule(path, module, name)
        if not hasattr(found, name):
            raise AssertionError(f"{path}: nothing called {name} is there")
        found = getattr(found, name)
    return found


def _submodule(path: str, module: str, name: str) -> Any:
    try:
        return import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        raise AssertionError(f"{path}: nothing called {name} is there") from None


def check_name(path: str, who: str) -> None:
    """It is there. Raises AssertionError naming it and `who` leans on it."""
    try:
        find(path)
    except AssertionError as error:
        raise AssertionError(f"{error}; {who} leans on it") from None


def check_arguments(path: str, names: str, who: str) -> None:
    """It takes these arguments: of a function, a class or a dataclass."""
    taken = _arguments(find(path))
    missing = [name for name in names.split() if name not in taken]
    assert not missing, f"{path} takes no {', '.join(missing)}; {who} gives it"


def _arguments(found: Any) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return set(inspect.signature(found).parameters)


PACKAGE = Path(__file__).resolve().parents[2] / "dapo_megatron"


def imports_of(giant: str) -> dict[str, str]:
    """Everything that dapo_megatron imports from a giant: path of a name -> the file."""
    found: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == giant:
                for name in node.names:
                    path = f"{node.module}:{name.name}"
                    found.setdefault(path, file.relative_to(PACKAGE).as_posix())
    return found
