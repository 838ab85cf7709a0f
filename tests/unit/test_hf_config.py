"""config.json: round trips, and metadata fields of other programs, which are ignored."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.model import architecture, to_hf_config
from dapo_megatron.types import ConfigError
from tests.helpers.models import FAMILIES
from tests.helpers.published import PUBLISHED

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(family: str, **changes: Any) -> dict[str, Any]:
    published = next(fields for _, fields in PUBLISHED.values() if fields["model_type"] == family)
    return {**published, **changes}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_written_config_reads_back_as_the_same_architecture(name: str) -> None:
    arch = architecture(PUBLISHED[name][1])
    written = to_hf_config(arch)
    assert architecture(written) == arch
    assert architecture(FAMILIES[arch.family][0](**written).to_dict()) == arch


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("glm4_moe", {"partial_rotary_factor": 1.0}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
        ("glm4_moe", {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
        ("qwen3", {"rope_scaling": YARN}),
        ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.3, "beta_slow": 2}}),
        ("glm4_moe_lite", {"rope_scaling": YARN}),
    ],
)
def test_features_of_a_checkpoint_read_back(family: str, fields: dict[str, Any]) -> None:
    arch = architecture(config(family, **fields))
    assert arch != architecture(config(family))
    written = to_hf_config(arch)
    assert architecture(written) == arch
    assert architecture(FAMILIES[family][0](**written).to_dict()) == arch


METADATA = {
    "_name_or_path": "meta-llama/Llama-3.1-8B",
    "_commit_hash": "0e9e39f249a16976918f6564b8830bc894c89659",
    "_attn_implementation": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "_experts_implementation": "grouped_mm",
    "_from_model_config": True,
    "_pre_quantization_dtype": "float16",
    "_note": {"by": "somebody"},
    "attn_implementation": "sdpa",
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.19",
    "transformers_version": "4.51.3",
    "tokenizer_padding_side": "left",
    "finetuning_task": "chat",
    "suppress_tokens": [1],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_metadata_fields_of_published_checkpoints_are_ignored(family: str) -> None:
    assert architecture(config(family, **METADATA)) == architecture(config(family))


def test_all_fields_of_older_versions_of_transformers_are_accepted() -> None:
    # PretrainedConfig.to_dict() of transformers 4.51, with values that fine-tuning scripts change.
    written = {
        **dict.fromkeys(["return_dict", "output_hidden_states", "do_sample"], True),
        **dict.fromkeys(["output_attentions", "torchscript", "use_bfloat16"], False),
        **dict.fromkeys(["tf_legacy_loss", "is_encoder_decoder", "is_decoder"], False),
        **dict.fromkeys(["add_cross_attention", "tie_encoder_decoder", "early_stopping"], False),
        **dict.fromkeys(["output_scores", "return_dict_in_generate", "use_cache"], False),
        **dict.fromkeys(["remove_invalid_values", "_attn_implementation_autoset"], False),
        **dict.fromkeys(["chunk_size_feed_forward", "min_length", "diversity_penalty"], 0),
        **dict.fromkeys(["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"], 0),
        **dict.fromkeys(["max_length", "num_beams", "num_beam_groups", "top_k"], 20),
        **dict.fromkeys(["temperature", "top_p", "typical_p", "repetition_penalty"], 0.9),
        **dict.fromkeys(["length_penalty", "num_return_sequences"], 1),
        **dict.fromkeys(["bos_token_id", "pad_token_id", "sep_token_id"], 3),
        **dict.fromkeys(["forced_bos_token_id", "forced_eos_token_id"], 4),
        **{key: [5] for key in ["suppress_tokens", "begin_suppress_tokens", "eos_token_id"]},
        **dict.fromkeys(["finetuning_task", "tokenizer_class", "prefix", "problem_type"], "x"),
        **dict.fromkeys(["_name_or_path", "transformers_version", "torch_dtype"], "x"),
        **{key: {"a": 1} for key in ["id2label", "label2id", "task_specific_params"]},
        "architectures": ["LlamaForCausalLM"],
        "bad_words_ids": [[1]],
        "cross_attention_hidden_size": None,
        "decoder_start_token_id": 5,
        "exponential_decay_length_penalty": [5, 1.1],
        "pruned_heads": {},
    }
    assert architecture(config("llama", **written)) == architecture(config("llama"))
    with pytest.raises(ConfigError, match="pruned_heads"):
        architecture(config("llama", **written | {"pruned_heads": {"0": [1]}}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("_sliding_window", 4096),
        ("__sliding_window", 4096),
        ("_attention_bias", True),
        ("_rope_scaling", {"factor": 2.0}),
        ("_num_hidden_layers", 3),
        ("_quantization_config", {"bits": 4}),
        ("_remove_final_layer_norm", True),
        ("sliding_window_pattern", 6),
        ("attn_logit_softcapping", 50.0),
        ("per_layer_config", {"0": {}}),
        ("transformers_weights", "other.safetensors"),
    ],
)
def test_an_unknown_field_that_may_change_the_model_is_rejected(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"the field {field} = .*model.ignore_fields"):
        architecture(config("llama", **{field: value}))
    accepted = architecture(config("llama", **{field: value}), ignore=[field])
    assert accepted == architecture(config("llama"))


def test_models_read_no_private_config_fields_except_two() -> None:
    """`_is_note` relies on this in the installed transformers and vLLM: a private field of
    config.json becomes a private attribute, and models read only these two."""
    packages = {
        "transformers": ["modeling_rope_utils.py", "masking_utils.py"]
        + [f"models/{family}/*_{family}.py" for family in FAMILIES],
        "vllm": [
            "model_executor/layers/rotary_embedding/*.py",
            "model_executor/layers/attention/*.py",
            *("model_executor/models/llama.py", "model_executor/models/mistral.py"),
            *("model_executor/models/qwen2.py", "model_executor/models/qwen3.py"),
            *("model_executor/models/qwen3_moe.py", "model_executor/models/deepseek_v2.py"),
            "model_executor/models/glm4_moe.py",
        ],
    }
    read = re.compile(r"config(?:\.|, [\"'])(_[a-z]\w*)")
    names: set[str] = set()
    for package, patterns in packages.items():
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        for pattern in patterns:
            paths = list(Path(spec.origin).parent.glob(pattern))
            assert paths, pattern
            for path in paths:
                names.update(read.findall(path.read_text(encoding="utf-8")))
    assert "_attn_implementation" in names
    assert names <= {"_attn_implementation", "_experts_implementation"}


@pytest.mark.parametrize("field", ["max_sequence_length", "model_max_length"])
def test_the_lowest_limit_of_positions_is_used(field: str) -> None:
    assert architecture(config("llama", **{field: 64})).max_positions == 64
    assert architecture(config("llama", **{field: 10**7})) == architecture(config("llama"))
    with pytest.raises(ConfigError, match=f"{field} = 'x'"):
        architecture(config("llama", **{field: "x"}))
