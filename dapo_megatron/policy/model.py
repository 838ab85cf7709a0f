"""A Megatron-core GPT model from an HF config: its Megatron config, and this rank's chunks."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture, ChunkPlace
from dapo_megatron.policy import activation, fp8, rope
from dapo_megatron.policy.device import device, has_cuda
from dapo_megatron.policy.kernels import kernels
from dapo_megatron.policy.moe import routers
from dapo_megatron.policy.specs import block_spec
from dapo_megatron.types import torch_dtype


def initialize_parallel(config: PolicyConfig, seed: int) -> None:
    """Create Megatron's process groups for this layout, unless they exist. Collective."""
    if parallel_state.model_parallel_is_initialized():
        assert _sizes(config) == (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        ), "Megatron's process groups have another layout. Close the other policy first"
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        # Only Megatron's own optimizer checkpoints use gloo groups.
        create_gloo_process_groups=False,
    )
    if has_cuda():
        # Layers built on a GPU need its generators, even if their initializer does nothing.
        model_parallel_cuda_manual_seed(seed)


def _sizes(config: PolicyConfig) -> tuple[int, int, int, int]:
    return (
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
    )


def destroy_parallel() -> None:
    """Destroy Megatron's process groups, which `destroy_model_parallel` only forgets.

    Each gloo group has three threads, and one wakes up a hundred times per second.
    """
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # None is the default group
            dist.destroy_process_group(group)


def transformer_config(arch: Architecture, config: PolicyConfig) -> TransformerConfig:
    """Return Megatron's config of the model.

    Fused rope is off by default: spikes in log-probs were reported with it (NVIDIA-NeMo/RL#1801).
    """
    dtype = torch_dtype(config.precision)
    fused = kernels(config, arch) == "transformer_engine"
    make = MLATransformerConfig if arch.latent else TransformerConfig
    return make(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm or _latent_norms(arch, config),
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        attention_output_gate=arch.delta is not None,
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
        # The schedule sums losses. Only policy/step.py divides, by the global token count.
        calculate_per_token_loss=True,
        # Every weight is read from a checkpoint. Initialization must still run, with initializers
        # that do nothing: it marks which parameters are sharded, and gradient norms need the marks.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        use_cpu_initialization=not has_cuda(),
        masked_softmax_fusion=False,
        bias_activation_fusion=True,  # policy/activation.py
        bias_dropout_fusion=False,
        apply_rope_fusion=fused and config.fused_rope,
        # `_accumulate_in_place` turns it on in Transformer Engine's layers.
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
        **_pipeline(config),
        **_recompute(config),
        **_experts(arch, config, fused),
        **_latent(arch),
        **fp8.model_settings(config),
    )


def _pipeline(config: PolicyConfig) -> dict[str, Any]:
    """Return Megatron's settings for communication between pipeline stages."""
    interleaved = config.virtual_pipeline_parallel is not None
    return {
        # Two interleaved stages send to each other in both directions at once. If the sends and
        # receives are batched, a receive can match the wrong send, and both stages hang.
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        # torch waits for batched sends and receives on the device's stream, not on the host.
        "batch_p2p_sync": False,
        # Shapes differ between micro-batches (policy/pipeline.py).
        "variable_seq_lengths": config.pipeline_parallel > 1,
        # Free an output when it is sent. Interleaved stages may still be sending it then.
        "deallocate_pipeline_outputs": config.pipeline_parallel > 1 and not interleaved,
    }


def _recompute(config: PolicyConfig) -> dict[str, Any]:
    """Return Megatron's settings for activation recomputation."""
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
    # The all-to-all dispatcher sends tokens to the ranks of their experts. The all-gather one needs
    # equal lengths on all ranks, and Megatron checks this setting for dense models, too.
    dispatch: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if not arch.num_experts:
        return dispatch
    return dispatch | {
        "num_moe_experts": arch.num_experts,
        "moe_router_topk": arch.experts_per_token,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_grouped_gemm": fused,
        # Transformer Engine sums the outputs of a token's experts in float32 and in a fixed order.
        # Megatron's own kernel uses atomics in bfloat16, so log-probs differ between passes.
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": 1,
        # Routing and the load-balancing loss are in policy/moe.py.
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.num_layers)],
        "moe_shared_expert_intermediate_size": arch.shared_intermediate_size or None,
        "moe_shared_expert_gate": arch.delta is not None,
    }


def _latent(arch: Architecture) -> dict[str, Any]:
    if arch.latent is None:
        return {}
    return {
        "q_lora_rank": arch.latent.q_lora_rank or None,
        "kv_lora_rank": arch.latent.kv_lora_rank,
        "qk_head_dim": arch.latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": arch.latent.qk_rope_head_dim,
        "v_head_dim": arch.latent.v_head_dim,
        # The frequencies are ours (policy/rope.py). The other two settings scale the softmax.
        "rope_type": "rope",
        "rotary_scaling_factor": arch.rope.factor,
        "mscale_all_dim": arch.rope.mscale_all_dim or 0.0,
    }


def _latent_norms(arch: Architecture, config: PolicyConfig) -> bool:
    """Return whether to set qk_layernorm for latent attention, which Megatron-core 0.19 requires.

    With it, Megatron sums the gradients of these norms over tensor-parallel ranks. This is right
    only with sequence parallelism, where each rank sees only some of the tokens.
    """
    return arch.latent is not None and (config.tensor_parallel == 1 or config.sequence_parallel)


def _leave_unset(weight: Tensor) -> Tensor:
    return weight


class Decoder(GPTModel):
    """A GPT model that returns its last hidden states, [length, rows, hidden].

    It computes no logits. The head computes them tile by tile, together with the log-probs
    (policy/vocab_parallel.py). It computes the rotation of rotary embeddings once for all layers
    (policy/rope.py).
    """

    rope_frequencies: Tensor
    rope_scaling: float

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        padding_mask: Tensor | None = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """Return what layers get. `padding_mask` [length, rows, columns] is that of routes.py: this
        rank's part under sequence parallelism. Megatron accepts only a real mask, so it never sees
        it."""
        embedded, _, *rest, _ = super()._preprocess(input_ids, position_ids, **given)
        if torch.is_grad_enabled() and embedded is not None:
            # With a frozen embedding, recomputed layers would take part in no backward pass.
            embedded.requires_grad_()
        rotation = rope.rotation(
            position_ids, self.rope_frequencies, self.config, scaling=self.rope_scaling
        )
        return embedded, rotation, *rest, padding_mask

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output layer, [vocabulary entries of this rank, hidden]; last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(
    arch: Architecture, config: PolicyConfig, *, where: torch.device | None = None
) -> list[Decoder]:
    """Return this rank's chunks of the model, with uninitialized weights.

    There is one chunk, except in interleaved pipelines. `where`: the meta device if only names and
    shapes are needed, None for the policy's device.
    """
    activation.use_in_megatron()
    rope.use_in_megatron()
    with warnings.catch_warnings():
        # Megatron warns about the default of a setting that is not used here.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        megatron_config = transformer_config(arch, config)
    megatron_config.init_model_with_meta_device = where is not None
    virtual = config.virtual_pipeline_parallel
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    with where or contextlib.nullcontext():
        chunks = [_build_chunk(arch, config, megatron_config, stage) for stage in stages]
    if where is None:
        for chunk in chunks:
            _to_device(chunk, arch)
    return chunks


def _build_chunk(
    arch: Architecture, config: PolicyConfig, megatron: TransformerConfig, vp_stage: int | None
) -> Decoder:
    first = get_transformer_layer_offset(megatron, vp_stage)
    layers = range(first, first + get_num_layers_to_build(megatron, vp_stage))
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = Decoder(
        config=megatron,
        transformer_layer_spec=block_spec(arch, config, layers),
        vocab_size=-(-arch.vocab_size // config.tensor_parallel) * config.tensor_parallel,
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="none",  # policy/rope.py
        vp_stage=vp_stage,
    )
    _accumulate_in_place(model)
    _mark_experts(model)
    for slot, router in enumerate(routers(model)):
        router.slot = slot
    return model


def _accumulate_in_place(model: Decoder) -> None:
    """Make Transformer Engine's linear layers add each micro-batch's gradient to the float32 buffer
    directly, without rounding it to bfloat16 first.

    Megatron's gradient_accumulation_fusion does the same, but also requires Apex's kernel for the
    output layer. Here the output layer is never called. The head adds the gradient of its weight to
    the same buffer if the weight is not tied (policy/vocab_parallel.py).
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _mark_experts(model: Decoder) -> None:
    """Mark the expert weights of Transformer Engine as parts of a tensor-parallel group, as
    Megatron's own are. Otherwise the norm of the gradient counts them on the group's first rank
    only (NVIDIA/Megatron-LM#5916, later than 0.16.1)."""
    for module in model.modules():
        if not hasattr(module, "num_gemms"):
            continue
        for weight in module.parameters(recurse=False):  # none of the padding that FP8 adds
            if not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, True, 0, 1)


def _to_device(model: Decoder, arch: Architecture) -> None:
    """Move a chunk to the device in one precision, and set its rotary frequencies.

    One precision, because torch's norms start in float32, and the distributed optimizer mixes up
    its shards if a parameter group has two dtypes. FP8 weights are on the device already, and
    moving or casting them would break them.
    """
    dtype = model.config.params_dtype

    def moved(value: Tensor) -> Tensor:
        return value.to(device(), dtype if value.is_floating_point() else None)

    for module in model.modules():
        if not any(map(fp8.is_quantized, module.parameters(recurse=False))):
            module._apply(moved, recurse=False)
    model.rope_frequencies = rope.frequencies(arch).to(device())
    model.rope_scaling = arch.rope.attention_scaling


def place(chunk: Decoder) -> ChunkPlace:
    """Return the position of a chunk, and of this rank, in the layout."""
    return ChunkPlace(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        first_layer=get_transformer_layer_offset(chunk.config, chunk.vp_stage),
        num_layers=len(chunk.decoder.layers),
        has_embedding=chunk.pre_process,
        has_head=chunk.post_process,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )
