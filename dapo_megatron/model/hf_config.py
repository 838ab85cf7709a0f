"""The only reader of HF config.json files: converts their fields to an `Architecture` and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.files import read_json
from dapo_megatron.model.architecture import Architecture, GroupedRouting, Latent, Rope
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import Family
from dapo_megatron.model.hf_fields import POSITIONS, check_fields, is_empty
from dapo_megatron.model.published import PublishedModel, find_published, published_or_refuse
from dapo_megatron.types import CheckpointError, ConfigError

_POSITIONS = POSITIONS[0]
_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e30
"""Upper bound of float fields, below the float32 maximum of 3.4e38."""


def read_architecture(config: Config) -> Architecture:
    """Read the config.json of a run's model. Raises ConfigError naming `model.path`."""
    try:
        hf = read_json(Path(config.model.path) / "config.json")
    except CheckpointError as error:
        model = find_published(config.model.path)
        command = f"hf download {model.name if model else 'OWNER/NAME'} --local-dir"
        raise ConfigError(
            f"model.path: {error}; set it to a folder with an HF checkpoint, or download one: "
            f"`{command} {config.model.path}`"
        ) from error
    return architecture(hf, config.model.ignore_fields)


def planned_architecture(config: Config) -> Architecture:
    """Return the architecture for planning a run.

    If the folder model.path exists, it is read. Otherwise the dimensions of the published model
    with this name are used, with at least as many positions as the run needs (see
    `published_notes`). Raises ConfigError naming `model.path`.
    """
    model = _published_model(config)
    if model is None:
        return read_architecture(config)
    positions = max(model.hf[_POSITIONS], config.max_sequence_tokens)
    return architecture({**model.hf, _POSITIONS: positions}, config.model.ignore_fields)


def published_notes(config: Config) -> Iterator[str]:
    """Yield notes about published dimensions that `planned_architecture` used. There are none if
    the model folder exists."""
    model = _published_model(config)
    if model is None:
        return
    yield (
        f"published dimensions of {model.name}, because there is no folder {config.model.path}; "
        "training needs the checkpoint"
    )
    if (needed := config.max_sequence_tokens) > model.hf[_POSITIONS]:
        yield (
            f"{_POSITIONS} is published as {model.hf[_POSITIONS]:,}, but the run needs {needed:,}; "
            f"before training, set it to at least {needed:,} in the model's config.json"
        )


def _published_model(config: Config) -> PublishedModel | None:
    """Return the published model with the name of a missing model folder; None if it exists."""
    path = config.model.path
    return None if Path(path).exists() else published_or_refuse(path)


def architecture(hf: Mapping[str, Any], ignore: Collection[str] = ()) -> Architecture:
    """Convert the fields of an HF config.json. `ignore` lists unknown fields to accept.

    Raises ConfigError naming an unsupported family, field or value, or a missing field.
    """
    family = _family(hf)
    hf = {**family.defaults, **hf}
    check_fields(hf, family, ignore)
    _refuse_windows(hf, family)
    heads = _size(hf, "num_attention_heads")
    # An explicit null means the number of attention heads.
    has_kv_heads = _is_not_null(hf, "num_key_value_heads")
    kv_heads = _size(hf, "num_key_value_heads") if has_kv_heads else heads
    if heads % kv_heads:
        raise ConfigError(
            f"model.path: num_key_value_heads = {kv_heads} does not divide num_attention_heads = "
            f"{heads}"
        )
    latent = _latent(hf) if family.has_latent else None
    if latent and kv_heads != heads:
        raise ConfigError(
            f"model.path: num_key_value_heads = {kv_heads} is not num_attention_heads = {heads}; "
            f"{family.model_type} has a key and a value for each head"
        )
    return Architecture(
        family=family.model_type,
        num_layers=_size(hf, "num_hidden_layers"),
        hidden_size=_size(hf, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=latent.qk_rope_head_dim if latent else _head_dim(hf),
        intermediate_size=_size(hf, "intermediate_size"),
        vocab_size=_size(hf, "vocab_size"),
        tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        qkv_bias=family.has("self_attention.linear_qkv.bias"),
        qk_norm=family.has("self_attention.k_layernorm.weight"),
        norm_eps=_number(hf, "rms_norm_eps"),
        rope=_rope(hf, ignore, _LATENT_ROPE_KINDS if latent else _ROPE_KINDS),
        max_positions=min(_size(hf, key) for key in POSITIONS if _is_limit(hf, key)),
        latent=latent,
        **(_experts(hf) if family.expert else {}),
        **(_grouped_routing(hf) if family.has_grouped_routing else {}),
    )


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """Return config.json fields that `architecture` converts to `arch`."""
    fields: dict[str, Any] = {
        "model_type": arch.family,
        "num_hidden_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate_size,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "rms_norm_eps": arch.norm_eps,
        "rope_parameters": _rope_fields(arch),
        "max_position_embeddings": arch.max_positions,
    }
    if FAMILIES[arch.family].has_window:
        fields["sliding_window"] = None
    if arch.num_experts:
        fields |= {
            "n_routed_experts" if arch.grouped_routing else "num_experts": arch.num_experts,
            "num_experts_per_tok": arch.experts_per_token,
            "moe_intermediate_size": arch.moe_intermediate_size,
            "norm_topk_prob": arch.normalize_topk,
        }
    if arch.latent:
        fields |= {
            "q_lora_rank": arch.latent.q_lora_rank or None,
            "kv_lora_rank": arch.latent.kv_lora_rank,
            "qk_nope_head_dim": arch.latent.qk_nope_head_dim,
            "qk_rope_head_dim": arch.latent.qk_rope_head_dim,
            "v_head_dim": arch.latent.v_head_dim,
        }
    if arch.grouped_routing:
        fields |= {
            **_ROUTER,
            "first_k_dense_replace": arch.num_dense_layers,
            "n_shared_experts": arch.shared_intermediate_size // arch.moe_intermediate_size,
            "n_group": arch.grouped_routing.n_group,
            "topk_group": arch.grouped_routing.topk_group,
            "routed_scaling_factor": arch.grouped_routing.scale,
        }
    return fields


def _family(hf: Mapping[str, Any]) -> Family:
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model.path: model_type {hf.get('model_type')!r} is not supported; known: "
            f"{', '.join(FAMILIES)}"
        )
    return family


def _head_dim(hf: Mapping[str, Any]) -> int:
    if hf.get("head_dim") is not None:
        return _size(hf, "head_dim")
    return _size(hf, "hidden_size") // _size(hf, "num_attention_heads")


def _is_limit(hf: Mapping[str, Any], key: str) -> bool:
    return key == POSITIONS[0] or hf.get(key) is not None


def _refuse_windows(hf: Mapping[str, Any], family: Family) -> None:
    """Raise ConfigError for attention with a window shorter than the model's positions."""
    types = hf.get("layer_types") or []
    unsupported = (
        [kind for kind in types if kind != "full_attention"] if isinstance(types, list) else [types]
    )
    if unsupported:
        raise ConfigError(
            f"model.path: layer_types has {unsupported[0]!r}; only 'full_attention' is supported"
        )
    if not family.has_window or not _is_not_null(hf, "sliding_window"):
        return
    window, positions = _size(hf, "sliding_window"), _size(hf, "max_position_embeddings")
    if window < positions:
        raise ConfigError(
            f"model.path: sliding_window = {window} is shorter than max_position_embeddings = "
            f"{positions}; only null or a window of at least this length is supported"
        )


# ------------------------------------------------------------------------------- parts


def _rope(
    hf: Mapping[str, Any], ignore: Collection[str], kinds: Mapping[str, Mapping[str, str]]
) -> Rope:
    """Read rope from `rope_parameters`, which contains rope_theta (transformers 5), or from
    `rope_scaling` and a separate rope_theta (older versions)."""
    where, settings = _rope_settings(hf)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in kinds:
        raise ConfigError(
            f"model.path: {where} has the rope type {kind!r}; known: {', '.join(kinds)}"
        )
    fields = kinds[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *fields}
    known |= {"mscale", "truncate"} if kind == "yarn" else set()
    for key, value in settings.items():
        if key not in known and f"{where}.{key}" not in ignore and not is_empty(value):
            raise ConfigError(
                f"model.path: {where}.{key} = {value!r} is not known for the rope type {kind!r}; "
                f"if it does not change what the model computes, add {where}.{key} to "
                "model.ignore_fields"
            )
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"model.path: partial_rotary_factor = {settings['partial_rotary_factor']}; only 1.0 is "
            "supported"
        )
    if kind == "yarn":
        _check_yarn(settings, where)
    values: dict[str, Any] = {
        name: (_size if name == "original_max_positions" else _number)(settings, hf_name, where)
        for hf_name, name in fields.items()
    }
    rope = Rope(_theta(hf, settings, where), kind, **values)
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ConfigError(
            f"model.path: {where}.low_freq_factor = {rope.low_freq_factor} must be below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
    return rope


def _theta(hf: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> float:
    if settings.get("rope_theta") is not None:
        return _number(settings, "rope_theta", where)
    return _number(hf, "rope_theta") if hf.get("rope_theta") is not None else 10_000.0


def _check_yarn(settings: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for unsupported variants of yarn."""
    # With different values, the rotary part of queries and keys would be scaled too.
    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if not mscale or mscale != mscale_all_dim:
        raise ConfigError(
            f"model.path: {where} has mscale = {mscale} and mscale_all_dim = {mscale_all_dim}; "
            "only equal values other than 0 are supported"
        )
    if not settings.get("truncate", True):
        raise ConfigError(f"model.path: {where}.truncate = False; only True is supported")


_ROPE_KINDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
}
"""For each rope type, its fields in config.json and their names in `Rope`."""

_LATENT_ROPE_KINDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale_all_dim": "mscale_all_dim",
        "original_max_position_embeddings": "original_max_positions",
    },
}
"""The same for latent attention, where vLLM treats every type except `default` as yarn."""


def _rope_fields(arch: Architecture) -> dict[str, Any]:
    rope = arch.rope
    names = (_LATENT_ROPE_KINDS if arch.latent else _ROPE_KINDS)[rope.kind]
    fields = {hf_name: getattr(rope, name) for hf_name, name in names.items()}
    if rope.kind == "yarn":
        fields["mscale"] = rope.mscale_all_dim
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **fields}


def _rope_settings(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
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


def _latent(hf: Mapping[str, Any]) -> Latent:
    latent = Latent(
        q_lora_rank=_size(hf, "q_lora_rank") if _is_not_null(hf, "q_lora_rank") else 0,
        kv_lora_rank=_size(hf, "kv_lora_rank"),
        qk_nope_head_dim=_size(hf, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(hf, "qk_rope_head_dim"),
        v_head_dim=_size(hf, "v_head_dim"),
    )
    # transformers also saves these derived fields.
    for key, value in (("head_dim", latent.qk_rope_head_dim), ("qk_head_dim", latent.qk_head_dim)):
        if hf.get(key) not in (None, value):
            raise ConfigError(
                f"model.path: {key} = {hf[key]!r}; the other fields make it {value}: remove it"
            )
    return latent


_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Required values. transformers ignores these fields, but vLLM uses another router without them."""


def _grouped_routing(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, wanted in _ROUTER.items():
        if hf.get(key) != wanted:
            raise ConfigError(
                f"model.path: {key} = {hf.get(key)!r} in config.json; only {wanted!r} is supported"
            )
    groups, chosen = _size(hf, "n_group"), _size(hf, "topk_group")
    experts, per_token = _size(hf, "n_routed_experts"), _size(hf, "num_experts_per_tok")
    if experts % groups or chosen > groups or experts // groups < 2:
        raise ConfigError(
            f"model.path: n_group = {groups} and topk_group = {chosen} of n_routed_experts = "
            f"{experts}; n_group must divide n_routed_experts into groups of at least 2 experts, "
            "and topk_group must not exceed n_group"
        )
    if per_token > chosen * (experts // groups):
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} is more than topk_group = {chosen} "
            f"groups of {experts // groups} experts have"
        )
    return {
        "num_dense_layers": _size(hf, "first_k_dense_replace", least=0),
        "shared_intermediate_size": _size(hf, "n_shared_experts")
        * _size(hf, "moe_intermediate_size"),
        "grouped_routing": GroupedRouting(groups, chosen, _number(hf, "routed_scaling_factor")),
    }


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    # Qwen3-MoE is published with the first name, but transformers 5 saves it with the second.
    known = ("num_experts", "num_local_experts", "n_routed_experts")
    names = [name for name in known if hf.get(name)]
    if len({_size(hf, name) for name in names}) > 1:
        values = " and ".join(f"{name} = {hf[name]}" for name in names)
        raise ConfigError(f"model.path: {values} differ; keep one of them")
    total = _size(hf, next((name for name in (*names, *known) if name in hf), "num_experts"))
    per_token = _size(hf, "num_experts_per_tok")
    if per_token > total:
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} is more than num_experts = {total}"
        )
    return {
        "num_experts": total,
        "experts_per_token": per_token,
        "moe_intermediate_size": _size(hf, "moe_intermediate_size"),
        "normalize_topk": _flag(hf, "norm_topk_prob"),
    }


def _is_not_null(hf: Mapping[str, Any], key: str) -> bool:
    """Return whether a required field has a value other than null. Raises ConfigError if it is
    missing."""
    return _required(hf, key) is not None


def _required(hf: Mapping[str, Any], key: str, where: str = "config.json") -> Any:
    if key not in hf:
        raise ConfigError(f"model.path: {key} is missing from {where}")
    return hf[key]


def _size(hf: Mapping[str, Any], key: str, where: str = "config.json", *, least: int = 1) -> int:
    value = _required(hf, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
        raise ConfigError(
            f"model.path: {_name(key, where)} = {value!r:.60}; must be an integer, at least "
            f"{least} and at most {_MAX_SIZE:,}"
        )
    return value


def _number(hf: Mapping[str, Any], key: str, where: str = "config.json") -> float:
    value = _required(hf, key, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER:  # the comparison is False for NaN
        raise ConfigError(
            f"model.path: {_name(key, where)} = {value!r:.60}; must be a number above 0, at most "
            f"{_MAX_NUMBER:g}"
        )
    return float(value)


def _flag(hf: Mapping[str, Any], key: str) -> bool:
    value = hf.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"model.path: {key} = {value!r}; must be true or false")
    return bool(value)


def _name(key: str, where: str) -> str:
    return key if where == "config.json" else f"{where}.{key}"
