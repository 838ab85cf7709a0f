"""Policy parity, as a chain:  HF = Megatron on one process = any layout, any micro-batch split.

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
from tests.helpers.models import RANDOM_MODELS, make_random_model, per_expert
from tests.helpers.ranks import run_ranks
from tests.helpers.selection import selected

LR = 1e-4
LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12, 3)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
ODD = {"tie_word_embeddings": True, "vocab_size": 99}
MODELS = {
    **RANDOM_MODELS,
    "qwen3_tied": ("qwen3", ODD),
    # Fewer key-value heads than tensor-parallel ranks, with norms on them and with biases.
    "qwen3_one_group": ("qwen3", {**ODD, "num_key_value_heads": 1}),
    "qwen2_one_group": ("qwen2", {"num_key_value_heads": 1}),
}

DEEP = ("qwen3_tied", "qwen3_moe")


@dataclass
class Observed:
    """What one layout gives for the same mini-batch; `moved` is how far three updates move each
    weight, which is about 1e-3 of the weight: their difference shows what weights would hide."""

    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    moved: dict[str, Tensor]


def batch_for(model: str) -> TokenBatch:
    return random_batch(LENGTHS, vocab=MODELS[model][1].get("vocab_size", 99))


def observe(rank: int, world_size: int, folder: str, model: str, layout: Mapping[str, Any]) -> Any:
    """Build the policy in this layout, measure, and take Megatron's groups down again."""
    from dapo_megatron.data.packing import plan_microbatches
    from dapo_megatron.policy.policy import MegatronPolicy

    torch.set_num_threads(1)
    split, tp = layout.get("max_tokens", 128), layout.get("tp", 1)
    # Megatron trains experts on tensor-parallel ranks so alone.
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
        [one.loss for one in stats],
        [one.grad_norm for one in stats],
        moved,
    )


def observe_all(rank: int, world_size: int, folders: dict[str, str], cases: Any) -> Any:
    """Observe (model, layout) cases, by the names of both."""
    return {
        (model, layout): observe(rank, world_size, folders[model], model, LAYOUTS[layout])
        for model, layout in cases
    }


ONE = {"one": {}, "one_skewed": {"skewed": 1}, "one_small": {"max_tokens": 60}}
COOL = {"one_cool": {"temperature": 0.7}}
TWO = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "dp2_skewed": {"skewed": 1}}
FOUR = {"tp2_pp2": {"tp": 2, "pp": 2}, "tp2_dp2": {"tp": 2}, "pp2_dp2": {"pp": 2}}
FOUR |= {"tp4": {"tp": 4}, "tp4_sequence": {"tp": 4, "sequence": True}}  # on two key-value heads
LAYOUTS: dict[str, dict[str, Any]] = ONE | COOL | TWO | FOUR


def cases(layouts: Iterable[str], everywhere: str) -> list[Any]:
    """Every model in every layout; long unless the model is of DEEP, or the layout `everywhere`."""
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
def one(folders: dict[str, str], request: pytest.FixtureRequest) -> dict[tuple[str, str], Observed]:
    """What one process gives: for every model in the layout "one", and what the tests look at."""
    chosen = selected(request, "model", "layout") | {
        (model, "one") for (model,) in selected(request, "model")
    }
    own = sorted((model, layout) for model, layout in chosen if layout in ONE | COOL)
    return run_ranks(observe_all, 1, 1, folders, own)[0]


@pytest.fixture(scope="module")
def two(folders: dict[str, str], request: pytest.FixtureRequest) -> dict[tuple[str, str], Observed]:
    """What two ranks give, in the layouts that the tests look at."""
    own = sorted(case for case in selected(request, "model", "layout") if case[1] in TWO)
    first, second = run_ranks(observe_all, 2, 2, folders, own)
    for key, seen in first.items():  # every rank sees the same
        assert torch.equal(seen.logprobs, second[key].logprobs)
        assert seen.losses == second[key].losses
    return first


def hf_observed(folder: Path, batch: TokenBatch, temperature: float) -> Observed:
    """The same figures by plain torch: one sequence at a time, one sum, one division."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # as in the ranks; more only wait for each other on tensors this small
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    seen: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    losses, norms = [], []
    for _ in range(3):
        logp, entropy = hf_logprobs(model, batch, temperature)
        loss = dapo_token_loss(
            logp, batch.old_logprobs, batch.advantages, batch.loss_mask, **CLIP
        ).total
        optimizer.zero_grad()
        (loss / batch.num_loss_tokens).backward()
        gradients = per_expert({name: weight.grad.clone() for name, weight in parameters.items()})
        seen.append((logp.detach(), entropy.detach(), gradients))
        losses.append(float(loss.detach()) / batch.num_loss_tokens)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), numbers.clip_grad)))
        optimizer.step()
    moved = {name: weight.detach() - before[name] for name, weight in parameters.items()}
    return Observed(*seen[0], losses, norms, per_expert(moved))


def hf_logprobs(model: Any, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs, entropy = [], []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        dist = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, dist.gather(-1, tokens[1:, None])[:, 0]]))
        entropy.append(torch.cat([zero, -(dist.exp() * dist).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropy)


def largest_difference(seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of any element of any tensor, absolute."""
    assert seen.keys() == wanted.keys()
    return max(float((seen[name] - wanted[name]).abs().max()) for name in wanted)


def distance(seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """|seen - wanted| / |wanted| in the Euclidean norm, of the tensor where it is largest."""
    assert seen.keys() == wanted.keys()
    return max(distances(seen, wanted).values())


def worst(seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference per tensor, relative to the tensor's largest element."""
    assert seen.keys() == wanted.keys()
    return max(
        float((seen[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted
    )


def check_same(seen: Observed, wanted: Observed) -> None:
    """The worst measured is in the comments (docs/decisions.md, 17): the largest of six models,
    eight layouts and splits, two temperatures, and on both links of the chain."""
    assert (seen.logprobs - wanted.logprobs).abs().max() < 1e-5  # 2.9e-6
    assert (seen.entropy - wanted.entropy).abs().max() < 1e-5  # 3.3e-6
    assert largest_difference(seen.gradients, wanted.gradients) < 1e-6  # 7.2e-7
    assert distance(seen.gradients, wanted.gradients) < 5e-6  # 2.7e-6
    assert worst(seen.gradients, wanted.gradients) < 1e-5  # 4.1e-6
    assert seen.losses == pytest.approx(wanted.losses, abs=3e-7, rel=0)  # 7.7e-8
    assert seen.grad_norms == pytest.approx(wanted.grad_norms, rel=3e-6)  # 9.9e-7
    assert distance(seen.moved, wanted.moved) < 2e-3  # 7.5e-4


@pytest.mark.parametrize(("model", "layout"), cases(("one", *COOL), everywhere="one"))
def test_hf_equals_megatron(model: str, layout: str, folders: dict[str, str], one: Any) -> None:
    temperature = LAYOUTS[layout].get("temperature", 1.0)
    wanted = hf_observed(Path(folders[model]), batch_for(model), temperature)
    check_same(one[model, layout], wanted)


@pytest.mark.parametrize(
    ("model", "layout"), cases([name for name in (*ONE, *TWO) if name != "one"], everywhere="tp2")
)
def test_layout_gives_the_same(model: str, layout: str, one: Any, two: Any) -> None:
    check_same({**one, **two}[model, layout], one[model, "one"])


@pytest.mark.long
@pytest.mark.parametrize("model", ["qwen3_tied", "qwen2_bias"])
def test_four_ranks_give_the_same(model: str, folders: dict[str, str], one: Any) -> None:
    four = run_ranks(observe_all, 4, 4, folders, [(model, layout) for layout in FOUR])[0]
    for layout in FOUR:
        check_same(four[model, layout], one[model, "one"])
