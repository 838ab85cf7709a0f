"""Compare the vLLM engine with HF: log-probs, seeds and cached prefixes, before and after syncs.

An engine of two workers starts in 20 s, so each is started once, and tests check what it returned.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from dapo_megatron.types import Finish, Segment
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Results,
    differing,
    gap,
    hf_model,
    message,
    requests,
    run,
    run_alone,
    start,
    sync,
    weights,
)
from tests.helpers.models import make_random_model, randomize

Observations = dict[str, Any]


# ------------------------------------------------------------------ inside the processes


def _over_syncs(engine: Any, folder: Path, num_syncs: int) -> Observations:
    """Return the gaps before the first sync and after each, the versions of the completions, and
    the tensors that differ from those sent."""
    model = hf_model(folder)
    gaps, versions, differ = [], [], []
    for version in range(num_syncs + 1):
        if version:
            randomize(model, seed=100 + version)
            sync(engine, model, version)
            differ += differing(engine, weights(model))
        results = run(engine, requests(range(6)))
        gaps.append(gap(model, requests(range(6)), results))
        versions += sorted(
            {segment.version for completion in results.values() for segment in completion.segments}
        )
    return {"gaps": gaps, "versions": versions, "differ": differ}


def _one_worker(folder: Path) -> Observations:
    engine = start(folder)
    observed: Observations = {"batch": run(engine, requests(range(6)))}
    observed["again"] = run(engine, requests(range(6)))
    observed["alone"] = {}
    for request in requests(range(6)):
        observed["alone"] |= run(engine, [request])
    observed["counts"], observed["expected"] = _first_tokens(engine, folder, 2_000)
    # More prompt tokens than fit into one vLLM step (4096), with no cached prefix.
    observed["flood"] = len(run(engine, requests(range(12), num_tokens=120, temperature=1.0)))
    observed["unseeded"] = [run(engine, _unseeded()) for _ in range(2)]
    observed |= _over_syncs(engine, folder, 3)
    observed["prefix"] = _gap_of_cached_prompt(engine, folder)
    observed["end"] = _closed(engine)
    other = start(folder, seed=1)
    observed["other seed"] = run(other, _unseeded())
    observed["same requests"] = run(other, requests(range(6)))
    other.sleep()
    observed["end asleep"] = _closed(other)
    return observed


def _two_workers(folder: Path) -> Observations:
    engine = start(folder, 2)
    unseeded = [run(engine, _unseeded()) for _ in range(2)]
    observed: Observations = {
        "modules": engine._llm.collective_rpc(_modules_of_the_policy),
        "unseeded": unseeded,
        # Each worker draws the tokens that it continues with.
        "unseeded gap": max(gap(hf_model(folder), _unseeded(), each) for each in unseeded),
        "in /dev/shm": [str(path) for path in Path("/dev/shm").glob(f"dapo-*-{os.getpid()}-*")],
    }
    observed |= _over_syncs(engine, folder, 3)
    observed["end"] = _closed(engine)
    return observed


def _unseeded() -> list[Any]:
    return [replace(request, seed=None) for request in requests(range(6))]


def _modules_of_the_policy(worker: Any) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "megatron"]


def _closed(engine: Any) -> Observations:
    """Close an engine twice. Return what is left of it."""
    freed = None
    if not psutil.Process().children():
        (model,) = engine._llm.apply_model(weakref.ref)
        freed = lambda: model() is None  # noqa: E731
    engine.close()
    engine.close()
    return {
        "refused": message(lambda: engine.submit(requests([0]))),
        "is freed": freed is None or freed(),
        "children": [child.cmdline() for child in psutil.Process().children(recursive=True)],
        "threads": [t.name for t in threading.enumerate() if not t.daemon and "Main" not in t.name],
    }


def _first_tokens(engine: Any, folder: Path, num: int) -> tuple[Tensor, Tensor]:
    """Sample the first token after one prompt `num` times without seeds. Return how often each
    token of the vocabulary was sampled, and how often it is expected."""
    first = replace(requests([0])[0], seed=None, max_tokens=1)
    sampled = run(engine, [replace(first, sample=sample) for sample in range(num)])
    tokens = [completion.tokens[0] for completion in sampled.values()]
    with torch.no_grad():
        logits = hf_model(folder)(torch.tensor([first.prompt.tokens])).logits[0, -1]
    return torch.tensor(tokens).bincount(minlength=len(logits)), num * logits.softmax(-1)


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


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def single(qwen3: Path) -> Observations:
    return run_alone(_one_worker, qwen3)


@pytest.fixture(scope="module")
def pair(qwen2: Path) -> Observations:
    return run_alone(_two_workers, qwen2)


def test_log_probs_equal_those_of_hf_before_and_after_each_sync(single: Observations) -> None:
    """At temperature 1, 0.7 and 0, with a tied head and four sets of weights."""
    assert len(single["gaps"]) == 4
    assert all(gap < GAP for gap in single["gaps"])
    assert single["versions"] == [0, 1, 2, 3] and single["differ"] == []


def test_a_prompt_cached_under_old_weights_is_recomputed(single: Observations) -> None:
    assert single["prefix"] < GAP


def test_the_same_seed_gives_the_same_completion_in_any_batch(single: Observations) -> None:
    assert single["batch"] == single["again"]
    for place, completion in single["batch"].items():
        assert single["alone"][place].tokens == completion.tokens
        assert single["alone"][place].logprobs == pytest.approx(completion.logprobs, abs=GAP)


def test_tokens_sampled_without_seeds_follow_the_distribution(single: Observations) -> None:
    """64 sequences per step: rows of a step, and steps, must have random numbers of their own."""
    counts, expected = single["counts"], single["expected"]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert expected.min() > 1  # enough for the approximation by a normal distribution
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_random_samples_of_a_prompt_differ_and_greedy_samples_do_not(
    single: Observations,
) -> None:
    def answers(ticket: int) -> set[tuple[int, ...]]:
        return {tuple(single["batch"][ticket, sample].tokens) for sample in range(4)}

    assert len(answers(0)) == 4
    assert len(answers(2)) == 1


def test_completions_end_at_eos_or_at_the_limit(single: Observations, qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    for completion in single["batch"].values():
        assert len(completion.tokens) == len(completion.logprobs)
        stopped = completion.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in completion.tokens[:-1]
        assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(completion.tokens) == RESPONSE_TOKENS
        assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)
        (segment,) = completion.segments
        assert segment == Segment(0, len(completion.tokens))
    finishes = {completion.finish for completion in single["batch"].values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_prompts_that_exceed_one_step_are_all_completed(single: Observations) -> None:
    assert single["flood"] == 48


def test_samples_without_seeds_differ_between_runs_and_engines(
    single: Observations, pair: Observations
) -> None:
    _check_random(*single["unseeded"])
    _check_random(*pair["unseeded"])
    _check_random(single["unseeded"][0], single["other seed"])


def _check_random(first: Results, second: Results) -> None:
    """Check that samples at temperature 1 or 0.7 differ, and that greedy ones do not."""
    for (ticket, sample), completion in first.items():
        assert (completion.tokens == second[ticket, sample].tokens) == (ticket % 3 == 2)


def test_engines_give_the_same_completions_for_the_same_requests(single: Observations) -> None:
    assert single["same requests"] == single["batch"]


def test_two_workers_agree_with_hf_before_and_after_each_sync(pair: Observations) -> None:
    assert len(pair["gaps"]) == 4
    assert max(*pair["gaps"], pair["unseeded gap"]) < GAP
    assert pair["versions"] == [0, 1, 2, 3] and pair["differ"] == []


def test_workers_import_nothing_of_the_policy_and_share_unnamed_memory(
    pair: Observations,
) -> None:
    assert pair["modules"] == [[], []]
    assert pair["in /dev/shm"] == []


def test_a_closed_engine_leaves_nothing_behind_and_another_can_be_made(
    single: Observations, pair: Observations
) -> None:
    for end in (single["end"], single["end asleep"], pair["end"]):
        assert end["refused"].endswith("it is closed")
        assert end["is freed"] and end["children"] == end["threads"] == []
