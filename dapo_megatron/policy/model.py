"""A Megatron-core GPT model from an HF config: its sizes, and this rank's part of it."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.config import PolicyConfig
from dapo_megatron.model import Architecture, Place, Rope
from dapo_megatron.policy import activation, fp8
from dapo_megatron.policy.device import device, has_cuda
from dapo_megatron.policy.kernels import kernels
from dapo_megatron.policy.specs import block_spec
from dapo_megatron.types import torch_dtype


def initialize_parallel(config: PolicyConfig, seed: int) -> None:
    """Make Megatron's process groups for this layout. Collective, once per process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        # Only Megatron's own checkpoints of the optimizer use them.
        create_gloo_process_groups=False,
    )
    if has_cuda():
        # Layers made on a GPU ask for its generators even if their initializer does nothing.
        model_parallel_cuda_manual_seed(seed)


def destroy_parallel() -> None:
    """Destroy Megatron's process groups, which `destroy_model_parallel` only forgets.

    Each group of gloo has three threads, one of which wakes a hundred times a second.
    """
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # None is the default group
            dist.destroy_process_group(group)


def transformer_config(arch: Architecture, config: PolicyConfig) -> TransformerConfig:
    """Describe the model to Megatron.

    Fused rope is off by default: spikes of log-probs with it are on record (NVIDIA-NeMo/RL issue
    1801). The "fused" activation is that of policy/activation.py."""
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
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused and config.fused_rope,
        # Where Transformer Engine has it, `_accumulate_in_place` turns it on.
        gradient_accumulation_fusion=False,
        persist_layer_norm=fused,
        **_recompute(config),
        **_experts(arch, config, fused),
        **_latent(arch),
        **fp8.model_settings(config),
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
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        "moe_grouped_gemm": fused,
        # Transformer Engine adds up a token's experts in float32 and in a fixed order. Megatron's
        # own kernel uses atomics in bfloat16, and log-probs differ from one pass to the next.
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": 1,
        # Routing and its balance are ours: policy/moe.py.
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.num_layers)],
        "moe_shared_expert_intermediate_size": arch.shared_intermediate_size or None,
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
        # The frequencies are then set to ours; the other two go into the scale of the softmax.
        "rope_type": "rope",
        "rotary_scaling_factor": arch.rope.factor,
        "mscale_all_dim": arch.rope.mscale_all_dim,
    }


def _latent_norms(arch: Architecture, config: PolicyConfig) -> bool:
    """Whether to name the norms of latent attention to Megatron, as 0.19 demands. With them named
    it adds up their gradients over tensor-parallel ranks, which is right by tokens alone."""
    return arch.latent is not None and (config.tensor_parallel == 1 or config.sequence_parallel)


def _leave_unset(weight: Tensor) -> Tensor:
    return weight


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


def build_model(
    arch: Architecture, config: PolicyConfig, *, where: torch.device | None = None
) -> list[Decoder]:
    """This rank's chunks of the model (one, but for interleaved pipelines), weights unset.

    `where`: the meta device, to look at names and shapes alone; None for the policy's own."""
    activation.use_in_megatron()
    with warnings.catch_warnings():
        # About the default of a setting that nobody here has set.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        megatron_config = transformer_config(arch, config)
    megatron_config.init_model_with_meta_device = where is not None
    virtual = config.virtual_pipeline_parallel
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    with where or contextlib.nullcontext():
        chunks = [_build_chunk(arch, config, megatron_config, stage) for stage in stages]
    if where is None:
        for chunk in chunks:
            _settle(chunk, arch)
    return chunks


def _build_chunk(
    arch: Architecture, config: PolicyConfig, megatron: TransformerConfig, vp_stage: int | None
) -> Decoder:
    first = get_transformer_layer_offset(megatron, vp_stage)
    layers = range(first, first + get_num_layers_to_build(megatron, vp_stage))
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = Decoder(
        config=megatron,
        transformer_layer_spec=block_spec(arch, config, layers),
        vocab_size=-(-arch.vocab_size // config.tensor_parallel) * config.tensor_parallel,
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    _accumulate_in_place(model)
    return model


def _accumulate_in_place(model: Decoder) -> None:
    """Let Transformer Engine's linear layers add each micro-batch's gradient to the float32 buffer
    as they compute it, not round it to bfloat16 first.

    That is Megatron's gradient_accumulation_fusion, which would have the output layer ask for
    Apex's kernel, too: here that layer is a weight alone, whose gradient the head makes and the
    data-parallel wrapper adds up as it does those of norms."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _settle(model: Decoder, arch: Architecture) -> None:
    """Onto the device, in one precision for all: torch's norms start in float32, and the
    distributed optimizer mixes up its shards when a parameter group holds two; with the
    frequencies of rope, of which Megatron's own scaling knows Llama 3.1's lengths alone (latent
    attention turns by itself).

    FP8 weights are there already, and are parameters of a kind that nobody else's `to` may touch.
    """
    dtype = model.config.params_dtype

    def moved(value: Tensor) -> Tensor:
        return value.to(device(), dtype if value.is_floating_point() else None)

    for module in model.modules():
        if not any(map(fp8.is_quantized, module.parameters(recurse=False))):
            module._apply(moved, recurse=False)
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = _rope_frequencies(arch).to(device())


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


def _rope_frequencies(arch: Architecture) -> Tensor:
    """Return the frequencies of rotary position embedding (arXiv 2104.09864), as transformers
    computes them: radians per position, [head_dim / 2], float32. High frequencies are kept, and low
    ones are divided by the scaling factor."""
    rope = arch.rope
    steps = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    plain = 1.0 / rope.theta**steps
    kept = _kept_share(rope, plain)
    return (1.0 - kept) * plain / rope.factor + kept * plain


def _kept_share(rope: Rope, plain: Tensor) -> Tensor:
    """Return the share of each frequency that is kept, from 0 to 1."""
    if rope.kind == "llama3":
        # In between, by the number of rotations within the original length.
        turns = rope.original_max_positions * plain / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)
    if rope.kind == "yarn":
        # In between, by the index of the frequency.
        first = max(math.floor(_index_of(rope, rope.beta_fast, len(plain))), 0)
        last = min(math.ceil(_index_of(rope, rope.beta_slow, len(plain))), 2 * len(plain) - 1)
        places = torch.arange(len(plain), dtype=torch.float32)
        return 1.0 - ((places - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return torch.zeros_like(plain)


def _index_of(rope: Rope, turns: float, count: int) -> float:
    """Return the index, among `count` frequencies, that rotates `turns` times within the original
    length."""
    return (
        count * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / math.log(rope.theta)
    )
