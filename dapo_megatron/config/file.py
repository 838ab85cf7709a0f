"""Reading a Config: YAML, overlays, `key.path=value` overrides; errors name the dotted key.

An overlay is a YAML file of some keys: its mappings are merged into those of the config, everything
else replaces what stood there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dapo_megatron.config import (
    Config,
    DatasetsSource,
    FileSource,
    ReasoningGymSource,
    Section,
)
from dapo_megatron.config.rules import check_values
from dapo_megatron.config.yaml12 import MAX_CHARACTERS, MAX_DEPTH, dump_yaml, parse_yaml
from dapo_megatron.types import ConfigError


def load_config(
    path: str | Path, overrides: Sequence[str] = (), overlays: Sequence[str | Path] = ()
) -> Config:
    """Read `path`, lay `overlays` over it in their order, apply `key.path=value` overrides, check
    everything that needs no model.

    Raises ConfigError naming every offending dotted key, and the overlay it is from.
    """
    tree = _read(path)
    origins: dict[str, str] = {}
    for overlay in overlays:
        _merge(tree, _read(overlay), str(overlay), origins)
    for override in overrides:
        origins[_apply(tree, override)] = ""
    return parse_config(tree, origins)


def parse_config(tree: dict[str, Any], origins: Mapping[str, str] | None = None) -> Config:
    """A checked Config from plain values; `origins` says which dotted keys are from which overlay.
    Raises ConfigError."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item, origins or {}) for item in error.errors()]  # type: ignore[arg-type]
        raise ConfigError("\n".join(lines)) from None
    check_values(config)
    return config


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal Config."""
    return dump_yaml(config.model_dump(mode="json"))


def _read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read ({why})") from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    return tree


def _merge(
    tree: dict[str, Any],
    overlay: dict[str, Any],
    where: str,
    origins: dict[str, str],
    above: str = "",
) -> None:
    """Lay `overlay` over `tree`; `origins` then knows what is from `where`."""
    for key, value in overlay.items():
        dotted = f"{above}{key}"
        below = tree.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _merge(below, value, where, origins, f"{dotted}.")
        else:
            tree[key] = value
            origins[dotted] = where


def _origin(dotted: str, origins: Mapping[str, str]) -> str:
    """The overlay that set a key or what it stands in; empty for none."""
    parts = dotted.split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((origins[name] for name in above if name in origins), "")


def _apply(tree: dict[str, Any], override: str) -> str:
    """Set one value; return the dotted key that it was for."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"{override!r:.100}: an override is written key.path=value")
    node: Any = tree
    *parents, last = dotted.split(".")
    if len(parents) > MAX_DEPTH:
        raise ConfigError(f"{dotted:.100}: nested more than {MAX_DEPTH} deep")
    for depth, part in enumerate(parents):
        node = _child(node, part, ".".join(parents[: depth + 1]))
    node[_index(node, last, dotted) if isinstance(node, list) else last] = parse_yaml(text, dotted)
    return dotted


def _child(node: Any, part: str, dotted: str) -> Any:
    if isinstance(node, list):
        child = node[_index(node, part, dotted)]
    else:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"{dotted}: is a value, it has no keys below it")
    return child


def _index(entries: list[Any], part: str, dotted: str) -> int:
    numbers = [str(number) for number in range(len(entries))]
    if part not in numbers:
        raise ConfigError(f"{dotted}: the list has {len(entries)} entries, numbered from 0")
    return numbers.index(part)


_SOURCES: dict[str, type[Section]] = {
    "reasoning_gym": ReasoningGymSource,
    "jsonl": FileSource,
    "parquet": FileSource,
    "datasets": DatasetsSource,
}

_WORDS = {
    "model_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
    "string_type": "must be text; quote it if YAML takes it for something else",
}


def _explain(item: dict[str, Any], origins: Mapping[str, str]) -> str:
    """One pydantic error as `dotted.key: what is wrong; what to do`, and the overlay it is from."""
    # The kind of a source is part of pydantic's location; users never typed it there.
    dotted = ".".join(str(part) for part in item["loc"] if part not in _SOURCES)
    overlay = _origin(dotted, origins)
    return _what_is_wrong(item, dotted) + (f" (in {overlay})" if overlay else "")


def _what_is_wrong(item: dict[str, Any], dotted: str) -> str:
    loc, error, given = item["loc"], item["type"], item.get("input")
    if error == "extra_forbidden":
        known = _fields(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{dotted}: unknown key; {hint}"
    if error == "missing":
        return f"{dotted}: missing; every run must state it"
    if error.startswith("union_tag"):
        dotted, given = f"{dotted}.kind", given.get("kind") if isinstance(given, dict) else given
        return f"{dotted}: must be one of {', '.join(_SOURCES)} (given: {given!r:.100})"
    shown = "" if isinstance(given, dict | list) else f" (given: {given!r:.100})"
    return f"{dotted}: {_WORDS.get(error, item['msg'])}{shown}"


def _fields(loc: Iterable[Any]) -> list[str]:
    """Names of the keys that may stand at a place of the tree."""
    section: type[BaseModel] = Config
    for part in loc:
        if part in _SOURCES:
            section = _SOURCES[part]
        elif part in section.model_fields:
            annotation = section.model_fields[part].annotation
            for kind in (annotation, *get_args(annotation)):  # `Section` or `Section | None`
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    section = kind
    return list(section.model_fields)
