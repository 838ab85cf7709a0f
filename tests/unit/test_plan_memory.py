"""Estimates of memory and time against published parameter counts and values worked out by hand.

tests/parity/test_families.py compares the counts with Megatron's models, and
tests/parity/test_plan_memory.py compares the estimates with measurements.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config import Config
from dapo_megatron.model import architecture
from dapo_megatron.plan import GIB, MemoryItem, activations
from dapo_megatron.plan.estimate import (
    ENGINE_RANKS,
    PHASES,
    MemoryEstimate,
    NodeSpec,
    estimate_memory,
    save_estimate,
)
from dapo_megatron.plan.forecast import fitting_layouts
from dapo_megatron.plan.layout import policy_ranks
from dapo_megatron.plan.speed import Assumptions, estimate_speed
from dapo_megatron.plan.stage import Stage
from dapo_megatron.policy import vocab_parallel
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

DENSE, DENSE_HF = PUBLISHED["Qwen3-8B"]
EXPERTS, EXPERTS_HF = PUBLISHED["Qwen3-30B-A3B"]
VOCABULARY = 2 * 151936 * 4096
"""Parameters of Qwen3-8B's embedding and head."""
ALL_PARTS = "[weights,gradients,optimizer]"
TRAINED = {"policy weights", "gradients", "optimizer"}
ENGINE = {"engine weights", "engine sampler", "engine workspace", "KV cache"}
CUDA = {"CUDA and NCCL", "CUDA and NCCL of the engine"}
USED = CUDA | {"Transformer Engine's buffers"}
"""Parts that stay in memory from the first update on."""


def config_of(folder: Path, hf: dict[str, Any] = DENSE_HF, **overrides: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    settings = {
        "model__path": folder,
        "policy__precision": "bfloat16",
        "policy__tensor_parallel": 1,
        "engine__tensor_parallel": 1,
        "engine__max_sequences": 256,
        "rollout__max_prompt_tokens": 2048,
        "rollout__max_response_tokens": 20480,
        "train__max_tokens_per_microbatch": 32768,
    }
    return tiny_config(**settings | overrides)


def part(estimate: MemoryEstimate, phase: str, name: str) -> MemoryItem:
    [match] = [item for item in estimate.fullest(phase)[1].parts if item.name == name]
    return match


def moments(estimate: MemoryEstimate, kind: str = "every rank") -> dict[str, dict[str, int]]:
    """Return the sizes of parts at each moment, by `phase: moment`."""
    return {
        f"{phase}: {moment.name}": {item.name: item.num_bytes for item in moment.parts}
        for phase, of_phase in estimate.kinds[kind].items()
        for moment in of_phase
    }


def host(estimate: MemoryEstimate) -> dict[str, int]:
    return {item.name: item.num_bytes for parts in estimate.hosts.values() for item in parts}


# ---------------------------------------------------------------------------- parts


@pytest.mark.parametrize(("count", "hf"), [(DENSE, DENSE_HF), (EXPERTS, EXPERTS_HF)])
def test_parts_of_one_gpu_match_the_parameter_count(
    count: int, hf: dict[str, Any], tmp_path: Path
) -> None:
    estimate = estimate_memory(config_of(tmp_path, hf), 1)
    assert part(estimate, "update", "policy weights").num_bytes == 2 * count
    assert part(estimate, "update", "gradients").num_bytes == 4 * count
    # Main weight and two moments.
    assert part(estimate, "update", "optimizer").num_bytes == 12 * count
    assert part(estimate, "generate", "engine weights").num_bytes == 2 * count
    assert [item.num_bytes for item in estimate.disk] == [14 * count] * 2


def test_experts_are_sharded_over_expert_parallel_ranks(tmp_path: Path) -> None:
    layout = {"tensor_parallel": 4, "sequence_parallel": True, "expert_parallel": 8}
    keys = {f"policy__{key}": value for key, value in layout.items()}
    estimate = estimate_memory(config_of(tmp_path, EXPERTS_HF, **keys), 16)
    experts = 48 * 128 * 3 * 2048 * 768
    # Norms and routers are replicated; the sharded rest is a quarter.
    dense = part(estimate, "update", "policy weights").num_bytes // 2 - experts // 8
    assert (EXPERTS - experts) / 4 < dense < (EXPERTS - experts) / 3.9
    # 4 data-parallel copies of the dense weights, 2 of each expert.
    expected = 12 * dense // 4 + 12 * experts // 8 // 2
    assert part(estimate, "update", "optimizer").num_bytes == expected


@pytest.mark.parametrize(
    ("keys", "device", "on_host"),
    [
        ({"optimizer__moments": "bfloat16"}, 8, 0),
        ({"optimizer__cpu_offload": 1.0}, 0, 16),  # on the host, together with its gradients
        ({"optimizer__cpu_offload": 0.25}, 9, 4),
    ],
)
def test_optimizer_state_in_bfloat16_or_on_the_host(
    tmp_path: Path, keys: dict[str, Any], device: int, on_host: int
) -> None:
    estimate = estimate_memory(config_of(tmp_path, **keys), 1)
    assert part(estimate, "update", "optimizer").num_bytes == device * DENSE
    assert host(estimate).get("optimizer for good", 0) == on_host * DENSE


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("offload", ["[]", "[gradients]"])
def test_fp8_copies_stay_until_the_policy_is_offloaded(
    tmp_path: Path, is_kept: bool, offload: str
) -> None:
    """Weights that exist only in FP8 take a byte each, and half as many copies."""
    fp8 = f"{{recipe: current, parameters: {str(is_kept).lower()}}}"
    by_moment = moments(
        estimate_memory(config_of(tmp_path, policy__fp8=fp8, policy__offload=offload), 1)
    )
    linear = DENSE - VOCABULARY
    weights = by_moment["update: layer"]["policy weights"]
    assert weights == pytest.approx(2 * DENSE - linear * is_kept, rel=0.001)
    copies = {
        when: parts.get("FP8 copies of weights", 0) / linear for when, parts in by_moment.items()
    }
    for when in ("update: layer", "sync: weights move"):
        assert copies[when] == pytest.approx(1 if is_kept else 2, rel=0.001)
    for when in ("sync: engine awake", "generate: engine awake"):
        assert (copies[when] > 0) == (offload == "[]")
    # Bfloat16 weights are quantized later, in the first forward pass.
    assert (copies["start: policy made"] > 0) == is_kept


def test_the_kv_cache_gets_the_memory_that_the_weights_leave(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__tensor_parallel=2, engine__memory_fraction=0.5)
    estimate = estimate_memory(config, 2, NodeSpec(gpu_memory_gib=80.0))
    sizes = {name: part(estimate, "generate", name).num_bytes for name in ENGINE}
    assert sum(sizes.values()) == 40 * GIB
    assert estimate.sequences == sizes["KV cache"] // (36 * 2 * 4 * 128 * 2 * 22528)


@pytest.mark.parametrize(("runner", "is_v2"), [("auto", True), ("v2", True), ("v1", False)])
def test_the_sampler_counts_every_token_for_every_sequence(
    runner: str, is_v2: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, engine__max_sequences=512, engine__model_runner=runner)
    counts, masks = 512 * 151_936 * 4, 2 * 512 * 4748 * 4
    sampler = part(estimate_memory(config, 1), "generate", "engine sampler").num_bytes
    assert sampler == (counts + masks + 512 * 4482 * 4 if is_v2 else 0)


def test_a_quantized_engine_takes_half_the_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__quantization="fp8")
    weights = part(estimate_memory(config, 1), "generate", "engine weights").num_bytes
    assert weights == pytest.approx(DENSE + VOCABULARY, rel=0.001)


def test_what_leaves_the_gpu_is_counted_on_the_host(tmp_path: Path) -> None:
    keys = {"policy__offload": ALL_PARTS, "loss__kl__coefficient": 0.001}
    sizes = host(estimate_memory(config_of(tmp_path, **keys), 8))
    assert sizes["offloaded while generating"] == (8 * 2 + 12) * DENSE
    assert sizes["reference model"] == 8 * 2 * DENSE
    assert sizes["a checkpoint's copy"] == (2 + 12) * DENSE


# ---------------------------------------------------------------------------- phases


def test_each_phase_counts_the_model_parts_that_are_loaded(tmp_path: Path) -> None:
    by_moment = moments(estimate_memory(config_of(tmp_path, policy__offload=ALL_PARTS), 8))
    both = TRAINED | {"engine weights", "engine sampler"} | USED
    assert set(by_moment["start: engine made"]) == ENGINE | CUDA
    assert set(by_moment["start: policy made"]) == TRAINED | CUDA
    assert set(by_moment["generate: engine awake"]) == ENGINE | USED
    assert set(by_moment["sync: weights move"]) == both | {"sync buckets"}
    assert set(by_moment["sync: engine awake"]) == ENGINE | USED
    assert set(by_moment["logprobs: layer"]) == TRAINED | USED | {"a layer at work"}
    at_head = TRAINED | USED | {"activations", "logits, at the head"}
    assert set(by_moment["update: head"]) == at_head
    stays = moments(estimate_memory(config_of(tmp_path, policy__offload="[gradients]"), 8))
    assert set(stays["generate: engine awake"]) & TRAINED == {"policy weights", "optimizer"}
    awake = moments(estimate_memory(config_of(tmp_path, engine__sleep=False), 8))
    assert all(set(parts) >= ENGINE for parts in awake.values())


def test_engines_on_other_gpus_have_memory_of_their_own(tmp_path: Path) -> None:
    keys = {"rollout__on_policy": False, "rollout__deterministic": False}
    config = config_of(tmp_path, engine__colocated=False, engine__replicas=8, **keys)
    estimate = estimate_memory(config, policy_ranks(config, 16), NodeSpec())
    policy, engine = (moments(estimate, kind) for kind in ("every policy rank", ENGINE_RANKS))
    assert not any(ENGINE & set(parts) for parts in policy.values())
    assert all(set(parts) >= ENGINE and not TRAINED & set(parts) for parts in engine.values())
    colocated = moments(estimate_memory(config_of(tmp_path), 8))["update: layer"]
    assert TRAINED | {"activations"} <= policy["update: layer"].keys()
    for name in TRAINED | {"activations"}:
        assert policy["update: layer"][name] == colocated[name]
    of_policy, of_engines = ({item.name for item in parts} for parts in estimate.hosts.values())
    assert "a checkpoint's copy" in of_policy and "grading processes" not in of_policy
    assert of_engines == {"processes", "grading processes"}
    speed = estimate_speed(estimate)
    generate, training = speed.seconds["generate"], speed.training_seconds
    assert speed.step_seconds == pytest.approx(max(generate, training) + speed.seconds["sync"])
    assert min(speed.waiting.values()) == 0 < max(speed.waiting.values()) < 1
    assert speed.sync_bytes == 8 * 2 * DENSE


def test_the_stage_that_takes_most_is_named(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path, policy__pipeline_parallel=2), 2)
    # Both stages have 18 layers and 151936 vocabulary rows; the first holds two micro-batches.
    assert estimate.fullest("update")[0] == "pipeline stage 1 of 2 (embedding)"
    assert estimate.fullest("logprobs")[0] == "pipeline stage 2 of 2 (output head)"
    first, last = (moments(estimate, kind) for kind in estimate.kinds)
    assert "update: head" in last and "update: head" not in first
    assert estimate.disk[1].num_bytes == 14 * DENSE


# ---------------------------------------------------------------------------- activations


def test_activations_of_a_transformer_engine_layer_match_a_count_by_hand(tmp_path: Path) -> None:
    """Bytes per token of a layer of Qwen3-8B in bfloat16, worked out by hand (H 4096, Q 4096,
    G 1024, F 12288): norms 2 (2H + 2H) + 8; norms of heads 2 (Q + G), and 4 x 40 of rows; queries,
    keys, values and outputs 2 (2Q + 2G); log-sum-exp of the scores 4 x 32; MLP 2 x 3F."""
    by_hand = 32776 + 10240 + 160 + 20480 + 128 + 73728
    config = config_of(tmp_path)
    stage = Stage(config, architecture(DENSE_HF), "transformer_engine", 1, 0, on_gpu=True)
    assert activations.kept_by_layer(stage, 0) == by_hand


def test_full_recompute_keeps_only_the_inputs_of_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, policy__recompute="full")
    kept = part(estimate_memory(config, 1), "update", "activations").num_bytes
    # Korthikanti et al. (arXiv 2205.05198), section 5: 2sbh per layer; then the RoPE cosines and
    # sines, rows, and a tile of the log-prob head.
    assert kept == 32768 * (4096 * 36 * 2 + 2 * 2 * 128 + 260) + 32 * 2**20


@pytest.mark.parametrize(
    ("hf", "weights", "workspaces"),
    [
        (DENSE_HF, 6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288, 1),
        (EXPERTS_HF, 5120 * 2048 + 2048 * 4096 + 1536 * 2048 + 2048 * 768, 5),
    ],
)
def test_buffers_of_transformer_engine_match_a_count_by_hand(
    hf: dict[str, Any], weights: int, workspaces: int, tmp_path: Path
) -> None:
    """A bfloat16 gradient of each shape of weight, and workspaces of 32 MiB and 1 KiB."""
    buffers = part(
        estimate_memory(config_of(tmp_path, hf), 1), "update", "Transformer Engine's buffers"
    )
    assert buffers.num_bytes == 2 * weights + workspaces * (32 * 2**20 + 1024)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([DENSE_HF, EXPERTS_HF, PUBLISHED["DeepSeek-V3"][1]]),
)
def test_more_tensor_parallelism_never_needs_more_memory(
    tmp_path_factory: pytest.TempPathFactory, size: int, recompute: str, hf: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    keys = {"policy__recompute": recompute, "policy__sequence_parallel": size > 1}
    small, large = (
        estimate_memory(config_of(folder, hf, policy__tensor_parallel=n, **keys), 16)
        for n in (size, 2 * size)
    )
    for phase in ("logprobs", "update"):
        assert large.num_bytes(phase) <= small.num_bytes(phase)


@pytest.mark.parametrize(
    "name", ["TILE_BYTES", "MIN_TILE_ENTRIES", "WIDE_TILE_ENTRIES", "ERROR_BYTES"]
)
def test_tile_sizes_equal_those_of_the_policy(name: str) -> None:
    assert getattr(activations, name) == getattr(vocab_parallel, name)


# ---------------------------------------------------------------------------- what fits


def test_layouts_that_fit_are_valid_and_fit(tmp_path: Path) -> None:
    """They are overrides of the command line, and their times are those of the changed config."""
    keys = {"policy__offload": ALL_PARTS, "train__max_tokens_per_microbatch": 65536}
    estimate = estimate_memory(config_of(tmp_path, **keys), 8)
    [problem] = estimate.problems()
    assert problem.startswith("update: every rank takes") and "(activations " in problem
    assert "more than there is" in problem
    fitting = fitting_layouts(estimate, Assumptions())
    assert fitting and not any(text == "" for _, text in fitting)
    assert any("policy.recompute=full" in text for _, text in fitting)
    for seconds, text in fitting:
        changed = dict(word.split("=") for word in text.split(" "))
        overrides = {key.replace(".", "__"): value for key, value in changed.items()}
        other = estimate_memory(config_of(tmp_path, **keys | overrides), 8)
        assert other.fits() and not any(other.gpu_warnings())
        assert seconds == pytest.approx(estimate_speed(other).step_seconds)
    assert fitting_layouts(estimate_memory(estimate.config, 1), Assumptions()) == []


def test_host_memory_and_kv_cache_can_be_too_small(tmp_path: Path) -> None:
    keys = {"policy__offload": ALL_PARTS, "policy__recompute": "full"}
    config = config_of(tmp_path, policy__tensor_parallel=2, **keys)
    taken = estimate_memory(config, 8).host_bytes / GIB
    short = estimate_memory(config, 8, NodeSpec(host_memory_gib=taken - 10.0))
    [problem] = short.problems()
    assert problem.startswith("host: ") and ", 10.0 more than a node has" in problem
    [warning] = estimate_memory(config, 8, NodeSpec(host_memory_gib=taken / 0.95)).warnings()
    assert "the ranks of a node need" in warning
    no_cache = estimate_memory(config_of(tmp_path, engine__memory_fraction=0.24, **keys), 8)
    assert any("cannot hold one sequence" in text for text in no_cache.problems())
    assert estimate_memory(tiny_config(), 2, NodeSpec(gpus_per_node=0, host_memory_gib=1.0)).fits()


def test_a_reference_model_takes_a_second_pass(tmp_path: Path) -> None:
    before, after = (
        estimate_speed(estimate_memory(config_of(tmp_path, **keys), 8)).seconds
        for keys in ({}, {"loss__kl__coefficient": 0.001})
    )
    exchanges = 4 * 2 * DENSE / Assumptions().host_bytes_per_second
    assert after["logprobs"] == pytest.approx(2 * before["logprobs"] + exchanges)
    assert after["update"] == before["update"]


def test_plan_json_has_the_phases_that_the_policys_ranks_measure(tmp_path: Path) -> None:
    for keys in ({}, {"engine__colocated": False, "engine__replicas": 1}):
        config, file = tiny_config(policy__tensor_parallel=1, **keys), tmp_path / "plan.json"
        assert save_estimate(config, file, 2, int(79.25 * GIB)) is None
        plan = estimate_memory(config, 2, NodeSpec(gpu_memory_gib=79.25, gpus_per_node=2))
        plan.kinds.pop(ENGINE_RANKS, None)
        kept = json.loads(file.read_text())
        assert kept["device"] == "gpu"
        assert kept["phases"] == {
            phase: plan.num_bytes(phase) / GIB for phase in PHASES if phase != "start"
        }
    failure = save_estimate(config, tmp_path / "missing" / "plan.json", 2, GIB)
    assert failure is not None and failure.startswith("no plan.json: ")
