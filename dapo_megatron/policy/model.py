"""A Megatron-core GPT model from an HF config: families, layer spec, and this rank's part of it."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from dapo_megatron.bridge.families import Architecture, Place
from dapo_megatron.config import PolicyConfig
from dapo_megatron.policy.attention import CausalAttention
from dapo_megatron.policy.device import device, has_cuda
from dapo_megatron.types import ConfigError


def initialize_parallel(config: PolicyConfig, seed: int) -> None:
    """Make Megatron's process groups for this layout. Collective, once per process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
    )
    if has_cuda():
        # Layers made on a GPU ask for its generators even if their initializer does nothing.
        model_parallel_cuda_manual_seed(seed)


def kernels(config: PolicyConfig) -> str:
    """`transformer_engine` or `local`: what `auto` means here. Raises ConfigError."""
    installed = find_spec("transformer_engine") is not None
    if config.kernels == "auto":
        fused = installed and has_cuda() and config.precision != "float32"
        return "transformer_engine" if fused else "local"
    if config.kernels == "transformer_engine" and not (installed and has_cuda()):
        raise ConfigError(
            "policy.kernels: transformer_engine needs an NVIDIA GPU and the package "
            "(requirements.txt); use auto or local"
        )
    return config.kernels


def transformer_config(arch: Architecture, config: PolicyConfig) -> TransformerConfig:
    """Megatron's description of the model. Fusions that need CUDA extensions stay off locally."""
    dtype = getattr(torch, config.precision)
    fused = kernels(config) == "transformer_engine"
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Rows and lengths differ between micro-batches, so stages tell each other the shape.
        variable_seq_lengths=config.pipeline_parallel > 1,
        # Megatron checks this of dense models too when lengths vary.
        moe_token_dispatcher_type="alltoall",
        # The schedule sums losses; policy/step.py alone divides, by the global token count.
        calculate_per_token_loss=True,
        # Every weight is read from a checkpoint. Initialization must still run, with nothing to do:
        # it marks which parameters are sharded, without which gradient norms are wrong.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        use_cpu_initialization=not has_cuda(),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
    )


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def layer_spec(arch: Architecture, config: PolicyConfig) -> ModuleSpec:
    """The modules of a layer: Transformer Engine's, or Megatron's own with our attention."""
    if kernels(config) == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def build_model(arch: Architecture, config: PolicyConfig) -> GPTModel:
    """This rank's stage of the model, weights unset."""
    padded_vocab = -(-arch.vocab // config.tensor_parallel) * config.tensor_parallel
    with warnings.catch_warnings():
        # About the default of a setting that nobody here has set.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        megatron_config = transformer_config(arch, config)
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=layer_spec(arch, config),
        vocab_size=padded_vocab,
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        rope_scaling=arch.rope_scaling_factor is not None,
        rope_scaling_factor=arch.rope_scaling_factor or 1.0,
    )
    # One precision for all: torch's norms start in float32, and the distributed optimizer mixes up
    # its shards when a parameter group holds two.
    return model.to(device(), getattr(torch, config.precision))


def place(arch: Architecture) -> Place:
    """Where this rank stands in the layout."""
    stage_layers = arch.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        first_layer=parallel_state.get_pipeline_model_parallel_rank() * stage_layers,
        is_data_parallel_first=parallel_state.get_data_parallel_rank() == 0,
    )
