"""Test the capture of routes in engines: the experts of every token are those that the policy
chooses with the weights that sampled the token, also after cached prefixes, interrupts, syncs, and
in tensor-parallel engines.

Qwen3-MoE, and DeepSeek-V3 with a dense first layer, groups of experts and biases. The engine
computes in float32, the policy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
SECONDS = 900.0
pytestmark = pytest.mark.timeout(2 * SECONDS)


def sampled(num_workers: int, folders: Mapping[str, list[Path]]) -> dict[str, tuple[Results, str]]:
    """Sample with each model, interrupted once and continued under other weights. The prompts of a
    ticket share a cached block of 128 tokens. Also return the error of a completion without
    routes."""
    results: dict[str, tuple[Results, str]] = {}
    for name, (first, second) in folders.items():
        engine = start(first, num_workers, policy__router_replay="engine")
        done = run(engine, REQUESTED, 6)
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
        refused = message(engine.interrupt)
        engine._llm.llm_engine.abort_request(list(engine._requests))
        engine._requests.clear()
        results[name] = done | run(engine, continued), refused
        engine.close()
    return results


PREEMPTED = requests(range(4), num_tokens=124, temperature=1.0)
"""Their prompts fill a block of 128 tokens almost, and their responses need a second one."""


def sampled_with_preemption(folder: Path) -> tuple[Results, int]:
    """Sample with a KV cache of 18 blocks, interrupting the engine after every step. Return the
    completions, and the number of preemptions."""
    engine = start(folder, policy__router_replay="engine", engine__kv_cache_gib=0.0034)
    num_preempted = 0
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def count(request: Any, *arguments: Any, **options: Any) -> None:
        nonlocal num_preempted
        num_preempted += 1
        preempt(request, *arguments, **options)

    scheduler._preempt_request = count
    done: Results = {}
    for num_steps in (9, 2, 1, 3, 1, 2, 1, 1):
        partial = interrupted(engine)
        done |= run(engine, rest(PREEMPTED, done, partial), num_steps)
    done |= run(engine, rest(PREEMPTED, done, interrupted(engine)))
    engine.close()
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
def results(folders: Any) -> dict[int, dict[str, tuple[Results, str]]]:
    """Results of `sampled` for one worker, and for two with one model."""
    of_two = {"qwen3_moe": folders["qwen3_moe"]}
    return {1: run_alone(sampled, 1, folders), 2: run_alone(sampled, 2, of_two)}


@pytest.fixture(scope="module")
def choices(folders: Any, results: Any) -> dict[str, list[Choices]]:
    sequences: dict[str, list[list[int]]] = {name: [] for name in MODELS}
    for of_workers in results.values():
        for name, (completions, _) in of_workers.items():
            sequences[name] += tokens_of(completions)
    return run_ranks(teacher_forced, 1, folders, sequences, timeout=SECONDS)[0]


def tokens_of(results: Results, requested: Sequence[SampleRequest] = REQUESTED) -> list[list[int]]:
    by_place = {(request.ticket, request.sample): request for request in requested}
    return [
        [*by_place[place].prompt.tokens, *completion.tokens]
        for place, completion in sorted(results.items())
    ]


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
    completions = results[workers][model][0]
    first = 0 if workers == 1 else len(results[1][model][0])
    assert len(completions) == len(REQUESTED)
    by_place = {(request.ticket, request.sample): request for request in REQUESTED}
    num_versions = set()
    for number, (place, completion) in enumerate(sorted(completions.items()), first):
        routes = routes_of(completion, by_place[place], model)
        # A segment's last token is computed when the next segment starts.
        bounds = np.cumsum([len(by_place[place].prompt.tokens) - 1])
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


def test_routes_survive_preemption(folders: Any) -> None:
    folder = folders["qwen3_moe"][0]
    completions, num_preempted = run_alone(sampled_with_preemption, folder)
    assert num_preempted > 2
    sequences = {"qwen3_moe": tokens_of(completions, PREEMPTED)}
    (forced,) = run_ranks(teacher_forced, 1, {"qwen3_moe": [folder]}, sequences, timeout=SECONDS)
    (expected,) = forced["qwen3_moe"]
    by_place = {(request.ticket, request.sample): request for request in PREEMPTED}
    for number, (place, completion) in enumerate(sorted(completions.items())):
        routes = routes_of(completion, by_place[place], "qwen3_moe")
        is_equal = (routes == expected.experts[number][:-1]).all(-1)
        assert bool((is_equal | (expected.margins[number][:-1] < MARGIN)).all()), place


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
    refused = results[1][model][1]
    assert "tokens are not known. They were sampled without" in refused
    assert refused.startswith("ticket ")
