"""Test what an engine samples: log-probs as HF's, seeds, cached prefixes, and interrupted
completions that continue correctly, under the same and under new weights.

An engine takes long to start, so each is started once, and tests check what it returned.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Results,
    close,
    gap,
    hf_model,
    interrupted,
    requests,
    rest,
    run,
    run_alone,
    segment_gap,
    start,
    sync,
    unseeded,
)
from tests.helpers.models import make_random_model, randomize

MAX_SEQUENCES = 8
Observations = dict[str, Any]


# ------------------------------------------------------------------ inside the process


def _observe(folder: Path) -> Observations:
    engine = start(folder)
    observed: Observations = {"batch": run(engine, requests(range(6)))}
    observed["gap"] = gap(hf_model(folder), requests(range(6)), observed["batch"])
    observed["again"] = run(engine, requests(range(6)))
    observed["alone"] = {}
    for request in requests(range(6)):
        observed["alone"] |= run(engine, [request])
    observed["counts"], observed["expected"] = _first_tokens(engine, folder, 2_000)
    # More prompt tokens than fit into one vLLM step (4096), with no cached prefix.
    observed["flood"] = len(run(engine, requests(range(12), num_tokens=120, temperature=1.0)))
    observed["stopped"] = _stopped(engine, observed["batch"])
    observed["unseeded"] = run(engine, unseeded())
    close(engine)
    other = start(folder, seed=1, engine__max_sequences=MAX_SEQUENCES)
    observed["other seed"] = run(other, unseeded())
    observed["same requests"] = run(other, requests(range(6)))
    observed["idle"] = other.interrupt()
    other.submit(requests([0]))
    observed["no step"] = other.interrupt()
    observed["same"] = _same_weights(other, folder)
    observed["again and again"] = _again_and_again(other, folder)
    observed["queued"] = _queued(other)
    observed["new"] = _new_weights(other, folder)
    close(other)
    return observed


def _stopped(engine: Any, whole: Results) -> list[tuple[str, Completion, Completion]]:
    """Sample completions again that end at a text from their middle. Return (text, whole one, new
    one) of each."""
    observed = []
    for request in requests(range(6)):
        completion = whole[request.ticket, request.sample]
        stop = engine.text(completion.tokens[5:8])
        if completion.num_tokens > 8 and stop.strip():
            results = run(engine, [replace(request, stop=(stop, "not there"))])
            observed += [(stop, completion, each) for each in results.values()]
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


def _same_weights(engine: Any, folder: Path) -> Observations:
    """Interrupt at every step and continue. 12 sequences at temperatures 1, 0.7 and 0; at most 8
    run at once."""
    model = hf_model(folder)
    requested = requests(range(3))
    observed: Observations = {"whole": run(engine, requested), "gaps": [], "cut": []}
    for num_steps in range(RESPONSE_TOKENS + 4):
        done = run(engine, requested, num_steps)
        partial = interrupted(engine)
        results = done | run(engine, rest(requested, done, partial))
        observed["cut"].append((done, partial, results))
        observed["gaps"].append(gap(model, requested, results))
    return observed


def _again_and_again(engine: Any, folder: Path) -> Observations:
    """Interrupt after each step, so that each token is sampled after a prefill of all tokens before
    it. The prompt has the maximum length."""
    requested = requests([0], num_tokens=PROMPT_TOKENS)[:1]
    done: Results = {}
    partial: Results = {}
    while not done:
        done = run(engine, rest(requested, {}, partial), 1)
        partial |= interrupted(engine)
    (completion,) = done.values()
    return {
        "completion": completion,
        "gap": gap(hf_model(folder), requested, done),
        "scored": engine.score([[*requested[0].prompt.tokens, *completion.tokens][:-1]])[0],
    }


def _queued(engine: Any) -> Observations:
    """Submit more continuations than can run, and interrupt while some are queued."""
    requested = requests(range(3), temperature=1.0)
    partials = [
        Completion(request.sample, (5, 6), (-1.0, -2.0), "", Finish.UNFINISHED, (Segment(0, 2),))
        for request in requested
    ]
    continued = [
        replace(request, so_far=so_far) for request, so_far in zip(requested, partials, strict=True)
    ]
    new = [replace(request, ticket=request.ticket + 10) for request in requested]
    done = run(engine, [*continued, *new], 3)
    partial = interrupted(engine)
    places = [(request.ticket, request.sample) for request in continued]
    same = [
        partial[place] is so_far
        for place, so_far in zip(places, partials, strict=True)
        if place in partial
    ]
    return {"same": same, "order": list(partial), "places": places, "done": done}


def _new_weights(engine: Any, folder: Path) -> Observations:
    """Interrupt three times, each time followed by a sync of other weights.

    Prompts are longer than a cached block of 128 tokens. All requests are finished under the last
    weights.
    """
    model = hf_model(folder)
    first = engine.version
    models = {first: copy.deepcopy(model)}
    requested = requests(range(3), num_tokens=PROMPT_TOKENS - 8)
    done: Results = {}
    partial: Results = {}
    clean = []
    for version in range(first + 1, first + 4):
        done |= run(engine, rest(requested, done, partial), 4)
        partial = interrupted(engine)
        clean.append((bool(engine.requests), engine._llm.llm_engine.has_unfinished_requests()))
        randomize(model, seed=200 + version)
        sync(engine, model, version)
        models[version] = copy.deepcopy(model)
    done |= run(engine, rest(requested, done, partial))
    versions = [
        [segment.version - first for segment in completion.segments] for completion in done.values()
    ]
    return {
        "gap": segment_gap(models, requested, done),
        "gap under one version": segment_gap({}, requested, done, other=models[first]),
        "versions": versions,
        "clean": clean,
    }


# ------------------------------------------------------------------ sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def observed(folder: Path) -> Observations:
    return run_alone(_observe, folder)


def test_the_same_seed_gives_the_same_completion_in_any_batch_and_engine(
    observed: Observations,
) -> None:
    """With the log-probs of HF, at temperature 1, 0.7 and 0."""
    assert observed["gap"] < GAP
    assert observed["batch"] == observed["again"]
    for place, completion in observed["batch"].items():
        for other in (observed["alone"][place], observed["same requests"][place]):
            assert other.tokens == completion.tokens
            assert other.logprobs == pytest.approx(completion.logprobs, abs=GAP)
    answers = [
        {tuple(observed["batch"][ticket, sample].tokens) for sample in range(4)}
        for ticket in (0, 2)
    ]
    assert [len(tokens) for tokens in answers] == [4, 1]  # the second is greedy


def test_tokens_sampled_without_seeds_follow_the_distribution(observed: Observations) -> None:
    """64 sequences per step: rows of a step, and steps, must have random numbers of their own."""
    counts, expected = observed["counts"], observed["expected"]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert expected.min() > 1  # enough for the approximation by a normal distribution
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5
    for (ticket, sample), completion in observed["unseeded"].items():
        other = observed["other seed"][ticket, sample]
        assert (completion.tokens == other.tokens) == (ticket % 3 == 2)  # greedy


def test_completions_end_at_eos_or_at_the_limit(observed: Observations, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for completion in observed["batch"].values():
        assert len(completion.tokens) == len(completion.logprobs)
        stopped = completion.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in completion.tokens[:-1]
        assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(completion.tokens) == RESPONSE_TOKENS
        assert completion.text == tokenizer.decode(completion.tokens, skip_special_tokens=True)
        (segment,) = completion.segments
        assert segment == Segment(0, len(completion.tokens))
    finishes = {completion.finish for completion in observed["batch"].values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}
    assert observed["flood"] == 48  # prompts that exceed one step


def test_a_text_ends_a_completion(observed: Observations, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(observed["stopped"]) > 6
    for stop, whole, completion in observed["stopped"]:
        num_tokens = completion.num_tokens
        assert num_tokens <= 8 and completion.tokens == whole.tokens[:num_tokens]
        assert completion.logprobs == pytest.approx(whole.logprobs[:num_tokens], abs=GAP)
        assert stop in tokenizer.decode(completion.tokens)
        assert stop not in tokenizer.decode(completion.tokens[:-1])


# ------------------------------------------------------------------ interrupts


def test_completions_interrupted_at_any_step_continue_under_the_same_weights(
    observed: Observations,
) -> None:
    assert observed["idle"] == observed["no step"] == []
    assert len(observed["same"]["gaps"]) == RESPONSE_TOKENS + 4
    assert all(gap < GAP for gap in observed["same"]["gaps"])
    finishes = set()
    for done, partial, results in observed["same"]["cut"]:
        assert results.keys() == observed["same"]["whole"].keys()
        assert not done.keys() & partial.keys()
        for place, whole in observed["same"]["whole"].items():
            assert results[place].segments == (Segment(0, len(results[place].tokens)),)
            assert 1 <= len(results[place].tokens) <= RESPONSE_TOKENS
            finishes.add(results[place].finish)
            if place in done or place[0] == 2:  # ticket 2 is greedy
                assert results[place].tokens == whole.tokens
                assert results[place].text == whole.text
        for place, part in partial.items():
            assert part.finish is Finish.UNFINISHED
            assert 1 <= len(part.tokens) < RESPONSE_TOKENS
            # The partial tokens are a prefix of the uninterrupted completion.
            num = len(part.tokens)
            assert part.tokens == observed["same"]["whole"][place].tokens[:num]
            assert part.logprobs == results[place].logprobs[:num]
    assert finishes == {Finish.STOP, Finish.LENGTH}
    # Some interruptions came while sequences were queued, others after some had finished.
    cuts = [(len(done), len(partial)) for done, partial, _ in observed["same"]["cut"]]
    assert (0, MAX_SEQUENCES) in cuts
    assert any(done and partial for done, partial in cuts)


def test_interruptions_after_each_token_keep_log_probs_exact(observed: Observations) -> None:
    again = observed["again and again"]
    completion, scored = again["completion"], again["scored"]
    assert len(completion.tokens) > 4
    assert completion.segments == (Segment(0, len(completion.tokens)),)
    assert again["gap"] < GAP
    assert completion.logprobs[:-1] == pytest.approx(scored[PROMPT_TOKENS - 1 :], abs=GAP)


def test_each_token_was_sampled_by_the_version_of_its_segment(observed: Observations) -> None:
    """This also shows that syncs reach the engine, and that blocks cached under older weights are
    not reused."""
    new = observed["new"]
    assert new["gap"] < GAP
    assert new["gap under one version"] > 100 * GAP  # the versions do differ
    assert [0, 1, 2, 3] in new["versions"]
    assert all(versions == sorted(set(versions)) for versions in new["versions"])
    assert new["clean"] == [(False, False)] * 3


def test_queued_continuations_are_returned_unchanged(observed: Observations) -> None:
    same, order, places = (observed["queued"][key] for key in ("same", "order", "places"))
    assert order == [place for place in places if place not in observed["queued"]["done"]]
    # The first eight ran, the other continuations were queued, and new requests are not returned.
    num_queued = len(places) - MAX_SEQUENCES
    assert same[:-num_queued].count(True) == 0
    assert same[-num_queued:] == [True] * num_queued
