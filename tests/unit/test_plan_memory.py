"""The plan against published parameter counts and figures worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dapo_megatron.bridge.families import architecture
from dapo_megatron.config import Config
from dapo_megatron.plan import Plan, activations, estimate_speed, make_plan, render, to_json
from dapo_megatron.plan.knobs import knobs
from dapo_megatron.plan.parts import GIB, Part
from dapo_megatron.plan.phases import PHASES
from dapo_megatron.policy import vocab_parallel
from tests.helpers.configs import tiny_config
from tests.helpers.published import PUBLISHED

DENSE, DENSE_HF = PUBLISHED["Qwen3-8B"]
EXPERTS, EXPERTS_HF = PUBLISHED["Qwen3-30B-A3B"]
ALL_PARTS = "[weights,gradients,optimizer]"


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


def part(of: Plan, phase: str, name: str) -> Part:
    [found] = [one for one in of.fullest(phase)[1] if one.name == name]
    return found


def names(of: Plan, phase: str) -> set[str]:
    return {one.name for one in of.fullest(phase)[1]}


def test_one_gpu_holds_every_parameter(tmp_path: Path) -> None:
    for count, hf in PUBLISHED["Qwen3-8B"], PUBLISHED["Qwen3-30B-A3B"]:
        found = make_plan(config_of(tmp_path, hf), 1)
        assert part(found, "update", "policy weights").num_bytes == 2 * count
        assert part(found, "update", "gradients").num_bytes == 4 * count
        # Main weight and two moments.
        assert part(found, "update", "optimizer").num_bytes == 12 * count
        assert part(found, "generate", "engine weights").num_bytes == 2 * count
        assert [one.num_bytes for one in found.disk] == [14 * count] * 2


def test_data_parallel_ranks_share_the_optimizer_alone(tmp_path: Path) -> None:
    found = make_plan(config_of(tmp_path, policy__context_parallel=2), 8)
    assert part(found, "update", "policy weights").num_bytes == 2 * DENSE
    assert part(found, "update", "optimizer").num_bytes == 12 * DENSE // 8
    assert found.disk[1].num_bytes == (8 * 2 + 12) * DENSE


def test_experts_are_shared_out_over_their_own_ranks(tmp_path: Path) -> None:
    layout = {"tensor_parallel": 4, "sequence_parallel": True, "expert_parallel": 8}
    keys = {f"policy__{key}": value for key, value in layout.items()}
    found = make_plan(config_of(tmp_path, EXPERTS_HF, **keys), 16)
    experts = 48 * 128 * 3 * 2048 * 768
    # Norms and routers are whole on every rank; what the ranks cut is at least a quarter.
    dense = part(found, "update", "policy weights").num_bytes // 2 - experts // 8
    assert (EXPERTS - experts) / 4 < dense < (EXPERTS - experts) / 3.9
    # 4 copies of the rest, 2 of each expert.
    wanted = 12 * dense // 4 + 12 * experts // 8 // 2
    assert part(found, "update", "optimizer").num_bytes == wanted


@pytest.mark.parametrize(
    ("keys", "device", "host"),
    [
        ({"optimizer__moments": "bfloat16"}, 8, 0),
        ({"optimizer__cpu_offload": 1.0}, 0, 16),  # and the gradients it is updated by
        ({"optimizer__cpu_offload": 0.25}, 9, 4),
    ],
)
def test_optimizer_in_other_places(
    tmp_path: Path, keys: dict[str, Any], device: int, host: int
) -> None:
    found = make_plan(config_of(tmp_path, **keys), 1)
    assert part(found, "update", "optimizer").num_bytes == device * DENSE
    on_host = [one.num_bytes for one in found.host if one.name == "optimizer for good"]
    assert on_host == ([host * DENSE] if host else [])


def test_fp8_parameters_are_half(tmp_path: Path) -> None:
    """All but embedding, head and norms."""
    whole, half = (
        make_plan(config_of(tmp_path, policy__fp8=f"{{recipe: current, parameters: {kept}}}"), 1)
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


def test_who_is_there_when(tmp_path: Path) -> None:
    trained = {"policy weights", "gradients", "optimizer"}
    engine = {"engine weights", "engine workspace", "KV cache"}
    found = make_plan(config_of(tmp_path, policy__offload=ALL_PARTS), 8)
    assert names(found, "generate") == engine | {"CUDA and NCCL"}
    assert names(found, "sync") == trained | {"engine weights", "CUDA and NCCL", "sync buckets"}
    assert names(found, "logprobs") & (trained | engine) == trained
    assert names(found, "update") & (trained | engine) == trained
    stays = make_plan(config_of(tmp_path, policy__offload="[gradients]"), 8)
    assert names(stays, "generate") & trained == {"policy weights", "optimizer"}
    awake = make_plan(config_of(tmp_path, engine__sleep=False), 8)
    for phase in PHASES:
        assert engine <= names(awake, phase)


def test_cache_holds_what_the_weights_leave(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__tensor_parallel=2, engine__memory_fraction=0.5)
    found = make_plan(config, 2, gpu_memory_gib=80.0)
    cache, *rest = (
        part(found, "generate", name).num_bytes
        for name in ("KV cache", "engine weights", "engine workspace")
    )
    assert cache == 40 * GIB - sum(rest)
    assert found.sequences == cache // (36 * 2 * 4 * 128 * 2 * 22528)


def test_quantised_engine_is_half(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine__quantization="fp8")
    weights = part(make_plan(config, 1), "generate", "engine weights").num_bytes
    rest = 2 * 151936 * 4096
    assert weights == pytest.approx(DENSE - rest + 2 * rest, rel=0.001)


def test_offloaded_memory_is_on_the_host(tmp_path: Path) -> None:
    found = make_plan(config_of(tmp_path, policy__offload=ALL_PARTS), 8)
    sizes = {one.name: one.num_bytes for one in found.host}
    assert sizes["offloaded while generating"] == (8 * 2 + 12) * DENSE
    assert sizes["a checkpoint's copy"] == (8 * 2 + 12) * DENSE


def test_the_fullest_stage_is_named(tmp_path: Path) -> None:
    parts = {"policy__pipeline_parallel": 2, "engine__tensor_parallel": 1}
    found = make_plan(config_of(tmp_path, **parts), 2)
    # Both have 18 layers and 151936 rows; the first holds two micro-batches.
    assert found.fullest("update")[0] == "pipeline stage 1 of 2 (embedding)"
    assert found.fullest("logprobs")[0] == "pipeline stage 2 of 2 (output head)"
    assert found.disk[1].num_bytes == 14 * DENSE


# ---------------------------------------------------------------------------- activations


def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    """By hand, bytes per token of a layer of Qwen3-8B in bfloat16 (H 4096, Q 4096, G 1024, F
    12288): norms 2 (2H + 2H) + 8; projected 2 (Q + 2G); norms of heads, the queries' copy 2Q and
    4 x 40 of rows; queries, outputs, keys 2 (2Q + G); scores' sums 4 x 32; cosines and sines 8 x
    128; MLP 2 x 5F."""
    by_hand = 32776 + 12288 + 8192 + 160 + 18432 + 128 + 1024 + 122880
    config = config_of(tmp_path)
    micro = activations.micro_of(config, architecture(DENSE_HF), "transformer_engine", on_gpu=True)
    assert activations.kept_by_layer(micro, 0) == by_hand


def test_recomputing_leaves_the_inputs(tmp_path: Path) -> None:
    config = config_of(tmp_path, policy__recompute="full")
    kept = part(make_plan(config, 1), "update", "activations").num_bytes
    # Korthikanti et al. (arXiv 2205.05198), section 5: 2sbh per layer; then the last norm's, and
    # what is scored.
    assert kept == 32768 * (4096 * (36 * 2 + 2 + 2) + 4)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]))
def test_more_tensor_parallel_never_takes_more(
    tmp_path_factory: pytest.TempPathFactory, size: int, recompute: str
) -> None:
    folder = tmp_path_factory.mktemp("model")
    keys = {"policy__recompute": recompute, "policy__sequence_parallel": size > 1}
    small, large = (
        make_plan(config_of(folder, policy__tensor_parallel=n, **keys), 16)
        for n in (size, 2 * size)
    )
    for phase in ("logprobs", "update"):
        assert large.num_bytes(phase) <= small.num_bytes(phase)


@pytest.mark.parametrize(
    "name", ["TILE_BYTES", "MIN_TILE_ENTRIES", "WIDE_TILE_ENTRIES", "ERROR_BYTES"]
)
def test_tiles_are_those_of_the_policy(name: str) -> None:
    assert getattr(activations, name) == getattr(vocab_parallel, name)


# ---------------------------------------------------------------------------- refusing


def test_what_does_not_fit_is_said_with_what_frees_it(tmp_path: Path) -> None:
    found = make_plan(config_of(tmp_path), 8)
    problems = "\n".join(found.problems())
    assert "update: every rank takes" in problems and "more than there is" in problems
    assert "policy.recompute=full" in problems and "policy.offload" in problems
    fits = make_plan(
        config_of(
            tmp_path,
            policy__tensor_parallel=8,
            policy__sequence_parallel=True,
            policy__recompute="full",
            policy__offload=ALL_PARTS,
        ),
        16,
    )
    assert not list(fits.problems()) and fits.fits()


def test_knobs_free_what_they_say(tmp_path: Path) -> None:
    """Each is an override: applied, the plan is smaller by just that."""
    found = make_plan(config_of(tmp_path), 8)
    for phase in ("generate", "update"):
        freed = knobs(found, phase)
        assert freed == sorted(freed, key=lambda knob: (-knob.freed_gib, knob.change))
        for knob in freed:
            if knob.change.startswith("twice"):
                continue
            keys = dict(text.split("=") for text in knob.change.split(" "))
            overrides = {key.replace(".", "__"): value for key, value in keys.items()}
            other = make_plan(config_of(tmp_path, **overrides), 8)
            difference = (found.num_bytes(phase) - other.num_bytes(phase)) / GIB
            assert knob.freed_gib == pytest.approx(difference)
            assert knob.suffices == other.fits()
    assert "policy.offload=[weights,gradients,optimizer]" in {
        knob.change for knob in knobs(found, "generate")
    }


def test_a_cache_too_small_for_one_sequence(tmp_path: Path) -> None:
    found = make_plan(config_of(tmp_path, engine__memory_fraction=0.24), 8)
    assert found.sequences == 0
    [problem] = [text for text in found.problems() if "cannot hold one sequence" in text]
    assert "engine.memory_fraction=0.34" in problem


def test_without_gpus_nothing_is_refused() -> None:
    found = make_plan(tiny_config(), 2, gpus_per_node=0)
    assert found.num_bytes("update") < 1.5 * GIB
    assert not list(found.problems())
    assert found.slack_gib("update") is None


def test_figures_for_people_and_programs(tmp_path: Path) -> None:
    found = make_plan(config_of(tmp_path), 8)
    speed = estimate_speed(found)
    console = Console(file=io.StringIO(), width=160)
    render(found, console, speed)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in text for word in (*PHASES, "KV cache", "host memory", "mfu", "free"))
    told = json.loads(json.dumps(to_json(found, speed)))
    assert told["phases"]["update"]["bytes"] == found.num_bytes("update")
    assert told["seconds"]["step"] == pytest.approx(speed.step_seconds)
    assert told["fits"] is False and told["problems"]
