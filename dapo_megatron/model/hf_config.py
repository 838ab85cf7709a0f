"""The one reader of HF config.json files: from its fields to an `Architecture`, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.files import read_json
from dapo_megatron.model.architecture import Architecture, GroupedRouting, Latent, Rope
from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import Family
from dapo_megatron.model.hf_fields import POSITIONS, check_fields, says_none
from dapo_megatron.model.published import PublishedModel, find_published, published_or_refuse
from dapo_megatron.types import CheckpointError, ConfigError

_POSITIONS = POSITIONS[0]
_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e30
"""Numbers are used in float32, whose largest is 3.4e38."""


def read_architecture(config: Config) -> Architecture:
    """Read the config.json of a run's model. Raises ConfigError naming `model.path`."""
    try:
        hf = read_json(Path(config.model.path) / "config.json")
    except CheckpointError as error:
        model = find_published(config.model.path)
        command = f"hf download {model.name if model else 'OWNER/NAME'} --local-dir"
        raise ConfigError(
            f"model.path: {error}; name a folder with an HF checkpoint, or get one: "
            f"`{command} {config.model.path}`"
        ) from error
    return architecture(hf, config.model.ignore_fields)


def planned_architecture(config: Config) -> Architecture:
    """Return the architecture of a run that is only planned.

    A model folder counts where there is one. Without, the published dimensions of the model that
    model.path is named after do, with as many positions as the run needs (`published_notes`).
    Raises ConfigError naming `model.path`.
    """
    model = _stand_in(config)
    if model is None:
        return read_architecture(config)
    positions = max(model.hf[_POSITIONS], config.max_sequence_tokens)
    return architecture({**model.hf, _POSITIONS: positions}, config.model.ignore_fields)


def published_notes(config: Config) -> Iterator[str]:
    """Yield what `planned_architecture` took from published dimensions. Nothing with a folder."""
    model = _stand_in(config)
    if model is None:
        return
    yield (
        f"published dimensions of {model.name}, because there is no folder {config.model.path}; "
        "training needs the checkpoint"
    )
    if (needed := config.max_sequence_tokens) > model.hf[_POSITIONS]:
        yield (
            f"{_POSITIONS} is published as {model.hf[_POSITIONS]:,}; the run needs {needed:,}, and "
            "training refuses the model until its config.json says so"
        )


def _stand_in(config: Config) -> PublishedModel | None:
    """Return the published model of a run whose model folder does not exist, None if it does."""
    path = config.model.path
    return None if Path(path).exists() else published_or_refuse(path)


def architecture(hf: Mapping[str, Any], ignore: Collection[str] = ()) -> Architecture:
    """Read an HF config.json. `ignore` names fields that are known not to matter.

    Raises ConfigError naming a family, field or value that is not supported, or a missing field.
    """
    family = _family(hf)
    hf = {**family.defaults, **hf}
    check_fields(hf, family, ignore)
    _refuse_windows(hf, family)
    heads = _size(hf, "num_attention_heads")
    # An explicit null means as many as there are heads.
    groups = _size(hf, "num_key_value_heads") if _given(hf, "num_key_value_heads") else heads
    if heads % groups:
        raise ConfigError(
            f"model.path: num_key_value_heads = {groups} does not divide num_attention_heads = "
            f"{heads}"
        )
    latent = _latent(hf) if family.has_latent else None
    if latent and groups != heads:
        raise ConfigError(
            f"model.path: num_key_value_heads = {groups} is not num_attention_heads = {heads}; "
            f"{family.model_type} has a key and a value for each head"
        )
    return Architecture(
        family=family.model_type,
        num_layers=_size(hf, "num_hidden_layers"),
        hidden_size=_size(hf, "hidden_size"),
        num_heads=heads,
        num_kv_heads=groups,
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
        **(_scoring(hf) if family.has_grouped_routing else {}),
    )


def to_hf_config(arch: Architecture) -> dict[str, Any]:
    """Return the fields of a config.json that reads as `arch`."""
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
    """Refuse attention that does not see the whole sequence."""
    types = hf.get("layer_types") or []
    others = (
        [kind for kind in types if kind != "full_attention"] if isinstance(types, list) else [types]
    )
    if others:
        raise ConfigError(
            f"model.path: layer_types has {others[0]!r}; only 'full_attention' is supported"
        )
    if not family.has_window or not _given(hf, "sliding_window"):
        return
    window, positions = _size(hf, "sliding_window"), _size(hf, "max_position_embeddings")
    if window < positions:
        raise ConfigError(
            f"model.path: sliding_window = {window} is shorter than max_position_embeddings = "
            f"{positions}; only null, or a longer one, is supported"
        )


# ------------------------------------------------------------------------------- parts


def _rope(
    hf: Mapping[str, Any], ignore: Collection[str], kinds: Mapping[str, Mapping[str, str]]
) -> Rope:
    """Read `rope_parameters`, which has rope_theta inside (transformers 5), or `rope_scaling` with
    rope_theta next to it (older versions)."""
    where, given = _rope_settings(hf)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in kinds:
        raise ConfigError(
            f"model.path: {where} has the rope type {kind!r}; known: {', '.join(kinds)}"
        )
    fields = kinds[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *fields}
    known |= {"mscale", "truncate"} if kind == "yarn" else set()
    for key, value in given.items():
        if key not in known and f"{where}.{key}" not in ignore and not says_none(value):
            raise ConfigError(
                f"model.path: {where}.{key} = {value!r} is not known for the rope type {kind!r}; "
                f"if it does not matter, add {where}.{key} to model.ignore_fields"
            )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"model.path: partial_rotary_factor = {given['partial_rotary_factor']}; only 1.0 is "
            "supported"
        )
    if kind == "yarn":
        _refuse_other_yarn(given, where)
    numbers: dict[str, Any] = {
        ours: (_size if ours == "original_max_positions" else _number)(given, theirs, where)
        for theirs, ours in fields.items()
    }
    rope = Rope(_theta(hf, given, where), kind, **numbers)
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ConfigError(
            f"model.path: {where}.low_freq_factor = {rope.low_freq_factor} must be below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
    return rope


def _theta(hf: Mapping[str, Any], given: Mapping[str, Any], where: str) -> float:
    if given.get("rope_theta") is not None:
        return _number(given, "rope_theta", where)
    return _number(hf, "rope_theta") if hf.get("rope_theta") is not None else 10_000.0


def _refuse_other_yarn(given: Mapping[str, Any], where: str) -> None:
    # Else the rotary part of queries and keys would be scaled, too.
    one, other = given.get("mscale"), given.get("mscale_all_dim")
    if not one or one != other:
        raise ConfigError(
            f"model.path: {where} has mscale = {one} and mscale_all_dim = {other}; only equal ones "
            "are supported"
        )
    if not given.get("truncate", True):
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
"""For each rope type: its fields, and what `Rope` calls them."""

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
"""With latent attention vLLM takes all others for yarn."""


def _rope_fields(arch: Architecture) -> dict[str, Any]:
    rope = arch.rope
    names = (_LATENT_ROPE_KINDS if arch.latent else _ROPE_KINDS)[rope.kind]
    fields = {name: getattr(rope, ours) for name, ours in names.items()}
    if rope.kind == "yarn":
        fields["mscale"] = rope.mscale_all_dim
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **fields}


def _rope_settings(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The field that describes rope, and its value."""
    given = [key for key in ("rope_parameters", "rope_scaling") if hf.get(key)]
    if len(given) == 2 and hf[given[0]] != hf[given[1]]:
        raise ConfigError("model.path: rope_parameters and rope_scaling differ; keep one of them")
    where = given[0] if given else "rope_parameters"
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
        q_lora_rank=_size(hf, "q_lora_rank") if _given(hf, "q_lora_rank") else 0,
        kv_lora_rank=_size(hf, "kv_lora_rank"),
        qk_nope_head_dim=_size(hf, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(hf, "qk_rope_head_dim"),
        v_head_dim=_size(hf, "v_head_dim"),
    )
    # transformers saves what follows from the others, too.
    for key, value in (("head_dim", latent.qk_rope_head_dim), ("qk_head_dim", latent.qk_head_dim)):
        if hf.get(key) not in (None, value):
            raise ConfigError(
                f"model.path: {key} = {hf[key]!r}; by the other fields it is {value}: remove it"
            )
    return latent


_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Required: transformers ignores these fields, and vLLM takes another router without them."""


def _scoring(hf: Mapping[str, Any]) -> dict[str, Any]:
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
            f"{experts}; equal groups of at least 2, and not more chosen than there are"
        )
    if per_token > chosen * (experts // groups):
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} of topk_group = {chosen} groups of "
            f"{experts // groups} experts; there are not so many"
        )
    return {
        "num_dense_layers": _size(hf, "first_k_dense_replace", least=0),
        "shared_intermediate_size": _size(hf, "n_shared_experts")
        * _size(hf, "moe_intermediate_size"),
        "grouped_routing": GroupedRouting(groups, chosen, _number(hf, "routed_scaling_factor")),
    }


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    # Qwen3-MoE is published with the first name, and saved by transformers 5 with the second.
    known = ("num_experts", "num_local_experts", "n_routed_experts")
    names = [name for name in known if hf.get(name)]
    if len({_size(hf, name) for name in names}) > 1:
        given = " and ".join(f"{name} = {hf[name]}" for name in names)
        raise ConfigError(f"model.path: {given} differ; keep one of them")
    total = _size(hf, next((name for name in (*names, *known) if name in hf), "num_experts"))
    per_token = _size(hf, "num_experts_per_tok")
    if per_token > total:
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} of num_experts = {total}; "
            "not more than all"
        )
    return {
        "num_experts": total,
        "experts_per_token": per_token,
        "moe_intermediate_size": _size(hf, "moe_intermediate_size"),
        "normalize_topk": _flag(hf, "norm_topk_prob"),
    }


def _given(hf: Mapping[str, Any], key: str) -> bool:
    return _required(hf, key) is not None


def _required(hf: Mapping[str, Any], key: str, where: str = "config.json") -> Any:
    if key not in hf:
        raise ConfigError(f"model.path: {key} is missing from {where}")
    return hf[key]


def _size(hf: Mapping[str, Any], key: str, where: str = "config.json", *, least: int = 1) -> int:
    value = _required(hf, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
        raise ConfigError(
            f"model.path: {_name(key, where)} = {value!r:.60}; must be a whole number, at least "
            f"{least} and at most {_MAX_SIZE:,}"
        )
    return value


def _number(hf: Mapping[str, Any], key: str, where: str = "config.json") -> float:
    value = _required(hf, key, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER:  # false for NaN too
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
