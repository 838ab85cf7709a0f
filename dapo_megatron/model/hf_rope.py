"""Rotary position embedding in an HF config.json: its fields, converted to a `Rope` and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dapo_megatron.model.architecture import Architecture, Rope
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import Family
from dapo_megatron.model.hf_fields import PARTIAL_ROTARY, is_empty
from dapo_megatron.model.hf_values import number, size
from dapo_megatron.types import ConfigError

_ORIGINAL = "original_max_position_embeddings"
_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""The required fields of each rope type."""
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
}
"""Optional fields, whose defaults are those of `Rope`."""
_LATENT_KINDS = ("default", "yarn")
"""The types for latent attention, where vLLM treats every type except `default` as yarn."""


def read_rope(hf: Mapping[str, Any], ignore: Collection[str], family: Family) -> Rope:
    """Read rope from `rope_parameters`, which contains rope_theta (transformers 5), or from
    `rope_scaling` and a separate rope_theta (older versions)."""
    where, settings = _settings(hf)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    kinds = _LATENT_KINDS if family.has_latent else tuple(_KINDS)
    if kind not in kinds:
        raise ConfigError(
            f"model.path: {where} has the rope type {kind!r}; known: {', '.join(kinds)}"
        )
    optional = [name for name in _OPTIONAL.get(kind, ()) if name in settings]
    fields = (*_KINDS[kind], *optional)
    known = {"rope_type", "type", "rope_theta", PARTIAL_ROTARY, *fields}
    known |= {"truncate"} if kind == "yarn" else set()
    for key, value in settings.items():
        if key not in known and f"{where}.{key}" not in ignore and not is_empty(value):
            raise ConfigError(
                f"model.path: {where}.{key} = {value!r} is not known for the rope type {kind!r}; "
                f"if it does not change what the model computes, add {where}.{key} to "
                "model.ignore_fields"
            )
    values: dict[str, Any] = {
        name: (size if name == _ORIGINAL else number)(settings, name, where) for name in fields
    }
    if _ORIGINAL in values:
        values["original_max_positions"] = values.pop(_ORIGINAL)
    values[PARTIAL_ROTARY] = _partial_rotary_factor(hf, settings, where, family)
    rope = Rope(_theta(hf, settings, where), kind, **values)
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ConfigError(
            f"model.path: {where}.low_freq_factor = {rope.low_freq_factor} must be below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
    if kind == "yarn":
        _check_yarn(settings, where, family)
    return rope


def rope_fields(arch: Architecture) -> dict[str, Any]:
    """Return the value of `rope_parameters` that `read_rope` converts to the model's rope."""
    rope = arch.rope
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    for name in (*_KINDS[rope.kind], *_OPTIONAL.get(rope.kind, ())):
        value = getattr(rope, "original_max_positions" if name == _ORIGINAL else name)
        if value is not None:
            fields[name] = value
    if FAMILIES[arch.family].has_partial_rotary:
        fields[PARTIAL_ROTARY] = rope.partial_rotary_factor
    return fields


def _settings(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the value of the field that describes rope."""
    present = [key for key in ("rope_parameters", "rope_scaling") if hf.get(key)]
    if len(present) == 2 and hf[present[0]] != hf[present[1]]:
        raise ConfigError("model.path: rope_parameters and rope_scaling differ; keep one of them")
    where = present[0] if present else "rope_parameters"
    settings: Mapping[str, Any] = hf.get(where) or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"model.path: {where} = {settings!r}; must be an object, or null")
    inner, outer = settings.get("rope_theta"), hf.get("rope_theta")
    if inner and outer and inner != outer:
        raise ConfigError(
            f"model.path: rope_theta = {outer} and {where}.rope_theta = {inner} differ; keep one"
        )
    return where, settings


def _theta(hf: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> float:
    if settings.get("rope_theta") is not None:
        return number(settings, "rope_theta", where)
    return number(hf, "rope_theta") if hf.get("rope_theta") is not None else 10_000.0


def _partial_rotary_factor(
    hf: Mapping[str, Any], settings: Mapping[str, Any], where: str, family: Family
) -> float:
    """Return the share of a head's columns that rotate. The field in `settings` takes precedence,
    as in transformers and vLLM."""
    if PARTIAL_ROTARY in settings:
        factor = number(settings, PARTIAL_ROTARY, where)
    else:
        factor = number(hf, PARTIAL_ROTARY) if family.has_partial_rotary else 1.0
    if factor > 1.0 or (factor < 1.0 and not family.has_partial_rotary):
        wanted = "a number up to 1.0" if family.has_partial_rotary else "1.0"
        raise ConfigError(f"model.path: {PARTIAL_ROTARY} = {factor}; only {wanted} is supported")
    return factor


def _check_yarn(settings: Mapping[str, Any], where: str, family: Family) -> None:
    """Raise ConfigError for variants of yarn that transformers and vLLM compute differently."""
    if not settings.get("truncate", True):
        raise ConfigError(f"model.path: {where}.truncate = False; only True is supported")
    if not family.has_latent:
        return
    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if ("mscale" in settings) != ("mscale_all_dim" in settings):
        raise ConfigError(
            f"model.path: {where} has mscale = {mscale} and mscale_all_dim = {mscale_all_dim}; "
            f"{family.model_type} needs both or none"
        )
    if "attention_factor" in settings:
        raise ConfigError(
            f"model.path: {where}.attention_factor is not supported for {family.model_type}; use "
            "mscale and mscale_all_dim"
        )
