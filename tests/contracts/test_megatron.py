"""Test the undocumented names of Megatron-core that this project uses.

`make test` checks the installed version, `make test-contracts` also the next one, so that an
upgrade fails here first. Parity tests (CORE in the Makefile) show whether names still mean the
same.
"""

from __future__ import annotations

import pytest

from tests.contracts.names import check_arguments, check_name, imports_of

C = "megatron.core."
DISPATCH = f"{C}transformer.moe.token_dispatcher:"
LATENT = f"{C}transformer.multi_latent_attention:"
GPT = f"{C}models.gpt.gpt_model:GPTModel"
CHAINED = f"{C}optimizer.optimizer:ChainedOptimizer."
SHARDED = f"{C}optimizer.distrib_optimizer:DistributedOptimizer."

NAMES = {
    # Replaced while Megatron runs without CUDA.
    "policy/device.py": f"""
        {C}tensor_parallel.random:_CUDA_RNG_STATE_TRACKER
        {C}tensor_parallel.random:_CUDA_RNG_STATE_TRACKER_INITIALIZED
        {C}tensor_parallel.random:_get_cuda_rng_state
        {C}tensor_parallel.random:_set_cuda_rng_state
        {C}optimizer.clip_grads:multi_tensor_applier
        {C}optimizer.clip_grads:multi_tensor_scale_impl
        {C}optimizer.clip_grads:l2_norm_impl
        {C}optimizer.optimizer:multi_tensor_applier
        {C}optimizer.optimizer:multi_tensor_scale_impl
        {C}utils:local_multi_tensor_applier
        {C}utils:local_multi_tensor_l2_norm
        {C}utils:local_multi_tensor_scale""",
    "policy/activation.py": f"""
        {C}transformer.mlp:bias_swiglu_impl
        {C}transformer.mlp:weighted_bias_swiglu_impl
        {C}transformer.moe.experts:weighted_bias_swiglu_impl
        {C}transformer.moe.shared_experts:bias_swiglu_impl""",
    "policy/rope.py": f"""
        {LATENT}apply_rotary_pos_emb
        {C}models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb""",
    # Replaced permanently.
    "policy/attention.py": f"""
        {LATENT}Linear {LATENT}HAVE_TE {LATENT}TELinear {LATENT}MLASelfAttention""",
    # Overridden, or called although not documented.
    "policy/model.py": f"{GPT}.shared_embedding_or_output_weight",
    "policy/optimizer.py": f"{SHARDED}_get_model_param_range_map",
    "policy/policy.py": f"""
        {CHAINED}prepare_grads {CHAINED}get_grad_norm {CHAINED}step_with_ready_grads
        {CHAINED}param_groups {SHARDED}get_parameters
        {C}distributed:DistributedDataParallel.zero_grad_buffer""",
}
"""Our file -> private names that it uses. What it imports is read from its source."""

ARGUMENTS = {
    DISPATCH + "maybe_move_tensor_to_cpu": ("tensor as_numpy record_stream", "policy/device.py"),
    GPT + ".forward": (
        "input_ids position_ids attention_mask packed_seq_params padding_mask",
        "policy/step.py",
    ),
    GPT + "._preprocess": ("input_ids position_ids padding_mask", "policy/model.py"),
    GPT + "._postprocess": ("hidden_states", "policy/model.py"),
    f"{C}transformer.attention:apply_rotary_pos_emb": (
        "t freqs config mscale cu_seqlens cp_group",
        "policy/rope.py",
    ),
    f"{C}pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes": (
        "tensor_send_next tensor_send_prev recv_prev recv_next",
        "policy/pipeline.py",
    ),
    f"{C}pipeline_parallel.schedules:get_schedule_table": (
        "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage",
        "policy/pipeline.py",
    ),
    f"{C}transformer.moe.moe_layer:MoELayer.forward": (
        "hidden_states intermediate_tensors padding_mask",
        "policy/moe.py",
    ),
    # These are used on a GPU only.
    f"{C}models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec": (
        "num_experts moe_grouped_gemm qk_layernorm",
        "policy/model.py",
    ),
}
"""Functions that are overridden or replaced, and their arguments. Arguments of functions that are
called on a CPU are tested by every policy that is built."""


IMPORTS = imports_of("megatron")


@pytest.mark.parametrize("user", NAMES)
def test_private_names_exist(user: str) -> None:
    for path in NAMES[user].split():
        check_name(path, user)


def test_imported_names_exist() -> None:
    for path, user in IMPORTS.items():
        check_name(path, user)


@pytest.mark.parametrize("path", ARGUMENTS)
def test_arguments_are_accepted(path: str) -> None:
    check_arguments(path, *ARGUMENTS[path])
