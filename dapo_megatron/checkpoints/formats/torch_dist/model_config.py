"""The configuration of a model in Megatron's own words: `run_config.yaml` of Megatron-Bridge, and
the arguments of Megatron-LM in `common.pt`. Both are written, and checked against config.json."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose, log
from pathlib import Path
from typing import Any

import torch
import yaml

from dapo_megatron.checkpoints.formats.torch_dist.reading import COMMON, read_common
from dapo_megatron.checkpoints.formats.torch_dist.records import Placeholder
from dapo_megatron.files import read_file
from dapo_megatron.model import Architecture, Rope
from dapo_megatron.types import CheckpointError, ConfigError

RUN_CONFIG = "run_config.yaml"
MARK = "dapo_megatron"
"""Key of common.pt in training checkpoints of this project: the layout of the run."""
_MAX_YAML_BYTES = 4 * 2**20
_NAMESPACES = ("Namespace", "SimpleNamespace")

_ARGUMENTS = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""Name of a field in run_config.yaml -> its name among the arguments, where they differ."""
RENAMED = ("layernorm_epsilon", "layernorm_zero_centered_gamma")
"""Fields that are arguments of newer versions, too."""
DELTA = "gated_delta_net"
_DELTA_SPEC = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)
"""Function that builds layers with and without gated delta nets, by the fields of a config."""
_TIED, _UNTIED = "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights"
_NULL_IS_A_VALUE = (
    "num_moe_experts",
    "num_experts",
    "seq_len_interpolation_factor",
    "rotary_seq_len_interpolation_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "window_size",
)
"""Fields whose null is a value. Null of other fields means that Megatron derives them."""
_FIXED = {
    "rotary_interleaved": False,
    "layernorm_zero_centered_gamma": False,
    "apply_layernorm_1p": False,
    "window_size": None,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "no_rope_freq": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "activation_func": "silu",
    "activation_func_clamp_value": None,
    "quick_geglu": False,
}
"""Values, under either name, of fields that `megatron_fields` has for some families only."""
_ZERO_IS_A_VALUE = ("softmax_scale", "activation_func_clamp_value")
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")


def megatron_fields(arch: Architecture) -> dict[str, Any]:
    """Return the fields of run_config.yaml that determine what the model computes.

    Raises ConfigError for a rope or a router that Megatron does not have.
    """
    if arch.rope.kind == "yarn" and arch.rope.partial_rotary_factor != 1.0:
        raise ConfigError(
            "model.path: rope_parameters: Megatron rotates whole heads with yarn, and not "
            f"{arch.rope.partial_rotary_factor:g} of them; a checkpoint of Megatron would compute "
            "something else"
        )
    if arch.grouped_routing and not arch.normalize_topk and arch.experts_per_token > 1:
        raise ConfigError(
            "model.path: norm_topk_prob: Megatron always normalizes the weights of experts with "
            "sigmoid scores; a checkpoint of Megatron would compute something else"
        )
    _check_groups(arch)
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
        _TIED: arch.tie_word_embeddings,
        "rotary_base": arch.rope.theta,
        "rotary_percent": arch.rope.partial_rotary_factor,
        # It has no effect on the experts, and is not compared if all layers have them.
        **({} if arch.has_experts(0) else {"ffn_hidden_size": arch.intermediate_size}),
        **_attention(arch),
        **_delta(arch),
        **_experts(arch),
        **(_latent_rope if arch.latent else _rope)(arch.rope),
    }


def _check_groups(arch: Architecture) -> None:
    """Raise ConfigError if Megatron would choose other groups of experts."""
    routing = arch.grouped_routing
    if routing is None or routing.topk_group == routing.n_group:
        return
    num_best = arch.experts_per_token // routing.topk_group
    if num_best != 2:
        raise ConfigError(
            f"model.path: num_experts_per_tok = {arch.experts_per_token}, topk_group = "
            f"{routing.topk_group}: Megatron ranks groups by their best {num_best} experts "
            "(num_experts_per_tok // topk_group), HF and vLLM always by their best 2; a checkpoint "
            "of Megatron would compute something else"
        )


def _attention(arch: Architecture) -> dict[str, Any]:
    if arch.latent is None:
        return {
            "num_query_groups": arch.num_kv_heads,
            "kv_channels": arch.head_dim,
            "multi_latent_attention": False,
        }
    return {
        "multi_latent_attention": True,
        "q_lora_rank": arch.latent.q_lora_rank or None,
        "kv_lora_rank": arch.latent.kv_lora_rank,
        "qk_head_dim": arch.latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": arch.latent.qk_rope_head_dim,
        "v_head_dim": arch.latent.v_head_dim,
    }


def _delta(arch: Architecture) -> dict[str, Any]:
    if arch.delta is None:
        return {}
    return {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": DELTA,
        "linear_attention_freq": arch.delta.interval,
        "linear_conv_kernel_dim": arch.delta.kernel,
        "linear_key_head_dim": arch.delta.key_dim,
        "linear_value_head_dim": arch.delta.value_dim,
        "linear_num_key_heads": arch.delta.key_heads,
        "linear_num_value_heads": arch.delta.value_heads,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    if not arch.num_experts:
        return {"num_moe_experts": None}
    fields: dict[str, Any] = {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.experts_per_token,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
    }
    if arch.shared_intermediate_size:
        fields["moe_shared_expert_intermediate_size"] = arch.shared_intermediate_size
        fields |= {"moe_shared_expert_gate": True} if arch.delta else {}
    if arch.num_dense_layers:
        fields["moe_layer_freq"] = [int(arch.has_experts(n)) for n in range(arch.num_layers)]
    routing = arch.grouped_routing
    if routing is None:
        # Without pre-softmax, the weights of the chosen experts add up to 1.
        return fields | {
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not arch.normalize_topk,
        }
    return fields | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": routing.scale,
        "moe_router_num_groups": routing.n_group if routing.n_group > 1 else None,
        "moe_router_group_topk": routing.topk_group if routing.n_group > 1 else None,
    }


def _rope(rope: Rope) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rope_scaling": rope.kind == "llama3",
        "seq_len_interpolation_factor": rope.factor if rope.kind == "linear" else None,
    }
    if rope.kind == "llama3":
        fixed = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions)
        if fixed != (1, 4, 8192):
            raise ConfigError(
                "model.path: rope_parameters: Megatron has the rope llama3 only with "
                "low_freq_factor 1, high_freq_factor 4 and original_max_position_embeddings 8192, "
                f"not {fixed}; a checkpoint of Megatron would compute something else"
            )
        fields["rope_scaling_factor"] = rope.factor
    if rope.kind == "yarn":
        fields["position_embedding_type"] = "yarn"
        fields |= {f"yarn_{name}": value for name, value in _yarn(rope).items()}
        fields["yarn_original_max_position_embeddings"] = rope.original_max_positions
        fields["yarn_correction_range_round_to_int"] = True
    return fields


def _latent_rope(rope: Rope) -> dict[str, Any]:
    fields: dict[str, Any] = {"position_embedding_type": "rope"}
    if rope.kind != "yarn":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    positions = {"original_max_position_embeddings": rope.original_max_positions}
    return fields | {"rope_type": "yarn"} | _yarn(rope) | positions


def _yarn(rope: Rope) -> dict[str, Any]:
    return {
        "rotary_scaling_factor": rope.factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        **_magnitudes(rope),
    }


def _magnitudes(rope: Rope) -> dict[str, float]:
    """Return Megatron's mscale and mscale_all_dim. Cosines and sines are multiplied by
    m(mscale) / m(mscale_all_dim), with m(x) = 0.1 x log factor + 1."""
    if rope.attention_factor is not None and rope.factor > 1.0:
        mscale = (rope.attention_factor - 1.0) / (0.1 * log(rope.factor))
        return {"mscale": mscale, "mscale_all_dim": 0.0}
    if rope.mscale is None or rope.mscale_all_dim is None:
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    return {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}


def as_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of run_config.yaml by the names of Megatron-LM's arguments."""
    arguments = {_ARGUMENTS.get(name, name): value for name, value in fields.items()}
    # Their names in newer versions.
    arguments |= {name: fields[name] for name in RENAMED if name in fields}
    if _TIED in arguments:
        arguments[_UNTIED] = not arguments.pop(_TIED)
    return arguments


# ------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class SavedConfig:
    """The configuration in a checkpoint: its file and its fields, whose names are those of
    Megatron-LM's arguments if `in_arguments`."""

    path: Path
    fields: Mapping[str, Any]
    in_arguments: bool

    def padded_vocabulary(self, vocab_size: int) -> int | None:
        """Return the rows to which the run padded its vocabulary, or None if they are not in the
        file."""
        multiple = 1
        for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size"):
            size = self.fields.get(name)
            if type(size) is not int or size < 1:
                return None
            multiple *= size
        return -(-vocab_size // multiple) * multiple


def check_config(folder: Path, saved: SavedConfig, arch: Architecture) -> None:
    """Raise CheckpointError if the checkpoint's configuration contradicts config.json.

    The error lists every contradiction with both values.
    """
    stored = saved.fields
    try:
        wanted = megatron_fields(arch)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if stored.get("rope_type") == "rope":
        stored = {**stored, "rotary_scaling_factor": 1.0}  # not used
    if stored.get("moe_router_topk_scaling_factor", 1.0) is None:
        stored = {**stored, "moe_router_topk_scaling_factor": 1.0}
    if stored.get("moe_router_num_groups") == 1:  # the same as no groups
        stored = {**stored, **dict.fromkeys(_GROUPS)}
    if stored.get("experimental_attention_variant") == "gdn":  # its name in newer versions
        stored = {**stored, "experimental_attention_variant": DELTA}
    if stored.get("activation_func") is not None:
        stored = {**stored, "activation_func": _function_name(stored["activation_func"])}
    if saved.in_arguments:
        wanted = as_arguments(wanted)
        if stored.get("group_query_attention") is False:  # Megatron-LM then ignores its default, 1
            stored = {**stored, "num_query_groups": stored.get("num_attention_heads")}
    num_tokens = stored.get("vocab_size")
    if isinstance(num_tokens, int) and num_tokens > arch.vocab_size:
        wanted = {**wanted, "vocab_size": arch.vocab_size}  # rows of tokens would be cut off
    wanted = {**_FIXED, **wanted}
    problems = [
        f"  {name} is {stored[name]!r:.80} there, {value!r} by config.json"
        for name, value in wanted.items()
        if name in stored and name != "rope_type" and not _is_same(name, stored[name], value)
    ]
    if problems:
        raise CheckpointError(
            f"{saved.path}: is of another model than config.json:\n"
            + "\n".join(problems)
            + "\nName the HF model from which this checkpoint was made"
        )


def _function_name(stored: Any) -> Any:
    """Return the name of a function, without its module, or `stored` if it is none."""
    target = stored.get("_target_") if isinstance(stored, dict) else stored
    return target.rpartition(".")[2] if isinstance(target, str) else stored


def _is_same(name: str, stored: Any, wanted: Any) -> bool:
    if stored is None and name not in _NULL_IS_A_VALUE:
        return True
    if name in _ZERO_IS_A_VALUE:
        return False
    if isinstance(stored, int | float) and isinstance(wanted, int | float):
        return isclose(stored, wanted, rel_tol=1e-9)
    # Megatron writes false, 0 and null for what a model does not have.
    return bool((not stored and not wanted) or stored == wanted)


def read_config(folder: Path) -> SavedConfig | None:
    """Return the configuration in a checkpoint; None if a run of this project saved it, which
    computes the model of config.json. Raises CheckpointError for a damaged file."""
    path = folder / RUN_CONFIG
    if path.exists():
        model = _read_yaml(path).get("model")
        if not isinstance(model, dict):
            raise CheckpointError(f"{path}: has no section model; copy it again")
        return SavedConfig(path, model, False)
    path, common = read_common(folder)
    if MARK in common:
        return None
    arguments = common.get("args")
    if not isinstance(arguments, Placeholder) or type(arguments).__name__ not in _NAMESPACES:
        return SavedConfig(path, {}, True)  # not written by Megatron-LM
    fields = arguments.state if isinstance(arguments.state, dict) else {}
    return SavedConfig(path, fields, True)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(read_file(path, _MAX_YAML_BYTES))
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: no mapping of names to values; copy it again")
    return value


# ------------------------------------------------------------------------------- writing


def write_config(folder: Path, arch: Architecture, dtype: torch.dtype, stacked: bool) -> None:
    """Write `common.pt` and `run_config.yaml`. Raises ConfigError as `megatron_fields` does."""
    fields = megatron_fields(arch) | {
        "ffn_hidden_size": arch.intermediate_size,
        "max_position_embeddings": arch.max_positions,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    arguments = as_arguments(fields) | {
        "seq_length": arch.max_positions,
        "group_query_attention": arch.latent is None,
        "params_dtype": dtype,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }
    common = {
        "args": argparse.Namespace(**arguments),
        # Version 3: query, key and value of a head group are next to each other.
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not stacked,
        },
    }
    buffer = io.BytesIO()
    torch.save(common, buffer)
    (folder / COMMON).write_bytes(buffer.getvalue())
    text = yaml.safe_dump(_run_config(fields, arch, dtype), sort_keys=False)
    (folder / RUN_CONFIG).write_text(text, encoding="utf-8")


def _run_config(
    fields: Mapping[str, Any], arch: Architecture, dtype: torch.dtype
) -> dict[str, Any]:
    theta = float(arch.rope.theta)
    kind = "mla_provider.MLAModelProvider" if arch.latent else "gpt_provider.GPTModelProvider"
    model = {name: value for name, value in fields.items() if name != "max_position_embeddings"}
    model.pop("multi_latent_attention")
    if arch.delta:
        model["transformer_layer_spec"] = {"_target_": _DELTA_SPEC, "_call_": False}
    return {
        "model": {
            "_target_": f"megatron.bridge.models.{kind}",
            **model,
            "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
            "params_dtype": {"_target_": str(dtype), "_call_": False},
            "rotary_base": int(theta) if theta.is_integer() else theta,
            "seq_length": arch.max_positions,
            "vocab_size": arch.vocab_size,
            "should_pad_vocab": True,
        },
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
    }
