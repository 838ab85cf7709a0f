"""Test that each fault of a sync is reported in that sync, with its tensor or engine, by the check
intended for it, and that the next sync repairs the engine.

`pytest -s` prints the table of docs/results.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.types import SyncError
from tests.helpers.configs import tiny_config
from tests.helpers.models import make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.saboteur import FAULT, FAULTS, GATE, NORM, SabotagedServer

FAULTY = 1
"""Engine and rank at fault."""
FLIPPED = "one bit flipped in the engine"
OF_THE_POLICY = "a policy rank whose weights drifted"
ON_BOTH = "one bit flipped in each engine"
FINGERPRINT, CANARY = "fingerprints differ", "on canary sequences"
MISSING = "missing from the weights given to the engine"
DECODING = "decoded tokens have other log-probs"

Reported = list[tuple[str, list[int]]]
"""Text of each error, and the engines at fault."""


def rank_main(rank: int, folder: Path, precision: str = "float32") -> dict[str, Reported]:
    """Return what each fault makes the sync report on rank 0.

    In bfloat16 no fingerprints are compared, and the canary's maximum has no bound.
    """
    from dapo_megatron.cluster.ranks import Ranks
    from dapo_megatron.run import models

    config = tiny_config(
        model__path=folder / "model",
        policy__tensor_parallel=1,
        policy__precision=precision,
        engine__tensor_parallel=1,
        engine__replicas=2,
        sync__max_gap=1e-4 if precision == "float32" else 20.0,
    )
    fault = folder / str(rank)
    os.environ[FAULT] = str(fault)
    models.Server = SabotagedServer
    ranks = Ranks(rank, 2, rank)
    engines = models.start_engines(config, ranks)
    built = models.build_models(config, ranks, engines)
    policy, sync = built.policy, built.sync
    if precision == "bfloat16":
        sync._verifier.check_fingerprints = lambda *_: None
    sync(0)
    lost: Reported = []
    if engines.pool is not None:  # a lost server would start again, for seconds
        engines.pool.lose = lambda replica, why: lost.append((why, [replica]))

    def report() -> Reported:
        sync.switch_to_policy()
        for shard in policy.shards():
            shard.view.mul_(1.01)  # all ranks update the policy alike
        lost.clear()
        try:
            sync(1)
        except SyncError as error:
            return [*lost, (str(error), sorted(error.engines))]
        return [*lost]

    reported = {"nothing": report()}
    for name in FAULTS:
        if rank == FAULTY:
            fault.write_text(name)
        reported[name] = report()
        reported[f"after: {name}"] = report()
    fault.write_text(FLIPPED)
    reported[ON_BOTH] = report()
    [shard] = [shard for shard in policy.shards() if shard.tensor_slice.name == NORM]
    shard.view[0] += 1e-3 * rank
    reported[OF_THE_POLICY] = report()
    engines.close()
    return reported


EXPECTED = {
    FLIPPED: (FINGERPRINT, NORM, "engine ranks 1 "),
    "a tensor dropped from the stream": (MISSING, NORM),
    "a tensor given twice": ("given twice", NORM),
    "two experts swapped": (FINGERPRINT, GATE.format(2), "engine ranks 1 "),
    "an engine given older weights": (FINGERPRINT, "lm_head.weight", "engine ranks 1 "),
    "expert packing skipped": (FINGERPRINT, "mlp.experts.0.", "engine ranks 1 "),
    "decoding unlike scoring": (DECODING, "engine 1;"),
    "log-probs that are no numbers": (CANARY, "by inf", "engine 1;"),
    "right weights, another computation": (CANARY, "engine 1;"),
}
BY_CANARY = {
    "two experts swapped",
    "an engine given older weights",
    "expert packing skipped",
    "log-probs that are no numbers",
    "right weights, another computation",
}
"""Faults that the canary finds in bfloat16 without fingerprints."""
UNSEEN = (FLIPPED, ON_BOTH, OF_THE_POLICY)
"""Faults that only fingerprints find in bfloat16: they are smaller than its rounding."""


def observe(folder: Path, *more: Any) -> dict[str, Reported]:
    """Return what each fault makes rank 0 report."""
    # Experts of a size that vLLM packs without padding. Otherwise unpacked experts are refused for
    # their shape, and the fault would not be silent.
    make_random_model("qwen3_moe", folder / "model", moe_intermediate_size=64)
    return run_ranks(rank_main, 2, folder, *more)[0]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reported]:
    return observe(tmp_path_factory.mktemp("moe"))


def test_a_sync_without_a_fault_reports_nothing(reported: dict[str, Reported]) -> None:
    assert reported["nothing"] == []
    assert set(EXPECTED) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_by_the_intended_check_and_repaired(
    reported: dict[str, Reported], name: str
) -> None:
    """The sync that reports the engine is tried again, or goes on without it."""
    [(text, engines)] = reported[name]
    print(f"{name}: {text}")
    for words in EXPECTED[name]:
        assert words in text
    assert engines == [FAULTY]
    assert reported[f"after: {name}"] == []


def test_faults_of_all_engines_or_of_the_policy_end_the_run(reported: dict[str, Reported]) -> None:
    """Nobody knows the right copy of a policy that differs."""
    [(text, engines)] = reported[ON_BOTH]
    assert text.count(NORM) == 2 and engines == [0, 1]
    [(text, engines)] = reported[OF_THE_POLICY]
    assert FINGERPRINT in text and NORM in text and "policy ranks" in text and engines == []


@pytest.mark.long
def test_in_bfloat16_the_canary_finds_gross_faults_without_fingerprints(tmp_path: Path) -> None:
    reported = observe(tmp_path, "bfloat16")
    assert reported["nothing"] == []
    for name in BY_CANARY:
        [(text, engines)] = reported[name]
        assert CANARY in text and "engine 1;" in text and engines == [FAULTY]
        assert "derived from bfloat16 with experts" in text or "by inf" in text
        assert reported[f"after: {name}"] == []
    assert all(reported[name] == [] for name in UNSEEN)
    # The others are found in the transfer, or by decoding.
    assert len(BY_CANARY) + 1 + 3 == len(FAULTS)
