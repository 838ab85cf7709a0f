"""Compare DeepSeek-V3 in HF, in Megatron on one process and in other layouts, like test_policy.py.

Log-probs, entropy, every gradient, and loss, gradient norm and weights over three updates agree in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.parity.test_policy import CLIP, LENGTHS, LR, Observed, check_same, hf_observed

YARN = {
    # Of eight frequencies, two are kept, four divided and two interpolated.
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 5.0,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN, "num_hidden_layers": 3},
    "whole_query": {"q_lora_rank": None, "tie_word_embeddings": True},
    "dense": {"first_k_dense_replace": 2},
}
BIAS = "mlp.gate.e_score_correction_bias"

ONE_RANK: dict[str, dict[str, Any]] = {"packed": {}, "padded": {"train__packing": "false"}}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": {"policy__tensor_parallel": 2, "policy__sequence_parallel": "true"},
    "pp2": {"policy__pipeline_parallel": 2, "policy__first_stage_layers": 1},
    "ep2": {"policy__expert_parallel": 2},
    "cp2": {"policy__context_parallel": 2},
    "recomputed": {"policy__recompute": "full"},
    "tp2_padded": {
        "policy__tensor_parallel": 2,
        "policy__sequence_parallel": "true",
        "train__packing": "false",
    },
}
# Megatron trains experts on tensor-parallel ranks only with sequence parallelism.
DENSE = {"tp2_alone": {"policy__tensor_parallel": 2}}


def observe(rank: int, world_size: int, folders: dict[str, str], layouts: Any) -> Any:
    """Return the Observed of each (model, layout)."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    torch.set_num_threads(1)
    batch, loss = (
        random_batch(LENGTHS, vocab=99),
        loss_with(**CLIP),
    )
    plan = partial(plan_microbatches, max_tokens=128)
    observed = {}
    for model, folder in folders.items():
        for layout_name, layout in layouts.items():
            plain = {"policy__tensor_parallel": 1, "policy__sequence_parallel": "false"}
            config = tiny_config(model__path=folder, **{**plain, **layout})
            policy = MegatronPolicy(config, Ranks(rank, world_size, rank), plan)
            logprobs = policy.logprobs(batch)
            _, gradients = policy.gradients(batch, loss)
            before = {name: tensor.clone() for name, tensor in policy.weights()}
            stats = [policy.update(batch, loss, LR) for _ in range(3)]
            moved = {name: tensor - before[name] for name, tensor in policy.weights()}
            policy.close()
            observed[model, layout_name] = Observed(
                logprobs.logprobs,
                logprobs.entropy,
                gradients,
                [update.loss for update in stats],
                [update.grad_norm for update in stats],
                moved,
            )
    return observed


def check(actual: Observed, expected: Observed) -> None:
    """Assert the bounds of test_policy.py, and that the router's bias is not trained."""
    biases = {name for name in actual.moved if name.endswith(BIAS)}
    for name in biases:
        assert not actual.moved[name].any()
        assert not actual.gradients[name].any()
    check_same(without(actual, biases), without(expected, biases))


def without(actual: Observed, names: set[str]) -> Observed:
    def others(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    return replace(actual, gradients=others(actual.gradients), moved=others(actual.moved))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model("deepseek_v3", root / name, seed=1, **overrides))
        for name, overrides in MODELS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    return run_ranks(observe, 1, 1, folders, ONE_RANK)[0]


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    sparse = {name: folder for name, folder in folders.items() if name != "dense"}
    observed = run_ranks(observe, 2, 2, sparse, TWO_RANKS)[0]
    return {**observed, **run_ranks(observe, 2, 2, {"dense": folders["dense"]}, DENSE)[0]}


@pytest.mark.parametrize("rows", ONE_RANK)
@pytest.mark.parametrize("model", MODELS)
def test_megatron_on_one_rank_equals_hf(
    model: str, rows: str, folders: dict[str, str], one_rank: Any
) -> None:
    expected = hf_observed(Path(folders[model]), random_batch(LENGTHS, vocab=99), 1.0)
    check(one_rank[model, rows], expected)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in ("yarn", "whole_query") for layout in TWO_RANKS]
    + [("dense", layout) for layout in DENSE],
)
def test_every_layout_gives_the_result_of_one_rank(
    model: str, layout: str, one_rank: Any, two_ranks: Any
) -> None:
    check(two_ranks[model, layout], one_rank[model, "packed"])
