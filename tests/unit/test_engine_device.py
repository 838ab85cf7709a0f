"""Arguments and environment of the engine, rejected configs, and memory needed to wake up."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.engine import device, memory, routes
from dapo_megatron.model import architecture
from dapo_megatron.types import ConfigError
from tests.helpers.configs import tiny_config

GIB = 2**30
HF = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
EXPERTS: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 384}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)


# ------------------------------------------------------------------ memory to wake up


@given(free=st.integers(0, 80 * GIB), needed=st.integers(0, 80 * GIB))
def test_a_memory_shortage_is_reported_with_both_keys(free: int, needed: int) -> None:
    message = memory.shortage("kv_cache", needed, free, 80 * GIB)
    assert (message is None) == (needed <= free)
    if message is not None:
        assert message.startswith("engine.memory_fraction: the engine's KV cache take")
        assert "policy.offload" in message and "of 80.00 GiB" in message


def test_waking_a_part_needs_its_own_memory_and_that_of_tags_that_wake_with_it() -> None:
    from vllm.device_allocator import DEFERRABLE_TAGS, AllocationData

    assert set(memory.MEMORY_TAGS) == set(DEFERRABLE_TAGS)
    sizes = {"weights": 1, "kv_cache": 10, "workspace": 100, "runtime": 1000}
    asleep = [AllocationData((0, n, 0, 0), tag, is_asleep=True) for tag, n in sizes.items()]
    awake = [AllocationData((0, 10_000, 0, 0), tag) for tag in sizes]
    assert memory.bytes_asleep([*asleep, *awake], "weights") == 1101
    assert memory.bytes_asleep([*asleep, *awake], "kv_cache") == 1110


# ------------------------------------------------------------------ arguments

GRAPHS = {"engine__enforce_eager": "false", "engine__max_batched_tokens": 8192}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (GRAPHS, {"enforce_eager": False, "max_num_batched_tokens": 8192,
                  "enable_sleep_mode": True, "enable_chunked_prefill": True,
                  "enable_flashinfer_autotune": False, "async_scheduling": None}),
        ({"engine__sleep": "false", "engine__max_batched_tokens": "null"},
         {"enforce_eager": True, "enable_sleep_mode": False, "compilation_config": None,
          "max_num_batched_tokens": None, "quantization": None}),
        ({"policy__precision": "bfloat16"}, {"hf_overrides": {"head_dtype": "float32"}}),
        ({"engine__async_scheduling": "true"}, {"async_scheduling": True}),
        ({"engine__async_scheduling": "false"}, {"async_scheduling": False}),
    ],
)  # fmt: skip
def test_arguments_on_a_gpu_follow_the_config(
    gpu: None, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    arch = architecture(HF)
    arguments = device.arguments(tiny_config(**keys), arch)
    assert {name: arguments.get(name) for name in expected} == expected
    fraction = tiny_config(**keys).engine.memory_fraction
    assert arguments["gpu_memory_utilization"] == fraction


@pytest.mark.parametrize(("setting", "variable"), [("auto", None), ("v1", "0"), ("v2", "1")])
def test_the_model_runner_is_chosen_by_an_environment_variable(
    setting: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    device.choose_kernels(tiny_config(engine__model_runner=setting))
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == variable


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_deterministic_run_sums_over_ranks_in_a_fixed_order(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "")
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_SYMM_MEM")
    device.choose_kernels(tiny_config(rollout__deterministic=str(is_deterministic).lower()))
    assert envs.VLLM_ALLREDUCE_USE_SYMM_MEM is not is_deterministic


@pytest.mark.parametrize("is_gpu", [True, False])
def test_kernels_compiled_at_run_time_are_off_by_default(
    is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(device._CUDA_ENVIRONMENT)
    for name in (*names, *device._ENVIRONMENT, device.ENGINE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")  # the user's setting is kept
    monkeypatch.setattr(device, "has_cuda", lambda: is_gpu)
    monkeypatch.setattr(device, "disable_compiler", lambda: None)
    device.prepare_environment()
    assert os.environ["VLLM_USE_DEEP_GEMM"] == "1"
    values = [os.environ.get(name) for name in names if name != "VLLM_USE_DEEP_GEMM"]
    assert values == (["0"] * 3 if is_gpu else [None] * 3)


def test_cuda_graphs_capture_full_decode_without_compilation() -> None:
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    graphs = CompilationConfig(**device._graphs(96))
    assert graphs.mode == CompilationMode.NONE
    assert graphs.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert not graphs.cudagraph_mode.requires_piecewise_compilation()
    assert graphs.cudagraph_capture_sizes[-1] == 96
    methods = _ONLINE_SHORTHANDS[device.FP8]
    assert methods.linear is not None and methods.moe is not None


@given(st.integers(1, 4096))
def test_a_graph_is_captured_for_the_largest_batch(max_sequences: int) -> None:
    """vLLM's model runner V2 itself chooses which of the sizes it captures."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    sizes = device.capture_sizes(max_sequences)
    manager = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        max_num_reqs=max_sequences,
        decode_query_len=1,
        vllm_config=SimpleNamespace(speculative_config=None),
        varlen_decode=False,
        lora_capture_cases=[0],
        _maybe_ubatch_twin=lambda _: None,
        _candidates={},
        _capture_descs={},
        use_breakable_cg=False,
    )
    CudaGraphManager._init_candidates(manager)
    captured = [each.num_tokens for descs in manager._capture_descs.values() for each in descs]
    assert max(captured) == max_sequences
    assert sorted(captured) == sizes


# ------------------------------------------------------------------ rejections


FP8 = {"engine__quantization": "fp8", "policy__precision": "bfloat16"}
TWO_RANKS = {**FP8, "engine__tensor_parallel": 2, "engine__sleep": "false"}


@pytest.mark.parametrize(
    ("is_gpu", "hf", "keys", "message"),
    [
        (False, {}, {"engine__model_runner": "v2"}, "engine.model_runner: v2 needs"),
        (False, EXPERTS, FP8, "no FP8 experts for this CPU"),
        (True, EXPERTS, FP8, "not for experts in an engine that sleeps or uses CUDA graphs"),
        (True, EXPERTS, {**TWO_RANKS, "engine__enforce_eager": "false"}, "uses CUDA graphs"),
        (True, {"intermediate_size": 640}, TWO_RANKS, "intermediate_size = 640"),
        (True, {"head_dim": 32}, TWO_RANKS, "attention heads x head size = 128"),
        (True, EXPERTS, TWO_RANKS, "moe_intermediate_size = 384"),
        (True, {"hidden_size": 320}, TWO_RANKS, "hidden_size = 320"),
        (True, {}, TWO_RANKS, ""),
        (False, {}, {"engine__max_batched_tokens": 8}, "engine.max_batched_tokens: 8 is less than"),
        (True, {}, {"engine__max_batched_tokens": 8}, ""),
    ],
)
def test_configs_that_vllm_cannot_run_are_rejected(
    is_gpu: bool,
    hf: dict[str, Any],
    keys: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: is_gpu)
    config = tiny_config(**keys)
    if not message:
        device.check_config(config, architecture({**HF, **hf}))
        return
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        device.check_config(config, architecture({**HF, **hf}))
    is_split = keys is TWO_RANKS
    assert ("engine.tensor_parallel = 2" in str(raised.value)) == is_split


# ------------------------------------------------------------------ routes


def test_only_routes_of_preempted_requests_wait_for_the_pass_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[bool] = []

    def collective_rpc(name: str, args: tuple[list[int], bool]) -> list[Any]:
        waits.append(args[1])
        return [np.zeros((1, 1, 2)), None]

    manager = SimpleNamespace(get_block_ids=lambda _: ([0],))
    running = SimpleNamespace(num_computed_tokens=1)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    scheduler = SimpleNamespace(
        kv_cache_config=groups,
        kv_cache_manager=manager,
        _free_request_blocks=lambda _: None,
        requests={"2": running},
    )
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    llm_engine = SimpleNamespace(engine_core=core)
    monkeypatch.setenv(routes.ROUTES, "")
    reader = routes.RouteReader(architecture({**HF, **EXPERTS}))
    reader.follow(SimpleNamespace(collective_rpc=collective_rpc, llm_engine=llm_engine))  # type: ignore[arg-type]
    for is_finished in (True, False):
        request = SimpleNamespace(request_id=str(is_finished), is_finished=lambda: is_finished)  # noqa: B023
        scheduler._free_request_blocks(request)
    assert reader.read("2", 1).tolist() == [0, 0]
    assert waits == [False, True, False]
