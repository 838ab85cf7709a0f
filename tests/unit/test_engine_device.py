"""What an engine is asked for, what is refused, and what it must find when it wakes up."""

from __future__ import annotations

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


# ------------------------------------------------------------------ room to wake up


@given(free=st.integers(0, 80 * GIB), needed=st.integers(0, 80 * GIB))
def test_too_little_memory_is_told_with_both_keys(free: int, needed: int) -> None:
    said = memory.shortage("kv_cache", needed, free, 80 * GIB)
    assert (said is None) == (needed <= free)
    if said is not None:
        assert said.startswith("engine.memory_fraction: the engine's KV cache take")
        assert "policy.offload" in said and "of 80.00 GiB" in said


# ------------------------------------------------------------------ arguments


def test_on_a_gpu_prompts_are_prefilled_in_chunks_and_decoding_is_in_graphs(gpu: None) -> None:
    engine = tiny_config(
        engine__enforce_eager="false", engine__max_batched_tokens=8192, engine__max_sequences=96
    ).engine
    asked = device.arguments(engine)
    assert asked.pop("compilation_config")["max_cudagraph_capture_size"] == 96
    assert asked == {
        "enforce_eager": False,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": engine.memory_fraction,
        "enable_sleep_mode": True,
        "enable_chunked_prefill": True,
    }


def test_an_eager_engine_that_stays_awake(gpu: None) -> None:
    asked = device.arguments(tiny_config(engine__sleep="false").engine)
    assert asked["enforce_eager"] and not asked["enable_sleep_mode"]
    assert not {"compilation_config", "max_num_batched_tokens", "quantization"} & asked.keys()


# ------------------------------------------------------------------ refusals


def refusal(hf: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        device.check_config(tiny_config(**keys), architecture(hf))
    return str(refused.value)


FP8 = {"engine__quantization": "fp8", "policy__precision": "bfloat16"}


def test_experts_are_not_quantised_on_cpu() -> None:
    assert "no FP8 experts for this CPU" in refusal({**HF, **EXPERTS}, **FP8)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"intermediate_size": 640}, "intermediate_size = 640"),
        ({"head_dim": 32}, "attention heads x head size = 128"),
        (EXPERTS, "moe_intermediate_size = 384"),
        ({"hidden_size": 320}, "hidden_size = 320"),
    ],
)
def test_on_a_gpu_ranks_must_hold_whole_blocks(gpu: None, wrong: dict[str, Any], what: str) -> None:
    two = {**FP8, "policy__tensor_parallel": 2}
    said = refusal({**HF, **wrong}, **two)
    assert what in said and "engine.tensor_parallel = 2" in said
    device.check_config(tiny_config(**two), architecture(HF))


def test_on_cpu_a_step_takes_a_whole_prompt() -> None:
    said = refusal(HF, engine__max_batched_tokens=8)
    assert said.startswith("engine.max_batched_tokens: 8 is less than")


def test_on_a_gpu_a_step_may_take_less_than_a_prompt(gpu: None) -> None:
    device.check_config(tiny_config(engine__max_batched_tokens=8), architecture(HF))
