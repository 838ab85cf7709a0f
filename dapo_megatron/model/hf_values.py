"""Fields of an HF config.json as checked values. Errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_megatron.types import ConfigError

_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e30
"""Upper bound of float fields, below the float32 maximum of 3.4e38."""


def is_not_null(hf: Mapping[str, Any], key: str) -> bool:
    """Return whether a required field has a value other than null. Raises ConfigError if it is
    missing."""
    return _required(hf, key) is not None


def _required(hf: Mapping[str, Any], key: str, where: str = "config.json") -> Any:
    if key not in hf:
        raise ConfigError(f"model.path: {key} is missing from {where}")
    return hf[key]


def size(hf: Mapping[str, Any], key: str, where: str = "config.json", *, least: int = 1) -> int:
    """Return an integer of at least `least`. `where` names the object that has the field."""
    value = _required(hf, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
        raise ConfigError(
            f"model.path: {_name(key, where)} = {value!r:.60}; must be an integer, at least "
            f"{least} and at most {_MAX_SIZE:,}"
        )
    return value


def number(hf: Mapping[str, Any], key: str, where: str = "config.json") -> float:
    """Return a number above 0. `where` names the object that has the field."""
    value = _required(hf, key, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER:  # the comparison is False for NaN
        raise ConfigError(
            f"model.path: {_name(key, where)} = {value!r:.60}; must be a number above 0, at most "
            f"{_MAX_NUMBER:g}"
        )
    return float(value)


def flag(hf: Mapping[str, Any], key: str) -> bool:
    """Return a boolean; absent and null are False."""
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"model.path: {key} = {value!r}; must be true or false")
    return bool(value)


def _name(key: str, where: str) -> str:
    return key if where == "config.json" else f"{where}.{key}"
