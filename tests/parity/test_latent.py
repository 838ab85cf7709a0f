"""Compare families with a biased router in HF, in Megatron on one process and in other layouts,
like test_policy.py: DeepSeek-V3 and GLM-4.7-Flash, with latent attention, and GLM-4.5.

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
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 256,
}
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("deepseek_v3", {"rope_parameters": YARN, "num_hidden_layers": 3}),
    "moonlight": ("deepseek_v3", {**MOONLIGHT, "tie_word_embeddings": True}),
    "dense": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "glm_flash": ("glm4_moe_lite", {}),
    "glm": ("glm4_moe", {"num_hidden_layers": 3, "has_mtp": True}),
    "glm_air": ("glm4_moe", {"use_qk_norm": False}),  # biases without norms
    "glm_plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
}
HEAD_DIM = 32
"""Columns of a head of GLM-4.5, of which half rotate."""
IN_LAYOUTS = ("yarn", "moonlight", "glm")
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
            config = tiny_config(model__path=folder, **{**plain, **layout}, model__drop_mtp=True)
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
    check_same(comparable(actual, biases), comparable(expected, biases))


def comparable(actual: Observed, biases: set[str]) -> Observed:
    """Return the results without router biases, which HF does not train, and without moves of key
    biases in columns that do not rotate.

    Such a bias adds the same number to all scores of a query. Without norms its gradient is 0
    except for rounding, which AdamW makes as large as any other gradient.
    """

    def others(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if name not in biases}

    moved = {
        name: tensor.unflatten(0, (-1, HEAD_DIM))[:, : HEAD_DIM // 2]
        if name.endswith("k_proj.bias")
        else tensor
        for name, tensor in others(actual.moved).items()
    }
    return replace(actual, gradients=others(actual.gradients), moved=moved)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model(family, root / name, seed=1, **overrides))
        for name, (family, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    return run_ranks(observe, 1, 1, folders, ONE_RANK)[0]


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    sparse = {name: folders[name] for name in IN_LAYOUTS}
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
    [(model, layout) for model in IN_LAYOUTS for layout in TWO_RANKS]
    + [("dense", layout) for layout in DENSE],
)
def test_every_layout_gives_the_result_of_one_rank(
    model: str, layout: str, one_rank: Any, two_ranks: Any
) -> None:
    check(two_ranks[model, layout], one_rank[model, "packed"])
