"""Fields of config.json that all families share: what is read, what must have one value, and what
does not matter. Each family's file adds its own; `hf_config.py` refuses the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "partial_rotary_factor": 1.0,
    # vLLM takes tokens to see those behind them, too, where this is false.
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}
"""Fields that must have this value, or be absent or null."""
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
        "gradient_checkpointing",
        # About tokens and sampling: the tokenizer's and generation_config.json's business.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
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
        "output_scores",
        "return_dict_in_generate",
        # Of other tasks, and of how HF's classes answer.
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        # Of transformers' other classes, TensorFlow's and TorchScript's among them.
        "chunk_size_feed_forward",
        "is_decoder",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
    }
)
