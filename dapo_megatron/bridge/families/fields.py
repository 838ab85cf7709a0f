"""An HF config.json as an `Architecture`; what is not understood is refused by name.

A field is read here, or must have a certain value, or is known to be harmless. Any other that says
more than "none" may change what the model computes, and stops the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dapo_megatron.bridge.families.architecture import Architecture, Rope
from dapo_megatron.bridge.families.family import Family
from dapo_megatron.bridge.families.registry import FAMILIES
from dapo_megatron.types import ConfigError

READ = frozenset(
    {
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "tie_word_embeddings",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
    }
)
READ_OF_EXPERTS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    }
)
REQUIRED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
HARMLESS = frozenset(
    {
        # About the checkpoint's making, saving and tools.
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "_name_or_path",
        "name_or_path",
        "_attn_implementation_autoset",
        "initializer_range",
        "use_cache",
        "tokenizer_class",
        # About tokens and sampling: the tokenizer's and generation_config.json's business.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "max_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        # Of other tasks, and of how HF's classes answer.
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "return_dict",
    }
)


def architecture(hf: Mapping[str, Any], ignore: Collection[str] = ()) -> Architecture:
    """Read an HF config.json. `ignore` names fields of it that are known not to matter.

    Raises ConfigError on a family, a field or a value that is not understood, and on a missing one:
    what changes the computation is refused, never ignored."""
    family = FAMILIES.get(hf.get("model_type", ""))
    if family is None:
        raise ConfigError(
            f"model.path: model_type {hf.get('model_type')!r} is not supported; known: "
            f"{', '.join(FAMILIES)}"
        )
    hf = {**family.defaults, **hf}
    _refuse_unknown(hf, family, ignore)
    _refuse_windows(hf, family)
    heads = _size(hf, "num_attention_heads")
    # An explicit null means as many as there are heads.
    groups = _size(hf, "num_key_value_heads") if _given(hf, "num_key_value_heads") else heads
    if heads % groups:
        raise ConfigError(
            f"model.path: num_key_value_heads = {groups} does not divide num_attention_heads = "
            f"{heads}"
        )
    return Architecture(
        family=family.model_type,
        num_layers=_size(hf, "num_hidden_layers"),
        hidden=_size(hf, "hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=hf.get("head_dim") or _size(hf, "hidden_size") // heads,
        ffn=_size(hf, "intermediate_size"),
        vocab=_size(hf, "vocab_size"),
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family.has("self_attention.linear_qkv.bias"),
        qk_norm=family.has("self_attention.q_layernorm.weight"),
        norm_eps=float(_required(hf, "rms_norm_eps")),
        rope=_rope(hf, ignore),
        max_positions=_size(hf, "max_position_embeddings"),
        **(_experts(hf) if family.expert else {}),
    )


def _refuse_unknown(hf: Mapping[str, Any], family: Family, ignore: Collection[str]) -> None:
    if hf.get("quantization_config"):
        raise ConfigError(
            "model.path: quantization_config: a quantised checkpoint cannot be trained; use the "
            "model's bfloat16 or float32 checkpoint"
        )
    for key, wanted in {**REQUIRED, **family.required}.items():
        value = hf.get(key)
        if value is not None and value != wanted and (value or wanted):
            raise ConfigError(f"model.path: {key} = {value!r}; only {wanted!r} is supported")
    known = READ | REQUIRED.keys() | family.required.keys() | HARMLESS | family.harmless
    known |= READ_OF_EXPERTS if family.expert else frozenset()
    known |= {"sliding_window"} if family.has_window else frozenset()
    for key, value in hf.items():
        if key not in known and key not in ignore and value:
            raise ConfigError(
                f"model.path: the field {key} = {value!r} of config.json is not known for "
                f"{family.model_type}, and may change what the model computes; if it does not, add "
                f"{key} to model.ignore_fields"
            )


def _refuse_windows(hf: Mapping[str, Any], family: Family) -> None:
    """Attention here sees the whole sequence."""
    others = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise ConfigError(
            f"model.path: layer_types has {others[0]!r}; only 'full_attention' is supported"
        )
    window, positions = hf.get("sliding_window"), _size(hf, "max_position_embeddings")
    if family.has_window and window is not None and window < positions:
        raise ConfigError(
            f"model.path: sliding_window = {window} is shorter than max_position_embeddings = "
            f"{positions}; only null, or a longer one, is supported"
        )


# ------------------------------------------------------------------------------- parts


def _rope(hf: Mapping[str, Any], ignore: Collection[str]) -> Rope:
    """transformers 5 writes `rope_parameters`, with rope_theta in it; others wrote `rope_scaling`
    beside rope_theta."""
    where, given = _rope_settings(hf)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ConfigError(
            f"model.path: {where} has the rope type {kind!r}; known: {', '.join(_ROPE_KINDS)}"
        )
    fields = _ROPE_KINDS[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *fields}
    for key, value in given.items():
        if key not in known and f"{where}.{key}" not in ignore and value:
            raise ConfigError(
                f"model.path: {where}.{key} = {value!r} is not known for the rope type {kind!r}; "
                f"if it does not matter, add {where}.{key} to model.ignore_fields"
            )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"model.path: partial_rotary_factor = {given['partial_rotary_factor']}; only 1.0 is "
            "supported"
        )
    theta = float(given.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    numbers = {ours: _required(given, theirs, where) for theirs, ours in fields.items()}
    rope = Rope(theta, kind, **numbers)
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ConfigError(
            f"model.path: {where}.low_freq_factor = {rope.low_freq_factor} must be below "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
    return rope


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


def _rope_settings(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The field that describes rope, and its value."""
    given = [key for key in ("rope_parameters", "rope_scaling") if hf.get(key)]
    if len(given) == 2 and hf[given[0]] != hf[given[1]]:
        raise ConfigError("model.path: rope_parameters and rope_scaling differ; keep one of them")
    where = given[0] if given else "rope_parameters"
    settings: Mapping[str, Any] = hf.get(where) or {}
    inner, outer = settings.get("rope_theta"), hf.get("rope_theta")
    if inner and outer and inner != outer:
        raise ConfigError(
            f"model.path: rope_theta = {outer} and {where}.rope_theta = {inner} differ; keep one"
        )
    return where, settings


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    # Published checkpoints have the first name; transformers 5 saves the second.
    names = [name for name in ("num_experts", "num_local_experts") if hf.get(name)]
    if len(names) == 2 and hf[names[0]] != hf[names[1]]:
        raise ConfigError(
            f"model.path: num_experts = {hf['num_experts']} and num_local_experts = "
            f"{hf['num_local_experts']} differ; keep one of them"
        )
    total = _size(hf, names[0] if names else "num_experts")
    per_token = _required(hf, "num_experts_per_tok")
    if not 1 <= per_token <= total:
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} of num_experts = {total}; "
            "at least 1 and not more than all"
        )
    return {
        "num_experts": total,
        "experts_per_token": per_token,
        "expert_ffn": _size(hf, "moe_intermediate_size"),
        "normalize_topk": bool(hf.get("norm_topk_prob", False)),
    }


def _given(hf: Mapping[str, Any], key: str) -> bool:
    return _required(hf, key) is not None


def _required(hf: Mapping[str, Any], key: str, where: str = "config.json") -> Any:
    if key not in hf:
        raise ConfigError(f"model.path: {key} is missing from {where}")
    return hf[key]


def _size(hf: Mapping[str, Any], key: str) -> int:
    value = _required(hf, key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model.path: {key} = {value!r}; must be a whole number, at least 1")
    return value
