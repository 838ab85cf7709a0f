"""The vLLM engine against HF: log-probs, seeds, prefixes, before weight syncs and after them.

A vLLM start takes 10 to 25 s, so each world is started once and brings home what it saw; the
tests look at that.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron.types import Finish, Segment
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    gap,
    hf_model,
    requests,
    run,
    start,
    sync,
)
from tests.helpers.models import make_random_model, randomize
from tests.helpers.ranks import run_ranks

Seen = dict[str, Any]


# ------------------------------------------------------------------ inside the ranks


def _gaps_over_syncs(engine: Any, folder: Path, num_syncs: int) -> tuple[list[float], list[int]]:
    """Gap before any sync and after each, and the versions that the completions carried."""
    model = hf_model(folder)
    tickets = range(10 * engine.replica, 10 * engine.replica + 6)
    gaps, versions = [], []
    for version in range(num_syncs + 1):
        if version:
            randomize(model, seed=100 + version)
            sync(engine, model, version)
        results = run(engine, requests(tickets))
        gaps.append(gap(model, requests(tickets), results))
        versions += sorted({part.version for one in results.values() for part in one.segments})
    return gaps, versions


def _global_state() -> Seen:
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


def _one_rank(rank: int, folder: Path) -> Seen:
    before = _global_state()
    engine = start(folder, rank, 1, 1)
    seen: Seen = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    seen["batch"] = run(engine, requests(range(6)))
    seen["again"] = run(engine, requests(range(6)))
    seen["alone"] = {}
    for request in requests(range(6)):
        seen["alone"] |= run(engine, [request])
    seen["state"] = (before, _global_state())
    # More prompt tokens at once than vLLM takes into one step (4096), no prefix of them cached.
    seen["flood"] = len(run(engine, requests(range(12), num_tokens=120, temperature=1.0)))
    seen["gaps"], seen["versions"] = _gaps_over_syncs(engine, folder, 3)
    seen["prefix"] = _gap_of_cached_prompt(engine, folder)
    return seen


def _gap_of_cached_prompt(engine: Any, folder: Path) -> float:
    """vLLM keeps blocks of 128 tokens: a prompt longer than that, before and after a sync."""
    model = hf_model(folder)
    asked = requests([3], num_tokens=PROMPT_TOKENS)
    run(engine, asked)
    randomize(model, seed=7)
    sync(engine, model, 4)
    return gap(model, asked, run(engine, asked))


def _two_ranks(rank: int, folder: Path, engine_ranks: int) -> Seen:
    engine = start(folder, rank, 2, engine_ranks)
    seen: Seen = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    seen["batch"] = run(engine, requests(range(6)))
    seen["gaps"], seen["versions"] = _gaps_over_syncs(engine, folder, 3)
    # Another test's engine may be starting meanwhile.
    ours = f"dapo-{os.geteuid()}-{os.environ['MASTER_PORT']}"
    torch.distributed.barrier()  # the last rank deletes the lock
    seen["left in /dev/shm"] = [path.name for path in Path("/dev/shm").glob(f"*{ours}*")]
    del engine
    torch.distributed.barrier()  # a dropped engine has not taken the process group along
    return seen


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def one(qwen3: Path) -> Seen:
    return run_ranks(_one_rank, 1, qwen3)[0]


@pytest.fixture(scope="module")
def tensor_parallel(qwen2: Path) -> list[Seen]:
    return run_ranks(_two_ranks, 2, qwen2, 2)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return run_ranks(_two_ranks, 2, make_random_model("llama", tmp_path_factory.mktemp("llama")), 1)


def test_logprobs_are_those_of_hf_before_and_after_each_sync(one: Seen) -> None:
    """At temperature 1, 0.7 and 0, with a tied head; four sets of weights."""
    assert len(one["gaps"]) == 4
    assert all(gap < GAP for gap in one["gaps"])
    assert one["versions"] == [0, 1, 2, 3]


def test_prompt_cached_under_old_weights_is_computed_anew(one: Seen) -> None:
    assert one["prefix"] < GAP


def test_same_seed_gives_the_same_completion_whatever_else_runs(one: Seen) -> None:
    assert one["batch"] == one["again"]
    for place, completion in one["batch"].items():
        assert one["alone"][place].tokens == completion.tokens
        assert one["alone"][place].logprobs == pytest.approx(completion.logprobs, abs=GAP)


def test_samples_of_one_prompt_differ_and_greedy_ones_do_not(one: Seen) -> None:
    def answers(ticket: int) -> set[tuple[int, ...]]:
        return {one["batch"][ticket, sample].tokens for sample in range(4)}

    assert len(answers(0)) == 4
    assert len(answers(2)) == 1


def test_completions_end_at_eos_or_at_the_limit(one: Seen, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    for completion in one["batch"].values():
        assert len(completion.tokens) == len(completion.logprobs)
        stopped = completion.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in completion.tokens[:-1]
        assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(completion.tokens) == RESPONSE_TOKENS
        assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)
        (part,) = completion.segments
        assert part == Segment(0, len(completion.tokens))
    finishes = {completion.finish for completion in one["batch"].values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_engine_leaves_the_process_as_it_was(one: Seen) -> None:
    before, after = one["state"]
    assert before == after


def test_more_prompts_than_one_step_takes(one: Seen) -> None:
    assert one["flood"] == 48


def test_tensor_parallel_ranks_agree_with_each_other_and_with_hf(
    tensor_parallel: list[Seen],
) -> None:
    first, second = tensor_parallel
    assert (first["identity"], second["identity"]) == ((0, 1, True), (0, 1, False))
    assert list(first["batch"].items()) == list(second["batch"].items())  # in order, too
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])
    assert first["versions"] == [0, 1, 2, 3]
    assert first["left in /dev/shm"] == []


def test_replicas_work_on_their_own_and_give_the_same_for_the_same(replicas: list[Seen]) -> None:
    first, second = replicas
    assert (first["identity"], second["identity"]) == ((0, 2, True), (1, 2, True))
    assert first["batch"] == second["batch"]
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])
