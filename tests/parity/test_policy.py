"""Test policy parity as a chain: HF = Megatron on one process = two ranks, in every family.

The first link compares with plain torch on the HF model, the second with the one-process result.
Both compare log-probs, entropy, every gradient tensor, and loss, gradient norm and weights over
three optimizer steps. All in float32.

Every model is compared with HF, the models of DEEP also in other layouts. test_layouts.py compares
gradients of all models in all layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algo.loss import dapo_token_loss
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor.measure import distances
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import (
    KIMI_YARN,
    RANDOM_MODELS,
    ROPE,
    load_hf,
    make_random_model,
    per_expert,
)
from tests.helpers.ranks import run_ranks

LR = 1e-4
LENGTHS = (5, 100, 17, 9, 33, 4, 70, 12, 3)
BATCH = random_batch(LENGTHS, vocab=99)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
ODD = {"tie_word_embeddings": True, "vocab_size": 99}
MSCALES = ROPE["yarn"] | {"mscale": 0.9, "mscale_all_dim": 0.7}
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **RANDOM_MODELS,
    "qwen3_tied": ("qwen3", ODD),
    "qwen2_one_group": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3_mscales": ("qwen3", {"rope_parameters": MSCALES}),
    "qwen3_factor": ("qwen3", {"rope_parameters": ROPE["yarn"] | {"attention_factor": 1.3}}),
    "deepseek": ("deepseek_v3", {"rope_parameters": MSCALES, "num_hidden_layers": 3}),
    "kimi": ("deepseek_v3", {"rope_parameters": KIMI_YARN}),
    "moonlight": ("deepseek_v3", {**MOONLIGHT, "tie_word_embeddings": True}),
    "deepseek_dense": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "glm_flash": ("glm4_moe_lite", {}),
    "glm": ("glm4_moe", {"num_hidden_layers": 3, "has_mtp": True}),
    "glm_air": ("glm4_moe", {"use_qk_norm": False}),  # biases without norms
    "glm_plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
}
DEEP = ("qwen3_tied", "qwen3_moe", "deepseek", "qwen3_5_moe")
SHARED_HEAD = "qwen3_5_tied"
"""Two ranks share its key-value head, and so the query heads' gates next to it."""
SEQUENCE = {"policy__tensor_parallel": 2, "policy__sequence_parallel": "true"}
ONE_RANK: dict[str, dict[str, Any]] = {
    "one": {},
    "padded": {"train__packing": "false"},
    "low_temperature": {"rollout__temperature": 0.7},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": SEQUENCE,
    "tp2_padded": {**SEQUENCE, "train__packing": "false"},
    "pp2": {"policy__pipeline_parallel": 2, "policy__first_stage_layers": 1},
    "cp2": {"policy__context_parallel": 2},
    "dp2_recomputed": {"policy__recompute": "full"},
    "ep2": {"policy__expert_parallel": 2},
}
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
HEAD_DIM = 32
"""Columns of a head of GLM-4.5, of which half rotate."""


@dataclass
class Observed:
    """Results of one layout for the same mini-batch.

    `moved` is the change of each weight over three updates. It is about 1e-3 of the weight, so
    comparing it is more sensitive than comparing weights.
    """

    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    moved: dict[str, Tensor]


Cases = dict[tuple[str, str], Observed]
"""Results by model and layout."""


def observe(rank: int, world_size: int, folders: dict[str, str], layouts: Any) -> Cases:
    """Return the results of each model in each layout."""
    torch.set_num_threads(1)
    return {
        (model, name): _observe(Ranks(rank, world_size, rank), folder, layout)
        for name, layout in layouts.items()
        for model, folder in folders.items()
        if is_tested(model, name)
    }


def is_tested(model: str, layout: str) -> bool:
    """Return whether a model is observed in a layout."""
    if model == SHARED_HEAD:
        return layout in ("one", "tp2")
    return layout == "one" or (model in DEEP and (layout != "ep2" or model != "qwen3_tied"))


def _observe(exchange: Ranks, folder: str, layout: dict[str, Any]) -> Observed:
    """Build the policy in this layout, observe it, and destroy Megatron's process groups."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    plain = {"policy__tensor_parallel": 1, "policy__sequence_parallel": "false"}
    config = tiny_config(model__path=folder, model__drop_mtp=True, **{**plain, **layout})
    policy = MegatronPolicy(config, exchange, partial(plan_microbatches, max_tokens=128))
    loss = loss_with(**CLIP)
    logprobs = policy.logprobs(BATCH)
    _, gradients = policy.gradients(BATCH, loss)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    stats = [policy.update(BATCH, loss, LR) for _ in range(3)]
    moved = {name: tensor - before[name] for name, tensor in policy.weights()}
    policy.close()
    return Observed(
        logprobs.logprobs,
        logprobs.entropy,
        gradients,
        [update.loss for update in stats],
        [update.grad_norm for update in stats],
        moved,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model(family, root / name, seed=1, **overrides))
        for name, (family, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> Cases:
    return dict(run_ranks(observe, 1, 1, folders, ONE_RANK)[0])


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str]) -> Cases:
    deep = {name: folders[name] for name in (*DEEP, SHARED_HEAD)}
    first, second = run_ranks(observe, 2, 2, deep, TWO_RANKS)
    for key, observed in first.items():  # both ranks must give the same
        assert torch.equal(observed.logprobs, second[key].logprobs)
        assert observed.losses == second[key].losses
    return dict(first)


def hf_observed(folder: Path, batch: TokenBatch, temperature: float) -> Observed:
    """Compute the same results with plain torch, one sequence at a time, with one sum and one
    division."""
    torch.set_num_threads(1)  # as in the ranks; more threads would be slower on such small tensors
    model = load_hf(folder)
    parameters = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    numbers = tiny_config().optimizer
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=LR,
        betas=(numbers.beta1, numbers.beta2),
        eps=numbers.eps,
        weight_decay=numbers.weight_decay,
    )
    passes: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    losses, norms = [], []
    for _ in range(3):
        logp, entropy = hf_logprobs(model, batch, temperature)
        loss = dapo_token_loss(
            logp, batch.old_logprobs, batch.advantages, batch.loss_mask, **CLIP
        ).per_token.sum()
        optimizer.zero_grad()
        (loss / batch.num_loss_tokens).backward()
        gradients = per_expert({name: weight.grad.clone() for name, weight in parameters.items()})
        passes.append((logp.detach(), entropy.detach(), gradients))
        losses.append(float(loss.detach()) / batch.num_loss_tokens)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), numbers.clip_grad)))
        optimizer.step()
    moved = {name: weight.detach() - before[name] for name, weight in parameters.items()}
    return Observed(*passes[0], losses, norms, per_expert(moved))


def hf_logprobs(model: Any, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs, entropy = [], []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        tokens = tokens.long()
        dist = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, dist.gather(-1, tokens[1:, None])[:, 0]]))
        entropy.append(torch.cat([zero, -(dist.exp() * dist).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropy)


def check_same(actual: Observed, expected: Observed) -> None:
    """Assert the bounds of docs/decisions.md, 17, and that biases of routers are not trained.

    Comments give the largest difference measured over six models, eight layouts and splits, two
    temperatures, and both links of the chain.
    """
    biases = {name for name in actual.moved if name.endswith(ROUTER_BIAS)}
    assert not any(actual.moved[name].any() or actual.gradients[name].any() for name in biases)
    gradients, wanted = (trained(observed.gradients) for observed in (actual, expected))
    assert gradients.keys() == wanted.keys()
    differences = {name: (gradients[name] - wanted[name]).abs().max() for name in wanted}
    # A gradient of a gated delta net's small tensors is a large sum over all tokens.
    has_delta = any("linear_attn" in name for name in wanted)
    assert (actual.logprobs - expected.logprobs).abs().max() < 1e-5  # 2.9e-6, Qwen3.5 6.2e-6
    assert (actual.entropy - expected.entropy).abs().max() < 1e-5  # 3.3e-6
    largest = max(float(d / wanted[name].abs().max()) for name, d in differences.items())
    assert max(differences.values()) < (2e-5 if has_delta else 1e-6)  # 9.7e-6, others 7.2e-7
    assert max(distances(gradients, wanted).values()) < (1e-5 if has_delta else 5e-6)  # 7.5e-6
    assert largest < (2e-5 if has_delta else 1e-5)  # 1.1e-5, others 4.1e-6
    assert actual.losses[0] == pytest.approx(expected.losses[0], abs=3e-7, rel=0)  # 7.7e-8
    assert actual.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=3e-6)  # 9.9e-7
    # After an update, one element whose gradient is near 0 is enough for 6.8e-7 and 2.2e-5: AdamW
    # divides noise by noise (GLM-4.7-Flash on Megatron-core 0.19.2, DeepSeek-V3 on some CPUs).
    assert actual.losses == pytest.approx(expected.losses, abs=2e-6, rel=0)
    assert actual.grad_norms == pytest.approx(expected.grad_norms, rel=6e-5)
    moved, wanted = (rotating(trained(observed.moved)) for observed in (actual, expected))
    assert moved.keys() == wanted.keys()
    assert max(distances(moved, wanted).values()) < 6e-3  # 7.5e-4, DeepSeek-V3 2.2e-3


def trained(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without biases of routers, which HF does not train."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ROUTER_BIAS)}


def rotating(moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the moves without those of key biases of GLM in columns that do not rotate.

    Such a bias adds the same number to all scores of a query. Without norms its gradient is 0
    except for rounding, which AdamW makes as large as any other gradient.
    """
    is_glm = any("shared_experts" in name for name in moved)
    return {
        name: tensor.unflatten(0, (-1, HEAD_DIM))[:, : HEAD_DIM // 2]
        if is_glm and name.endswith("k_proj.bias")
        else tensor
        for name, tensor in moved.items()
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, "one") for model in MODELS]
    + [(model, layout) for model in DEEP for layout in ("padded", "low_temperature")],
)
def test_megatron_on_one_rank_equals_hf(
    model: str, layout: str, folders: dict[str, str], one_rank: Cases
) -> None:
    temperature = ONE_RANK[layout].get("rollout__temperature", 1.0)
    expected = hf_observed(Path(folders[model]), BATCH, temperature)
    check_same(one_rank[model, layout], expected)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, n) for model in (*DEEP, SHARED_HEAD) for n in TWO_RANKS if is_tested(model, n)],
)
def test_two_ranks_give_the_result_of_one(
    model: str, layout: str, one_rank: Cases, two_ranks: Cases
) -> None:
    check_same(two_ranks[model, layout], one_rank[model, "one"])
