"""Load a Config from YAML, overlays and `key.path=value` overrides. Errors name the dotted key.

An overlay is a YAML file with some of the keys. Its mappings are merged into the config's;
all other values replace the config's values.
"""

from __future__ import annotations

import difflib
import os
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
    TasksSource,
)
from dapo_megatron.config.consistency import check_values
from dapo_megatron.config.yaml12 import MAX_CHARACTERS, MAX_DEPTH, dump_yaml, parse_yaml
from dapo_megatron.types import ConfigError


def load_config(
    path: str | Path, overrides: Sequence[str] = (), overlays: Sequence[str | Path] = ()
) -> Config:
    """Read `path`, merge `overlays` into it in order, apply `key.path=value` overrides, and check
    everything that does not need the model.

    Raises ConfigError naming every invalid dotted key, and the overlay that set it.
    """
    tree = _read(path)
    origins: dict[str, str] = {}
    for overlay in overlays:
        _merge(tree, _read(overlay), str(overlay), origins)
    for override in overrides:
        origins[_apply(tree, override)] = ""
    return parse_config(tree, origins)


def parse_config(tree: dict[str, Any], origins: Mapping[str, str] | None = None) -> Config:
    """Return the Config of plain values, checked. `origins` maps a dotted key to the overlay that
    set it. Raises ConfigError."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item, origins or {}) for item in error.errors()]  # type: ignore[arg-type]
        raise ConfigError("\n".join(lines)) from None
    check_values(config)
    return config if config.engine.colocated else _without_turns(config)


def _without_turns(config: Config) -> Config:
    """Return the config of a run in which no GPU has both a policy and an engine, so neither has to
    make room for the other."""
    engine = config.engine.model_copy(update={"sleep": False})
    policy = config.policy.model_copy(update={"offload": ()})
    return config.model_copy(update={"engine": engine, "policy": policy})


def dump_config(config: Config) -> str:
    """Return YAML from which `load_config` reads an equal Config."""
    return dump_yaml(config.model_dump(mode="json"))


def _read(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a FIFO would wait for its writer
            raise ConfigError(f"{path}: not a regular file; write the config into a file")
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read ({reason})") from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    return tree


def _merge(
    tree: dict[str, Any],
    overlay: dict[str, Any],
    source: str,
    origins: dict[str, str],
    prefix: str = "",
) -> None:
    """Merge `overlay`, read from the file `source`, into `tree`. Record in `origins` which keys it
    set."""
    for key, value in overlay.items():
        dotted = f"{prefix}{key}"
        current = tree.get(key)
        if isinstance(value, dict) and isinstance(current, dict):
            _merge(current, value, source, origins, f"{dotted}.")
        else:
            tree[key] = value
            origins[dotted] = source


def _origin(dotted: str, origins: Mapping[str, str]) -> str:
    """Return the overlay that set a key or one of its parents; empty if none did."""
    parts = dotted.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((origins[name] for name in prefixes if name in origins), "")


def _apply(tree: dict[str, Any], override: str) -> str:
    """Set the value of one override in `tree`. Return its dotted key."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"{override!r:.100}: an override must have the form key.path=value")
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
        raise ConfigError(f"{dotted}: is a single value and has no keys below it")
    return child


def _index(entries: list[Any], part: str, dotted: str) -> int:
    numbers = [str(number) for number in range(len(entries))]
    if part not in numbers:
        raise ConfigError(
            f"{dotted}: no such entry; the list has {len(entries)} entries, numbered from 0"
        )
    return numbers.index(part)


_SOURCES: dict[str, type[Section]] = {
    "reasoning_gym": ReasoningGymSource,
    "jsonl": FileSource,
    "parquet": FileSource,
    "datasets": DatasetsSource,
    "tasks": TasksSource,
}

_MESSAGES = {
    "model_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
    "string_type": "must be text; quote it if YAML reads it as another type",
}

REMOVED = {
    "roles": "gone; set run.processes to the number of the policy's ranks, engine.colocated to "
    "false and engine.replicas to the number of engines",
    **dict.fromkeys(
        ("sync.canary_tokens", "sync.canary_mean_gap", "sync.canary_quantile_gap"),
        "gone; leave it out. sync.max_gap and sync.max_mean_gap check every trained token, for "
        "each engine",
    ),
    "checkpoint.rollouts": "gone; leave it out. A run always repeats what it recorded "
    "(tracking.samples)",
    "checkpoint.export_megatron": "gone; leave it out. Megatron reads the checkpoints themselves",
    "preflight.min_gbps_pair": "gone; set preflight.min_gbps_all_to_all, or give the cluster's own "
    "test of links as preflight.command",
    "preflight.max_seconds": "gone; leave it out. DAPO_PREFLIGHT_SECONDS of slurm/train.sbatch "
    "limits the whole check, preflight.check_seconds one program that it starts",
}
"""Keys of earlier versions, and what to write instead."""


def _explain(item: dict[str, Any], origins: Mapping[str, str]) -> str:
    """Format a pydantic error as `dotted.key: problem; remedy`, with the overlay that set it."""
    # pydantic's location includes the kind of a source, which is not part of the user's key.
    dotted = ".".join(str(part) for part in item["loc"] if part not in _SOURCES)
    overlay = _origin(dotted, origins)
    return _problem(item, dotted) + (f" (in {overlay})" if overlay else "")


def _problem(item: dict[str, Any], dotted: str) -> str:
    loc, error, given = item["loc"], item["type"], item.get("input")
    if error == "extra_forbidden":
        if dotted in REMOVED:
            return f"{dotted}: {REMOVED[dotted]}"
        known = _fields(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(known)}"
        return f"{dotted}: unknown key; {hint}"
    if error == "missing":
        return f"{dotted}: missing; every config must set it"
    if error.startswith("union_tag"):
        dotted, given = f"{dotted}.kind", given.get("kind") if isinstance(given, dict) else given
        return f"{dotted}: must be one of {', '.join(_SOURCES)} (given: {given!r:.100})"
    shown = "" if isinstance(given, dict | list) else f" (given: {given!r:.100})"
    return f"{dotted}: {_MESSAGES.get(error, item['msg'])}{shown}"


def _fields(loc: Iterable[Any]) -> list[str]:
    """Return the names of the keys that the section at `loc` has."""
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
