"""Test that each fault of a sync is reported in that sync, with its tensor or rank, by the check
intended for it.

`pytest -s` prints the table of docs/results.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.types import DapoError
from tests.helpers import saboteur
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.saboteur import Saboteur

NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight"
FAULTY_RANK = 1
ON_BOTH = "one bit flipped in each engine"
FINGERPRINT, COVERAGE, VERSION, CANARY = (
    "fingerprints differ", "given to the engine", "its engine has", "on canary sequences",
)  # fmt: skip
DECODING = "decoded tokens have other log-probs"


Reported = tuple[str, list[int]]
"""Text of an error, and the ranks at fault; an empty text without an error."""


def rank_main(rank: int, folder: Path, precision: str = "float32") -> dict[str, Reported]:
    """Return what each fault makes the sync report on this rank.

    In bfloat16 no fingerprints are compared, and the canary's maximum has no bound.
    """
    import torch

    from dapo_megatron.bridge.bounds import canary_bounds
    from dapo_megatron.bridge.sync import WeightSync
    from dapo_megatron.cluster.ranks import Ranks
    from dapo_megatron.engine.engine import VllmEngine
    from dapo_megatron.policy.policy import MegatronPolicy
    from dapo_megatron.run.models import planner
    from dapo_megatron.types import SyncError

    exchange = Ranks(rank, 2, rank)
    config = tiny_config(
        model__path=folder,
        policy__tensor_parallel=1,
        policy__precision=precision,
        engine__tensor_parallel=1,
        sync__max_gap=1e-4 if precision == "float32" else 20.0,
    )  # two replicas of policy and engine
    engine = Saboteur(VllmEngine(config, rank=rank, world_size=2, local_rank=rank))
    policy = MegatronPolicy(config, exchange, planner(config.policy, config.train))
    vocab = policy.architecture.vocab_size
    sync = WeightSync(
        policy,
        engine,
        exchange,
        config.sync,
        bounds=canary_bounds(config, has_experts=True),
        vocab=vocab,
        max_tokens=32,
        ranks_per_node=2,
        device=torch.device("cpu"),
    )
    if precision == "bfloat16":
        sync._verifier.check_fingerprints = lambda *_: None
    old: dict[str, Any] = {}
    engine.stream = lambda weights: old.update(saboteur.kept(weights)) or old.items()
    reported = {"nothing": attempt(sync, 0, SyncError)}
    for number, (name, inject) in enumerate(FAULTS.items(), start=1):
        engine.heal()
        for shard in policy.shards():
            shard.view.mul_(1.01)  # all ranks update the policy alike
        if rank == FAULTY_RANK:
            with inject(engine, policy, old):
                reported[name] = attempt(sync, number, SyncError)
        else:
            reported[name] = attempt(sync, number, SyncError)
        engine.heal()
        reported[f"after: {name}"] = attempt(sync, number, SyncError)
    engine.afterwards = saboteur.flip_bit(NORM)
    reported[ON_BOTH] = attempt(sync, number, SyncError)
    return reported


def attempt(sync: Any, version: int, error: type[DapoError]) -> Reported:
    try:
        sync(version)
    except error as raised:
        return str(raised), sorted(raised.ranks)
    return "", []


Fault = Callable[[Saboteur, Any, dict[str, Any]], Any]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Callable[..., Iterator[None]]], None]:
    def keep(inject: Callable[..., Iterator[None]]) -> None:
        FAULTS[name] = contextmanager(inject)

    return keep


@fault("one bit flipped in the engine")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.afterwards = saboteur.flip_bit(NORM)
    yield


@fault("a tensor dropped from the stream")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.stream = saboteur.dropped(NORM)
    yield


@fault("a tensor given twice")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.stream = saboteur.repeated(NORM)
    yield


@fault("two experts swapped")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.stream = saboteur.swapped(GATE.format(2), GATE.format(5))
    yield


@fault("an engine given older weights")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.stream = saboteur.replaced(old)
    yield


@fault("an engine told an older version")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.sent_version = lambda version: version - 1
    yield


@fault("a policy rank whose weights drifted")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    [shard] = [shard for shard in policy.shards() if shard.tensor_slice.name == NORM]
    before = shard.view.clone()
    shard.view[0] += 1e-3
    yield
    shard.view.copy_(before)


@fault("expert packing skipped")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    from dapo_megatron.engine import device

    original = device.forget_expert_kernels
    device.forget_expert_kernels = lambda model: None
    yield
    device.forget_expert_kernels = original


@fault("decoding unlike scoring")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    handle = saboteur.stale_decoding(engine)
    yield
    handle.remove()


@fault("log-probs that are no numbers")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.score = lambda sequences: [[math.nan] * (len(tokens) - 1) for tokens in sequences]
    yield
    del engine.score


@fault("right weights, another computation")
def _(engine: Saboteur, policy: Any, old: Any) -> Iterator[None]:
    engine.afterwards = saboteur.other_epsilon
    yield


EXPECTED = {
    "one bit flipped in the engine": (FINGERPRINT, NORM, "engine ranks 1 "),
    "a tensor dropped from the stream": (COVERAGE, NORM, "rank 1"),
    "a tensor given twice": ("twice", NORM, "rank 1"),
    "two experts swapped": (FINGERPRINT, GATE.format(2), "engine ranks 1 "),
    "an engine given older weights": (FINGERPRINT, "lm_head.weight", "engine ranks 1 "),
    "an engine told an older version": (VERSION, "rank 1"),
    "a policy rank whose weights drifted": (FINGERPRINT, NORM, "policy ranks"),
    "expert packing skipped": (FINGERPRINT, "mlp.experts.0.", "engine ranks 1 "),
    "decoding unlike scoring": (DECODING, "engine ranks 1;"),
    "log-probs that are no numbers": (CANARY, "by inf", "engine ranks 1;"),
    "right weights, another computation": (CANARY, "engine ranks 1"),
}
OF_THE_POLICY = "a policy rank whose weights drifted"


BY_CANARY = {
    "two experts swapped",
    "an engine given older weights",
    "expert packing skipped",
    "log-probs that are no numbers",
    "right weights, another computation",
}
"""Faults that the canary finds in bfloat16 without fingerprints."""
UNSEEN = {"one bit flipped in the engine", OF_THE_POLICY}
"""Faults that only fingerprints find in bfloat16: they are smaller than its rounding."""


def messages(folder: Path, *more: str) -> dict[str, Reported]:
    """Return what each fault makes all ranks report."""
    # Experts of a size that vLLM packs without padding. Otherwise unpacked experts are refused for
    # their shape, and the fault would not be silent.
    make_random_model("qwen3_moe", folder, moe_intermediate_size=64)
    first, second = run_ranks(rank_main, 2, folder, *more)
    assert first == second  # every rank raises the same error
    return first


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reported]:
    return messages(tmp_path_factory.mktemp("moe"))


def test_a_sync_without_a_fault_reports_nothing(reported: dict[str, Reported]) -> None:
    assert reported["nothing"] == ("", [])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_by_the_intended_check_in_that_sync(
    reported: dict[str, Reported], name: str
) -> None:
    """Both copies of a policy that differ are at fault, because nobody knows the right one."""
    text, ranks = reported[name]
    print(f"{name}: {text}")
    for words in EXPECTED[name]:
        assert words in text
    assert ranks == ([0, 1] if name == OF_THE_POLICY else [FAULTY_RANK])


@pytest.mark.parametrize("name", FAULTS)
def test_the_next_sync_repairs_the_engine(reported: dict[str, Reported], name: str) -> None:
    if name != "right weights, another computation":  # a sync of weights cannot repair it
        assert reported[f"after: {name}"] == ("", [])


def test_both_engines_may_be_at_fault(reported: dict[str, Reported]) -> None:
    text, ranks = reported[ON_BOTH]
    assert text.count(NORM) == 2 and ranks == [0, 1]


@pytest.mark.long
def test_in_bfloat16_the_canary_finds_gross_faults_without_fingerprints(tmp_path: Path) -> None:
    reported = messages(tmp_path / "moe", "bfloat16")
    assert reported["nothing"] == ("", [])
    for name in BY_CANARY:
        text, ranks = reported[name]
        assert CANARY in text and "engine ranks 1;" in text and ranks == [FAULTY_RANK]
        assert "derived from bfloat16 with experts" in text or "by inf" in text
        if name != "right weights, another computation":
            assert reported[f"after: {name}"] == ("", [])
    for name in UNSEEN:
        assert reported[name] == ("", [])
    # The others are found in the exchange, or by decoding.
    assert len(BY_CANARY | UNSEEN) + 4 == len(FAULTS)
