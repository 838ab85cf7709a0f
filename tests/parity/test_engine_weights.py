"""Test weight slices of a vLLM engine: which it requests, how it loads them, which it refuses.

Each process runs several engines in turn, and tests check what it returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.types import SyncError
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    arrivals,
    differing,
    gap,
    hf_model,
    message,
    offer,
    requests,
    run,
    run_alone,
    send,
    start,
    sync,
    weights,
)
from tests.helpers.models import make_random_model, randomize

NUM_SYNCS = 3
"""Syncs of an engine of one worker. With two workers there is one, because they are slow."""
Observations = dict[str, Any]
Cases = Mapping[str, tuple[str, Observations, Observations]]

# vLLM's CPU kernel pads the size of experts to a multiple of 32.
UNPADDED = "qwen3_moe, not padded"
# Name of the engine: (family, overrides of the model's config, overrides of the run's config).
ALONE: Cases = {
    UNPADDED: ("qwen3_moe", {"moe_intermediate_size": 64}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "qwen3_moe, bfloat16": ("qwen3_moe", {}, {"policy__precision": "bfloat16"}),
    # vLLM keeps its routers in float32, and skips the layer for multi-token prediction.
    "glm4_moe, bfloat16": ("glm4_moe", {"has_mtp": True}, {"policy__precision": "bfloat16"}),
    "llama": ("llama", {"intermediate_size": 600}, {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, {}),
}
PAIRS: Cases = {
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": True}, {}),
    "qwen3_moe, experts by worker": ("qwen3_moe", {}, {"engine__expert_parallel": "true"}),
    "llama tied, one kv head": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {},
    ),
}


# ------------------------------------------------------------------ inside the processes


def _observe(cases: Cases, folders: Mapping[str, Path], num_workers: int) -> Observations:
    observed: Observations = {}
    for name, folder in folders.items():
        engine = start(folder, num_workers, **cases[name][2])
        observed[name] = _synced(engine, folder, cases[name][2])
        if name == UNPADDED:
            observed["unpacked"] = _without_packing(engine, folder)
        if name in ("qwen3 tied", "llama tied, one kv head"):
            observed["unfit"] = _wrong_offers(engine, weights(hf_model(folder)))
        if name == "qwen3 tied":
            observed["refused"] = _wrong_arrivals(engine, folder)
        engine.close()
    return observed


def _synced(engine: Any, folder: Path, overrides: Observations) -> Observations:
    """Return the slices that an engine requests, and gaps and wrong tensors after several syncs."""
    dtype = torch.bfloat16 if overrides.get("policy__precision") == "bfloat16" else torch.float32
    model = hf_model(folder)
    observed: Observations = {"gaps": [], "scores": [], "differ": []}
    before = run(engine, requests(range(6)))
    wanted = engine.trace(offer(_cast(weights(model), dtype)))
    observed["slices"] = wanted
    observed["undisturbed"] = run(engine, requests(range(6))) == before
    observed["gaps"].append(gap(model, requests(range(6)), before))
    for version in range(1, (NUM_SYNCS if len(wanted) == 1 else 1) + 1):
        randomize(model, seed=100 + version)
        sent = _cast(weights(model), dtype)
        engine._llm.collective_rpc(_reallocate)
        arriving = [arrivals(slices, sent, seed=version) for slices in wanted]
        send(engine, wanted, arriving, version)
        results = run(engine, requests(range(6)))
        observed["gaps"].append(gap(model, requests(range(6)), results))
        observed["differ"] += differing(engine, sent)
        observed["scores"].append(_score_gap(engine, model))
        observed["undisturbed"] &= run(engine, requests(range(6))) == results
    observed["version"] = {
        segment.version for completion in results.values() for segment in completion.segments
    }
    return observed


def _reallocate(worker: Any) -> None:
    """Give every parameter other memory, full of NaN, as a wake-up may. Packed layers store theirs
    elsewhere."""
    for parameter in worker.get_model().parameters():
        parameter.data = torch.full_like(parameter.data, torch.nan)


def _cast(whole: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in whole.items()}


@torch.no_grad()
def _score_gap(engine: Any, model: Any) -> float:
    """Return the largest difference of scores to HF. The first sequence is longer than a cached
    block, and was just sampled."""
    cached = requests([3], num_tokens=PROMPT_TOKENS)[:1]
    run(engine, cached)
    sequences = [cached[0].prompt.tokens] + [
        tuple(4 + (place * step) % 60 for place in range(20 + step)) for step in (3, 7, 11)
    ]
    gaps = []
    for tokens, scores in zip(sequences, engine.score(sequences), strict=True):
        ids = torch.tensor(tokens)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None])[:, 0]
        gaps.append((expected - torch.tensor(scores)).abs().max())
    return float(torch.stack(gaps).max())


def _without_packing(engine: Any, folder: Path) -> Observations:
    """Sync without our correction. Then vLLM does not pack the experts of an update."""
    from dapo_megatron.engine import device

    model = hf_model(folder)
    randomize(model, seed=999)
    original, device.forget_expert_kernels = device.forget_expert_kernels, lambda model: None
    sync(engine, model, 9)
    device.forget_expert_kernels = original
    results = run(engine, requests(range(6)))
    return {
        "names": sorted(weights(model)),
        "differ": differing(engine, weights(model)),
        "gap": gap(model, requests(range(6)), results),
    }


def _wrong_offers(engine: Any, whole: dict[str, Tensor]) -> dict[str, str]:
    """Return the error message for each kind of wrong offer, and for a good offer."""
    layer = "model.layers.1."
    q_proj, k_proj, norm = (
        f"{layer}{name}.weight"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm")
    )
    rows, columns = whole[q_proj].shape

    def other(name: str, *shape: int) -> dict[str, Tensor]:
        return whole | {name: torch.empty(shape)}

    offers = {
        "no norm": {name: tensor for name, tensor in whole.items() if name != norm},
        "no key": {name: tensor for name, tensor in whole.items() if name != k_proj},
        "extra": other("model.extra.weight", 3),
        "extra bias": other(f"{layer}mlp.down_proj.bias", columns),
        "extra head": other("lm_head.weight", *whole["model.embed_tokens.weight"].shape),
        "extra layer": other("model.layers.2.input_layernorm.weight", columns),
        "more rows": other(q_proj, rows + 2, columns),
        "fewer rows": other(q_proj, rows - 2, columns),
        "more columns": other(q_proj, rows, columns + 2),
        "long norm": other(norm, columns + 1),
        "more words": other("model.embed_tokens.weight", 10_000, columns),
        "good": whole,
    }
    return {
        name: message(lambda made=made: engine.trace(offer(made))) for name, made in offers.items()
    }


def _wrong_arrivals(engine: Any, folder: Path) -> Observations:
    """Return, for each kind of wrong arrival, the error message and the number of tensors that
    passed before it."""
    from dapo_megatron.engine.loading import by_name, checked

    whole = weights(hf_model(folder))
    (tensor_slices,) = engine.trace(offer(whole))
    good = [
        (tensor_slice.name, [(tensor_slice.region, whole[tensor_slice.name])])
        for tensor_slice in tensor_slices
    ]
    wanted = by_name(tensor_slices)
    name, [(region, weight)] = good[3]
    other = type(region)(region.start, (1, *region.shape[1:]))
    bad = {
        "good": good,
        "missing": good[:3] + good[4:],
        "extra": [*good[:3], ("model.extra.weight", [(region, weight)]), *good[3:]],
        "repeated": [*good[:4], *good[3:]],
        "no slice": [*good[:3], (name, []), *good[4:]],
        "other slice": [*good[:3], (name, [(other, weight[:1])]), *good[4:]],
        "slice repeated": [*good[:3], (name, [(region, weight)] * 2), *good[4:]],
        "misshapen": [*good[:3], (name, [(region, weight[:-1])]), *good[4:]],
        "other dtype": [*good[:3], (name, [(region, weight.double())]), *good[4:]],
    }

    def receive(arriving: Sequence[Any]) -> None:
        send(engine, [tensor_slices], [arriving], 9)

    observed: Observations = {"name": name, "num": len(good)}
    for kind, arriving in bad.items():
        passed: list[Any] = []
        observed[kind] = (message(lambda: passed.extend(checked(arriving, wanted))), len(passed))  # noqa: B023
    engine.submit(requests([0]))
    observed["in flight"] = message(lambda: engine.load(9, []))
    observed["score in flight"] = message(lambda: engine.score([[4, 5]]))
    engine.interrupt()
    observed["engine"] = message(lambda: receive(bad["missing"]))
    observed["submit after"] = message(lambda: engine.submit(requests([0])))
    observed["load after"] = message(lambda: receive(good))
    observed["submit then"] = message(lambda: engine.submit(requests([0])))
    engine.interrupt()
    return observed


# ------------------------------------------------------------------ the tests


def _observations(factory: pytest.TempPathFactory, cases: Cases, num_workers: int) -> Observations:
    folders = {
        name: make_random_model(family, factory.mktemp(family), **model)
        for name, (family, model, _) in cases.items()
    }
    return run_alone(_observe, cases, folders, num_workers)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    return _observations(tmp_path_factory, ALONE, 1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    return _observations(tmp_path_factory, PAIRS, 2)


def _check(observed: Observations, *, exact: bool = True) -> None:
    limit = GAP if exact else 10.0  # in bfloat16 a token may go to another expert
    num_syncs = NUM_SYNCS if len(observed["slices"]) == 1 else 1
    assert len(observed["gaps"]) == num_syncs + 1 and len(observed["scores"]) == num_syncs
    assert all(value < limit for value in (*observed["gaps"], *observed["scores"]))  # False for NaN
    assert observed["differ"] == []
    assert observed["undisturbed"]
    assert observed["version"] == {num_syncs}


@pytest.mark.parametrize("name", ALONE)
def test_an_engine_computes_with_the_weights_sent(alone: Observations, name: str) -> None:
    """Log-probs equal HF's after each sync, and the weights read back are bitwise as sent."""
    _check(alone[name], exact="bfloat16" not in name)
    (slices,) = alone[name]["slices"]
    for tensor_slice in slices:
        assert tensor_slice.region.shape == tensor_slice.global_shape


@pytest.mark.parametrize("name", PAIRS)
def test_workers_request_slices_and_compute_with_them(pairs: Observations, name: str) -> None:
    _check(pairs[name])
    first, second = ({(p.name, p.region) for p in slices} for slices in pairs[name]["slices"])
    split = ("q_proj.weight", "o_proj.weight", "down_proj.weight", "embed_tokens.weight")
    for tensor, region in first & second:  # tensors that both workers request in full
        assert not tensor.endswith(split), (tensor, region)


def test_expert_parallel_workers_request_different_whole_experts(pairs: Observations) -> None:
    experts = [
        {part.name: part for part in slices if ".experts." in part.name}
        for slices in pairs["qwen3_moe, experts by worker"]["slices"]
    ]
    assert not experts[0].keys() & experts[1].keys()
    for of_worker in experts:
        assert len(of_worker) == 2 * 4 * 3
        assert all(part.region.shape == part.global_shape for part in of_worker.values())


def test_a_single_kv_head_is_requested_by_both_workers(pairs: Observations) -> None:
    for slices in pairs["llama tied, one kv head"]["slices"]:
        assert all(p.region.shape == p.global_shape for p in slices if "k_proj" in p.name)


def test_unpacked_experts_are_detected_by_reading_back(alone: Observations) -> None:
    """This is the bug of vLLM 0.32 that engine/device.py corrects."""
    observed = alone["unpacked"]
    assert observed["differ"] == [name for name in observed["names"] if ".experts." in name]
    assert observed["gap"] > 0.01


@pytest.mark.parametrize("workers", [1, 2])
def test_offers_that_do_not_fit_are_refused_by_name(
    alone: Observations, pairs: Observations, workers: int
) -> None:
    messages = (alone if workers == 1 else pairs)["unfit"]
    layer = "model.layers.1."
    assert messages["good"] == ""
    assert messages["no norm"].startswith(f"{layer}input_layernorm.weight[0:")
    assert messages["no key"].startswith(f"{layer}self_attn.qkv_proj.weight[")
    assert "no offered tensor is loaded there" in messages["no key"]
    assert messages["extra"].startswith("model.extra.weight: ") and "no such" in messages["extra"]
    assert messages["extra bias"] == f"{layer}mlp.down_proj.bias: the engine has no such tensor"
    assert messages["extra head"] == "lm_head.weight: the engine has no such tensor"  # tied
    assert messages["extra layer"].startswith("model.layers.2.input_layernorm.weight: ")
    for kind in ("more rows", "fewer rows", "more columns"):
        assert messages[kind].startswith(f"{layer}self_attn.q_proj.weight: shape ("), kind
    assert messages["long norm"].startswith(f"{layer}input_layernorm.weight: shape (")
    assert messages["more words"].startswith("model.embed_tokens.weight: shape (10000")


def test_wrong_arrivals_are_refused_by_name_before_they_are_loaded(alone: Observations) -> None:
    refused = alone["refused"]
    name, num = refused["name"], refused["num"]
    missing = "missing from the weights given to the engine"
    assert refused["good"] == ("", num)
    assert refused["missing"] == (f"{name}: {missing}", num - 1)
    assert refused["extra"][0].startswith("model.extra.weight: ")
    assert refused["repeated"] == (f"{name}: given twice", 4)
    assert refused["no slice"][0].startswith(f"{name}: [") and missing in refused["no slice"][0]
    assert "is not a slice that this rank asked for" in refused["other slice"][0]
    assert refused["slice repeated"][0].endswith(" given twice")
    assert refused["misshapen"][0].startswith(f"{name}: shape (")
    assert "torch.float64" in refused["other dtype"][0]
    for kind in ("extra", "no slice", "other slice", "slice repeated", "misshapen", "other dtype"):
        assert (
            refused[kind][0].startswith((f"{name}: ", "model.extra")) and refused[kind][1] == 3
        ), kind


def test_an_engine_is_unusable_after_a_refusal_until_the_next_load(alone: Observations) -> None:
    messages = alone["refused"]
    assert "4 requests in flight" in messages["in flight"]
    assert "4 requests in flight" in messages["score in flight"]
    assert messages["engine"] == messages["missing"][0]
    assert "a weight sync failed" in messages["submit after"]
    assert messages["load after"] == messages["submit then"] == ""


def test_load_is_refused_before_trace_was_called() -> None:
    from dapo_megatron.engine.engine import VllmEngine

    engine = object.__new__(VllmEngine)
    engine._unusable, engine._requests, engine._knows_slices = "", {}, False
    engine._asleep = set()
    with pytest.raises(SyncError, match="was not asked for its slices"):
        engine.load(1, [])
