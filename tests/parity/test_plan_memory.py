"""Compare the memory estimate with measurements of tiny models on a CPU: every part, and the peaks
of updates and log-probs, from 10% below to 15% above."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import Config
from dapo_megatron.plan import MemoryItem
from dapo_megatron.plan.estimate import MemoryEstimate, NodeSpec, estimate_memory, fullest
from dapo_megatron.plan.layout import data_parallel
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.peak import PeakMemory
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(2400)  # the first test does the measurements

LOSS = loss_with()
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
LATENT_SIZES = {key: value for key, value in SIZES.items() if key != "head_dim"}
OF_EXPERTS = {"moe_intermediate_size": 192}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "plain": ("llama", SIZES),
    "experts": ("qwen3_moe", SIZES | OF_EXPERTS),
    "latent": ("deepseek_v3", LATENT_SIZES | OF_EXPERTS | {"num_key_value_heads": 8}),
    "partial": ("glm4_moe", SIZES | OF_EXPERTS),
    "delta": ("qwen3_5_text", SIZES),
}
SHORT = {"policy__precision": "bfloat16"}
SEQUENCE = {"policy__tensor_parallel": 2, "policy__sequence_parallel": True}
STAGES = {"policy__pipeline_parallel": 2}
LORA = {"policy__lora": "{rank: 8, alpha: 16}"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("dense", 1, {}),
    "dense bfloat16": ("dense", 1, SHORT),
    "plain": ("plain", 1, {}),
    "full": ("dense", 1, {"policy__recompute": "full"}),
    "selective": ("dense", 1, {"policy__recompute": "selective"}),
    "selective plain": ("plain", 1, {"policy__recompute": "selective"}),
    "experts": ("experts", 1, {}),
    "experts bfloat16": ("experts", 1, SHORT),
    "lora": ("dense", 1, LORA),
    "lora experts": ("experts", 1, LORA),
    "lora experts full": ("experts", 1, LORA | {"policy__recompute": "full"}),
    "lora experts bfloat16": ("experts", 1, LORA | SHORT),
    "latent": ("latent", 1, {}),
    "partial": ("partial", 1, {}),
    "delta": ("delta", 1, {}),
    "delta bfloat16": ("delta", 1, SHORT),
    "delta full": ("delta", 1, {"policy__recompute": "full"}),
    "delta sequence": ("delta", 2, SEQUENCE),
    "tensor": ("dense", 2, {"policy__tensor_parallel": 2}),
    "sequence": ("dense", 2, SEQUENCE),
    "sequence bfloat16": ("plain", 2, SEQUENCE | SHORT),
    "pipeline": ("dense", 2, STAGES),
    "pipeline full": ("dense", 2, STAGES | {"policy__recompute": "full"}),
    "interleaved": ("plain", 2, STAGES | {"policy__virtual_pipeline_parallel": 2}),
    "context": ("dense", 2, {"policy__context_parallel": 2}),
    "data bfloat16": ("dense", 2, SHORT),
    "expert": ("experts", 2, {"policy__expert_parallel": 2}),
    "experts sequence": ("experts", 2, SEQUENCE),
}
EVERY_DAY = {
    "lora experts",
    "dense bfloat16",
    "full",
    "experts",
    "sequence",
    "pipeline",
    "context",
    "delta",
}
"""Cases that always run. The others are marked `long`."""
TOKENS = 1024
"""Tokens of a micro-batch per rank: two sequences, or halves of four with context parallelism."""


def config_of(models: Path, case: str) -> Config:
    model, _, keys = CASES[case]
    usual = {
        "policy__tensor_parallel": 1,
        "engine__tensor_parallel": 1,
        "train__max_tokens_per_microbatch": TOKENS,
        "rollout__max_prompt_tokens": 2,
        "rollout__max_response_tokens": TOKENS // 2 - 2,
        "overlong__max_tokens": TOKENS // 2 - 2,
    }
    return tiny_config(model__path=models / model, **{**usual, **keys})


def plan_of(models: Path, case: str) -> MemoryEstimate:
    return estimate_memory(config_of(models, case), CASES[case][1], NodeSpec(gpus_per_node=0))


def measure(rank: int, models: Path, case: str) -> dict[str, Any]:
    """Return bytes of this rank: weights, gradients, peaks of an update and of log-probs, file."""
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner

    config, world = config_of(models, case), CASES[case][1]
    exchange = Ranks(rank, world, rank)
    policy = MegatronPolicy(config, exchange, planner(config.policy, config.train))
    num_bytes: dict[str, Any] = {
        "weights": sum(p.nbytes for model in policy._models() for p in model.parameters()),
        "gradients": sum(
            bucket.grad_data.nbytes
            for chunk in policy._chunks
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
            for bucket in buffer.buckets
        ),
    }
    # The optimizer creates its state in the first update.
    policy.update(random_batch([32] * 8, vocab=2000), LOSS, 1e-3)
    num_micro = 2 * config.policy.pipeline_parallel
    rows = num_micro * data_parallel(config.policy, world) * config.policy.context_parallel
    batch = random_batch([TOKENS // 2] * 2 * rows, vocab=2000)
    with PeakMemory() as peak:
        policy.update(batch, LOSS, 1e-3)
    num_bytes["update"] = peak.peak_bytes
    with PeakMemory() as peak:
        policy.logprobs(batch)
    num_bytes["logprobs"] = peak.peak_bytes
    boxes = policy.snapshot()._boxes
    num_bytes["file"] = sum(box.values.nbytes for box in boxes if not box.key.startswith("rng."))
    policy.close()
    return num_bytes


def all_cases(rank: int, models: Path, cases: list[str]) -> dict[str, Any]:
    return {case: measure(rank, models, case) for case in cases}


Measured = tuple[Path, dict[str, list[dict[str, Any]]]]


def every_case() -> list[Any]:
    """Return all cases. Those not in EVERY_DAY are marked `long`."""
    return [
        pytest.param(case, marks=() if case in EVERY_DAY else pytest.mark.long) for case in CASES
    ]


@pytest.fixture(scope="module")
def measure_all(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Measured]:
    """A function that measures the cases of EVERY_DAY, or all others, once each."""

    @cache
    def measure_them(every_day: bool) -> Measured:
        models = tmp_path_factory.mktemp("models")
        for name, (family, sizes) in MODELS.items():
            make_random_model(family, models / name, **sizes)
        measurements = {}
        for world in (1, 2):
            cases = [
                case
                for case, (_, size, _) in CASES.items()
                if size == world and (case in EVERY_DAY) == every_day
            ]
            ranks = run_ranks(all_cases, world, models, cases, timeout=1200.0)
            measurements |= {case: [of_rank[case] for of_rank in ranks] for case in cases}
        return models, measurements

    return measure_them


@pytest.fixture
def measured(case: str, measure_all: Callable[[bool], Measured]) -> Measured:
    return measure_all(case in EVERY_DAY)


def of_stage(plan: MemoryEstimate, phase: str, rank: int) -> dict[str, MemoryItem]:
    """Return the parts of a rank at the phase's peak. Without pipeline stages all ranks have the
    same."""
    kinds = list(plan.kinds.values())
    moment = fullest(kinds[rank if len(kinds) > 1 else 0][phase])
    return {part.name: part for part in moment.parts}


@pytest.mark.parametrize("case", every_case())
def test_weights_gradients_and_checkpoint_files_have_the_estimated_size(
    case: str, measured: Measured
) -> None:
    models, measurements = measured
    plan, ranks = plan_of(models, case), measurements[case]
    for rank, actual in enumerate(ranks):
        parts = of_stage(plan, "update", rank)
        assert parts["policy weights"].num_bytes == actual["weights"]
        # Megatron pads its buffers: each parameter to 64 elements, each bucket to 128 per rank.
        counted = parts["gradients"].num_bytes
        assert counted <= actual["gradients"] < 1.1 * counted
    # Tensor-parallel ranks share norms, which are counted with each and saved once.
    disk = {part.name: part.num_bytes for part in plan.disk}
    files = [actual["file"] for actual in ranks]
    assert sum(files) <= disk["checkpoint"] <= 1.01 * sum(files)
    assert disk["checkpoint, a rank's part"] == pytest.approx(max(files), rel=0.02)


@pytest.mark.parametrize("case", every_case())
@pytest.mark.parametrize("phase", ["update", "logprobs"])
def test_peaks_are_near_the_estimate(case: str, phase: str, measured: Measured) -> None:
    """Compare only temporary memory, without weights, gradients and optimizer state."""
    models, measurements = measured
    plan = plan_of(models, case)
    always = {"policy weights", "gradients", "optimizer"}
    always |= {"engine weights", "engine sampler", "engine workspace"}
    for rank, actual in enumerate(measurements[case]):
        parts = of_stage(plan, phase, rank).values()
        planned = sum(p.num_bytes for p in parts if p.name not in always | {"KV cache"})
        print(f"{case:20} rank {rank} {phase:9} {planned / 1e6:8.1f} {actual[phase] / 1e6:8.1f} MB")
        assert 0.9 * actual[phase] <= planned <= 1.15 * actual[phase]


def test_memory_is_counted_until_it_is_freed() -> None:
    """Test PeakMemory itself."""
    kept = torch.zeros(1000)
    with PeakMemory() as peak:
        kept += 1  # allocated before
        for _ in range(3):
            first = torch.ones(500)
            second = first * 2
            del first, second
        grown = torch.empty(0)
        grown.resize_(300)
    assert peak.peak_bytes == 2 * 4 * 500
