"""Test the undocumented names and behavior of Megatron-core that this project uses.

`make test` checks the installed version, `make test-contracts` also the next one, so that an
upgrade fails here first. Names come first (imports are read from our source), then behavior,
observed in two ranks on tiny models (megatron_probe.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.contracts.megatron_probe import CLIP, DECAY, LENGTHS, NUM_MICRO, observe
from tests.contracts.names import check_arguments, check_name, imports_of
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

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


# ---------------------------------------------------------------------------- behavior, two ranks


Ranks = list[dict[str, Any]]
"""The observations of each rank, by name."""


def observed_in(family: str, probe: str, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = make_random_model(family, tmp_path_factory.mktemp("contracts") / family)
    return run_ranks(observe, 2, 2, str(folder), probe)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return observed_in("qwen2", "dense", tmp_path_factory)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return observed_in("qwen3_moe", "experts", tmp_path_factory)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return observed_in("deepseek_v3", "latent", tmp_path_factory)


def test_schedule_adds_losses_and_data_parallel_ranks_add_gradients(dense: Ranks) -> None:
    """policy/step.py: with calculate_per_token_loss only policy/step.py divides the loss."""
    for rank in dense:
        assert rank["gradient_of_one_each"] == 2 * NUM_MICRO


def test_schedule_returns_the_third_value_of_the_loss_function(dense: Ranks) -> None:
    """policy/step.py: of (loss, tokens, results) it returns the results, in order."""
    assert dense[0]["collected"] == list(range(NUM_MICRO))


def test_schedule_calls_our_finalizer_once(dense: Ranks) -> None:
    """policy/step.py: it calls finalize_model_grads_func of the first chunk's config."""
    assert dense[0]["finalizer_calls"] == 1


def test_gradient_norm_is_that_of_all_ranks_before_clipping(dense: Ranks) -> None:
    """policy/policy.py: prepare_grads, then get_grad_norm."""
    for rank in dense:
        assert rank["norm"] > 100 * CLIP
        assert math.isclose(rank["norm"], rank["norm_by_hand"], rel_tol=1e-5)


def test_step_with_ready_grads_does_not_clip(dense: Ranks) -> None:
    """policy/policy.py clips itself, after it has checked the norm."""
    for rank in dense:
        assert rank["main_norm_before"] == rank["main_norm_after"] > 100 * CLIP / 2


def test_empty_overrides_decay_every_parameter(dense: Ranks) -> None:
    """policy/policy.py: biases and norms are decayed as well."""
    assert dense[0]["decays"] == [DECAY]


def test_learning_rate_is_read_from_the_groups_at_each_step(dense: Ranks) -> None:
    """policy/policy.py sets group["lr"] before each step."""
    assert dense[0]["moved_at_zero_rate"] == 0.0
    assert dense[0]["moved_at_some_rate"] > 0.0


def test_range_maps_split_each_parameter_over_the_ranks(dense: Ranks) -> None:
    """policy/optimizer.py: chained_optimizers, model_param_group_index_map, and "param" ranges."""
    owned: dict[str, list[tuple[int, int]]] = {}
    for rank in dense:
        for name, param_range in rank["ranges"].items():
            owned.setdefault(name, []).append(param_range)
    for name, size in dense[0]["sizes"].items():
        ranges = sorted(owned[name])
        assert [ranges[0][0], ranges[-1][1]] == [0, size], name
        assert sum(end - start for start, end in ranges) == size, name


def test_buckets_hold_every_gradient(dense: Ranks) -> None:
    """policy/policy.py: buffers, expert_parallel_buffers, their buckets' grad_data, main_grad."""
    for rank in dense:
        assert rank["bucket_elements"] >= sum(rank["sizes"].values())
        assert rank["main_grad_is_in_a_bucket"]


def test_model_ends_in_postprocess_with_hidden_states(dense: Ranks) -> None:
    """policy/model.py: _postprocess gets hidden states [length, rows, hidden], which Decoder
    returns."""
    assert dense[0]["hidden_shape"] == (sum(LENGTHS), 1, 128)


def test_packed_attention_gets_three_dimensions_and_the_bounds(dense: Ranks) -> None:
    """policy/attention.py: query [T, heads, D] and cu_seqlens_q reach core attention."""
    assert dense[0]["query_shape"] == (sum(LENGTHS), 4, 32)
    assert dense[0]["bounds"] == [0, LENGTHS[0], sum(LENGTHS)]


@pytest.mark.parametrize("family", ["dense", "latent"])
def test_layers_rotate_by_what_preprocess_returns(
    family: str, request: pytest.FixtureRequest
) -> None:
    """policy/model.py returns a rotation in place of Megatron's angles. policy/rope.py uses it."""
    ranks: Ranks = request.getfixturevalue(family)
    assert ranks[0]["turned_otherwise"] > 1e-3


def test_sharded_parameters_are_marked_although_initializers_do_nothing(dense: Ranks) -> None:
    """policy/model.py: without the mark, gradient norms count shared parameters twice."""
    assert dense[0]["marked"] == {"word_embeddings", "linear_qkv", "linear_proj", "linear_fc1"} | {
        "linear_fc2",
        "output_layer",
    }


def test_padding_mask_reaches_the_experts_unchanged(experts: Ranks) -> None:
    """policy/routes.py passes sequence numbers and experts in it, in a third dimension."""
    assert experts[0]["sequences"] == [0] * LENGTHS[0] + [1] * LENGTHS[1]
    first = [token % 8 for token in range(sum(LENGTHS))]
    assert experts[0]["first_experts"] == first
    assert experts[0]["taken"] == [sorted((expert, (expert + 1) % 8)) for expert in first]


def test_megatron_builds_and_calls_our_router(experts: Ranks) -> None:
    """policy/moe.py: it is called with config and pg_collection and returns (weights, taken)."""
    assert experts[0]["router"] == ("Router", (sum(LENGTHS), 8))


def test_experts_without_allreduce_have_their_own_buffers(experts: Ranks) -> None:
    """policy/moe.py, policy/policy.py: weight.allreduce = False moves it to expert buffers."""
    assert experts[0]["num_expert_buffers"] == 1
    assert experts[0]["only_experts_in_them"]


def test_latent_attention_uses_our_down_projections(latent: Ranks) -> None:
    """policy/attention.py: `Linear` of that module is built with (inputs, outputs, config=)."""
    assert latent[0]["down_projections"] == ["DownProjection", "DownProjection"]


def test_a_second_model_can_be_built_after_destroy_model_parallel(dense: Ranks) -> None:
    """policy/policy.py (close): all observations here are of the second model of a process."""
    assert dense
