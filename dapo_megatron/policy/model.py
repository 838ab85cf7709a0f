"""A Megatron-core GPT model from an HF config: families, layer spec, and this rank's part of it."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.bridge.families import Architecture, Place
from dapo_megatron.config import PolicyConfig
from dapo_megatron.policy.attention import CausalAttention
from dapo_megatron.policy.device import device, has_cuda
from dapo_megatron.policy.latent import LatentAttention
from dapo_megatron.policy.moe import BiasedRouter, ExpertLayer, Router
from dapo_megatron.policy.norm import RMSNorm
from dapo_megatron.policy.rope import rope_frequencies
from dapo_megatron.types import ConfigError


def initialize_parallel(config: PolicyConfig, seed: int) -> None:
    """Make Megatron's process groups for this layout. Collective, once per process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
    )
    if has_cuda():
        # Layers made on a GPU ask for its generators even if their initializer does nothing.
        model_parallel_cuda_manual_seed(seed)


def kernels(config: PolicyConfig) -> str:
    """`transformer_engine` or `local`: what `auto` means here. Raises ConfigError."""
    installed = find_spec("transformer_engine") is not None
    if config.kernels == "auto":
        fused = installed and has_cuda() and config.precision == "bfloat16"
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
    make = MLATransformerConfig if arch.latent else TransformerConfig
    return make(
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
        sequence_parallel=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel,
        num_layers_in_first_pipeline_stage=config.first_stage_layers,
        num_layers_in_last_pipeline_stage=config.last_stage_layers,
        context_parallel_size=config.context_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Two interleaved stages send to each other in both directions at once; in one batch, a
        # receive takes what was meant for the other, and both wait for ever.
        batch_p2p_comm=config.virtual_pipeline_parallel is None,
        overlap_p2p_comm=config.virtual_pipeline_parallel is not None,
        # Rows and lengths differ between micro-batches, so stages tell each other the shape.
        variable_seq_lengths=config.pipeline_parallel > 1,
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
        **_recompute(config),
        **_experts(arch, config, fused),
        **_latent(arch),
    )


def _recompute(config: PolicyConfig) -> dict[str, Any]:
    """Which activations are computed again in the backward pass, in Megatron's words."""
    if config.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if config.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _experts(arch: Architecture, config: PolicyConfig, fused: bool) -> dict[str, Any]:
    # Tokens go to the ranks of their experts. (Megatron checks the dispatcher of dense models too
    # when lengths vary; the other one wants equal lengths on all ranks.)
    dispatch: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if not arch.num_experts:
        return dispatch
    return dispatch | {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.experts_per_token,
        "moe_ffn_hidden_size": arch.expert_ffn,
        "moe_grouped_gemm": fused,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": 1,
        # Routing and its balance are ours: policy/moe.py.
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.num_layers)],
        "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
    }


def _latent(arch: Architecture) -> dict[str, Any]:
    if arch.latent is None:
        return {}
    return {
        "q_lora_rank": arch.latent.query_rank or None,
        "kv_lora_rank": arch.latent.rank,
        "qk_head_dim": arch.latent.plain_dim,
        "qk_pos_emb_head_dim": arch.latent.rope_dim,
        "v_head_dim": arch.latent.value_dim,
        # The frequencies are then set to ours; the other two go into the scale of the softmax.
        "rope_type": "rope",
        "rotary_scaling_factor": arch.rope.factor,
        "mscale_all_dim": arch.rope.sharpening,
    }


def _leave_unset(weight: Tensor) -> Tensor:
    return weight


def layer_spec(arch: Architecture, config: PolicyConfig, number: int) -> ModuleSpec:
    """The modules of a layer, counted over the model: Transformer Engine's, or Megatron's own with
    our attention and norm; experts with our router in both."""
    num_experts = arch.num_experts if arch.has_experts(number) else None
    if kernels(config) == "transformer_engine":
        if arch.latent:
            raise ConfigError(
                f"policy.kernels: {arch.family} runs in Megatron's own layers alone; set local"
            )
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=True, qk_layernorm=arch.qk_norm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=arch.qk_norm,
            multi_latent_attention=arch.latent is not None,
        )
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = CausalAttention
        if arch.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if arch.latent:
            layer.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
    if num_experts:
        experts = spec.submodules.mlp
        experts.module = ExpertLayer
        experts.submodules.router = partial(Router, normalize_topk=arch.normalize_topk)
        if arch.scoring:
            experts.submodules.router = partial(
                BiasedRouter, normalize_topk=arch.normalize_topk, scoring=arch.scoring
            )
    return spec


class Decoder(GPTModel):
    """A GPT model that ends in its last hidden states, [length, rows, hidden].

    Logits are never made here: the head computes them in chunks, together with the log-probs
    (policy/vocab_parallel.py)."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary of this rank, hidden], on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(arch: Architecture, config: PolicyConfig) -> list[Decoder]:
    """This rank's chunks of the model (one, but for interleaved pipelines), weights unset."""
    with warnings.catch_warnings():
        # About the default of a setting that nobody here has set.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        megatron_config = transformer_config(arch, config)
    virtual = config.virtual_pipeline_parallel
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    return [_build_chunk(arch, config, megatron_config, stage) for stage in stages]


def _build_chunk(
    arch: Architecture, config: PolicyConfig, megatron: TransformerConfig, vp_stage: int | None
) -> Decoder:
    spec: Any = layer_spec(arch, config, 0)
    if kernels(config) == "local":
        # Told layer by layer, also for the sake of the norm after the last.
        first = get_transformer_layer_offset(megatron, vp_stage)
        layers = range(first, first + get_num_layers_to_build(megatron, vp_stage))
        specs = [layer_spec(arch, config, layer) for layer in layers]
        spec = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = Decoder(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=-(-arch.vocab // config.tensor_parallel) * config.tensor_parallel,
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    # Megatron's own scaling knows Llama 3.1's lengths alone. Latent attention turns by itself.
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = rope_frequencies(arch).to(device())
    # One precision for all: torch's norms start in float32, and the distributed optimizer mixes up
    # its shards when a parameter group holds two.
    return model.to(device(), getattr(torch, config.precision))


def place(chunk: Decoder) -> Place:
    """Where this rank, and this chunk of its layers, stand in the layout."""
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        first_layer=get_transformer_layer_offset(chunk.config, chunk.vp_stage),
        num_layers=len(chunk.decoder.layers),
        has_embedding=chunk.pre_process,
        has_head=chunk.post_process,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )
