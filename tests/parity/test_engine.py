"""Compare the vLLM engine with HF: log-probs, seeds and cached prefixes, before and after syncs.

A vLLM start takes 10 to 25 s, so each world is started once, and tests check what it returned.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.types import Finish, Segment
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Results,
    gap,
    hf_model,
    requests,
    run,
    start,
    sync,
)
from tests.helpers.models import make_random_model, randomize
from tests.helpers.ranks import run_ranks

Observations = dict[str, Any]


# ------------------------------------------------------------------ inside the ranks


def _gaps_over_syncs(engine: Any, folder: Path, num_syncs: int) -> tuple[list[float], list[int]]:
    """Return the gaps before the first sync and after each, and the versions of the completions."""
    model = hf_model(folder)
    tickets = range(10 * engine.replica, 10 * engine.replica + 6)
    gaps, versions = [], []
    for version in range(num_syncs + 1):
        if version:
            randomize(model, seed=100 + version)
            sync(engine, model, version)
        results = run(engine, requests(tickets))
        gaps.append(gap(model, requests(tickets), results))
        versions += sorted(
            {segment.version for completion in results.values() for segment in completion.segments}
        )
    return gaps, versions


def _global_state() -> Observations:
    return {
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "python": hash(random.getstate()),
        "numpy": hash(np.random.get_state()[1].tobytes()),  # type: ignore[index]
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__module__,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "environment": {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")},
    }


def _one_rank(rank: int, folder: Path) -> Observations:
    before = _global_state()
    engine = start(folder, rank, 1, 1)
    observed: Observations = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    observed["batch"] = run(engine, requests(range(6)))
    observed["again"] = run(engine, requests(range(6)))
    observed["alone"] = {}
    for request in requests(range(6)):
        observed["alone"] |= run(engine, [request])
    observed["counts"], observed["expected"] = _first_tokens(engine, folder, 2_000)
    observed["state"] = (before, _global_state())
    # More prompt tokens than fit into one vLLM step (4096), with no cached prefix.
    observed["flood"] = len(run(engine, requests(range(12), num_tokens=120, temperature=1.0)))
    observed["gaps"], observed["versions"] = _gaps_over_syncs(engine, folder, 3)
    observed["prefix"] = _gap_of_cached_prompt(engine, folder)
    return observed


def _first_tokens(engine: Any, folder: Path, num: int) -> tuple[Tensor, Tensor]:
    """Sample the first token after one prompt `num` times without seeds. Return how often each
    token of the vocabulary was sampled, and how often it is expected."""
    first = replace(requests([0])[0], seed=None, max_tokens=1)
    sampled = run(engine, [replace(first, sample=sample) for sample in range(num)])
    tokens = [completion.tokens[0] for completion in sampled.values()]
    with torch.no_grad():
        logits = hf_model(folder)(torch.tensor([first.prompt.tokens])).logits[0, -1]
    return torch.tensor(tokens).bincount(minlength=len(logits)), num * logits.softmax(-1)


def _unseeded(engine: Any, rank: int) -> Results:
    """Sample without seeds, while the policy of each rank uses the global generators differently
    between two steps."""
    engine.submit([replace(request, seed=None) for request in requests(range(6))])
    results: Results = {}
    while engine.requests:
        torch.manual_seed(rank)
        np.random.seed(rank)
        torch.rand(rank)
        for request, completion in engine.step():
            results[request.ticket, request.sample] = completion
    return results


def _gap_of_cached_prompt(engine: Any, folder: Path) -> float:
    """Return the gap after a sync for a prompt that vLLM cached before the sync.

    The prompt is longer than a block of 128 tokens, because vLLM caches only full blocks.
    """
    model = hf_model(folder)
    long_prompt = requests([3], num_tokens=PROMPT_TOKENS)
    run(engine, long_prompt)
    randomize(model, seed=7)
    sync(engine, model, 4)
    return gap(model, long_prompt, run(engine, long_prompt))


def _two_ranks(rank: int, folder: Path, engine_ranks: int) -> Observations:
    engine = start(folder, rank, 2, engine_ranks)
    observed: Observations = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    observed["batch"] = run(engine, requests(range(6)))
    observed["unseeded"] = [_unseeded(engine, rank) for _ in range(2)]
    observed["gaps"], observed["versions"] = _gaps_over_syncs(engine, folder, 3)
    # Another test's engine may start at the same time. Look only for files of this one.
    own_prefix = f"dapo-{os.geteuid()}-{os.environ['MASTER_PORT']}"
    torch.distributed.barrier()  # the last rank deletes the lock
    observed["left in /dev/shm"] = [path.name for path in Path("/dev/shm").glob(f"*{own_prefix}*")]
    del engine
    torch.distributed.barrier()  # deleting an engine keeps the process group
    return observed


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def single_rank(qwen3: Path) -> Observations:
    return run_ranks(_one_rank, 1, qwen3)[0]


@pytest.fixture(scope="module")
def tensor_parallel(qwen2: Path) -> list[Observations]:
    return run_ranks(_two_ranks, 2, qwen2, 2)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Observations]:
    return run_ranks(_two_ranks, 2, make_random_model("llama", tmp_path_factory.mktemp("llama")), 1)


def test_log_probs_equal_those_of_hf_before_and_after_each_sync(single_rank: Observations) -> None:
    """At temperature 1, 0.7 and 0, with a tied head and four sets of weights."""
    assert len(single_rank["gaps"]) == 4
    assert all(gap < GAP for gap in single_rank["gaps"])
    assert single_rank["versions"] == [0, 1, 2, 3]


def test_a_prompt_cached_under_old_weights_is_recomputed(single_rank: Observations) -> None:
    assert single_rank["prefix"] < GAP


def test_the_same_seed_gives_the_same_completion_in_any_batch(single_rank: Observations) -> None:
    assert single_rank["batch"] == single_rank["again"]
    for place, completion in single_rank["batch"].items():
        assert single_rank["alone"][place].tokens == completion.tokens
        assert single_rank["alone"][place].logprobs == pytest.approx(completion.logprobs, abs=GAP)


def test_tokens_sampled_without_seeds_follow_the_distribution(single_rank: Observations) -> None:
    """64 sequences per step: rows of a step, and steps, must have random numbers of their own."""
    counts, expected = single_rank["counts"], single_rank["expected"]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert expected.min() > 1  # enough for the approximation by a normal distribution
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_random_samples_of_a_prompt_differ_and_greedy_samples_do_not(
    single_rank: Observations,
) -> None:
    def answers(ticket: int) -> set[tuple[int, ...]]:
        return {tuple(single_rank["batch"][ticket, sample].tokens) for sample in range(4)}

    assert len(answers(0)) == 4
    assert len(answers(2)) == 1


def test_completions_end_at_eos_or_at_the_limit(single_rank: Observations, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    for completion in single_rank["batch"].values():
        assert len(completion.tokens) == len(completion.logprobs)
        stopped = completion.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in completion.tokens[:-1]
        assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(completion.tokens) == RESPONSE_TOKENS
        assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)
        (segment,) = completion.segments
        assert segment == Segment(0, len(completion.tokens))
    finishes = {completion.finish for completion in single_rank["batch"].values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_an_engine_restores_the_global_state_of_its_process(single_rank: Observations) -> None:
    before, after = single_rank["state"]
    assert before == after


def test_prompts_that_exceed_one_step_are_all_completed(single_rank: Observations) -> None:
    assert single_rank["flood"] == 48


def test_tensor_parallel_ranks_agree_with_each_other_and_with_hf(
    tensor_parallel: list[Observations],
) -> None:
    first, second = tensor_parallel
    assert (first["identity"], second["identity"]) == ((0, 1, True), (0, 1, False))
    assert list(first["batch"].items()) == list(second["batch"].items())  # in the same order
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])
    assert first["versions"] == [0, 1, 2, 3]
    assert first["left in /dev/shm"] == []


def test_tensor_parallel_ranks_draw_the_same_random_numbers(
    tensor_parallel: list[Observations],
) -> None:
    first, second = (rank["unseeded"] for rank in tensor_parallel)
    assert [list(results.items()) for results in first] == [
        list(results.items()) for results in second
    ]
    _check_random(*first)


def _check_random(first: Results, second: Results) -> None:
    """Check that samples at temperature 1 or 0.7 differ, and that greedy ones do not."""
    for (ticket, sample), completion in first.items():
        assert (completion.tokens == second[ticket, sample].tokens) == (ticket % 3 == 2)


def test_replicas_draw_different_random_numbers(replicas: list[Observations]) -> None:
    first, second = (rank["unseeded"] for rank in replicas)
    _check_random(first[0], second[0])
    _check_random(first[0], first[1])


def test_replicas_give_the_same_completions_for_the_same_requests(
    replicas: list[Observations],
) -> None:
    first, second = replicas
    assert (first["identity"], second["identity"]) == ((0, 2, True), (1, 2, True))
    assert first["batch"] == second["batch"]
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])
