"""The only reader of HF config.json files: converts their fields to an `Architecture` and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.config import Config
from dapo_megatron.files import read_json
from dapo_megatron.model.architecture import Architecture, Delta, GroupedRouting, Latent, Rope
from dapo_megatron.model.families import ALIASES, FAMILIES, WITH_IMAGES
from dapo_megatron.model.families.family import BIASED_ROUTER, Family
from dapo_megatron.model.hf_fields import HARMLESS, REQUIRED, Fields
from dapo_megatron.model.hf_rope import PARTIAL_ROTARY, read_rope, rope_fields
from dapo_megatron.model.published import PublishedModel, find_published, published_or_refuse
from dapo_megatron.types import CheckpointError, ConfigError

_POSITIONS = "max_position_embeddings"
_OTHER_POSITIONS = ("max_sequence_length", "model_max_length")
"""Other fields that limit the sequence length. vLLM reads all of them."""
_MLP_TYPES = "mlp_layer_types"
_MTP_LAYERS = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Fields with the number of layers for multi-token prediction. Checkpoints have those of the first
one after the model's own layers, those of the second one apart (`mtp.`)."""
_OF_IMAGES = frozenset(
    {
        *("text_config", "vision_config", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "language_model_only"),
    }
)
"""Fields of a model for images and text that its text model lacks."""


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


def stop_ids(folder: Path, eos_token_id: int | None) -> list[int]:
    """Return the tokens that end a response: those of the tokenizer (`eos_token_id`), of
    config.json and of generation_config.json."""
    ids = set() if eos_token_id is None else {eos_token_id}
    for name in ("config.json", "generation_config.json"):
        value = None
        if (folder / name).exists():
            value = text_fields(read_json(folder / name)).get("eos_token_id")
        ids |= {value} if isinstance(value, int) else set(value or ())
    return sorted(ids)


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


def with_teacher(config: Config) -> Config:
    """Return the config of a policy with the model of loss.distill, for planning it."""
    assert config.loss.distill is not None
    changed = {
        "model": config.model.model_copy(update={"path": config.loss.distill.teacher}),
        "policy": config.policy.model_copy(update={"lora": None, "fp8": None}),
        "loss": config.loss.model_copy(update={"distill": None}),
    }
    return config.model_copy(update=changed)


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
    hf = text_fields(hf)
    family = _family(hf)
    fields = Fields({**family.defaults, **hf})
    if fields.get("quantization_config"):
        raise ConfigError(
            "model.path: quantization_config: a quantized checkpoint cannot be trained; use the "
            "model's bfloat16 or float32 checkpoint"
        )
    arch = _read(fields, family, ignore)
    required = {**REQUIRED, **family.required}
    fields.refuse_unless({key: required[key] for key in required if key not in fields.read})
    known = HARMLESS | family.harmless | {"model_type"}
    fields.refuse_unknown(known, ignore, family.model_type)
    return arch


def _read(hf: Fields, family: Family, ignore: Collection[str]) -> Architecture:
    _refuse_windows(hf, family)
    heads = hf.size("num_attention_heads")
    # An explicit null means the number of attention heads.
    has_kv_heads = hf.required("num_key_value_heads") is not None
    kv_heads = hf.size("num_key_value_heads") if has_kv_heads else heads
    if heads % kv_heads:
        raise hf.refusal("num_key_value_heads", f"does not divide num_attention_heads = {heads}")
    latent = _latent(hf) if family.has_latent else None
    if latent and kv_heads != heads:
        raise hf.refusal(
            "num_key_value_heads",
            f"{family.model_type} has a key and a value for each of num_attention_heads = {heads}",
        )
    rope = read_rope(hf, ignore, family)
    arch = Architecture(
        family=family.model_type,
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hf.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=latent.qk_rope_head_dim if latent else _head_dim(hf),
        intermediate_size=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        qkv_bias=_feature(hf, family, "qkv_bias", "self_attention.linear_qkv.bias"),
        qk_norm=_feature(hf, family, "qk_norm", "self_attention.k_layernorm.weight"),
        norm_eps=hf.number("rms_norm_eps"),
        rope=rope,
        max_positions=_max_positions(hf, rope),
        latent=latent,
        delta=_delta(hf) if family.has_delta else None,
        **(_experts(hf, family) if family.expert else {}),
        **(_grouped_routing(hf, family) if family.has_grouped_routing else {}),
    )
    if family.has_partial_rotary and (arch.rotary_dim < 2 or arch.rotary_dim % 2):
        raise ConfigError(
            f"model.path: head_dim = {arch.head_dim} and {PARTIAL_ROTARY} = "
            f"{arch.rope.partial_rotary_factor} rotate {arch.rotary_dim} columns of a head; must "
            "be an even number, at least 2"
        )
    return arch


def text_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, if these are of a model for images and text; else all
    fields. Raises ConfigError if a field has two values."""
    model_type = str(hf.get("model_type"))
    if model_type not in WITH_IMAGES:
        return dict(hf)
    family, architecture_name = WITH_IMAGES[model_type]
    inner, outer = Fields(hf).inside("text_config"), Fields(hf)
    own = {"model_type": family, "architectures": [architecture_name]}
    if inner.get("model_type") not in (None, family):
        raise inner.refusal("model_type", f"only {family!r} is supported")
    fields = {key: value for key, value in hf.items() if key not in _OF_IMAGES}
    for key, value in (hf.get("text_config") or {}).items():
        if key in fields and fields[key] != value and key not in HARMLESS | own.keys():
            raise inner.refusal(key, f"{key} = {outer.get(key)!r:.60} outside differs; keep one")
        fields[key] = value
    return fields | own


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
        "rope_parameters": rope_fields(arch),
        "max_position_embeddings": arch.max_positions,
    }
    family = FAMILIES[arch.family]
    if family.has_window:
        fields["sliding_window"] = None
    fields |= {field: getattr(arch, feature) for feature, field in family.flags.items()}
    if family.has_mlp_types:
        fields[_MLP_TYPES] = _mlp_types(arch.num_dense_layers, arch.num_layers)
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
    if arch.delta:
        fields |= {
            "layer_types": _layer_types(arch.delta.interval, arch.num_layers),
            "full_attention_interval": arch.delta.interval,
            "linear_num_key_heads": arch.delta.key_heads,
            "linear_num_value_heads": arch.delta.value_heads,
            "linear_key_head_dim": arch.delta.key_dim,
            "linear_value_head_dim": arch.delta.value_dim,
            "linear_conv_kernel_dim": arch.delta.kernel,
        }
        if arch.num_experts:
            fields["shared_expert_intermediate_size"] = arch.shared_intermediate_size
    if arch.grouped_routing:
        fields |= {
            **BIASED_ROUTER,
            "first_k_dense_replace": arch.num_dense_layers,
            "n_shared_experts": arch.shared_intermediate_size // arch.moe_intermediate_size,
            "n_group": arch.grouped_routing.n_group,
            "topk_group": arch.grouped_routing.topk_group,
            "routed_scaling_factor": arch.grouped_routing.scale,
        }
    return fields


def mtp_layers(hf: Mapping[str, Any]) -> range:
    """Return the numbers of the layers for multi-token prediction that follow the model's own."""
    fields, name = Fields(hf), _MTP_LAYERS[0]
    first = fields.size("num_hidden_layers")
    number = 0 if fields.get(name) is None else fields.size(name, least=0)
    return range(first, first + number)


def without_mtp(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the same model without layers for multi-token prediction."""
    return {**hf, **{name: 0 for name in _MTP_LAYERS if hf.get(name)}}


def _family(hf: Mapping[str, Any]) -> Family:
    model_type = str(hf.get("model_type"))
    family = FAMILIES.get(ALIASES.get(model_type, model_type))
    if family is None:
        raise ConfigError(
            f"model.path: model_type {hf.get('model_type')!r} is not supported; known: "
            f"{', '.join((*FAMILIES, *ALIASES, *WITH_IMAGES))}"
        )
    return family


def _feature(hf: Fields, family: Family, feature: str, parameter: str) -> bool:
    """Return whether the model has a feature, whose `parameter` layers then have."""
    field = family.flags.get(feature)
    return family.has(parameter) if field is None else hf.flag(field)


def _head_dim(hf: Fields) -> int:
    if hf.get("head_dim") is not None:
        return hf.size("head_dim")
    return hf.size("hidden_size") // hf.size("num_attention_heads")


def _max_positions(hf: Fields, rope: Rope) -> int:
    """Return the maximum sequence length. With yarn, vLLM has no angles beyond `factor` x the
    original length."""
    limits = [hf.size(_POSITIONS)]
    limits += [hf.size(key) for key in _OTHER_POSITIONS if hf.get(key) is not None]
    if rope.kind == "yarn":
        limits.append(int(rope.original_max_positions * rope.factor))
    return min(limits)


def _refuse_windows(hf: Fields, family: Family) -> None:
    """Raise ConfigError for attention with a window shorter than the model's positions."""
    types = hf.get("layer_types") or []
    is_full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    if not is_full and not family.has_delta:
        raise hf.refusal("layer_types", "only 'full_attention' is supported")
    if family.has_window and hf.required("sliding_window") is not None:
        window, positions = hf.size("sliding_window"), hf.size(_POSITIONS)
        if window < positions:
            raise hf.refusal(
                "sliding_window",
                f"shorter than {_POSITIONS} = {positions}; only null or a window of at least this "
                "length is supported",
            )


# ------------------------------------------------------------------------------- parts


def _latent(hf: Fields) -> Latent:
    latent = Latent(
        q_lora_rank=0 if hf.required("q_lora_rank") is None else hf.size("q_lora_rank"),
        kv_lora_rank=hf.size("kv_lora_rank"),
        qk_nope_head_dim=hf.size("qk_nope_head_dim"),
        qk_rope_head_dim=hf.size("qk_rope_head_dim"),
        v_head_dim=hf.size("v_head_dim"),
    )
    # transformers also saves these derived fields.
    for key, value in (("head_dim", latent.qk_rope_head_dim), ("qk_head_dim", latent.qk_head_dim)):
        if hf.get(key) not in (None, value):
            raise hf.refusal(key, f"the other fields make it {value}: remove it")
    return latent


def _delta(hf: Fields) -> Delta:
    if hf.get("output_gate_type") not in ("silu", "swish"):  # two names of one function
        raise hf.refusal("output_gate_type", "only 'silu' and 'swish' are supported")
    num_layers, types = hf.size("num_hidden_layers"), hf.get("layer_types")
    interval = hf.size("full_attention_interval")
    if types is not None and types != _layer_types(interval, num_layers):
        raise hf.refusal(
            "layer_types",
            f"only 'full_attention' in every {interval}-th layer (full_attention_interval) and "
            "'linear_attention' in the others are supported",
        )
    delta = Delta(
        interval=interval,
        key_heads=hf.size("linear_num_key_heads"),
        value_heads=hf.size("linear_num_value_heads"),
        key_dim=hf.size("linear_key_head_dim"),
        value_dim=hf.size("linear_value_head_dim"),
        kernel=hf.size("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        raise hf.refusal(
            "linear_num_key_heads",
            f"does not divide linear_num_value_heads = {delta.value_heads}",
        )
    return delta


def _layer_types(interval: int, num_layers: int) -> list[str]:
    types = ["linear_attention"] * num_layers
    types[interval - 1 :: interval] = ["full_attention"] * (num_layers // interval)
    return types


def _dense_layers(hf: Fields, family: Family) -> int:
    """Return the number of layers without experts, which are the first ones."""
    dense = hf.size("first_k_dense_replace", least=0)
    if family.has_mlp_types:
        num_layers = hf.size("num_hidden_layers")
        types = hf.get(_MLP_TYPES)
        types = _mlp_types(1, num_layers) if types is None else types
        if dense > num_layers or types != _mlp_types(dense, num_layers):
            raise ConfigError(
                f"model.path: first_k_dense_replace = {dense}, but {_MLP_TYPES} = {types!r:.60}; "
                f"it must be 'dense' for the first {dense} layers, then 'sparse' (absent: 1 dense "
                "layer)"
            )
    return dense


def _mlp_types(dense: int, num_layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (num_layers - dense)


def _grouped_routing(hf: Fields, family: Family) -> dict[str, Any]:
    hf.refuse_unless(BIASED_ROUTER, optional=False)
    groups, chosen = hf.size("n_group"), hf.size("topk_group")
    experts, per_token = hf.size("n_routed_experts"), hf.size("num_experts_per_tok")
    if experts % groups or chosen > groups or experts // groups < 2:
        raise ConfigError(
            f"model.path: n_group = {groups} and topk_group = {chosen} of n_routed_experts = "
            f"{experts}; n_group must divide n_routed_experts into groups of at least 2 experts, "
            "and topk_group must not exceed n_group"
        )
    if per_token > chosen * (experts // groups):
        raise hf.refusal(
            "num_experts_per_tok",
            f"more than topk_group = {chosen} groups of {experts // groups} experts have",
        )
    return {
        "num_dense_layers": _dense_layers(hf, family),
        "shared_intermediate_size": hf.size("n_shared_experts") * hf.size("moe_intermediate_size"),
        "grouped_routing": GroupedRouting(groups, chosen, hf.number("routed_scaling_factor")),
    }


def _experts(hf: Fields, family: Family) -> dict[str, Any]:
    # Qwen3-MoE is published with the first name, but transformers 5 saves it with the second.
    known = ("num_experts", "num_local_experts", "n_routed_experts")
    own = known[2] if family.has_grouped_routing else known[0]
    names = [name for name in known if hf.get(name)] or [own]
    total, *others = (hf.size(name) for name in names)
    if any(other != total for other in others):
        values = " and ".join(f"{name} = {hf.get(name)}" for name in names)
        raise ConfigError(f"model.path: {values} differ; keep one of them")
    per_token = hf.size("num_experts_per_tok")
    if per_token > total:
        raise hf.refusal("num_experts_per_tok", f"more than num_experts = {total}")
    experts = {
        "num_experts": total,
        "experts_per_token": per_token,
        "moe_intermediate_size": hf.size("moe_intermediate_size"),
        "normalize_topk": hf.flag("norm_topk_prob"),
    }
    if family.has_delta:
        hf.refuse_unless({"norm_topk_prob": True})  # transformers does not read it
        experts["shared_intermediate_size"] = hf.size("shared_expert_intermediate_size")
    return experts
