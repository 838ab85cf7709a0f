"""Test weight slices of a vLLM engine: which it requests, how it loads them, which it refuses.

A vLLM start takes 6 to 25 s, so each world runs several engines in turn, and tests check what it
returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.types import DapoError, SyncError
from tests.helpers.engines import (
    GAP,
    PROMPT_TOKENS,
    arrivals,
    gap,
    hf_model,
    offer,
    requests,
    run,
    start,
    weights,
)
from tests.helpers.models import make_random_model, randomize
from tests.helpers.ranks import run_ranks

NUM_SYNCS = 3
Observations = dict[str, Any]

# vLLM's CPU kernel pads the size of experts to a multiple of 32.
UNPADDED = "qwen3_moe, not padded"
# Name of the engine: (family, overrides of the model's config, overrides of the run's config).
# Experts come first: vLLM creates their process group only with the first engine of a process.
ALONE: dict[str, tuple[str, Observations, Observations]] = {
    UNPADDED: ("qwen3_moe", {"moe_intermediate_size": 64}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "qwen3_moe, bfloat16": ("qwen3_moe", {}, {"policy__precision": "bfloat16"}),
    # vLLM keeps its routers in float32, and skips the layer for multi-token prediction.
    "glm4_moe, bfloat16": ("glm4_moe", {"has_mtp": True}, {"policy__precision": "bfloat16"}),
    "llama": ("llama", {"intermediate_size": 600}, {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, {}),
}
PAIRS: dict[str, tuple[str, Observations, Observations]] = {
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": True}, {}),
    "qwen3_moe, experts by rank": ("qwen3_moe", {}, {"engine__expert_parallel": "true"}),
    "qwen2": ("qwen2", {}, {}),
    "llama tied, one kv head": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {},
    ),
}


# ------------------------------------------------------------------ inside the ranks


def _world(rank: int, folders: Mapping[str, Path], world_size: int) -> Observations:
    cases = ALONE if world_size == 1 else PAIRS
    observed: Observations = {}
    for name, folder in folders.items():
        engine = start(folder, rank, world_size, world_size, **cases[name][2])
        observed[name] = _synced(engine, folder, cases[name][2])
        if name == UNPADDED:
            observed["unpacked"] = _without_packing(engine, folder)
        if name in ("qwen3 tied", "qwen2"):
            observed["unfit"] = _wrong_offers(engine, weights(hf_model(folder)))
        if name == "qwen3 tied":
            observed["refused"] = _wrong_arrivals(engine, folder)
        del engine
    return observed


def _synced(engine: Any, folder: Path, overrides: Observations) -> Observations:
    """Return the slices that an engine requests, and gaps and wrong tensors after several syncs."""
    dtype = torch.bfloat16 if overrides.get("policy__precision") == "bfloat16" else torch.float32
    model = hf_model(folder)
    observed: Observations = {"gaps": [], "scores": [], "differ": []}
    before = run(engine, requests(range(6)))
    observed["pieces"] = engine.needed_slices(offer(_cast(weights(model), dtype)))
    observed["undisturbed"] = run(engine, requests(range(6))) == before
    observed["gaps"].append(gap(model, requests(range(6)), before))
    for version in range(1, NUM_SYNCS + 1):
        randomize(model, seed=100 + version)
        sent = _cast(weights(model), dtype)
        engine._llm.apply_model(_reallocate)
        engine.receive(arrivals(observed["pieces"], sent, seed=version), version)
        results = run(engine, requests(range(6)))
        observed["gaps"].append(gap(model, requests(range(6)), results))
        observed["differ"].append(_differing(engine, sent))
        observed["scores"].append(_score_gap(engine, model))
        observed["undisturbed"] &= run(engine, requests(range(6))) == results
    observed["held"] = [tensor_slice for tensor_slice, _ in engine.read_back()]
    observed["version"] = {
        segment.version for completion in results.values() for segment in completion.segments
    }
    return observed


def _reallocate(model: torch.nn.Module) -> None:
    """Give every parameter other memory, full of NaN, as a wake-up may. Packed layers store theirs
    elsewhere."""
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter.data, torch.nan)


def _cast(whole: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in whole.items()}


def _differing(engine: Any, sent: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise as sent when read back."""
    return [
        tensor_slice.name
        for tensor_slice, value in engine.read_back()
        if value is None
        or value.dtype != sent[tensor_slice.name].dtype
        or not torch.equal(value, sent[tensor_slice.name][tensor_slice.region.slices])
    ]


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
    engine.receive(arrivals(engine.needed_slices(offer(weights(model))), weights(model)), 9)
    device.forget_expert_kernels = original
    results = run(engine, requests(range(6)))
    return {
        "names": sorted(weights(model)),
        "differ": sorted(_differing(engine, weights(model))),
        "gap": gap(model, requests(range(6)), results),
    }


def _message(call: Any) -> str:
    try:
        call()
    except DapoError as error:
        return str(error)
    return ""


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
        name: _message(lambda made=made: engine.needed_slices(offer(made)))
        for name, made in offers.items()
    }


def _wrong_arrivals(engine: Any, folder: Path) -> Observations:
    """Return, for each kind of wrong arrival, the error message and the number of tensors that
    passed before it."""
    from dapo_megatron.engine.loading import by_name, checked

    whole = weights(hf_model(folder))
    tensor_slices = engine.needed_slices(offer(whole))
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
    observed: Observations = {"name": name, "num": len(good)}
    for kind, arriving in bad.items():
        passed: list[Any] = []
        observed[kind] = (_message(lambda: passed.extend(checked(arriving, wanted))), len(passed))  # noqa: B023
    engine.submit(requests([0]))
    observed["in flight"] = _message(lambda: engine.receive(good, 9))
    observed["score in flight"] = _message(lambda: engine.score([[4, 5]]))
    engine.interrupt()
    observed["engine"] = _message(lambda: engine.receive(bad["misshapen"], 9))
    observed["submit after"] = _message(lambda: engine.submit(requests([0])))
    observed["receive after"] = _message(lambda: engine.receive(good, 9))
    return observed


# ------------------------------------------------------------------ the tests


def _observations(
    factory: pytest.TempPathFactory, cases: Mapping[str, Any], ranks: int
) -> list[Observations]:
    folders = {
        name: make_random_model(family, factory.mktemp(family), **model)
        for name, (family, model, _) in cases.items()
    }
    return run_ranks(_world, ranks, folders, ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Observations:
    return _observations(tmp_path_factory, ALONE, 1)[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Observations]:
    return _observations(tmp_path_factory, PAIRS, 2)


def _check(observed: Observations, *, exact: bool = True) -> None:
    limit = GAP if exact else 10.0  # in bfloat16 a token may go to another expert
    assert len(observed["gaps"]) == NUM_SYNCS + 1 and len(observed["scores"]) == NUM_SYNCS
    assert all(value < limit for value in (*observed["gaps"], *observed["scores"]))  # False for NaN
    assert observed["differ"] == [[]] * NUM_SYNCS
    assert observed["held"] and set(observed["held"]) == set(observed["pieces"])
    assert observed["undisturbed"]
    assert observed["version"] == {NUM_SYNCS}


@pytest.mark.parametrize("name", ALONE)
def test_an_engine_computes_with_the_weights_sent(alone: Observations, name: str) -> None:
    """Log-probs equal HF's after each sync, and the weights read back are bitwise as sent."""
    _check(alone[name], exact="bfloat16" not in name)
    for tensor_slice in alone[name]["pieces"]:
        assert tensor_slice.region.shape == tensor_slice.global_shape


@pytest.mark.parametrize("name", PAIRS)
def test_tensor_parallel_ranks_request_slices_and_compute_with_them(
    pairs: list[Observations], name: str
) -> None:
    for observed in pairs:
        _check(observed[name])
    first, second = ({(p.name, p.region) for p in observed[name]["pieces"]} for observed in pairs)
    split = ("q_proj.weight", "o_proj.weight", "down_proj.weight", "embed_tokens.weight")
    for tensor, region in first & second:  # tensors that both ranks request in full
        assert not tensor.endswith(split), (tensor, region)


def test_expert_parallel_ranks_request_different_whole_experts(pairs: list[Observations]) -> None:
    experts = [
        {
            tensor_slice.name
            for tensor_slice in observed["qwen3_moe, experts by rank"]["pieces"]
            if ".experts." in tensor_slice.name
        }
        for observed in pairs
    ]
    assert not experts[0] & experts[1]
    assert len(experts[0]) == len(experts[1]) == 2 * 4 * 3
    for observed in pairs:
        for tensor_slice in observed["qwen3_moe, experts by rank"]["pieces"]:
            if ".experts." in tensor_slice.name:
                assert tensor_slice.region.shape == tensor_slice.global_shape


def test_a_single_kv_head_is_requested_by_both_ranks(pairs: list[Observations]) -> None:
    for observed in pairs:
        tensor_slices = observed["llama tied, one kv head"]["pieces"]
        assert all(p.region.shape == p.global_shape for p in tensor_slices if "k_proj" in p.name)


def test_unpacked_experts_are_detected_by_reading_back(alone: Observations) -> None:
    """This is the bug of vLLM 0.32 that engine/device.py corrects."""
    observed = alone["unpacked"]
    assert observed["differ"] == [name for name in observed["names"] if ".experts." in name]
    assert observed["gap"] > 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_offers_that_do_not_fit_are_refused_by_name(
    alone: Observations, pairs: list[Observations], ranks: int
) -> None:
    worlds = [alone] if ranks == 1 else pairs
    messages = worlds[0]["unfit"]
    assert all(
        observed["unfit"] == messages for observed in worlds
    )  # every rank raises the same error
    layer = "model.layers.1."
    assert messages["good"] == ""
    assert messages["no norm"].startswith(f"{layer}input_layernorm.weight[0:")
    assert messages["no key"].startswith(f"{layer}self_attn.qkv_proj.weight[")
    assert "no offered tensor is loaded there" in messages["no key"]
    assert messages["extra"].startswith("model.extra.weight: ") and "no such" in messages["extra"]
    assert messages["extra bias"] == f"{layer}mlp.down_proj.bias: the engine has no such tensor"
    if ranks == 1:  # tied
        assert messages["extra head"] == "lm_head.weight: the engine has no such tensor"
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


def test_an_engine_is_unusable_after_a_refusal_and_not_synced_while_working(
    alone: Observations,
) -> None:
    messages = alone["refused"]
    assert "4 requests in flight" in messages["in flight"]
    assert "4 requests in flight" in messages["score in flight"]
    assert messages["engine"] == messages["misshapen"][0]
    assert "a weight sync failed" in messages["submit after"]
    assert "a weight sync failed" in messages["receive after"]


def test_receive_is_refused_before_needed_slices_was_called() -> None:
    from dapo_megatron.engine.engine import VllmEngine

    engine = object.__new__(VllmEngine)
    engine._unusable, engine._requests, engine._knows_slices = "", {}, False
    engine._asleep = set()
    with pytest.raises(SyncError, match="was not asked for its slices"):
        engine.receive([], 1)
