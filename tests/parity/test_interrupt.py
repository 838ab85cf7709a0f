"""Interrupting the vLLM engine and going on, under the same weights and under new ones.

A vLLM start takes 10 to 25 s, so each world is started once and brings home what it saw; the
tests look at that.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.types import Completion, Finish, Segment
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Results,
    gap,
    hf_model,
    interrupted,
    requests,
    rest,
    run,
    segment_gap,
    start,
    sync,
)
from tests.helpers.models import make_random_model, randomize
from tests.helpers.ranks import run_ranks

MAX_SEQUENCES = 8
Seen = dict[str, Any]


# ------------------------------------------------------------------ inside the ranks


def _same_weights(engine: Any, folder: Path) -> Seen:
    """Interrupted at every step and continued, at temperatures 1, 0.7 and 0; 12 sequences, 8 at
    once."""
    model = hf_model(folder)
    asked = requests(range(3))
    seen: Seen = {"whole": run(engine, asked), "gaps": [], "cut": []}
    for num_steps in range(RESPONSE_TOKENS + 4):
        done = run(engine, asked, num_steps)
        partial = interrupted(engine)
        results = done | run(engine, rest(asked, done, partial))
        seen["cut"].append((done, partial, results))
        seen["gaps"].append(gap(model, asked, results))
    return seen


def _again_and_again(engine: Any, folder: Path) -> Seen:
    """Interrupted after each step, so that every token comes of a prompt that holds those before;
    the longest prompt there may be."""
    asked = requests([0], num_tokens=PROMPT_TOKENS)[:1]
    done: Results = {}
    partial: Results = {}
    while not done:
        done = run(engine, rest(asked, {}, partial), 1)
        partial |= interrupted(engine)
    (completion,) = done.values()
    return {
        "completion": completion,
        "gap": gap(hf_model(folder), asked, done),
        "scored": engine.score([[*asked[0].prompt.tokens, *completion.tokens][:-1]])[0],
    }


def _new_weights(engine: Any, folder: Path) -> Seen:
    """Three interruptions, each followed by other weights. Prompts long enough for cached blocks
    (128 tokens), and every request asked for again under the last weights."""
    model = hf_model(folder)
    first = engine.version
    models = {first: copy.deepcopy(model)}
    asked = requests(range(3), num_tokens=PROMPT_TOKENS - 8)
    done: Results = {}
    partial: Results = {}
    clean = []
    for version in range(first + 1, first + 4):
        done |= run(engine, rest(asked, done, partial), 4)
        partial = interrupted(engine)
        clean.append((bool(engine.requests), engine._llm.llm_engine.has_unfinished_requests()))
        randomize(model, seed=200 + version)
        sync(engine, model, version)
        models[version] = copy.deepcopy(model)
    done |= run(engine, rest(asked, done, partial))
    versions = [[part.version - first for part in one.segments] for one in done.values()]
    return {
        "gap": segment_gap(models, asked, done),
        "gap under one version": segment_gap({}, asked, done, other=models[first]),
        "versions": versions,
        "clean": clean,
    }


def _queued(engine: Any) -> Seen:
    """More requests that continue something than can run: the queued come back as they came."""
    asked = requests(range(3), temperature=1.0)
    prompt = [
        Completion(request.sample, (5, 6), (-1.0, -2.0), "", Finish.UNFINISHED, (Segment(0, 2),))
        for request in asked
    ]
    continued = [replace(one, so_far=so_far) for one, so_far in zip(asked, prompt, strict=True)]
    new = [replace(one, ticket=one.ticket + 10) for one in asked]
    done = run(engine, [*continued, *new], 3)
    partial = interrupted(engine)
    places = [(one.ticket, one.sample) for one in continued]
    same = [
        partial[place] is so_far
        for place, so_far in zip(places, prompt, strict=True)
        if place in partial
    ]
    return {"same": same, "order": list(partial), "places": places, "done": done}


def _one_rank(rank: int, folder: Path) -> Seen:
    engine = start(folder, rank, 1, 1, engine__max_sequences=MAX_SEQUENCES)
    seen: Seen = {"max": engine.max_sequences, "idle": engine.interrupt()}
    engine.submit(requests([0]))
    seen["no step"] = engine.interrupt()
    seen["same"] = _same_weights(engine, folder)
    seen["again"] = _again_and_again(engine, folder)
    seen["queued"] = _queued(engine)
    seen["new"] = _new_weights(engine, folder)
    return seen


def _two_ranks(rank: int, folder: Path) -> Seen:
    engine = start(folder, rank, 2, 2, engine__max_sequences=MAX_SEQUENCES)
    seen: Seen = {}
    asked = requests(range(3))
    done = run(engine, asked, 7)
    seen["partial"] = interrupted(engine)
    seen["rest"] = run(engine, rest(asked, done, seen["partial"]))
    seen["new"] = _new_weights(engine, folder)
    return seen


# ------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = make_random_model("qwen3", tmp_path_factory.mktemp("qwen3"))
    return run_ranks(_one_rank, 1, folder)[0]


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return run_ranks(_two_ranks, 2, make_random_model("qwen2", tmp_path_factory.mktemp("qwen2")))


def test_an_engine_without_tokens_has_nothing_to_give(one: Seen) -> None:
    assert one["max"] == MAX_SEQUENCES
    assert one["idle"] == one["no step"] == []


def test_continued_under_the_same_weights_at_every_step(one: Seen) -> None:
    assert len(one["same"]["gaps"]) == RESPONSE_TOKENS + 4
    assert all(gap < GAP for gap in one["same"]["gaps"])
    for done, partial, results in one["same"]["cut"]:
        assert results.keys() == one["same"]["whole"].keys()
        assert not done.keys() & partial.keys()
        for place, whole in one["same"]["whole"].items():
            assert results[place].segments == (Segment(0, len(results[place].tokens)),)
            assert 1 <= len(results[place].tokens) <= RESPONSE_TOKENS
            assert results[place].finish is not Finish.UNFINISHED
            if place in done or place[0] == 2:  # ticket 2 is greedy
                assert results[place].tokens == whole.tokens
                assert results[place].text == whole.text
        for place, part in partial.items():
            assert part.finish is Finish.UNFINISHED
            assert 1 <= len(part.tokens) < RESPONSE_TOKENS
            # Nothing was sampled that the whole run has not.
            num = len(part.tokens)
            assert part.tokens == one["same"]["whole"][place].tokens[:num]
            assert part.logprobs == results[place].logprobs[:num]
    finishes = {one.finish for _, _, results in one["same"]["cut"] for one in results.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH}
    # Of twelve, cuts found some waiting for their place, and some finished while others ran.
    cuts = [(len(done), len(partial)) for done, partial, _ in one["same"]["cut"]]
    assert (0, MAX_SEQUENCES) in cuts
    assert any(done and partial for done, partial in cuts)


def test_interrupted_after_each_token(one: Seen) -> None:
    completion, scored = one["again"]["completion"], one["again"]["scored"]
    assert len(completion.tokens) > 4
    assert completion.segments == (Segment(0, len(completion.tokens)),)
    assert one["again"]["gap"] < GAP
    assert completion.logprobs[:-1] == pytest.approx(scored[PROMPT_TOKENS - 1 :], abs=GAP)


@pytest.mark.parametrize("world", ["one", "tensor_parallel"])
def test_each_token_is_of_the_version_of_its_segment(
    world: str, request: pytest.FixtureRequest
) -> None:
    """Also: no block cached under older weights is used, and the engine took the new weights."""
    ranks = request.getfixturevalue(world)
    for seen in ranks if isinstance(ranks, list) else [ranks]:
        new = seen["new"]
        assert new["gap"] < GAP
        assert new["gap under one version"] > 100 * GAP  # the versions do differ
        assert [0, 1, 2, 3] in new["versions"]
        assert all(versions == sorted(set(versions)) for versions in new["versions"])
        assert new["clean"] == [(False, False)] * 3


def test_queued_continuations_come_back_as_they_came(one: Seen) -> None:
    same, order, places = (one["queued"][key] for key in ("same", "order", "places"))
    assert order == [place for place in places if place not in one["queued"]["done"]]
    # The first eight ran, the others waited, and of the new ones there is nothing.
    assert same[: -(len(places) - MAX_SEQUENCES)].count(True) == 0
    assert same[-(len(places) - MAX_SEQUENCES) :] == [True] * (len(places) - MAX_SEQUENCES)


def test_tensor_parallel_ranks_give_the_same(tensor_parallel: list[Seen]) -> None:
    first, second = tensor_parallel
    assert list(first["partial"].items()) == list(second["partial"].items())  # in order, too
    assert list(first["rest"].items()) == list(second["rest"].items())
    assert first["partial"] and first["new"]["versions"] == second["new"]["versions"]
