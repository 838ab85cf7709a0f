"""Test the capture of routes in engines: the experts of every token are those that the policy
chooses with the weights that sampled the token, also after cached prefixes, interrupts, syncs and
tokens of an environment, and in tensor-parallel engines.

Qwen3-MoE, DeepSeek-V3 with a dense first layer, groups of experts and biases, and Qwen3.5, whose
gated delta nets have other blocks of the cache than its attention. The engine
computes in float32, the policy in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.engine.continuation import observe
from dapo_megatron.types import Completion, SampleRequest, TokenBatch
from tests.helpers.batches import random_batch
from tests.helpers.configs import tiny_config
from tests.helpers.engines import (
    PROMPT_TOKENS,
    Results,
    close,
    hf_model,
    interrupted,
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
    "qwen3_5_moe_text": {},
}
LAYERS_AND_TOPK = {"qwen3_moe": (3, 2), "deepseek_v3": (2, 3), "qwen3_5_moe_text": (4, 2)}
MAX_ROUNDED = 3
"""Choices of a model that rounding may reverse, because two scores are nearly equal."""
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
    """Completions of an engine."""

    completions: Results
    num_preempted: int


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
        continued = [after_an_answer(each) for each in rest(REQUESTED, done, partial)]
        results[name] = Sampled(done | run(engine, continued), num_preempted)
        close(engine)
    return results


def after_an_answer(request: SampleRequest) -> SampleRequest:
    """Return a request that goes on after an environment's answer, if its sample is even."""
    if request.so_far is None or request.sample % 2:
        return request
    observed = observe(request.so_far, (7, 8, 9), request.sample, version=0)
    return replace(request, so_far=observed)


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


def chosen_by_policy(
    rank: int, folders: Mapping[str, list[Path]], sequences: Mapping[str, list[list[int]]]
) -> dict[str, list[list[Tensor]]]:
    """Return the experts that the policy chooses for each model, weights and sequence, [tokens,
    layers, k] in ascending order."""
    return {
        name: [_chosen(rank, folder, name, sequences[name]) for folder in folders[name]]
        for name in folders
    }


def _chosen(rank: int, folder: Path, model: str, sequences: Sequence[list[int]]) -> list[Tensor]:
    from dapo_megatron.policy.policy import MegatronPolicy

    config = tiny_config(
        model__path=folder, policy__tensor_parallel=1, policy__precision="float64",
        policy__router_replay="policy",
    )  # fmt: skip
    policy = MegatronPolicy(
        config, Ranks(rank, 1, rank), lambda lengths, _: [[[n] for n in range(len(lengths))]]
    )
    routes = policy.logprobs(batch_of(sequences)).routes
    policy.close()
    assert routes is not None
    experts = routes.long().unflatten(1, LAYERS_AND_TOPK[model]).sort(-1).values
    return list(experts.split([len(sequence) for sequence in sequences]))


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
def choices(folders: Any, results: Any) -> dict[str, list[list[Tensor]]]:
    sequences: dict[str, list[list[int]]] = {name: [] for name in MODELS}
    for (name, _), result in results.items():
        sequences[name] += [
            [*BY_PLACE[place].prompt.tokens, *completion.tokens]
            for place, completion in sorted(result.completions.items())
        ]
    return run_ranks(chosen_by_policy, 1, folders, sequences, timeout=SECONDS)[0]


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
    num_versions, num_different, num_observed = set(), 0, 0
    for number, (place, completion) in enumerate(sorted(completions.items()), first):
        request = BY_PLACE[place]
        routes = routes_of(completion, request, model)
        # A segment's last token is computed when the next segment starts.
        bounds = np.cumsum([len(request.prompt.tokens) - 1])
        for segment in completion.segments:
            bounds = np.append(bounds, bounds[-1] + segment.num_tokens)
        starts = [0, *bounds[1:-1]]
        num_versions.add(len(completion.segments))
        segments = completion.segments
        num_observed += any(segment.is_observed for segment in segments)
        # Observed tokens are computed together with those that are sampled after them.
        versions = [
            segments[place + segment.is_observed].version - segments[0].version
            for place, segment in enumerate(segments)
        ]
        for version, start_, stop in zip(versions, starts, bounds[1:], strict=True):
            expected = choices[model][version][number]
            part = slice(int(start_), int(stop))
            num_different += int((routes[part] != expected[part]).any(-1).sum())
    assert num_different <= MAX_ROUNDED
    assert 2 in num_versions, "a completion was interrupted and continued"
    assert num_observed and 3 in num_versions
    if (model, workers) == ("qwen3_moe", 1):
        assert completions.keys() == BY_PLACE.keys()
        assert results[model, workers].num_preempted > 2


@pytest.mark.parametrize("model", MODELS)
def test_weights_choose_differently_so_that_the_comparison_can_fail(
    model: str, choices: Any
) -> None:
    pairs = zip(*choices[model], strict=True)
    share = [float((a == b).all(-1).double().mean()) for a, b in pairs]
    assert max(share) < 0.5
