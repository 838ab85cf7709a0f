"""Fields of an HF config.json as checked values, and those that are accepted without being read.

Any other field with a non-empty value may change what the model computes, so it is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dapo_megatron.types import ConfigError

_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e30
"""Upper bound of float fields, below the float32 maximum of 3.4e38."""

REQUIRED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
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
"""Fields that must have this value, or be absent or null, unless the family reads them."""
HARMLESS = frozenset(
    [
        # How and with which tools the checkpoint was made and saved.
        *("architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path"),
        *("transformers.js_config", "base_model_name_or_path", "unsloth_fixed", "unsloth_version"),
        *("finetuning_task", "axolotl_version", "mergekit_version", "neftune_noise_alpha"),
        *("initializer_range", "use_cache", "gradient_checkpointing"),
        *("_name_or_path", "_commit_hash", "_from_model_config", "_pre_quantization_dtype"),
        # Choice between equivalent kernels in transformers.
        *("attn_implementation", "use_flash_attn", "experts_implementation"),
        *("_attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
        # Tokens and sampling, which the tokenizer and generation_config.json define.
        *("tokenizer_class", "tokenizer_padding_side", "tokenizer_model_max_length", "prefix"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
        *("suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
        *("max_length", "min_length", "do_sample", "early_stopping", "temperature", "top_k"),
        *("top_p", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("diversity_penalty", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "remove_invalid_values", "output_past"),
        *("output_scores", "return_dict_in_generate"),
        # Other tasks, and outputs of HF's classes.
        *("id2label", "label2id", "problem_type", "num_labels", "classifier_dropout", "loss_type"),
        *("task_specific_params", "return_dict", "output_attentions", "output_hidden_states"),
        # For other classes of transformers, such as TensorFlow's and TorchScript's.
        *("chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder"),
        *("tf_legacy_loss", "torchscript", "use_bfloat16"),
    ]
)
"""Fields that do not change what the model computes."""


class Fields:
    """The fields of config.json, or of an object in it, as checked values. `read` are the names of
    those that were asked for."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """Take also the name of the object; empty for config.json itself."""
        self._values, self._where = values, where
        self.read: set[str] = set()

    def name(self, key: str) -> str:
        """Return a field's name for messages and model.ignore_fields."""
        return f"{self._where}.{key}" if self._where else key

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """Return a value of any type; None if it is absent."""
        self.read.add(key)
        return self._values.get(key)

    def inside(self, key: str) -> Fields:
        """Return the fields of an object in this one; no fields if it is absent or empty."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.refusal(key, "must be an object, or null")
        return Fields(value, self.name(key))

    def required(self, key: str) -> Any:
        """Return a value of any type. Raises ConfigError if it is absent."""
        if key not in self:
            raise ConfigError(f"model.path: {key} is missing from {self._where or 'config.json'}")
        return self.get(key)

    def size(self, key: str, *, least: int = 1) -> int:
        """Return a required integer of at least `least`."""
        value = self.required(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
            raise self.refusal(
                key, f"must be an integer, at least {least} and at most {_MAX_SIZE:,}"
            )
        return value

    def number(self, key: str) -> float:
        """Return a required number above 0."""
        value = self.required(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MAX_NUMBER:  # the comparison is False for NaN
            raise self.refusal(key, f"must be a number above 0, at most {_MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean; absent and null are False."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return bool(value)

    def refusal(self, key: str, remedy: str) -> ConfigError:
        """Return an error that names the field and its value."""
        return ConfigError(f"model.path: {self.name(key)} = {self.get(key)!r:.60}; {remedy}")

    def refuse_unless(self, required: Mapping[str, Any], *, optional: bool = True) -> None:
        """Raise ConfigError for a field that has not the required value. False, 0 and empty values
        are equal. `optional`: it may also be absent or null."""
        for key, wanted in required.items():
            value = self.get(key)
            if not (value is None and optional) and value != wanted and (value or wanted):
                raise self.refusal(key, f"only {wanted!r} is supported")

    def refuse_unknown(self, known: Collection[str], ignore: Collection[str], what: str) -> None:
        """Raise ConfigError for a non-empty field that was not read and is neither `known` nor in
        `ignore`, the fields that the user accepts. `what` is the reader of the fields.

        False and 0 are not empty, because an absent field may mean true or 1.
        """
        for key, value in self._values.items():
            is_empty = value is None or value in ([], {}, "")
            if not is_empty and key not in self.read | set(known) and self.name(key) not in ignore:
                raise ConfigError(
                    f"model.path: the field {self.name(key)} = {value!r:.60} of config.json is not "
                    f"known for {what} and may change what the model computes; if it does not, "
                    f"add {self.name(key)} to model.ignore_fields"
                )
