"""The vLLM engine against HF: log-probs, seeds, weight syncs, names and shapes of the tensors.

A vLLM start takes 10 to 25 s, so each world is started once and brings home what it saw; the
tests look at that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo_megatron.config import Config
from dapo_megatron.config_file import parse_config
from dapo_megatron.types import Completion, Finish, SampleRequest, SyncError
from tests.helpers.models import make_random_model, randomize
from tests.helpers.ranks import run_ranks

GAP = 1e-5  # largest difference of two log-probs in float32, natural logarithm
PROMPT_TOKENS, RESPONSE_TOKENS = 160, 24
Seen = dict[str, Any]
Results = dict[tuple[int, int], Completion]


# ------------------------------------------------------------------ inside the ranks


def _config(folder: Path, engine_ranks: int) -> Config:
    tree: dict[str, Any] = {
        "seed": 1,
        "run": {"name": "test"},
        "model": {"path": str(folder)},
        "policy": {"precision": "float32"},
        "engine": {"tensor_parallel": engine_ranks},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": RESPONSE_TOKENS,
            "on_policy": True,
            "dynamic_sampling": True,
            "max_rounds": 2,
            "at_bound": "train_partial",
            "max_age": 4,
        },
        "overlong": {
            "max_tokens": RESPONSE_TOKENS,
            "buffer_tokens": 8,
            "penalty": True,
            "filter": False,
        },
        "loss": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
            "aggregation": "token",
            "tis_cap": None,
            "advantage_eps": 1e-6,
        },
        "optimizer": {
            "lr": 1e-3,
            "warmup_rollout_steps": 0,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "clip_grad": 1.0,
        },
        "train": {"rollout_steps": 1, "updates_per_step": 1, "max_tokens_per_microbatch": 512},
        "data": {
            "shuffle": True,
            "train": [{"kind": "jsonl", "name": "none", "path": "none", "grader": "dapo_math"}],
        },
        "sync": {"max_gap": 1e-4},
    }
    return parse_config(tree)


def _start(folder: Path, rank: int, world_size: int, engine_ranks: int) -> Any:
    from dapo_megatron.engine.engine import VllmEngine

    config = _config(folder, engine_ranks)
    return VllmEngine(config, rank=rank, world_size=world_size, local_rank=rank)


def _requests(
    tickets: Sequence[int], num_tokens: int = 9, temperature: float | None = None
) -> list[SampleRequest]:
    """Four samples for each ticket; every third ticket at temperature 1, 0.7 and 0."""
    return [
        SampleRequest(
            ticket=ticket,
            sample=sample,
            tokens=tuple(4 + (ticket * 5 + place * 7) % 60 for place in range(num_tokens)),
            seed=1000 * ticket + sample,
            max_tokens=RESPONSE_TOKENS,
            temperature=(1.0, 0.7, 0.0)[ticket % 3] if temperature is None else temperature,
            top_p=1.0,
        )
        for ticket in tickets
        for sample in range(4)
    ]


def _run(engine: Any, requests: Sequence[SampleRequest]) -> Results:
    """Completions in the order in which they finished."""
    engine.submit(requests)
    results: Results = {}
    while engine.has_work():
        for ticket, completion in engine.step():
            results[ticket, completion.sample] = completion
    return results


@torch.no_grad()
def _gap(model: PreTrainedModel, requests: Sequence[SampleRequest], results: Results) -> float:
    """Largest |log-prob by engine - by HF| of any sampled token; nan if any is nan."""
    gaps = []
    for request in requests:
        completion = results[request.ticket, request.sample]
        ids = torch.tensor([*request.tokens, *completion.tokens])
        logits = model(ids[None]).logits[0, len(request.tokens) - 1 : -1]
        # A greedy token's log-prob is the plain one.
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        sampled = logprobs.gather(1, ids[len(request.tokens) :, None])[:, 0]
        gaps.append((sampled - torch.tensor(completion.logprobs)).abs().max())
    return float(torch.stack(gaps).max())


def _gaps_over_syncs(engine: Any, folder: Path, num_syncs: int) -> tuple[list[float], list[int]]:
    """Gap before any sync and after each, and the versions that the completions carried."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tickets = range(10 * engine.replica, 10 * engine.replica + 6)
    gaps, versions = [], []
    for version in range(num_syncs + 1):
        if version:
            randomize(model, seed=100 + version)
            report = engine.receive(_reusing_one_buffer(model), version)
            assert report.version == version
            assert report.num_tensors == len(engine.expected_tensors())
        results = _run(engine, _requests(tickets))
        gaps.append(_gap(model, _requests(tickets), results))
        versions += sorted({completion.version for completion in results.values()})
    return gaps, versions


def _reusing_one_buffer(model: PreTrainedModel) -> Any:
    """As protocols.Policy.weights may: a tensor holds until the next one is asked for."""
    buffer = torch.empty(max(weight.numel() for weight in model.parameters()))
    for name, weight in model.named_parameters():
        view = buffer[: weight.numel()].view(weight.shape)
        view.copy_(weight.detach())
        yield name, view
        buffer.fill_(float("nan"))


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
    engine = _start(folder, rank, 1, 1)
    seen: Seen = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    seen["batch"] = _run(engine, _requests(range(6)))
    seen["again"] = _run(engine, _requests(range(6)))
    seen["alone"] = {}
    for request in _requests(range(6)):
        seen["alone"] |= _run(engine, [request])
    seen["state"] = (before, _global_state())
    # More prompt tokens at once than vLLM takes into one step (4096), no prefix of them cached.
    seen["flood"] = len(_run(engine, _requests(range(12), num_tokens=120, temperature=1.0)))
    seen["aborted"] = _abort_midway(engine)
    seen["gaps"], seen["versions"] = _gaps_over_syncs(engine, folder, 3)
    seen["prefix"] = _gap_of_cached_prompt(engine, folder)
    seen["refusals"] = _refusals(engine, folder)
    seen["expected"] = engine.expected_tensors()
    return seen


def _abort_midway(engine: Any) -> Results:
    requests = _requests([0])
    engine.submit(requests)
    engine.step()
    engine.abort(requests[1:3])
    return _run(engine, [])


def _gap_of_cached_prompt(engine: Any, folder: Path) -> float:
    """vLLM keeps blocks of 128 tokens: a prompt longer than that, before and after a sync."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = _requests([3], num_tokens=PROMPT_TOKENS)
    _run(engine, requests)
    randomize(model, seed=7)
    engine.receive(model.named_parameters(), 4)
    return _gap(model, requests, _run(engine, requests))


def _refusals(engine: Any, folder: Path) -> Seen:
    """What is said of each kind of wrong weights, and how many tensors had gone through."""
    from dapo_megatron.engine.receiver import checked

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    good = [(name, weight.detach()) for name, weight in model.named_parameters()]
    name, weight = good[3]
    bad = {
        "missing": good[:3] + good[4:],
        "extra": [*good[:3], ("model.extra.weight", weight), *good[3:]],
        "misshapen": [*good[:3], (name, weight[:-1]), *good[4:]],
        "repeated": [*good[:4], *good[3:]],
    }
    seen: Seen = {
        "name": name,
        "good": len(list(checked(good, engine.expected_tensors(), torch.float32))),
    }
    for kind, weights in bad.items():
        passed = 0
        try:
            for _ in checked(weights, engine.expected_tensors(), torch.float32):
                passed += 1
        except SyncError as error:
            seen[kind] = (str(error), passed)
    calls = {
        "in flight": lambda: engine.receive(good, 9),
        "engine": lambda: engine.receive(bad["misshapen"], 9),
        "submit after": lambda: engine.submit(_requests([0])),
        "receive after": lambda: engine.receive(good, 9),
    }
    engine.submit(_requests([0]))
    for kind, call in calls.items():
        try:
            call()
        except SyncError as error:
            seen[kind] = str(error)
        engine.abort(_requests([0]))
    return seen


def _two_ranks(rank: int, folder: Path, engine_ranks: int) -> Seen:
    engine = _start(folder, rank, 2, engine_ranks)
    seen: Seen = {"identity": (engine.replica, engine.num_replicas, engine.is_leader)}
    seen["batch"] = _run(engine, _requests(range(6)))
    seen["gaps"], seen["versions"] = _gaps_over_syncs(engine, folder, 3)
    seen["expected"] = engine.expected_tensors()
    seen["left in /dev/shm"] = [path.name for path in Path("/dev/shm").glob("*cpushm*")]
    del engine
    torch.distributed.barrier()  # a dropped engine has not taken the process group along
    return seen


def _expected(rank: int, folders: Sequence[Path]) -> list[Seen]:
    return [_start(folder, rank, 1, 1).expected_tensors() for folder in folders]


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


def _checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


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
    assert {completion.finish for completion in one["batch"].values()} == set(Finish)


def test_engine_leaves_the_process_as_it_was(one: Seen) -> None:
    before, after = one["state"]
    assert before == after


def test_more_prompts_than_one_step_takes(one: Seen) -> None:
    assert one["flood"] == 48


def test_aborted_requests_do_not_come_back_and_the_others_do(one: Seen) -> None:
    assert {place: one["batch"][place] for place in one["aborted"]} == one["aborted"]
    assert set(one["aborted"]) == {(0, 0), (0, 3)}


def test_wrong_weights_are_refused_by_name_before_they_are_loaded(one: Seen) -> None:
    said = one["refusals"]
    name = said["name"]
    assert said["good"] == len(one["expected"])
    assert said["missing"] == (
        f"{name}: missing from the weights given to the engine",
        said["good"] - 1,
    )
    assert said["extra"] == ("model.extra.weight: the engine has no such tensor", 3)
    assert said["misshapen"][0].startswith(f"{name}: shape (") and said["misshapen"][1] == 3
    assert said["repeated"] == (f"{name}: given twice", 4)


def test_engine_is_not_used_after_a_refusal_nor_synced_while_it_works(one: Seen) -> None:
    said = one["refusals"]
    assert "4 requests in flight" in said["in flight"]
    assert said["engine"] == said["misshapen"][0]
    assert "a weight sync failed" in said["submit after"]
    assert "a weight sync failed" in said["receive after"]


def test_tensor_parallel_ranks_agree_with_each_other_and_with_hf(
    tensor_parallel: list[Seen], qwen2: Path
) -> None:
    first, second = tensor_parallel
    assert (first["identity"], second["identity"]) == ((0, 1, True), (0, 1, False))
    assert list(first["batch"].items()) == list(second["batch"].items())  # in order, too
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])
    assert first["versions"] == [0, 1, 2, 3]
    assert first["expected"] == second["expected"] == _checkpoint_shapes(qwen2)
    assert first["left in /dev/shm"] == []


def test_replicas_work_on_their_own_and_give_the_same_for_the_same(replicas: list[Seen]) -> None:
    first, second = replicas
    assert (first["identity"], second["identity"]) == ((0, 2, True), (1, 2, True))
    assert first["batch"] == second["batch"]
    assert all(gap < GAP for gap in first["gaps"] + second["gaps"])


def test_expected_tensors_are_those_of_the_checkpoint(
    one: Seen, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = [("qwen2", True), ("qwen3", False), ("llama", False), ("llama", True)]
    folders = [
        make_random_model(family, tmp_path_factory.mktemp(family), tie_word_embeddings=tied)
        for family, tied in cases
    ]
    truth = [_checkpoint_shapes(folder) for folder in folders]
    assert run_ranks(_expected, 1, folders)[0] == truth
    assert ["lm_head.weight" in shapes for shapes in truth] == [not tied for _, tied in cases]
    assert one["expected"] == _checkpoint_shapes(qwen3)
