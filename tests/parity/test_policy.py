"""Test policy parity as a chain: HF = Megatron on one process = any layout, any micro-batch split.

The first link compares with plain torch on the HF model, the second with the one-process result.
Both compare log-probs, entropy, every gradient tensor, and loss, gradient norm and weights over
three optimizer steps. All in float32.

Every family is compared on one process and on two tensor-parallel ranks, the families of DEEP in
every layout. The rest of the matrix is marked long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algo.loss import dapo_token_loss
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.doctor.matrix import skewed_plan
from dapo_megatron.doctor.measure import distances
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import loss_with
from tests.helpers.models import RANDOM_MODELS, load_hf, make_random_model, per_expert
from tests.helpers.ranks import run_ranks
from tests.helpers.selection import selected

LR = 1e-4
LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12, 3)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
ODD = {"tie_word_embeddings": True, "vocab_size": 99}
MODELS = {
    **RANDOM_MODELS,
    "qwen3_tied": ("qwen3", ODD),
    # Fewer key-value heads than tensor-parallel ranks, once with norms and once with biases.
    "qwen3_one_group": ("qwen3", {**ODD, "num_key_value_heads": 1}),
    "qwen2_one_group": ("qwen2", {"num_key_value_heads": 1}),
}

DEEP = ("qwen3_tied", "qwen3_moe")


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


def batch_for(model: str) -> TokenBatch:
    return random_batch(LENGTHS, vocab=MODELS[model][1].get("vocab_size", 99))


def observe(rank: int, world_size: int, folder: str, model: str, layout: Mapping[str, Any]) -> Any:
    """Build the policy in this layout, observe it, and destroy Megatron's process groups."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    torch.set_num_threads(1)
    split, tp = layout.get("max_tokens", 128), layout.get("tp", 1)
    # Megatron trains experts on tensor-parallel ranks only with sequence parallelism.
    by_tokens = layout.get("sequence", model == "qwen3_moe") and tp > 1
    config = tiny_config(
        model__path=folder,
        policy__tensor_parallel=tp,
        policy__sequence_parallel=str(by_tokens).lower(),
        policy__pipeline_parallel=layout.get("pp", 1),
        rollout__temperature=layout.get("temperature", 1.0),
    )
    plan = skewed_plan if layout.get("skewed") else partial(plan_microbatches, max_tokens=split)
    policy = MegatronPolicy(config, Ranks(rank, world_size, rank), plan)
    batch, loss = batch_for(model), loss_with(**CLIP)
    logprobs = policy.logprobs(batch)
    _, gradients = policy.gradients(batch, loss)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    stats = [policy.update(batch, loss, LR) for _ in range(3)]
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


def observe_all(rank: int, world_size: int, folders: dict[str, str], cases: Any) -> Any:
    """Return the Observed of each (model, layout) case."""
    return {
        (model, layout): observe(rank, world_size, folders[model], model, LAYOUTS[layout])
        for model, layout in cases
    }


ONE_RANK = {"one": {}, "one_skewed": {"skewed": 1}, "one_small": {"max_tokens": 60}}
LOW_TEMPERATURE = {"one_low_temperature": {"temperature": 0.7}}
TWO_RANKS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "dp2_skewed": {"skewed": 1}}
FOUR_RANKS = {"tp2_pp2": {"tp": 2, "pp": 2}, "tp2_dp2": {"tp": 2}, "pp2_dp2": {"pp": 2}}
# Models have two key-value heads.
FOUR_RANKS |= {"tp4": {"tp": 4}, "tp4_sequence": {"tp": 4, "sequence": True}}
LAYOUTS: dict[str, dict[str, Any]] = ONE_RANK | LOW_TEMPERATURE | TWO_RANKS | FOUR_RANKS


def cases(layouts: Iterable[str], everywhere: str) -> list[Any]:
    """Return every model in every layout. Cases are `long` unless the model is in DEEP or the
    layout is `everywhere`."""
    return [
        pytest.param(
            model,
            layout,
            marks=() if model in DEEP or layout == everywhere else pytest.mark.long,
        )
        for model in MODELS
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(make_random_model(family, root / name, seed=1, **overrides))
        for name, (family, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def one_rank(
    folders: dict[str, str], request: pytest.FixtureRequest
) -> dict[tuple[str, str], Observed]:
    """Results of one process, for the selected tests and for their models in the layout "one"."""
    chosen = selected(request, "model", "layout") | {
        (model, "one") for (model,) in selected(request, "model")
    }
    own = sorted(
        (model, layout) for model, layout in chosen if layout in ONE_RANK | LOW_TEMPERATURE
    )
    return run_ranks(observe_all, 1, 1, folders, own)[0]


@pytest.fixture(scope="module")
def two_ranks(
    folders: dict[str, str], request: pytest.FixtureRequest
) -> dict[tuple[str, str], Observed]:
    """Results of two ranks in the layouts of the selected tests."""
    own = sorted(case for case in selected(request, "model", "layout") if case[1] in TWO_RANKS)
    first, second = run_ranks(observe_all, 2, 2, folders, own)
    for key, observed in first.items():  # both ranks must give the same
        assert torch.equal(observed.logprobs, second[key].logprobs)
        assert observed.losses == second[key].losses
    return first


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
        ).total
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


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference of any element."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)


def distance(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest |actual - expected| / |expected| of a tensor, in the Euclidean norm."""
    assert actual.keys() == expected.keys()
    return max(distances(actual, expected).values())


def worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to the largest element of the tensor."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


def check_same(actual: Observed, expected: Observed) -> None:
    """Assert the bounds of docs/decisions.md, 17.

    Comments give the largest difference measured over six models, eight layouts and splits, two
    temperatures, and both links of the chain.
    """
    assert (actual.logprobs - expected.logprobs).abs().max() < 1e-5  # 2.9e-6
    assert (actual.entropy - expected.entropy).abs().max() < 1e-5  # 3.3e-6
    assert largest_difference(actual.gradients, expected.gradients) < 1e-6  # 7.2e-7
    assert distance(actual.gradients, expected.gradients) < 5e-6  # 2.7e-6
    assert worst(actual.gradients, expected.gradients) < 1e-5  # 4.1e-6
    assert actual.losses[0] == pytest.approx(expected.losses[0], abs=3e-7, rel=0)  # 7.7e-8
    assert actual.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=3e-6)  # 9.9e-7
    # After an update, one element whose gradient is near 0 is enough for 6.8e-7 and 4.9e-6: AdamW
    # divides noise by noise (GLM-4.7-Flash on Megatron-core 0.19.2).
    assert actual.losses == pytest.approx(expected.losses, abs=2e-6, rel=0)
    assert actual.grad_norms == pytest.approx(expected.grad_norms, rel=1.5e-5)
    assert distance(actual.moved, expected.moved) < 2e-3  # 7.5e-4


@pytest.mark.parametrize(("model", "layout"), cases(("one", *LOW_TEMPERATURE), everywhere="one"))
def test_megatron_on_one_rank_equals_hf(
    model: str, layout: str, folders: dict[str, str], one_rank: Any
) -> None:
    temperature = LAYOUTS[layout].get("temperature", 1.0)
    expected = hf_observed(Path(folders[model]), batch_for(model), temperature)
    check_same(one_rank[model, layout], expected)


@pytest.mark.parametrize(
    ("model", "layout"),
    cases([name for name in (*ONE_RANK, *TWO_RANKS) if name != "one"], everywhere="tp2"),
)
def test_every_layout_gives_the_result_of_one_rank(
    model: str, layout: str, one_rank: Any, two_ranks: Any
) -> None:
    check_same({**one_rank, **two_ranks}[model, layout], one_rank[model, "one"])


@pytest.mark.long
@pytest.mark.parametrize("model", ["qwen3_tied", "qwen2_bias"])
def test_layouts_on_four_ranks_give_the_result_of_one_rank(
    model: str, folders: dict[str, str], one_rank: Any
) -> None:
    four_ranks = run_ranks(observe_all, 4, 4, folders, [(model, layout) for layout in FOUR_RANKS])[
        0
    ]
    for layout in FOUR_RANKS:
        check_same(four_ranks[model, layout], one_rank[model, "one"])
