"""Test router replay: any given experts give the same log-probs and gradients in every layout and
in HF, the recorded ones give the gradient of free routing bit for bit, and changed choices are
counted.

Qwen3-MoE, and DeepSeek-V3 with a dense first layer, groups of experts and biases. In float64, with
a balance loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algo.loss import dapo_token_loss
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.data.batch import split
from dapo_megatron.data.owners import owners
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.plan.rows import row_multiple, sequence_multiple
from dapo_megatron.types import TokenBatch
from tests.helpers.batches import hold, random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.losses import NUMBERS, loss_with
from tests.helpers.models import make_random_model, per_expert
from tests.helpers.ranks import run_ranks
from tests.parity.test_policy import hf_logprobs

LENGTHS = (5, 60, 17, 9, 33, 4, 40, 12)
NUM_EXPERTS, NUM_LAYERS = 8, 4
MODELS = {"qwen3_moe": (0, 2), "deepseek_v3": (1, 3)}
"""Number of dense layers, and experts per token."""
LR = 3e-3
PLAIN = {"policy__moe_aux_loss": 0.0}
PADDED = {"train__packing": "false"}
SELECTIVE, FULL = {"policy__recompute": "selective"}, {"policy__recompute": "full"}
TP2 = {"policy__tensor_parallel": 2, "policy__sequence_parallel": "true"}
PP2 = {"policy__pipeline_parallel": 2}
CP2 = {"policy__context_parallel": 2}
ONE_RANK: dict[str, dict[str, Any]] = {"plain": PLAIN, "packed": {}, "padded_full": PADDED | FULL}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2_selective": TP2 | SELECTIVE,
    "tp2_padded_full": TP2 | PADDED | FULL,
    "pp2_padded": PP2 | PADDED,
    # The first chunk of DeepSeek-V3 has no experts.
    "vpp2_full": PP2 | {"policy__virtual_pipeline_parallel": 2} | FULL,
    "cp2": CP2,
    "cp2_padded_full": CP2 | PADDED | FULL,
    "ep2": {"policy__expert_parallel": 2},
}
LAYOUTS = {
    "qwen3_moe": ("dp2", "tp2_selective", "ep2"),
    "deepseek_v3": ("vpp2_full", "cp2_padded_full"),
}
"""Layouts on two ranks, by model."""
MORE_LAYOUTS = {
    "qwen3_moe": ("pp2_padded", "cp2"),
    "deepseek_v3": ("dp2", "tp2_padded_full"),
}
"""Layouts of `make test-layouts`."""
SECONDS = 1500.0
pytestmark = pytest.mark.timeout(2 * SECONDS)


def given_batch(model: str) -> TokenBatch:
    """Return a batch with random experts for each token and layer."""
    num_dense, topk = MODELS[model]
    batch = random_batch(LENGTHS, vocab=99)
    generator = torch.Generator().manual_seed(1)
    shape = (sum(LENGTHS), NUM_LAYERS - num_dense, NUM_EXPERTS)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., :topk]
    return replace(batch, routes=routes.flatten(1).to(torch.uint8))


def experts(routes: Tensor | None, model: str) -> Tensor:
    """Return routes as sorted experts [T, layers, k]."""
    assert routes is not None
    return routes.long().unflatten(1, (-1, MODELS[model][1])).sort(-1).values


# The router always chooses for the last token of a sequence.
IS_GIVEN = torch.ones(sum(LENGTHS), dtype=torch.bool)
IS_GIVEN[torch.tensor(LENGTHS).cumsum(0) - 1] = False


@dataclass
class Observed:
    """Results of one rank.

    free, given     log-probs without routes, and with those of `given_batch`
    recorded        routes of the pass without routes
    returned        routes that a pass with those of `given_batch` used
    gradients       of the given batch, and of free and recorded routing
    router          statistics of an update with the recorded routes: before the weights moved, and
                    afterwards
    minis           the same per mini-batch of a split step, and its tokens with given experts
    moved           free routes after the weights moved
    kept            routes that a pass with the recorded routes used then
    local           of a batch of which this rank holds its own sequences: data-parallel index that
                    owns each, log-probs, recorded routes, and gradients

    Routes are [T, layers * k].
    """

    free: Tensor
    given: Tensor
    recorded: Tensor
    returned: Tensor
    gradients: dict[str, dict[str, Tensor]]
    router: tuple[dict[str, float], dict[str, float]]
    minis: list[tuple[int, dict[str, float]]]
    moved: Tensor
    kept: Tensor
    local: tuple[list[int], Tensor, Tensor, dict[str, Tensor]] | None
    refusals: dict[str, str]


def observe(
    rank: int, world_size: int, folders: dict[str, str], layouts: dict[str, Sequence[str]]
) -> dict[tuple[str, str], Observed]:
    """Return the observations of this rank for each (model, layout)."""
    torch.set_num_threads(1)
    settings = ONE_RANK | TWO_RANKS
    return {
        (model, name): _observe(
            Ranks(rank, world_size, rank), model, folders[model], settings[name]
        )
        for model in layouts
        for name in layouts[model]
    }


def _observe(exchange: Ranks, model: str, folder: str, layout: dict[str, Any]) -> Observed:
    from dapo_megatron.policy.policy import MegatronPolicy

    settings: dict[str, Any] = {
        "policy__tensor_parallel": 1,
        "policy__precision": "float64",
        "policy__router_replay": "policy",
        "policy__moe_aux_loss": 0.01,
    }
    config = tiny_config(model__path=folder, **{**settings, **layout})
    plan = partial(
        plan_microbatches,
        max_tokens=80 * config.policy.context_parallel,
        packed=config.train.packing,
        sequence_multiple=sequence_multiple(config.policy),
        row_multiple=row_multiple(config.policy),
    )
    policy = MegatronPolicy(config, exchange, plan)
    given, loss = given_batch(model), loss_with()
    free = replace(given, routes=None)
    outputs, given_outputs = policy.logprobs(free), policy.logprobs(given)
    assert outputs.routes is not None and given_outputs.routes is not None
    replayed = replace(free, routes=outputs.routes)
    batches = {"given": given, "free": free, "replayed": replayed}
    gradients = {name: policy.gradients(batch, loss)[1] for name, batch in batches.items()}
    local = None
    if not layout:
        planned = owners(LENGTHS, 1, plan, exchange.world_size)
        own = hold(free, planned, policy.data_parallel_index)
        recorded = policy.logprobs(own)
        assert recorded.routes is not None
        mini = replace(own, routes=recorded.routes)
        local = planned, recorded.logprobs, recorded.routes, policy.gradients(mini, loss)[1]
    before = policy.update(replayed, loss, LR)
    moved = policy.logprobs(free).routes
    kept = policy.logprobs(replayed).routes
    after = policy.update(replayed, loss, 0.0)
    minis = [
        (int((mini.lengths - 1).sum()), dict(policy.update(mini, loss, 0.0).router))
        for mini in split(replayed, 2, "token")
    ]
    refusals = refusals_of(policy, given) if layout == PADDED | FULL else {}
    policy.close()
    assert moved is not None and kept is not None
    return Observed(
        outputs.logprobs,
        given_outputs.logprobs,
        outputs.routes,
        given_outputs.routes,
        gradients,
        (dict(before.router), dict(after.router)),
        minis,
        moved,
        kept,
        local,
        refusals,
    )


def refusals_of(policy: Any, batch: TokenBatch) -> dict[str, str]:
    """Return the messages of batches with impossible routes."""
    assert batch.routes is not None
    position = LENGTHS[0] + 3  # in sequence 1
    topk = policy.architecture.experts_per_token

    def broken(*experts: int, dtype: torch.dtype = torch.int16) -> Tensor:
        routes = batch.routes.to(dtype)  # type: ignore[union-attr]
        first = routes.shape[1] - topk  # of the last layer
        routes[position, first : first + len(experts)] = torch.tensor(experts, dtype=dtype)
        return routes

    impossible = {
        "too large": broken(NUM_EXPERTS, dtype=torch.uint8),
        "negative": broken(-2),
        "some missing": broken(-1),
        "twice": broken(3, 3),
        "layers": batch.routes[:, topk:],
        "length": batch.routes[1:],
    }
    messages = {}
    for name, routes in impossible.items():
        with pytest.raises(ValueError, match="route") as raised:
            policy.logprobs(replace(batch, routes=routes))
        messages[name] = str(raised.value)
    return messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        model: str(make_random_model(model, root / model, seed=1, num_hidden_layers=NUM_LAYERS))
        for model in MODELS
    }


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> dict[tuple[str, str], Observed]:
    layouts = dict.fromkeys(MODELS, tuple(ONE_RANK))
    return run_ranks(observe, 1, 1, folders, layouts, timeout=SECONDS)[0]


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str]) -> list[dict[tuple[str, str], Observed]]:
    return run_ranks(observe, 2, 2, folders, LAYOUTS, timeout=SECONDS)


@pytest.fixture(scope="module")
def more_ranks(folders: dict[str, str]) -> list[dict[tuple[str, str], Observed]]:
    return run_ranks(observe, 2, 2, folders, MORE_LAYOUTS, timeout=SECONDS)


def check_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=name or None)


def check_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        check_close(actual[name], gradient, name)


CASES = [
    *((model, layout) for model in MODELS for layout in (*ONE_RANK, *LAYOUTS[model])),
    *(
        pytest.param(model, layout, marks=pytest.mark.layouts)
        for model in MODELS
        for layout in MORE_LAYOUTS[model]
    ),
]
ranks_of = pytest.mark.parametrize(("model", "layout"), CASES)


@pytest.fixture
def ranks(model: str, layout: str, request: pytest.FixtureRequest) -> list[Observed]:
    if layout in ONE_RANK:
        return [request.getfixturevalue("one_rank")[model, layout]]
    name = "two_ranks" if layout in LAYOUTS[model] else "more_ranks"
    return [result[model, layout] for result in request.getfixturevalue(name)]


@ranks_of
def test_any_given_experts_give_the_result_of_one_rank(
    model: str, layout: str, ranks: list[Observed], one_rank: Any
) -> None:
    expected = one_rank[model, "packed"]
    assert float((expected.given - expected.free).abs().max()) > 0.01
    for rank in ranks:
        check_close(rank.given, expected.given)
        given = given_batch(model).routes
        assert torch.equal(rank.returned[IS_GIVEN], given[IS_GIVEN])  # type: ignore[index]
        if layout != "plain":
            check_gradients(rank.gradients["given"], expected.gradients["given"])


@ranks_of
def test_recorded_experts_give_the_gradient_of_free_routing(
    model: str, layout: str, ranks: list[Observed], one_rank: Any
) -> None:
    for rank in ranks:
        expected = experts(one_rank[model, "packed"].recorded, model)
        assert torch.equal(experts(rank.recorded, model), expected)
        assert rank.recorded.dtype == torch.uint8
        for name, gradient in rank.gradients["free"].items():
            assert torch.equal(rank.gradients["replayed"][name], gradient), name
        assert set(rank.router[0].values()) == {0.0}


@ranks_of
def test_after_weights_moved_old_experts_are_used_and_changes_are_counted(
    model: str, layout: str, ranks: list[Observed], one_rank: Any
) -> None:
    expected = one_rank[model, "packed"]
    num_dense, _ = MODELS[model]
    for rank in ranks:
        assert torch.equal(rank.kept[IS_GIVEN], rank.recorded[IS_GIVEN])
        is_changed = experts(rank.moved, model) != experts(rank.recorded, model)
        is_changed = is_changed.any(-1)[IS_GIVEN]
        assert 0.05 < float(is_changed.double().mean()) < 1.0
        # What precedes the first router does not depend on any choice.
        share = float(is_changed[:, 0].double().mean())
        assert rank.router[1][f"changed/layer_{num_dense}"] == pytest.approx(share, abs=1e-12)
        if layout != "plain":
            assert rank.router[1] == pytest.approx(expected.router[1], abs=1e-12)
        # Mini-batches get the routes of their tokens. The weights stay the same.
        for name, share in rank.router[1].items():
            count = sum(number * router[name] for number, router in rank.minis)
            assert count == pytest.approx(share * int(IS_GIVEN.sum()), abs=1e-6)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3_moe", "dp2"),
        pytest.param("deepseek_v3", "dp2", marks=pytest.mark.layouts),
    ],
)
def test_a_rank_that_holds_its_own_sequences_records_and_replays_theirs(
    model: str, ranks: list[Observed]
) -> None:
    for index, rank in enumerate(ranks):
        planned, logprobs, recorded, gradients = rank.local
        is_own = torch.tensor(planned).repeat_interleave(torch.tensor(LENGTHS)) == index
        assert bool(is_own.any()) and not bool(is_own.all())
        check_close(logprobs, rank.free[is_own])
        assert torch.equal(experts(recorded, model), experts(rank.recorded[is_own], model))
        check_gradients(gradients, rank.gradients["free"])


@pytest.mark.parametrize("model", MODELS)
def test_impossible_routes_are_refused_by_name(model: str, one_rank: Any) -> None:
    num_dense, topk = MODELS[model]
    refusals = one_rank[model, "padded_full"].refusals
    place = f"sequence 1, token 3, layer {NUM_LAYERS - 1}: its route ["
    for name in ("too large", "negative", "some missing", "twice"):
        assert refusals[name].startswith(place), refusals[name]
        assert refusals[name].endswith(f"is not {topk} different experts of 0 to 7")
    tokens, layers = sum(LENGTHS), NUM_LAYERS - num_dense
    for name, shape in (
        ("layers", (tokens, (layers - 1) * topk)),
        ("length", (tokens - 1, layers * topk)),
    ):
        assert str(shape) in refusals[name] and str((tokens, layers * topk)) in refusals[name]


# ------------------------------------------------------------------ HF with given experts


def hf_with(routes: Tensor, model: Any, *, num_dense: int, is_latent: bool) -> None:
    """Make the gates of an HF model use `routes` [layers, T, k], T the tokens of its next input."""
    for layer, experts in zip(model.model.layers[num_dense:], routes, strict=True):
        gate = layer.mlp.gate

        def forward(hidden: Tensor, gate: Any = gate, experts: Tensor = experts) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            scores = logits.sigmoid() if is_latent else logits.softmax(-1)
            weights = scores.gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), experts

        gate.forward = forward


@pytest.mark.parametrize("model", MODELS)
def test_given_experts_give_the_result_of_hf(
    model: str, folders: dict[str, str], one_rank: Any
) -> None:
    """In float32, as HF's norms are."""
    from transformers import AutoModelForCausalLM

    num_dense, _ = MODELS[model]
    hf = AutoModelForCausalLM.from_pretrained(Path(folders[model]), dtype=torch.float32)
    batch = given_batch(model)
    assert batch.routes is not None
    routes_T = batch.routes.long().unflatten(1, (-1, MODELS[model][1]))
    parts: Sequence[Tensor] = routes_T.split(LENGTHS)
    logprobs = []
    for tokens, routes in zip(batch.tokens.split(LENGTHS), parts, strict=True):
        hf_with(routes.transpose(0, 1), hf, num_dense=num_dense, is_latent=num_dense > 0)
        single = replace(batch, tokens=tokens, lengths=torch.tensor([len(tokens)]))
        logprobs.append(hf_logprobs(hf, single, 1.0)[0])
    logp = torch.cat(logprobs)
    numbers = {name: NUMBERS[name] for name in ("clip_low", "clip_high", "dual_clip")}
    total = dapo_token_loss(
        logp, batch.old_logprobs, batch.advantages, batch.loss_mask, **numbers
    ).per_token.sum()
    (total / batch.num_loss_tokens).backward()
    expected = per_expert({name: p.grad for name, p in hf.named_parameters() if p.grad is not None})
    rank = one_rank[model, "plain"]
    torch.testing.assert_close(rank.given.float(), logp.detach(), rtol=0, atol=2e-5)
    for name, gradient in expected.items():
        difference = float((rank.gradients["given"][name] - gradient).norm())
        assert difference <= 1e-4 * float(gradient.norm()), name
