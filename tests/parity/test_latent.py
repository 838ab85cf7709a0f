"""DeepSeek-V3: HF = Megatron on one process = any layout, as in test_policy.py: log-probs, entropy,
every gradient, and loss, gradient norm and weights over three updates. All in float32."""

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
    # Of eight frequencies two are kept, four divided, and two in between.
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

ONE: dict[str, dict[str, Any]] = {"packed": {}, "padded": {"train__packing": "false"}}
TWO: dict[str, dict[str, Any]] = {
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
# Megatron trains experts on tensor-parallel ranks with sequence parallelism alone.
DENSE = {"tp2_alone": {"policy__tensor_parallel": 2}}


def observe(rank: int, world_size: int, folders: dict[str, str], layouts: Any) -> Any:
    """What each layout gives for each model."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    torch.set_num_threads(1)
    batch, loss = (
        random_batch(LENGTHS, vocab=99),
        loss_with(**CLIP),
    )
    plan = partial(plan_microbatches, max_tokens=128)
    seen = {}
    for model, folder in folders.items():
        for name, layout in layouts.items():
            plain = {"policy__tensor_parallel": 1, "policy__sequence_parallel": "false"}
            config = tiny_config(model__path=folder, **{**plain, **layout})
            policy = MegatronPolicy(config, Ranks(rank, world_size, rank), plan)
            logprobs = policy.logprobs(batch)
            _, gradients = policy.gradients(batch, loss)
            before = {each: tensor.clone() for each, tensor in policy.weights()}
            stats = [policy.update(batch, loss, LR) for _ in range(3)]
            moved = {each: tensor - before[each] for each, tensor in policy.weights()}
            policy.close()
            seen[model, name] = Observed(
                logprobs.logprobs,
                logprobs.entropy,
                gradients,
                [one.loss for one in stats],
                [one.grad_norm for one in stats],
                moved,
            )
    return seen


def check(seen: Observed, wanted: Observed) -> None:
    """The bounds are those of test_policy.py; the router's bias is not trained."""
    biases = {name for name in seen.moved if name.endswith(BIAS)}
    for name in biases:
        assert not seen.moved[name].any()
        assert not seen.gradients[name].any()
    check_same(without(seen, biases), without(wanted, biases))


def without(seen: Observed, names: set[str]) -> Observed:
    def others(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    return replace(seen, gradients=others(seen.gradients), moved=others(seen.moved))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model("deepseek_v3", root / name, seed=1, **overrides))
        for name, overrides in MODELS.items()
    }


@pytest.fixture(scope="module")
def one(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    return run_ranks(observe, 1, 1, folders, ONE)[0]


@pytest.fixture(scope="module")
def two(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    sparse = {name: folder for name, folder in folders.items() if name != "dense"}
    seen = run_ranks(observe, 2, 2, sparse, TWO)[0]
    return {**seen, **run_ranks(observe, 2, 2, {"dense": folders["dense"]}, DENSE)[0]}


@pytest.mark.parametrize("rows", ONE)
@pytest.mark.parametrize("model", MODELS)
def test_hf_equals_megatron(model: str, rows: str, folders: dict[str, str], one: Any) -> None:
    wanted = hf_observed(Path(folders[model]), random_batch(LENGTHS, vocab=99), 1.0)
    check(one[model, rows], wanted)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in ("yarn", "whole_query") for layout in TWO]
    + [("dense", layout) for layout in DENSE],
)
def test_layout_gives_the_same(model: str, layout: str, one: Any, two: Any) -> None:
    check(two[model, layout], one[model, "packed"])
