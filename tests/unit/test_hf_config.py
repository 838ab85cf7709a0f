"""config.json: what is read, round trips, metadata that is ignored, and all else that is refused by
name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.engine.device import check_config, has_cuda
from dapo_megatron.model import Rope, architecture, text_fields, to_hf_config
from dapo_megatron.types import ConfigError
from tests.helpers.configs import tiny_config
from tests.helpers.models import FAMILIES
from tests.helpers.published import PUBLISHED, small_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 3.0,
    "low_freq_factor": 1.5,
    "original_max_position_embeddings": 4096,
}


def refusal(hf: dict[str, Any], *ignore: str) -> str:
    with pytest.raises(ConfigError) as raised:
        architecture(hf, ignore)
    message = str(raised.value)
    assert message.startswith("model.path: ") and len(message) < 1000
    return message


# ------------------------------------------------------------------ round trips


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
        ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.3, "beta_slow": 2}}),
        ("glm4_moe_lite", {"rope_scaling": YARN}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}),
    ],
)
def test_features_of_a_checkpoint_read_back(family: str, fields: dict[str, Any]) -> None:
    arch = architecture(small_config(family, **fields))
    assert arch != architecture(small_config(family))
    written = to_hf_config(arch)
    assert architecture(written) == arch
    assert architecture(FAMILIES[family][0](**written).to_dict()) == arch


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_written_by_transformers_are_understood(family: str) -> None:
    needed = {
        "mistral": {"sliding_window": None},
        # Fields that vLLM reads and transformers does not write.
        "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        "glm4_moe_lite": {"first_k_dense_replace": 1},
        "glm4_moe": {"head_dim": 128},  # else 42, of which an odd number would rotate
    }
    written = FAMILIES[family][0](**needed.get(family, {}))
    assert architecture(written.to_dict()).num_layers == written.num_hidden_layers


# ------------------------------------------------------------------ what is read


def test_the_number_of_experts_is_read_under_both_names() -> None:
    arch = architecture(small_config())
    assert (arch.num_experts, arch.experts_per_token, arch.moe_intermediate_size) == (8, 2, 4)
    assert arch.normalize_topk and arch.qk_norm
    renamed = small_config(num_local_experts=8)
    del renamed["num_experts"]
    assert architecture(renamed) == arch
    assert not architecture(small_config(norm_topk_prob=False)).normalize_topk


def test_missing_fields_get_the_defaults_of_transformers() -> None:
    for family, key, value in [
        ("llama", "num_key_value_heads", 4),
        ("qwen3", "head_dim", 128),
        ("llama", "tie_word_embeddings", False),
        ("llama", "rope_theta", 10_000.0),
        ("llama", "head_dim", 1),
    ]:
        incomplete = small_config(family)
        incomplete.pop(key, None)
        assert architecture(incomplete) == architecture({**incomplete, key: value}), key


def test_the_cpu_engine_checks_the_effective_head_dim() -> None:
    if has_cuda():
        pytest.skip("only vLLM on CPU restricts head_dim")
    absent = small_config("qwen3", hidden_size=64)
    del absent["head_dim"]
    check_config(tiny_config(), architecture(absent))  # head_dim is 128 by default
    with pytest.raises(ConfigError, match="head_dim = 16"):
        check_config(tiny_config(), architecture({**absent, "head_dim": None}))


def test_the_lowest_limit_of_positions_is_used() -> None:
    def positions(**fields: Any) -> int:
        return architecture(small_config("qwen3", **fields)).max_positions

    assert positions(max_sequence_length=64) == positions(model_max_length=64) == 64
    assert positions(model_max_length=10**7) == positions() == 256
    # vLLM has no angles beyond those.
    assert positions(rope_scaling=YARN) == 128
    assert positions(rope_scaling={**YARN, "factor": 90}) == 256


def test_rope_is_read_from_all_of_its_fields() -> None:
    new = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    expected = Rope(5e5, "llama3", 32.0, 1.5, 3.0, 4096)
    bare = small_config("llama")
    bare.pop("rope_theta", None)
    for fields in (
        {"rope_parameters": new},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": new},
    ):
        assert architecture({**bare, **fields}).rope == expected
    linear = {"type": "linear", "factor": 4}
    assert architecture(small_config("llama", rope_scaling=linear)).rope == Rope(1e4, "linear", 4.0)
    assert architecture(small_config("qwen3")).rope == Rope(1e6)


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, 1.0),
    ],
)
def test_the_share_of_rotated_columns_is_read(fields: dict[str, Any], rotated: float) -> None:
    published = small_config("glm4_moe", head_dim=8)
    del published["partial_rotary_factor"], published["rope_theta"]
    arch = architecture({**published, **fields})
    assert (arch.rope.partial_rotary_factor, arch.rotary_dim) == (rotated, 8 * rotated)


def test_the_text_model_of_a_model_for_images_is_read() -> None:
    text = small_config("qwen3_5_text", tie_word_embeddings=True)
    inner = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    released = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**inner, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152},
        "image_token_id": 1,
        "vision_start_token_id": 2,
        "transformers_version": "5.2.0",
        "tie_word_embeddings": True,
    }
    assert architecture(released) == architecture(text)
    assert architecture(released).tie_word_embeddings
    assert text_fields(released)["architectures"] == ["Qwen3_5ForCausalLM"]
    differing = {**released["text_config"], "tie_word_embeddings": False}
    message = refusal({**released, "text_config": differing})
    assert "text_config.tie_word_embeddings = False; tie_word_embeddings = True outside" in message
    assert "the field audio_config" in refusal({**released, "audio_config": {"depth": 1}})
    assert "text_config = 'x'" in refusal({**released, "text_config": "x"})
    assert "only 'qwen3_5_text'" in refusal({**released, "text_config": {"model_type": "llama"}})


# ------------------------------------------------------------------ what is ignored

METADATA: dict[str, Any] = {
    # Notes of programs that fine-tune, convert and publish.
    **dict.fromkeys(["_name_or_path", "_commit_hash", "unsloth_version", "finetuning_task"], "x"),
    **dict.fromkeys(["_attn_implementation_autoset", "_from_model_config", "unsloth_fixed"], True),
    "_attn_implementation": "flash_attention_2",
    "_experts_implementation": "grouped_mm",
    "_pre_quantization_dtype": "float16",
    "attn_implementation": "sdpa",
    "tokenizer_padding_side": "left",
    # PretrainedConfig.to_dict() of transformers 4.51, with values that scripts change.
    **dict.fromkeys(["return_dict", "output_hidden_states", "do_sample", "is_causal"], True),
    **dict.fromkeys(["output_attentions", "torchscript", "use_bfloat16"], False),
    **dict.fromkeys(["tf_legacy_loss", "is_encoder_decoder", "is_decoder"], False),
    **dict.fromkeys(["add_cross_attention", "tie_encoder_decoder", "early_stopping"], False),
    **dict.fromkeys(["output_scores", "return_dict_in_generate", "use_cache"], False),
    **dict.fromkeys(["chunk_size_feed_forward", "min_length", "diversity_penalty"], 0),
    **dict.fromkeys(["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"], 0),
    **dict.fromkeys(["max_length", "num_beams", "num_beam_groups", "top_k"], 20),
    **dict.fromkeys(["temperature", "top_p", "typical_p", "repetition_penalty"], 0.9),
    **dict.fromkeys(["length_penalty", "num_return_sequences"], 1),
    **dict.fromkeys(["bos_token_id", "pad_token_id", "sep_token_id", "forced_eos_token_id"], 3),
    **{key: [5] for key in ["suppress_tokens", "begin_suppress_tokens", "eos_token_id"]},
    **dict.fromkeys(["tokenizer_class", "prefix", "problem_type", "torch_dtype"], "x"),
    **{key: {"a": 1} for key in ["id2label", "label2id", "task_specific_params"]},
    "bad_words_ids": [[1]],
    "exponential_decay_length_penalty": [5, 1.1],
    "pruned_heads": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_metadata_is_ignored(family: str) -> None:
    assert architecture(small_config(family, **METADATA)) == architecture(small_config(family))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": 0.5, "output_router_logits": True}),  # of training
        # Qwen3-Coder
        ("qwen3_moe", {"qkv_bias": False, "use_qk_norm": True}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 0}),
        ("mistral", {"sliding_window": 256}),  # as long as the model
        ("qwen3_5_text", {"output_gate_type": "silu", "mtp_num_hidden_layers": 0}),
        ("qwen3_5_text", {"output_gate_type": "swish"}),
        *(("qwen3_moe", {"no_such_field": value}) for value in (None, [], {}, "")),
        *(("qwen3_moe", {"n_shared_experts": value}) for value in (None, [], {}, "")),
    ],
)
def test_fields_without_effect_are_accepted(family: str, fields: dict[str, Any]) -> None:
    assert architecture(small_config(family, **fields)) == architecture(small_config(family))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("no_such_field", False),  # a missing field may mean true, like is_causal in vLLM
        ("no_such_field", 0),
        ("attn_logit_softcapping", 50.0),
        ("per_layer_config", {"0": {}}),
        ("transformers_weights", "other.safetensors"),
        ("pruned_heads", {"0": [1]}),
        # Private fields, too: their writer may have intended an effect.
        ("_sliding_window", 4096),
        ("_rope_scaling", {"factor": 2.0}),
        ("_quantization_config", {"bits": 4}),
        ("rope_parameters.no_such_field", False),
        ("rope_parameters.attn_factor", 2.0),
        ("rope_parameters.mrope_section", [16, 24]),
    ],
)
def test_an_unknown_field_is_refused_unless_the_user_ignores_it(field: str, value: Any) -> None:
    outer, dot, inner = field.partition(".")
    fields = small_config("llama", **{outer: {inner: value} if dot else value})
    message = refusal(fields, "another")
    assert f"the field {field} = {value!r}" in message and "model.ignore_fields" in message
    assert architecture(fields, [field]) == architecture(small_config("llama"))


UNSUPPORTED: list[tuple[str, str, Any]] = [
    ("qwen3_moe", "decoder_sparse_step", 2),
    ("qwen3_moe", "mlp_only_layers", [0]),
    ("qwen3_moe", "shared_expert_intermediate_size", 64),
    ("qwen3_moe", "n_shared_experts", 1),
    ("qwen3_moe", "moe_router_enable_expert_bias", True),
    ("qwen3_moe", "topk_method", "noaux_tc"),
    ("qwen3_moe", "num_experts_per_tok", 9),
    ("qwen3_moe", "num_local_experts", 4),
    ("qwen3_moe", "model_type", "mixtral"),
    ("qwen3_moe", "use_qk_norm", False),
    ("qwen3", "num_experts", 8),
    ("qwen3", "hidden_act", "gelu"),
    ("qwen3", "attention_bias", True),
    ("qwen3", "is_causal", 0),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "layer_types", ["sliding_attention"]),
    ("qwen2", "use_mrope", True),
    ("llama", "mlp_bias", True),
    ("llama", "pretraining_tp", 2),
    ("llama", "attention_dropout", 0.1),
    ("llama", "sliding_window", 4096),  # transformers ignores it for Llama, but vLLM reads it
    ("llama", "rope_interleaved", True),
    ("llama", "qkv_bias", True),
    ("llama", "num_key_value_heads", 3),
    ("llama", "partial_rotary_factor", 0.25),
    ("mistral", "bias", True),
    ("mistral", "sliding_window", 255),
    ("mistral", "auto_map", {"AutoModel": "modeling.Model"}),
    ("llama", "quantization_config", {"quant_method": "fp8"}),
    ("deepseek_v3", "is_encoder_decoder", True),
    ("deepseek_v3", "rope_interleave", False),
    ("deepseek_v3", "moe_layer_freq", 2),
    ("deepseek_v3", "num_key_value_heads", 2),
    ("deepseek_v3", "head_dim", 64),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v3", "scoring_func", None),
    ("deepseek_v3", "topk_method", "greedy"),
    ("deepseek_v3", "n_group", 3),
    ("deepseek_v3", "n_group", 8),  # groups of one expert
    ("deepseek_v3", "topk_group", 5),
    ("deepseek_v3", "num_experts_per_tok", 5),  # only two groups of two experts are used
    ("glm4_moe_lite", "partial_rotary_factor", 0.5),
    ("glm4_moe_lite", "mlp_layer_types", ["dense", "dense", "sparse", "sparse"]),
    ("glm4_moe_lite", "mlp_layer_types", None),  # one dense layer in transformers
    ("glm4_moe", "partial_rotary_factor", 1.5),
    ("glm4_moe", "partial_rotary_factor", 0.3),  # of 4 columns: 1
    ("glm4_moe", "partial_rotary_factor", None),  # 1.0 in transformers, 0.5 in vLLM
    ("glm4_moe", "attention_bias", "yes"),
    ("qwen3_5_text", "model_type", "qwen4_exp"),
    ("qwen3_5_text", "output_gate_type", "sigmoid"),
    ("qwen3_5_text", "attn_output_gate", False),
    ("qwen3_5_text", "layer_types", ["full_attention", "linear_attention"]),
    ("qwen3_5_text", "linear_num_key_heads", 4),  # of 6 value heads
    ("qwen3_5_moe_text", "norm_topk_prob", False),  # transformers does not read it
    ("qwen3_5_moe_text", "mlp_only_layers", [0]),
]
"""Values of fields that are read, or whose other values the code does not compute."""


@pytest.mark.parametrize(("family", "field", "value"), UNSUPPORTED)
def test_unsupported_values_are_refused_with_their_field(
    family: str, field: str, value: Any
) -> None:
    dense = {"first_k_dense_replace": 2} if (field, value) == ("mlp_layer_types", None) else {}
    message = refusal(small_config(family, **dense, **{field: value}))
    assert field in message
    assert str(value).strip("[]") in message or field in ("quantization_config", "mlp_layer_types")


@pytest.mark.parametrize(
    ("family", "rope", "message"),
    [
        ("llama", {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is miss"),
        ("llama", {**YARN, "truncate": False}, "rope_scaling.truncate = False"),
        ("llama", {**YARN, "beta_fast": None}, "rope_scaling.beta_fast = None"),
        ("llama", {"type": "dynamic", "factor": 2.0}, "rope type 'dynamic'"),
        ("llama", {"type": "linear"}, "factor is missing from rope_scaling"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"type": "llama3", **LLAMA3, "low_freq_factor": 3.0}, "low_freq_factor = 3.0"),
        ("llama", {"rope_theta": 5e5}, "rope_scaling.rope_theta = 500000.0; rope_theta = 10000.0"),
        ("llama", {"type": ["linear"], "factor": 2.0}, "rope type"),
        ("llama", "linear", "rope_scaling = 'linear'; must be an object"),
        ("deepseek_v3", {"type": "linear", "factor": 2.0}, "rope type 'linear'"),
        ("deepseek_v3", {**YARN, "attention_factor": 2.0}, "attention_factor"),
        ("deepseek_v3", {**YARN, "mscale": 0.7}, "rope_scaling.mscale = 0.7"),
    ],
)
def test_unsupported_rope_is_refused_with_its_field(family: str, rope: Any, message: str) -> None:
    fields = small_config(family, rope_theta=1e4, rope_scaling=rope)
    assert message in refusal(fields)
    two = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert "rope_parameters and rope_scaling differ" in refusal({**fields, "rope_parameters": two})


SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor"),
    *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "rms_norm_eps", "rope_scaling.factor", "rope_scaling.beta_fast"),
    *("rope_scaling.original_max_position_embeddings", "rope_scaling.mscale_all_dim"),
)
NO_NUMBERS = [None, "x", True, [2], -1, 2**31 * 1e30, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("key", SIZES)
def test_a_number_that_is_missing_or_invalid_is_refused_with_its_field(key: str) -> None:
    outer, _, inner = key.rpartition(".")
    for value in NO_NUMBERS:
        fields = small_config("deepseek_v3")
        fields |= {outer: {**fields[outer], inner: value}} if outer else {inner: value}
        assert key in refusal(fields)
    fields = small_config("deepseek_v3")
    if not outer:
        del fields[inner]
        assert f"{inner} is missing" in refusal(fields)


STRANGE: list[Any] = [None, True, False, 0, -1, 2**31, 10**400, 1.5, 1e308, float("nan"), ""]
STRANGE += ["x", "\ud800", [], [1], ["x"], [[[]]], {}, {"a": 1}, {"rope_type": "default"}]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=400)
@given(data=st.data())
def test_any_strange_value_is_accepted_or_refused_with_a_config_error(
    family: str, data: st.DataObject
) -> None:
    fields = small_config(family)
    key = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(st.sampled_from(STRANGE))
    if isinstance(fields[key], dict) and data.draw(st.booleans()):
        value = {**fields[key], data.draw(st.sampled_from(sorted(fields[key]))): value}
    try:
        architecture({**fields, key: value})
    except ConfigError as error:
        assert str(error).startswith("model.path: ") and len(str(error)) < 1000
