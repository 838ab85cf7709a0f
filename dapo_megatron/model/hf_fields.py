"""Fields of an HF config.json: which are read, must have a certain value, or are ignored.

A family's file adds its own fields. Any other field with a non-empty value may change what the
model computes, so it is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dapo_megatron.model.families import FAMILIES
from dapo_megatron.model.families.family import Family
from dapo_megatron.types import ConfigError

POSITIONS = ("max_position_embeddings", "max_sequence_length", "model_max_length")
"""Fields that limit the sequence length. vLLM reads all of them."""
MLP_TYPES = "mlp_layer_types"
PARTIAL_ROTARY = "partial_rotary_factor"
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
        *POSITIONS,
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
READ_OF_LATENT = frozenset(
    {
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "qk_head_dim",
    }
)
READ_OF_SCORING = frozenset(
    {
        "n_routed_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
    }
)
REQUIRED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    PARTIAL_ROTARY: 1.0,
    # If this is false, vLLM uses bidirectional attention.
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    # Fields of one family that some tools also write for others.
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_mrope": False,
}
"""Fields that must have this value, or be absent or null, unless the family reads them. False, 0
and empty values are equal."""
HARMLESS = frozenset(
    {
        # How and with which tools the checkpoint was made and saved.
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "finetuning_task",
        "axolotl_version",
        "base_model_name_or_path",
        "mergekit_version",
        "neftune_noise_alpha",
        "name_or_path",
        "initializer_range",
        "use_cache",
        "gradient_checkpointing",
        # Choice between equivalent kernels in transformers.
        "attn_implementation",
        "use_flash_attn",
        "experts_implementation",
        # Tokens and sampling, which the tokenizer and generation_config.json define.
        "tokenizer_class",
        "tokenizer_padding_side",
        "tokenizer_model_max_length",
        "prefix",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "length_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "remove_invalid_values",
        "output_past",
        "output_scores",
        "return_dict_in_generate",
        # Other tasks, and outputs of HF's classes.
        "id2label",
        "label2id",
        "problem_type",
        "num_labels",
        "classifier_dropout",
        "loss_type",
        "task_specific_params",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        # For other classes of transformers, such as TensorFlow's and TorchScript's.
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "is_decoder",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
    }
)
"""Fields that do not change what the model computes."""


def _read(family: Family) -> frozenset[str]:
    """Return a family's fields that are read."""
    fields = READ | frozenset(family.flags.values())
    fields |= READ_OF_EXPERTS if family.expert else frozenset()
    fields |= {"sliding_window"} if family.has_window else frozenset()
    fields |= {PARTIAL_ROTARY} if family.has_partial_rotary else frozenset()
    fields |= {MLP_TYPES} if family.has_mlp_types else frozenset()
    fields |= READ_OF_LATENT if family.has_latent else frozenset()
    fields |= READ_OF_SCORING if family.has_grouped_routing else frozenset()
    return fields


def _required(family: Family) -> dict[str, Any]:
    """Return a family's fields that must have a certain value, and the value."""
    read = _read(family)
    required = {key: value for key, value in REQUIRED.items() if key not in read}
    return {**required, **family.required}


def _meaningful(family: Family) -> frozenset[str]:
    """Return a family's fields that are read or must have a certain value."""
    return _read(family) | _required(family).keys()


MEANINGFUL = frozenset({"quantization_config"}).union(*map(_meaningful, FAMILIES.values()))
"""Fields that change the computation of some family."""


def _is_note(key: str) -> bool:
    """Return whether a field is a private note of the program that wrote it (`_commit_hash`).

    For the families here, transformers and vLLM read only two private fields,
    `_attn_implementation` and `_experts_implementation`. They choose between equivalent kernels in
    transformers. Custom code could read others, but it is never loaded (`auto_map` is refused or
    not followed). A private field with the name of a meaningful field, such as `_sliding_window`,
    is not a note, because its writer may have intended an effect. Neither is
    `_remove_final_layer_norm`, which OPT reads.
    """
    return key.startswith("_") and key.lstrip("_") not in MEANINGFUL | {"remove_final_layer_norm"}


def check_fields(hf: Mapping[str, Any], family: Family, ignore: Collection[str]) -> None:
    """Raise ConfigError for an unknown field or an unsupported value.

    `ignore` lists unknown fields to accept.
    """
    if hf.get("quantization_config"):
        raise ConfigError(
            "model.path: quantization_config: a quantized checkpoint cannot be trained; use the "
            "model's bfloat16 or float32 checkpoint"
        )
    for key, wanted in _required(family).items():
        value = hf.get(key)
        if value is not None and value != wanted and (value or wanted):
            raise ConfigError(f"model.path: {key} = {value!r}; only {wanted!r} is supported")
    known = _meaningful(family) | HARMLESS | family.harmless
    for key, value in hf.items():
        if key not in known and key not in ignore and not _is_note(key) and not is_empty(value):
            raise ConfigError(
                f"model.path: the field {key} = {value!r} of config.json is not known for "
                f"{family.model_type} and may change what the model computes; if it does not, add "
                f"{key} to model.ignore_fields"
            )


def is_empty(value: Any) -> bool:
    """Return whether a value is null or an empty list, object or string.

    False and 0 are not empty, because an absent field may mean true or 1.
    """
    return value is None or value in ([], {}, "")
