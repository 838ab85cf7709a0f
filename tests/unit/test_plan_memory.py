"""Memory estimates against published parameter counts and values worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dapo_megatron.config import Config
from dapo_megatron.model import architecture
from dapo_megatron.plan import GIB, MemoryItem, activations
from dapo_megatron.plan.estimate import MemoryEstimate, NodeSpec, estimate_memory
from dapo_megatron.plan.forecast import render, to_json
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.plan.speed import Assumptions, Speed, estimate_speed
from dapo_megatron.plan.suggestions import problems, suggest
from dapo_megatron.policy import vocab_parallel
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

DENSE, DENSE_HF = PUBLISHED["Qwen3-8B"]
EXPERTS, EXPERTS_HF = PUBLISHED["Qwen3-30B-A3B"]
ALL_PARTS = "[weights,gradients,optimizer]"
HEADS = ("torch", "triton")


def config_of(folder: Path, hf: dict[str, Any] = DENSE_HF, **overrides: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    settings = {
        "model__path": folder,
        "policy__precision": "bfloat16",
        "policy__tensor_parallel": 1,
        "engine__max_sequences": 256,
        "rollout__max_prompt_tokens": 2048,
        "rollout__max_response_tokens": 20480,
        "train__max_tokens_per_microbatch": 32768,
    }
    return tiny_config(**settings | overrides)


def part(estimate: MemoryEstimate, phase: str, name: str) -> MemoryItem:
    [match] = [item for item in estimate.fullest(phase)[1].parts if item.name == name]
    return match


def names(estimate: MemoryEstimate, phase: str) -> set[str]:
    return {item.name for item in estimate.fullest(phase)[1].parts}


def test_weights_gradients_and_optimizer_of_one_gpu_match_the_parameter_count(
    tmp_path: Path,
) -> None:
    for count, hf in PUBLISHED["Qwen3-8B"], PUBLISHED["Qwen3-30B-A3B"]:
        estimate = estimate_memory(config_of(tmp_path, hf), 1)
        assert part(estimate, "update", "policy weights").num_bytes == 2 * count
        assert part(estimate, "update", "gradients").num_bytes == 4 * count
        # Main weight and two moments.
        assert part(estimate, "update", "optimizer").num_bytes == 12 * count
        assert part(estimate, "generate", "engine weights").num_bytes == 2 * count
        assert [item.num_bytes for item in estimate.disk] == [14 * count] * 2


def test_data_parallel_ranks_shard_only_the_optimizer(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path, policy__context_parallel=2), 8)
    assert part(estimate, "update", "policy weights").num_bytes == 2 * DENSE
    assert part(estimate, "update", "optimizer").num_bytes == 12 * DENSE // 8
    assert estimate.disk[1].num_bytes == (2 + 12) * DENSE


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
    ("keys", "device", "host"),
    [
        ({"optimizer__moments": "bfloat16"}, 8, 0),
        ({"optimizer__cpu_offload": 1.0}, 0, 16),  # on the host, together with its gradients
        ({"optimizer__cpu_offload": 0.25}, 9, 4),
    ],
)
def test_optimizer_state_in_bfloat16_or_on_the_host(
    tmp_path: Path, keys: dict[str, Any], device: int, host: int
) -> None:
    estimate = estimate_memory(config_of(tmp_path, **keys), 1)
    assert part(estimate, "update", "optimizer").num_bytes == device * DENSE
    on_host = [item.num_bytes for item in estimate.host if item.name == "optimizer for good"]
    assert on_host == ([host * DENSE] if host else [])


def test_fp8_parameters_take_half_the_memory(tmp_path: Path) -> None:
    """Except embedding, output head and norms."""
    whole, half = (
        estimate_memory(
            config_of(tmp_path, policy__fp8=f"{{recipe: current, parameters: {kept}}}"), 1
        )
        for kept in ("false", "true")
    )
    saved = (
        part(whole, "update", "policy weights").num_bytes
        - part(half, "update", "policy weights").num_bytes
    )
    rest = 2 * 151936 * 4096
    assert saved == pytest.approx(DENSE - rest, rel=0.001)
    assert "FP8 copies of weights" in names(whole, "update")


# ---------------------------------------------------------------------------- phases


def test_each_phase_counts_the_model_parts_that_are_loaded(tmp_path: Path) -> None:
    trained = {"policy weights", "gradients", "optimizer"}
    engine = {"engine weights", "engine sampler", "engine workspace", "KV cache"}
    processes = {"CUDA and NCCL", "CUDA and NCCL of the engine"}
    estimate = estimate_memory(config_of(tmp_path, policy__offload=ALL_PARTS), 8)
    assert names(estimate, "generate") == engine | processes
    moments = {
        moment.name: {item.name for item in moment.parts}
        for moment in estimate.kinds["every rank"]["sync"]
    }
    both = trained | {"engine weights", "engine sampler"} | processes
    assert moments["weights move"] == both | {"sync buckets"}
    assert moments["engine awake"] == engine | processes
    assert names(estimate, "logprobs") & (trained | engine) == trained
    assert names(estimate, "update") & (trained | engine) == trained
    stays = estimate_memory(config_of(tmp_path, policy__offload="[gradients]"), 8)
    assert names(stays, "generate") & trained == {"policy weights", "optimizer"}
    awake = estimate_memory(config_of(tmp_path, engine__sleep=False), 8)
    for phase in PHASES:
        assert engine <= names(awake, phase)


@pytest.mark.parametrize(
    ("fp8", "copies"),
    [("{recipe: current}", 2), ("{recipe: current, parameters: true}", 1)],
)
@pytest.mark.parametrize("offload", ["[]", "[gradients]"])
def test_fp8_copies_stay_until_the_policy_is_offloaded(
    tmp_path: Path, fp8: str, copies: int, offload: str
) -> None:
    config = config_of(tmp_path, policy__fp8=fp8, policy__offload=offload)
    phases = estimate_memory(config, 1).kinds["every rank"]
    fp8_bytes = {
        (phase, moment.name): sum(
            part.num_bytes for part in moment.parts if part.name == "FP8 copies of weights"
        )
        for phase, moments in phases.items()
        for moment in moments
    }
    whole = copies * (DENSE - 2 * 151936 * 4096)
    for when in [("update", "layer"), ("sync", "weights move")]:
        assert fp8_bytes[when] == pytest.approx(whole, rel=0.001)
    stays = whole if offload == "[]" else 0
    for when in [("sync", "engine awake"), ("generate", "engine awake")]:
        assert fp8_bytes[when] == pytest.approx(stays, rel=0.001)
    # Bfloat16 weights are quantized later, in the first forward pass.
    assert (fp8_bytes["start", "policy made"] > 0) == ("parameters" in fp8)


def test_a_sync_needs_the_memory_of_its_fullest_moment(tmp_path: Path) -> None:
    """A sync has several moments, from both models' weights to the engine's KV cache."""
    keys = {"policy__tensor_parallel": 4, "engine__memory_fraction": 0.9}
    estimate = estimate_memory(config_of(tmp_path, policy__offload=ALL_PARTS, **keys), 8)
    assert estimate.fullest("sync")[1].name == "engine awake"
    assert estimate.num_bytes("sync") == estimate.num_bytes("generate")
    small = estimate_memory(
        config_of(tmp_path, policy__offload=ALL_PARTS), 1, NodeSpec(gpu_memory_gib=40.0)
    )
    moments = {moment.name: moment.num_bytes for moment in small.kinds["every rank"]["sync"]}
    assert small.num_bytes("sync") == max(moments.values()) == moments["weights move"]


def test_layer_and_head_do_not_use_memory_at_the_same_time(tmp_path: Path) -> None:
    estimate = estimate_memory(
        config_of(tmp_path, policy__pipeline_parallel=2, engine__tensor_parallel=1), 2
    )
    first, last = estimate.kinds.values()
    for phase in ("logprobs", "update"):
        assert [moment.name for moment in first[phase]] == ["layer"]
        assert [moment.name for moment in last[phase]] == ["layer", "head"]
        for moment in last[phase]:
            part_names = {part.name for part in moment.parts}
            assert len(part_names & {"a layer at work", "logits, at the head"}) == 1


def test_the_kv_cache_gets_the_memory_that_the_weights_leave(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__tensor_parallel=2, engine__memory_fraction=0.5)
    estimate = estimate_memory(config, 2, NodeSpec(gpu_memory_gib=80.0))
    cache, *rest = (
        part(estimate, "generate", name).num_bytes
        for name in ("KV cache", "engine weights", "engine sampler", "engine workspace")
    )
    assert cache == 40 * GIB - sum(rest)
    assert estimate.sequences == cache // (36 * 2 * 4 * 128 * 2 * 22528)


@pytest.mark.parametrize(("runner", "is_v2"), [("auto", True), ("v2", True), ("v1", False)])
def test_the_sampler_counts_every_token_for_every_sequence(
    runner: str, is_v2: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, engine__max_sequences=512, engine__model_runner=runner)
    sampler = part(estimate_memory(config, 1), "generate", "engine sampler").num_bytes
    counts, masks = 512 * 151_936 * 4, 2 * 512 * 4748 * 4
    assert sampler == (counts + masks + 512 * 4482 * 4 if is_v2 else 0)
    on_cpu = estimate_memory(config, 1, NodeSpec(gpus_per_node=0))
    assert on_cpu.engine.sampler.num_bytes == 0


def test_a_quantized_engine_takes_half_the_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__quantization="fp8")
    weights = part(estimate_memory(config, 1), "generate", "engine weights").num_bytes
    rest = 2 * 151936 * 4096
    assert weights == pytest.approx(DENSE - rest + 2 * rest, rel=0.001)


def test_offloaded_memory_is_counted_on_the_host(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path, policy__offload=ALL_PARTS), 8)
    sizes = {item.name: item.num_bytes for item in estimate.host}
    assert sizes["offloaded while generating"] == (8 * 2 + 12) * DENSE
    assert sizes["a checkpoint's copy"] == (2 + 12) * DENSE


def test_the_reference_model_takes_host_memory_and_a_second_pass(tmp_path: Path) -> None:
    plain, with_kl = (
        estimate_memory(config_of(tmp_path, **keys), 8)
        for keys in ({}, {"loss__kl__coefficient": 0.001})
    )
    sizes = {item.name: item.num_bytes for item in with_kl.host}
    assert sizes["reference model"] == 8 * 2 * DENSE
    assert with_kl.host_bytes - plain.host_bytes == 8 * 2 * DENSE
    assert with_kl.num_bytes("logprobs") == plain.num_bytes("logprobs")
    before, after = (estimate_speed(estimate).seconds for estimate in (plain, with_kl))
    exchanges = 4 * 2 * DENSE / Assumptions().host_bytes_per_second
    assert after["logprobs"] == pytest.approx(2 * before["logprobs"] + exchanges)
    assert after["update"] == before["update"]


def test_the_fullest_stage_is_named(tmp_path: Path) -> None:
    parts = {"policy__pipeline_parallel": 2, "engine__tensor_parallel": 1}
    estimate = estimate_memory(config_of(tmp_path, **parts), 2)
    # Both stages have 18 layers and 151936 vocabulary rows; the first holds two micro-batches.
    assert estimate.fullest("update")[0] == "pipeline stage 1 of 2 (embedding)"
    assert estimate.fullest("logprobs")[0] == "pipeline stage 2 of 2 (output head)"
    assert estimate.disk[1].num_bytes == 14 * DENSE


# ---------------------------------------------------------------------------- activations


def test_activations_of_a_transformer_engine_layer_match_a_count_by_hand(tmp_path: Path) -> None:
    """Bytes per token of a layer of Qwen3-8B in bfloat16, worked out by hand (H 4096, Q 4096,
    G 1024, F 12288): norms 2 (2H + 2H) + 8; QKV projection 2 (Q + 2G); norms of heads: a copy of
    the queries 2Q, and 4 x 40 of rows; queries, outputs and keys 2 (2Q + G); log-sum-exp of the
    scores 4 x 32; MLP 2 x 3F."""
    by_hand = 32776 + 12288 + 8192 + 160 + 18432 + 128 + 73728
    config = config_of(tmp_path)
    micro = activations.micro_of(config, architecture(DENSE_HF), "transformer_engine", on_gpu=True)
    assert activations.kept_by_layer(micro, 0) == by_hand


def test_full_recompute_keeps_only_the_inputs_of_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, policy__recompute="full")
    kept = part(estimate_memory(config, 1), "update", "activations").num_bytes
    # Korthikanti et al. (arXiv 2205.05198), section 5: 2sbh per layer; then the last norm's, the
    # log-prob head's, and the RoPE cosines and sines.
    assert kept == 32768 * (4096 * (36 * 2 + 2 + 2) + 4 + 2 * 2 * 128)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]))
def test_more_tensor_parallelism_never_needs_more_memory(
    tmp_path_factory: pytest.TempPathFactory, size: int, recompute: str
) -> None:
    folder = tmp_path_factory.mktemp("model")
    keys = {"policy__recompute": recompute, "policy__sequence_parallel": size > 1}
    small, large = (
        estimate_memory(config_of(folder, policy__tensor_parallel=n, **keys), 16)
        for n in (size, 2 * size)
    )
    for phase in ("logprobs", "update"):
        assert large.num_bytes(phase) <= small.num_bytes(phase)


@pytest.mark.parametrize(
    "name", ["TILE_BYTES", "MIN_TILE_ENTRIES", "WIDE_TILE_ENTRIES", "ERROR_BYTES"]
)
def test_tile_sizes_equal_those_of_the_policy(name: str) -> None:
    assert getattr(activations, name) == getattr(vocab_parallel, name)


# ---------------------------------------------------------------------------- refusing


def test_a_plan_that_does_not_fit_names_settings_that_free_memory(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path), 8)
    text = "\n".join(problems(estimate))
    assert "update: every rank takes" in text and "more than there is" in text
    assert "policy.recompute=full" in text and "policy.offload" in text
    fits = estimate_memory(
        config_of(
            tmp_path,
            policy__tensor_parallel=8,
            policy__sequence_parallel=True,
            policy__recompute="full",
            policy__offload=ALL_PARTS,
        ),
        16,
    )
    assert not list(problems(fits)) and fits.fits()


def test_too_little_host_memory_is_reported(tmp_path: Path) -> None:
    keys = {"policy__offload": ALL_PARTS, "policy__recompute": "full"}
    keys |= {"policy__tensor_parallel": 2}
    config = config_of(tmp_path, **keys)
    estimate = estimate_memory(config, 8, NodeSpec(host_memory_gib=1024.0))
    taken = estimate.host_bytes / GIB
    assert estimate.fits() and not list(estimate.warnings())
    [warning] = estimate_memory(config, 8, NodeSpec(host_memory_gib=taken / 0.95)).warnings()
    assert "the ranks of a node need" in warning
    short = estimate_memory(config, 8, NodeSpec(host_memory_gib=taken - 10.0))
    assert not short.fits() and not short.excesses()
    [problem] = problems(short)
    assert "10 more than the" in problem
    freed = {item.change: item for item in suggest(short, "host")}
    assert freed["policy.offload=[weights,gradients]"].freed_gib > 80
    assert not estimate_memory(
        config, 8, NodeSpec(gpus_per_node=0, host_memory_gib=1.0)
    ).host_excess_gib


@pytest.mark.parametrize(("left_gib", "warned"), [(3.9, True), (4.1, False)])
def test_a_plan_with_little_memory_left_warns(
    tmp_path: Path, left_gib: float, warned: bool
) -> None:
    """The limit is 5% of 80 GiB. The KV cache, a share of the memory, does not matter."""
    config = config_of(tmp_path, policy__offload=ALL_PARTS, policy__recompute="full")
    roomy = estimate_memory(config, 8, NodeSpec(gpu_memory_gib=80.0))
    update = roomy.num_bytes("update") / GIB
    room = update + left_gib * update / (80.0 - left_gib)
    warnings = list(estimate_memory(config, 8, NodeSpec(gpu_memory_gib=room)).warnings())
    assert any(text.startswith("update leaves") for text in warnings) == warned


def test_suggestions_free_as_much_as_they_promise(tmp_path: Path) -> None:
    """Applying the override of a suggestion reduces the estimate by exactly its `freed_gib`."""
    estimate = estimate_memory(config_of(tmp_path), 8)
    for phase in ("generate", "update", "host"):
        freed = suggest(estimate, phase)
        assert freed == sorted(freed, key=lambda item: (-item.freed_gib, item.change))
        for item in freed:
            if item.change.startswith("twice"):
                continue
            keys = dict(text.split("=") for text in item.change.split(" "))
            overrides = {key.replace(".", "__"): value for key, value in keys.items()}
            other = estimate_memory(config_of(tmp_path, **overrides), 8)
            difference = (estimate.num_bytes(phase) - other.num_bytes(phase)) / GIB
            assert item.freed_gib == pytest.approx(difference)
            assert item.suffices == other.fits()
    assert "policy.offload=[weights,gradients,optimizer]" in {
        item.change for item in suggest(estimate, "generate")
    }


def test_a_kv_cache_too_small_for_one_sequence_is_a_problem(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path, engine__memory_fraction=0.24), 8)
    assert estimate.sequences == 0
    [problem] = [text for text in problems(estimate) if "cannot hold one sequence" in text]
    assert "engine.memory_fraction=0.34" in problem


def test_without_gpus_no_plan_is_refused() -> None:
    estimate = estimate_memory(tiny_config(), 2, NodeSpec(gpus_per_node=0))
    assert estimate.num_bytes("update") < 1.5 * GIB
    assert not list(problems(estimate))
    assert estimate.gpu_memory_bytes is None


def printed(plan: MemoryEstimate, speed: Speed | None = None) -> str:
    console = Console(file=io.StringIO(), width=200)
    render(plan, console, speed)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_printed_plan_names_the_logprob_head_if_it_is_torchs(tmp_path: Path) -> None:
    plans = [estimate_memory(config_of(tmp_path, policy__logprob_head=head), 1) for head in HEADS]
    assert ["counted as torch's" in printed(plan) for plan in plans] == [False, True]


def test_each_kind_of_rank_has_a_table(tmp_path: Path) -> None:
    """The two stages in the middle of four differ only in their activations."""
    keys = {"policy__pipeline_parallel": 4, "policy__recompute": "full"}
    text = printed(estimate_memory(config_of(tmp_path, engine__tensor_parallel=1, **keys), 8))
    titles = [line.strip() for line in text.splitlines() if line.strip().startswith("memory of")]
    assert [title.removesuffix(": GiB of 80") for title in titles] == [
        "memory of pipeline stage 1 of 4 (embedding)",
        "memory of pipeline stage 2 of 4, and 1 more like it, with fewer activations",
        "memory of pipeline stage 4 of 4 (output head)",
    ]
    # Only the last stage has a head. Of layer and head, one is in brackets, because they do not
    # use memory at the same time.
    rows = {
        name: [line.split("│") for line in text.splitlines() if name in line]
        for name in ("a layer at work", "logits, at the head")
    }
    assert [len(lines) for lines in rows.values()] == [3, 1]
    for column in (4, 5):  # log-probs, update
        cells = [lines[-1][column].strip() for lines in rows.values()]
        assert sum(cell.startswith("(") for cell in cells) == 1


def test_a_plan_is_rendered_as_text_and_as_json(tmp_path: Path) -> None:
    estimate = estimate_memory(config_of(tmp_path), 8)
    speed = estimate_speed(estimate)
    text = printed(estimate, speed)
    assert all(word in text for word in (*PHASES, "KV cache", "host memory", "mfu", "free"))
    report = json.loads(json.dumps(to_json(estimate, speed, list(problems(estimate)))))
    assert report["phases"]["update"]["bytes"] == estimate.num_bytes("update")
    assert report["seconds"]["step"] == pytest.approx(speed.step_seconds)
    assert report["phases"]["update"]["moment"] in report["kinds"]["every rank"]["update"]
    assert report["fits"] is False and report["problems"]
