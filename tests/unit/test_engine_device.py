"""Arguments and environment of the engine, rejected configs, and memory needed to wake up."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.engine import device, memory
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


# ------------------------------------------------------------------ arguments


def test_on_a_gpu_prefill_is_chunked_and_decoding_uses_cuda_graphs(gpu: None) -> None:
    config = tiny_config(
        engine__enforce_eager="false", engine__max_batched_tokens=8192, engine__max_sequences=96
    )
    arguments = device.arguments(config)
    assert arguments.pop("compilation_config")["cudagraph_capture_sizes"][-1] == 96
    assert arguments == {
        "enforce_eager": False,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": config.engine.memory_fraction,
        "enable_sleep_mode": True,
        "enable_chunked_prefill": True,
        "enable_flashinfer_autotune": False,
    }


def test_arguments_of_an_eager_engine_without_sleep(gpu: None) -> None:
    arguments = device.arguments(
        tiny_config(engine__sleep="false", engine__max_batched_tokens="null")
    )
    assert arguments["enforce_eager"] and not arguments["enable_sleep_mode"]
    assert not {"compilation_config", "max_num_batched_tokens", "quantization"} & arguments.keys()


def test_on_a_gpu_logits_of_a_bfloat16_model_are_float32(gpu: None) -> None:
    arguments = device.arguments(tiny_config(policy__precision="bfloat16"))
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize("setting", [None, "true", "false"])
def test_async_scheduling_is_set_only_if_the_config_sets_it(setting: str | None) -> None:
    keys = {} if setting is None else {"engine__async_scheduling": setting}
    arguments = device.arguments(tiny_config(**keys)).get("async_scheduling")
    assert arguments == {None: None, "true": True, "false": False}[setting]


@pytest.mark.parametrize(("setting", "variable"), [("auto", None), ("v1", "0"), ("v2", "1")])
def test_the_model_runner_is_chosen_by_an_environment_variable(
    setting: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    device.choose_model_runner(tiny_config(engine__model_runner=setting).engine)
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == variable


def test_model_runner_v2_is_rejected_without_a_gpu() -> None:
    assert refusal(HF, engine__model_runner="v2").startswith("engine.model_runner: v2 needs")


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


def refusal(hf: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        device.check_config(tiny_config(**keys), architecture(hf))
    return str(raised.value)


FP8 = {"engine__quantization": "fp8", "policy__precision": "bfloat16"}


def test_quantized_experts_are_rejected_on_cpu() -> None:
    assert "no FP8 experts for this CPU" in refusal({**HF, **EXPERTS}, **FP8)


def test_quantized_experts_are_rejected_with_engine_sleep(gpu: None) -> None:
    assert "not for experts in an engine that sleeps" in refusal({**HF, **EXPERTS}, **FP8)


@pytest.mark.parametrize(
    ("wrong", "dimension"),
    [
        ({"intermediate_size": 640}, "intermediate_size = 640"),
        ({"head_dim": 32}, "attention heads x head size = 128"),
        (EXPERTS, "moe_intermediate_size = 384"),
        ({"hidden_size": 320}, "hidden_size = 320"),
    ],
)
def test_quantization_blocks_that_ranks_would_split_are_rejected(
    gpu: None, wrong: dict[str, Any], dimension: str
) -> None:
    two_ranks = {**FP8, "engine__tensor_parallel": 2, "engine__sleep": "false"}
    message = refusal({**HF, **wrong}, **two_ranks)
    assert dimension in message and "engine.tensor_parallel = 2" in message
    device.check_config(tiny_config(**two_ranks), architecture(HF))


def test_on_cpu_max_batched_tokens_must_hold_a_whole_prompt() -> None:
    message = refusal(HF, engine__max_batched_tokens=8)
    assert message.startswith("engine.max_batched_tokens: 8 is less than")


def test_on_a_gpu_max_batched_tokens_may_be_less_than_a_prompt(gpu: None) -> None:
    device.check_config(tiny_config(engine__max_batched_tokens=8), architecture(HF))
