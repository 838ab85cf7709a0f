"""Names and layouts per model family: Megatron parameter -> HF tensors, as one table.

The decoder families here (Llama, Qwen2/2.5, Qwen3, Qwen3-MoE) share every rule; they differ in
which parameters exist. A parameter without a rule is an error, never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dapo_megatron.bridge.shards import Region, Shard
from dapo_megatron.types import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder, from its HF config.json.

    `num_experts` is 0 for a dense one; else every layer routes each token to `experts_per_token`
    experts of `expert_ffn` columns, whose weights sum to 1 with `normalize_topk`.
    """

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None
    max_positions: int
    num_experts: int
    experts_per_token: int
    expert_ffn: int
    normalize_topk: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands. Only data-parallel rank 0 answers for its slices, and of those that
    tensor-parallel ranks hold alike, only tensor-parallel rank 0.

    Experts are dealt out by expert parallelism alone and never cut: rank `ep_rank` holds the whole
    of experts [ep_rank * n, (ep_rank + 1) * n), n = num_experts / ep_size, and rank 0 of the
    expert data-parallel group answers for them.
    """

    tp_rank: int
    tp_size: int
    first_layer: int
    is_data_parallel_first: bool
    ep_rank: int = 0
    ep_size: int = 1
    is_expert_data_parallel_first: bool = True


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Read an HF config.json. Raises ConfigError on a family or field that is not understood:
    a field that changes the computation is refused, never ignored."""
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model.path: model_type {family!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    _refuse_unknown_computation(hf, family)
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    heads = hf["num_attention_heads"]
    has_experts = family == "qwen3_moe"
    return Architecture(
        family=family,
        num_layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        num_heads=heads,
        num_groups=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        ffn=hf["intermediate_size"],
        vocab=hf["vocab_size"],
        tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bool(hf.get("attention_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_eps=hf["rms_norm_eps"],
        rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling_factor=float(rope["factor"]) if _rope_type(rope) == "llama3" else None,
        max_positions=hf["max_position_embeddings"],
        num_experts=_num_experts(hf) if has_experts else 0,
        experts_per_token=_required(hf, "num_experts_per_tok") if has_experts else 0,
        expert_ffn=_required(hf, "moe_intermediate_size") if has_experts else 0,
        normalize_topk=has_experts and bool(hf.get("norm_topk_prob", False)),
    )


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _refuse_unknown_computation(hf: Mapping[str, Any], family: str) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    llama3 = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    kind = _rope_type(rope)
    if kind == "llama3":
        for key, value in llama3.items():
            if rope.get(key, value) != value:
                raise ConfigError(
                    f"model.path: rope {key} = {rope[key]}; only {value} is supported"
                )
    elif kind != "default":
        raise ConfigError(f"model.path: rope type {kind!r} is not supported (default, llama3)")
    wanted: dict[str, Any] = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "decoder_sparse_step": 1,
    }
    if family != "qwen2":
        wanted["attention_bias"] = False
    for key, value in wanted.items():
        if hf.get(key, value) != value:
            raise ConfigError(f"model.path: {key} = {hf[key]!r}; only {value!r} is supported")
    partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(f"model.path: partial_rotary_factor {partial}; only 1.0 is supported")
    if family == "qwen3_moe":
        _refuse_unknown_experts(hf)


_EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    # Of HF's training alone: what balances experts here is policy.moe_aux_loss.
    "router_aux_loss_coef",
    "output_router_logits",
)


def _refuse_unknown_experts(hf: Mapping[str, Any]) -> None:
    per_token, total = _required(hf, "num_experts_per_tok"), _num_experts(hf)
    if not 1 <= per_token <= total:
        raise ConfigError(
            f"model.path: num_experts_per_tok = {per_token} of num_experts = {total}; "
            "at least 1 and not more than all"
        )
    # vLLM reads fields that HF's model does not have (shared_expert_intermediate_size), so
    # whatever speaks of experts must be known here, or say "none".
    for key, value in hf.items():
        is_about_experts = re.search("expert|moe|router|topk|mlp_only", key)
        if is_about_experts and key not in _EXPERT_FIELDS and value:
            raise ConfigError(f"model.path: {key} = {value!r} is not supported")


def _num_experts(hf: Mapping[str, Any]) -> int:
    """Published checkpoints have the first name; transformers 5 saves the second."""
    return _required(hf, "num_experts", "num_local_experts")


def _required(hf: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if name in hf:
            return int(hf[name])
    raise ConfigError(f"model.path: {names[0]} is missing from config.json")


# --------------------------------------------------------------------- kinds of slices

Cut = Callable[[str, Tensor, Architecture, Place], list[Shard]]
"""(HF name with {layer} filled in, local parameter, sizes, place) -> its shards."""


def _whole(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    region = Region((0,) * param.dim(), tuple(param.shape))
    owner = place.tp_rank == 0 and place.is_data_parallel_first
    return [Shard(name, tuple(param.shape), region, param, owner)]


def _rows(name: str, view: Tensor, rows: int, first: int, total: int, place: Place) -> Shard:
    """`view` holds `rows` rows, from row `first`, of a tensor of `total` rows."""
    rest = (view.numel() // rows,) if view.dim() > 1 else ()
    region = Region((first, *(0 for _ in rest)), (rows, *rest))
    return Shard(name, (total, *rest), region, view, place.is_data_parallel_first)


def _vocab(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    first = place.tp_rank * param.shape[0]
    rows = min(param.shape[0], arch.vocab - first)  # what is beyond pads the vocabulary
    return [_rows(name, param[:rows], rows, first, arch.vocab, place)]


def _tied_copy(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    """The last stage's copy of a tied embedding: written, never answered for."""
    [shard] = _vocab(name, param, arch, place)
    return [Shard(name, shard.global_shape, shard.region, shard.view, is_owner=False)]


def _columns(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    rows, columns = param.shape
    region = Region((0, place.tp_rank * columns), (rows, columns))
    total = (rows, columns * place.tp_size)
    return [Shard(name, total, region, param, place.is_data_parallel_first)]


def _qkv(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    """Megatron interleaves per key-value head: its query heads, then key, then value."""
    groups = arch.num_groups // place.tp_size
    queries = arch.num_heads // arch.num_groups
    view = param.view(groups, queries + 2, arch.head_dim, *param.shape[1:])
    return [
        _part(name, "q", view[:, :queries], groups * queries * arch.head_dim, param, place),
        _part(name, "k", view[:, queries], groups * arch.head_dim, param, place),
        _part(name, "v", view[:, queries + 1], groups * arch.head_dim, param, place),
    ]


def _gate_up(name: str, param: Tensor, arch: Architecture, place: Place) -> list[Shard]:
    """Megatron stacks the rank's gate rows over its up rows."""
    rows = param.shape[0] // 2
    view = param.view(2, rows, *param.shape[1:])
    return [
        _part(name, "gate", view[0], rows, param, place),
        _part(name, "up", view[1], rows, param, place),
    ]


def _part(name: str, part: str, view: Tensor, rows: int, param: Tensor, place: Place) -> Shard:
    """One of the HF tensors fused into `param`: `rows` of its rows on each tensor-parallel rank."""
    rest = tuple(param.shape[1:])
    region = Region((place.tp_rank * rows, *(0 for _ in rest)), (rows, *rest))
    total = (rows * place.tp_size, *rest)
    name = name.replace("{part}", part)
    return Shard(name, total, region, view, place.is_data_parallel_first)


_LAYER = "model.layers.{layer}."
_EXPERT_GATE_UP = _LAYER + "mlp.experts.{expert}.{part}_proj.weight"
_EXPERT_DOWN = _LAYER + "mlp.experts.{expert}.down_proj.weight"
RULES: tuple[tuple[str, str, Cut], ...] = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight", _vocab),
    ("output_layer.weight", "lm_head.weight", _vocab),
    ("decoder.final_layernorm.weight", "model.norm.weight", _whole),
    ("input_layernorm.weight", _LAYER + "input_layernorm.weight", _whole),
    ("pre_mlp_layernorm.weight", _LAYER + "post_attention_layernorm.weight", _whole),
    # Transformer Engine fuses each norm into the linear layer that follows it.
    ("self_attention.linear_qkv.layer_norm_weight", _LAYER + "input_layernorm.weight", _whole),
    ("mlp.linear_fc1.layer_norm_weight", _LAYER + "post_attention_layernorm.weight", _whole),
    ("self_attention.linear_qkv.weight", _LAYER + "self_attn.{part}_proj.weight", _qkv),
    ("self_attention.linear_qkv.bias", _LAYER + "self_attn.{part}_proj.bias", _qkv),
    ("self_attention.linear_proj.weight", _LAYER + "self_attn.o_proj.weight", _columns),
    ("self_attention.q_layernorm.weight", _LAYER + "self_attn.q_norm.weight", _whole),
    ("self_attention.k_layernorm.weight", _LAYER + "self_attn.k_norm.weight", _whole),
    ("mlp.linear_fc1.weight", _LAYER + "mlp.{part}_proj.weight", _gate_up),
    ("mlp.linear_fc2.weight", _LAYER + "mlp.down_proj.weight", _columns),
    ("mlp.router.weight", _LAYER + "mlp.gate.weight", _whole),
    # Experts one after the other (SequentialMLP) ...
    ("mlp.experts.local_experts.{expert}.linear_fc1.weight", _EXPERT_GATE_UP, _gate_up),
    ("mlp.experts.local_experts.{expert}.linear_fc2.weight", _EXPERT_DOWN, _columns),
    # ... and grouped by Transformer Engine (TEGroupedMLP).
    ("mlp.experts.linear_fc1.weight{expert}", _EXPERT_GATE_UP, _gate_up),
    ("mlp.experts.linear_fc2.weight{expert}", _EXPERT_DOWN, _columns),
)
"""(Megatron name, without its "decoder.layers.N." prefix; HF name; how it is cut). {expert} is
numbered from 0 on each rank in Megatron's names, over the whole layer in HF's."""

_TABLE = {megatron: (hf, cut) for megatron, hf, cut in RULES}
_LAYER_NAME = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT_NUMBER = re.compile(r"(?<=local_experts\.)\d+|(?<=linear_fc[12]\.weight)\d+$")


def shards_of(params: Mapping[str, Tensor], arch: Architecture, place: Place) -> list[Shard]:
    """The shards of one rank's parameters, by their Megatron names (layers numbered from 0 on
    each stage). Raises ConfigError naming a parameter without a rule."""
    shards: list[Shard] = []
    experts_here = arch.num_experts // place.ep_size
    whole_experts = replace(
        place, tp_rank=0, tp_size=1, is_data_parallel_first=place.is_expert_data_parallel_first
    )
    for full_name, param in params.items():
        match = _LAYER_NAME.match(full_name)
        name = match.group(2) if match else full_name
        expert = _EXPERT_NUMBER.search(name)
        name = _EXPERT_NUMBER.sub("{expert}", name)
        if name not in _TABLE:
            raise ConfigError(f"model.path: no rule for the parameter {full_name} ({arch.family})")
        hf_name, cut = _TABLE[name]
        if match:
            layer = place.first_layer + int(match.group(1))
            hf_name = hf_name.replace("{layer}", str(layer))
        if expert:
            number = place.ep_rank * experts_here + int(expert.group())
            hf_name = hf_name.replace("{expert}", str(number))
        if name == "output_layer.weight" and arch.tied:
            hf_name, cut = "model.embed_tokens.weight", _tied_copy
        shards.extend(cut(hf_name, param, arch, whole_experts if expert else place))
    return shards
