"""config.json of published checkpoints, and how many parameters each is published with."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}

_QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}

_QWEN25 = _QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

_QWEN3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-2-7b": (
        6_738_415_616,
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf",
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
    ),
    "Llama-3.1-8B-Instruct": (
        8_030_261_248,
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rope_scaling": _llama3_rope(8.0),
            "rope_theta": 500000.0,
            "vocab_size": 128256,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        _LLAMA
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_scaling": _llama3_rope(32.0),
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        _LLAMA
        | {
            "_name_or_path": "checkpoints",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
    ),
    "Mistral-7B-Instruct-v0.3": (
        7_248_023_552,
        {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0",
            "use_cache": True,
            "vocab_size": 32768,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        _QWEN25
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen2.5-32B": (
        32_763_876_352,
        _QWEN25
        | {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 131072,
            "max_window_layers": 64,
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-8B": (
        8_190_735_360,
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        _QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen2.5-Math-7B": (
        7_615_616_512,
        _QWEN25
        | {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 4096,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "use_mrope": False,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-0.6B-Base": (
        596_049_920,
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-4B-Base": (
        4_022_468_096,
        _QWEN3
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 32768,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    # Published in 8 bits, with a layer of multi-token prediction behind these; here without both.
    "DeepSeek-V3": (
        671_026_419_200,
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "initializer_range": 0.02,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1",
            "use_cache": True,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
    ),
}
"""By name: parameters (a tied head not counted), and config.json."""

for _name in ("Qwen3-8B", "Qwen3-30B-A3B"):
    # The base models have the same sizes and fewer positions.
    _count, _hf = PUBLISHED[_name]
    PUBLISHED[f"{_name}-Base"] = (_count, _hf | {"max_position_embeddings": 32768})
