"""Rotary position embedding in an HF config.json: its fields, converted to a `Rope` and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dapo_megatron.model.architecture import Architecture, Rope
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import Family
from dapo_megatron.model.hf_fields import Fields
from dapo_megatron.types import ConfigError

PARTIAL_ROTARY = "partial_rotary_factor"
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
"""Optional fields, with the defaults of `Rope`."""
_LATENT_KINDS = ("default", "yarn")
"""The types for latent attention, where vLLM treats every type except `default` as yarn."""


def read_rope(hf: Fields, ignore: Collection[str], family: Family) -> Rope:
    """Read rope from `rope_parameters`, which contains rope_theta (transformers 5), or from
    `rope_scaling` and a separate rope_theta (older versions)."""
    settings = _settings(hf)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    kinds = _LATENT_KINDS if family.has_latent else tuple(_KINDS)
    if kind not in kinds:
        raise ConfigError(f"model.path: the rope type {kind!r} is not known: {', '.join(kinds)}")
    fields = [*_KINDS[kind], *(name for name in _OPTIONAL.get(kind, ()) if name in settings)]
    values: dict[str, Any] = {name: settings.number(name) for name in fields if name != _ORIGINAL}
    if _ORIGINAL in fields:
        values["original_max_positions"] = settings.size(_ORIGINAL)
    values[PARTIAL_ROTARY] = _partial_rotary_factor(hf, settings, family)
    if kind == "yarn":
        _check_yarn(settings, family)
    for name in ("mrope_section", "mrope_interleaved") if family.has_delta else ():
        settings.get(name)  # of images: the three positions of a text's token are equal
    rope = Rope(_theta(hf, settings), kind, **values)
    settings.refuse_unknown((), ignore, f"the rope type {kind!r}")
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise settings.refusal("low_freq_factor", "must be below high_freq_factor")
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


def _settings(hf: Fields) -> Fields:
    """Return the object that describes rope."""
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if new and old and new != old:
        raise ConfigError("model.path: rope_parameters and rope_scaling differ; keep one of them")
    return hf.inside("rope_scaling" if old and not new else "rope_parameters")


def _theta(hf: Fields, settings: Fields) -> float:
    inner, outer = settings.get("rope_theta"), hf.get("rope_theta")
    if inner and outer and inner != outer:
        raise settings.refusal("rope_theta", f"rope_theta = {outer!r:.60} differs; keep one")
    holder = settings if inner is not None else hf
    return 10_000.0 if holder.get("rope_theta") is None else holder.number("rope_theta")


def _partial_rotary_factor(hf: Fields, settings: Fields, family: Family) -> float:
    """Return the share of a head's columns that rotate. The field in `settings` takes precedence,
    as in transformers and vLLM."""
    if family.has_partial_rotary:
        hf.get(PARTIAL_ROTARY)  # read, also where `settings` has it
    elif PARTIAL_ROTARY not in settings:
        return 1.0
    holder = settings if PARTIAL_ROTARY in settings else hf
    factor = holder.number(PARTIAL_ROTARY)
    if factor > 1.0 or (factor < 1.0 and not family.has_partial_rotary):
        wanted = "a number up to 1.0" if family.has_partial_rotary else "1.0"
        raise holder.refusal(PARTIAL_ROTARY, f"only {wanted} is supported")
    return factor


def _check_yarn(settings: Fields, family: Family) -> None:
    """Raise ConfigError for variants of yarn that transformers and vLLM compute differently."""
    settings.refuse_unless({"truncate": True})
    if not family.has_latent:
        return
    if ("mscale" in settings) != ("mscale_all_dim" in settings):
        raise settings.refusal(
            "mscale", f"{family.model_type} needs mscale and mscale_all_dim, or none of them"
        )
    if "attention_factor" in settings:
        raise settings.refusal(
            "attention_factor", f"not supported for {family.model_type}; use mscale"
        )
