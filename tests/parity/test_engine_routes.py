"""Test the capture of routes in engines: the experts of every token are those that the policy
chooses with the weights that sampled the token, also after cached prefixes, interrupts, syncs, and
in tensor-parallel engines.

Qwen3-MoE, and DeepSeek-V3 with a dense first layer, groups of experts and biases. The engine
computes in float32, the policy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.types import Completion, SampleRequest, TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.engines import (
    PROMPT_TOKENS,
    Results,
    hf_model,
    interrupted,
    message,
    requests,
    rest,
    run,
    run_alone,
    start,
    sync,
)
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks

# vLLM's CPU kernel supports one size of latent attention only.
MODELS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}
LAYERS_AND_TOPK = {"qwen3_moe": (3, 2), "deepseek_v3": (2, 3)}
MARGIN = 1e-5
"""Largest difference of two scores that rounding in float32 may reverse."""
REQUESTED = requests(range(3), num_tokens=PROMPT_TOKENS - 8, temperature=1.0)
"""The prompts of a ticket share a cached block of 128 tokens."""
PREEMPTED = requests(range(10, 14), num_tokens=124, temperature=1.0)
"""Their prompts almost fill a block of 128 tokens, and their responses need a second one."""
BY_PLACE = {(each.ticket, each.sample): each for each in (*REQUESTED, *PREEMPTED)}
FEW_BLOCKS = {"engine__kv_cache_gib": 0.0034}
"""18 blocks, so that PREEMPTED do not fit."""
SECONDS = 900.0
pytestmark = pytest.mark.timeout(2 * SECONDS)


@dataclass
class Sampled:
    """Completions of an engine, and the error of a completion without routes."""

    completions: Results
    num_preempted: int
    refusal: str


def sampled(num_workers: int, folders: Mapping[str, list[Path]]) -> dict[str, Sampled]:
    """Sample with each model. Qwen3 in one worker has few blocks. Requests are interrupted and
    continued, once under other weights."""
    results = {}
    for name, (first, second) in folders.items():
        has_few_blocks = name == "qwen3_moe" and num_workers == 1
        settings = FEW_BLOCKS if has_few_blocks else {}
        engine = start(first, num_workers, policy__router_replay="engine", **settings)
        done, num_preempted = preempted(engine) if has_few_blocks else ({}, 0)
        done |= run(engine, REQUESTED, 6)
        partial = interrupted(engine)
        sync(engine, hf_model(second), engine.version + 1)
        continued = rest(REQUESTED, done, partial)
        unknown = [
            replace(request, so_far=replace(request.so_far, routes=None))
            for request in continued
            if request.so_far is not None
        ]
        engine.submit(unknown[:1])
        engine.step()
        refusal = message(engine.interrupt)
        engine._llm.llm_engine.abort_request(list(engine._requests))
        engine._requests.clear()
        results[name] = Sampled(done | run(engine, continued), num_preempted, refusal)
        engine.close()
    return results


def preempted(engine: Any) -> tuple[Results, int]:
    """Sample requests that do not fit, interrupting the engine after every few steps. Return the
    completions, and the number of preemptions."""
    num_preempted = 0
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def count(request: Any, *arguments: Any, **options: Any) -> None:
        nonlocal num_preempted
        num_preempted += 1
        preempt(request, *arguments, **options)

    scheduler._preempt_request = count
    done: Results = {}
    for num_steps in (9, 2, 1, 3, 1, 2, 1, 1, None):
        partial = interrupted(engine)
        done |= run(engine, rest(PREEMPTED, done, partial), num_steps)
    scheduler._preempt_request = preempt
    return done, num_preempted


class Choices:
    """Experts that the policy of a model chose for the tokens of sequences, and their margins.

    experts   per sequence int64 [tokens, layers, k], sorted
    margins   per sequence float [tokens, layers]: smallest difference of a score of a chosen expert
              or group of experts to one that is not chosen
    """

    def __init__(self) -> None:
        self.experts: list[Tensor] = []
        self.margins: list[Tensor] = []


@contextmanager
def observed_choices(choices: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Append (experts [T, k], margins [T]) of each call of a router."""
    from dapo_megatron.policy.moe import BiasedRouter, Router

    original, original_biased = Router._choose, BiasedRouter._choose

    def gap(scores: Tensor, number: int) -> Tensor:
        best = scores.topk(min(number + 1, scores.shape[-1]), dim=-1).values
        return best[:, number - 1] - best[:, number] if best.shape[-1] > number else best[:, 0] + 9

    def choose(router: Any, scores: Tensor) -> Tensor:
        experts = original(router, scores)
        choices.append((experts.sort(-1).values, gap(scores, experts.shape[-1])))
        return experts

    def choose_biased(router: Any, scores: Tensor) -> Tensor:
        groups = (scores + router.expert_bias).unflatten(-1, (router.scoring.n_group, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        experts = original_biased(router, scores)  # calls `choose`
        sets, margins = choices.pop()
        choices.append((sets, torch.minimum(margins, gap(group_scores, router.scoring.topk_group))))
        return experts

    Router._choose, BiasedRouter._choose = choose, choose_biased  # type: ignore[method-assign]
    try:
        yield
    finally:
        Router._choose, BiasedRouter._choose = original, original_biased  # type: ignore[method-assign]


def teacher_forced(
    rank: int, folders: Mapping[str, list[Path]], sequences: Mapping[str, list[list[int]]]
) -> dict[str, list[Choices]]:
    """Return the choices of the policy for each model and weights."""
    return {
        name: [_choices(rank, folder, sequences[name]) for folder in folders[name]]
        for name in folders
    }


def _choices(rank: int, folder: Path, sequences: Sequence[Sequence[int]]) -> Choices:
    from dapo_megatron.policy.policy import MegatronPolicy

    config = tiny_config(model__path=folder, policy__tensor_parallel=1, policy__precision="float64")
    policy = MegatronPolicy(
        config, Ranks(rank, 1, rank), lambda lengths, _: [[[n] for n in range(len(lengths))]]
    )
    seen: list[tuple[Tensor, Tensor]] = []
    with observed_choices(seen):
        policy.logprobs(batch_of(sequences))
    policy.close()
    result, layers = Choices(), len(seen) // len(sequences)
    for index, sequence in enumerate(sequences):
        of_layers = seen[index * layers : (index + 1) * layers]
        result.experts.append(torch.stack([e[: len(sequence)] for e, _ in of_layers], 1))
        result.margins.append(torch.stack([m[: len(sequence)] for _, m in of_layers], 1))
    return result


def batch_of(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    batch = random_batch(tuple(map(len, sequences)), vocab=99)
    tokens = [token for sequence in sequences for token in sequence]
    return replace(batch, tokens=torch.tensor(tokens, dtype=torch.int32))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: [
            make_random_model(name, root / f"{name}_{seed}", seed=seed, **sizes) for seed in (1, 2)
        ]
        for name, sizes in MODELS.items()
    }


@pytest.fixture(scope="module")
def results(folders: Any) -> dict[tuple[str, int], Sampled]:
    """Results by model and number of workers."""
    of_two = {"qwen3_moe": folders["qwen3_moe"]}
    return {
        (name, num_workers): result
        for num_workers, models in ((1, folders), (2, of_two))
        for name, result in run_alone(sampled, num_workers, models).items()
    }


@pytest.fixture(scope="module")
def choices(folders: Any, results: Any) -> dict[str, list[Choices]]:
    sequences: dict[str, list[list[int]]] = {name: [] for name in MODELS}
    for (name, _), result in results.items():
        sequences[name] += [
            [*BY_PLACE[place].prompt.tokens, *completion.tokens]
            for place, completion in sorted(result.completions.items())
        ]
    return run_ranks(teacher_forced, 1, folders, sequences, timeout=SECONDS)[0]


def routes_of(completion: Completion, request: SampleRequest, model: str) -> Tensor:
    """Return the routes of a completion as sorted experts [tokens - 1, layers, k]."""
    layers, topk = LAYERS_AND_TOPK[model]
    num_tokens = len(request.prompt.tokens) + completion.num_tokens - 1
    routes = torch.from_numpy(np.asarray(completion.routes).astype(np.int64))
    return routes.view(num_tokens, layers, topk).sort(-1).values


@pytest.mark.parametrize(
    ("model", "workers"), [*((model, 1) for model in MODELS), ("qwen3_moe", 2)]
)
def test_routes_are_those_of_the_weights_that_sampled_each_token(
    model: str, workers: int, results: Any, choices: Any
) -> None:
    completions = results[model, workers].completions
    first = 0 if workers == 1 else len(results[model, 1].completions)
    num_versions = set()
    for number, (place, completion) in enumerate(sorted(completions.items()), first):
        request = BY_PLACE[place]
        routes = routes_of(completion, request, model)
        # A segment's last token is computed when the next segment starts.
        bounds = np.cumsum([len(request.prompt.tokens) - 1])
        for segment in completion.segments:
            bounds = np.append(bounds, bounds[-1] + segment.num_tokens)
        starts = [0, *bounds[1:-1]]
        num_versions.add(len(completion.segments))
        version = completion.segments[0].version
        for segment, start_, stop in zip(completion.segments, starts, bounds[1:], strict=True):
            of_weights = choices[model][segment.version - version]
            part = slice(int(start_), int(stop))
            is_equal = (routes[part] == of_weights.experts[number][part]).all(-1)
            margins = of_weights.margins[number][part]
            assert bool((is_equal | (margins < MARGIN)).all()), (place, segment)
            assert float(is_equal.double().mean()) > 0.99
    assert 2 in num_versions, "a completion was interrupted and continued"
    if (model, workers) == ("qwen3_moe", 1):
        assert completions.keys() == BY_PLACE.keys()
        assert results[model, workers].num_preempted > 2


@pytest.mark.parametrize("model", MODELS)
def test_weights_choose_differently_so_that_the_comparison_can_fail(
    model: str, choices: Any
) -> None:
    first, second = choices[model]
    pairs = zip(first.experts, second.experts, strict=True)
    share = [float((a == b).all(-1).double().mean()) for a, b in pairs]
    assert max(share) < 0.5


@pytest.mark.parametrize("model", MODELS)
def test_a_completion_without_routes_cannot_be_continued(model: str, results: Any) -> None:
    refusal = results[model, 1].refusal
    assert "tokens are not known. They were sampled without" in refusal
    assert refusal.startswith("ticket ")
