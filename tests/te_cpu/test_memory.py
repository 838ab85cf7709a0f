"""The plan of each config for GPUs is at least what a rank's step takes, and at most 15% more.

memory.py has what is measured, and what is not: memory inside kernels, CUDA, NCCL, engines.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.te_cpu import memory
from tests.te_cpu.cases import needs_wheel

pytestmark = [needs_wheel, pytest.mark.long]
LORA = "policy.lora={rank: 32, alpha: 32}"
CASES = {
    "qwen3_0.6b_one_gpu": [],
    "qwen3_8b": [],
    "qwen2.5_math_7b": [],
    "qwen2.5_32b_dapo": [],
    "qwen2.5_32b_dapo, recompute": ["policy.recompute=full"],
    "qwen3_30b_a3b": [],
    "qwen3_30b_a3b, no recompute": [
        "policy.recompute=none",
        "train.max_tokens_per_microbatch=2560",
    ],
    "qwen3_8b, LoRA": [LORA],
    "qwen3_30b_a3b, LoRA": [LORA],
    "qwen3_30b_a3b, LoRA, no recompute": [
        LORA,
        "policy.recompute=none",
        "train.max_tokens_per_microbatch=2560",
    ],
}
"""Config in model_configs, and overrides."""
MARGIN = 1.15


@pytest.fixture(scope="module")
def measured() -> dict[str, memory.Bytes]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(memory.measure_all, CASES).result()


@pytest.mark.parametrize("case", CASES)
def test_plan_is_at_least_the_measured_memory(case: str, measured: dict[str, memory.Bytes]) -> None:
    actual, planned = measured[case], memory.planned(memory.config_of(case, CASES[case]))
    for of in (actual, planned):
        print(case, {name: round(value / 2**20) for name, value in of.items()}, "MiB")
    assert planned["states"] == pytest.approx(actual["states"], rel=0.001)
    # Routers keep the routes of the last micro-batch.
    assert planned["offloaded"] == pytest.approx(actual["offloaded"], abs=20 * 2**20)
    states = actual["states"]
    for moments in (("layer", "head", "step"), ("logprobs layer", "logprobs head")):
        # Without what is there all the time, of which there is much more.
        peak, estimate = (
            max(each[name] for name in moments) - states for each in (actual, planned)
        )
        assert peak <= estimate <= MARGIN * peak, moments
