"""Policy and engine take turns in the accelerator's memory: the order of calls, and who is loaded.

The sync and the loop are the real ones. A fake stands for both policy and engine. It refuses calls
that a sleeping engine or an offloaded policy could not serve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron import loop
from dapo_megatron.bridge.bounds import CanaryBounds
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import SyncConfig
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.types import (
    ConfigError,
    LogProbs,
    Rollouts,
    Shard,
    StarvedError,
    StepStats,
    Stopped,
    SyncError,
    TensorSlice,
    TokenBatch,
    whole,
)
from tests.helpers.batches import ONE_INDEX, described, tokens_of
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

NAME = "model.norm.weight"
VOCAB, NUM_TOKENS = 64, 8
BOUNDS = CanaryBounds(max=1e-3, mean=1e-3, quantile=1e-3, basis="", derived=frozenset())
SYNC = ["onload", "wake_weights", "receive", "held", "logprobs", "offload", "wake_cache", "score"]
SYNC += ["decode", "score"]


class Accelerator:
    """`protocols.Policy` and `protocols.RolloutEngine` of a model with one tensor of 6 elements."""

    replica, num_replicas, is_leader, max_sequences, version = 0, 1, True, 8, 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded = {"policy", "engine weights", "engine cache"}
        self.weight = torch.arange(6.0)
        self.kept = self.weight.clone()
        self.engine_weight = torch.zeros(6)
        self.damage: Callable[[Tensor], Tensor] = lambda weight: weight
        self.wake_error: str = ""

    def record(self, call: str, *needed: str) -> None:
        assert set(needed) <= self.loaded, f"{call} while only {self.loaded} are loaded"
        self.calls.append(call)

    # ---------------------------------------------------------------- the policy

    @property
    def tensor_slice(self) -> TensorSlice:
        return TensorSlice(NAME, (6,), torch.float32, whole((6,)))

    def shards(self) -> list[Shard]:
        return [Shard(self.tensor_slice, self.weight)]

    def onload(self) -> None:
        assert "engine cache" not in self.loaded or "policy" in self.loaded or self.is_failing
        self.record("onload")
        if "policy" not in self.loaded:
            self.weight.untyped_storage().resize_(24)
            self.weight.copy_(self.kept)
        self.loaded.add("policy")

    def offload(self) -> None:
        self.record("offload", "policy")
        self.kept = self.weight.clone()
        self.weight.untyped_storage().resize_(0)
        self.loaded.remove("policy")

    def logprobs(self, batch: TokenBatch, temperature: float | None = None) -> LogProbs:
        self.record("logprobs", "policy")
        value = -self.weight.sum().expand(len(batch.tokens)).clone()
        return LogProbs(value, torch.zeros_like(value))

    def update(self, mini: TokenBatch, loss: Any, lr: float, *, check: Any) -> StepStats:
        assert check is None
        self.record("update", "policy")
        assert "engine cache" not in self.loaded
        self.weight += 1
        return StepStats(0.0, 0.0, lr, 1, {})

    # ---------------------------------------------------------------- the engine

    def needed_slices(self, offered: Any) -> list[TensorSlice]:
        return [self.tensor_slice]

    def sleep(self) -> None:
        self.record("sleep")
        self.loaded -= {"engine weights", "engine cache"}
        self.engine_weight = torch.full((6,), torch.nan)

    def wake_weights(self) -> None:
        self.record("wake_weights", "policy")
        self.loaded.add("engine weights")

    def receive(self, weights: Iterable[Any], version: int) -> None:
        self.record("receive", "policy", "engine weights")
        for _, [(_, value)] in weights:
            self.engine_weight = self.damage(value.clone())
        self.version = version

    def read_back(self, names: Any = None) -> Iterator[tuple[TensorSlice, Tensor]]:
        self.record("held", "policy", "engine weights")
        yield self.tensor_slice, self.engine_weight

    def wake_cache(self) -> None:
        self.record("wake_cache", "engine weights")
        assert "policy" not in self.loaded
        if self.wake_error:
            raise ConfigError(self.wake_error)
        self.loaded.add("engine cache")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.record("score", "engine weights", "engine cache")
        return [[-float(self.engine_weight.sum())] * (len(tokens) - 1) for tokens in sequences]

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        self.record("decode", "engine weights", "engine cache")
        logprob = -float(self.engine_weight.sum()) + self.decoding_error
        return [([1] * num_tokens, [logprob] * num_tokens) for _ in prompts]

    is_failing = False
    decoding_error = 0.0


def make_sync(both: Any, **keys: Any) -> WeightSync:
    return WeightSync(
        both, both, Ranks(0, 1, 0), SyncConfig(max_gap=1e-3, **keys),
        bounds=BOUNDS, vocab=VOCAB, max_tokens=NUM_TOKENS, ranks_per_node=1,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_a_sync_moves_weights_while_both_models_are_loaded_then_offloads_the_policy() -> None:
    both = Accelerator()
    sync = make_sync(both)
    for version in range(3):
        both.calls.clear()
        both.sleep()
        report = sync(version)
        assert both.calls == ["sleep", *SYNC]
        assert both.loaded == {"engine weights", "engine cache"}
        assert report.canary_gap == 0 and report.turn_seconds >= 0
        both.sleep()
        both.onload()
        both.weight += 1


def test_damage_seen_only_by_the_canary_is_located_by_reloading_the_policy() -> None:
    both = Accelerator()
    sync = make_sync(both, fingerprint_every=10)
    both.sleep()
    sync(0)
    both.sleep()
    both.calls.clear()
    both.damage, both.is_failing = lambda weight: weight + 1, True
    with pytest.raises(SyncError, match=NAME):
        sync(1)
    until_score = SYNC[: SYNC.index("score") + 1]
    without_fingerprints = [call for call in until_score if call != "held"]
    assert both.calls == [*without_fingerprints, "onload", "held"]


def test_a_canary_gap_is_reported_even_if_the_policy_no_longer_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def onload() -> None:
        if "engine cache" in both.loaded:
            raise torch.OutOfMemoryError("out of memory")
        Accelerator.onload(both)

    both = Accelerator()
    sync = make_sync(both, fingerprint_every=10)
    both.sleep()
    sync(0)
    both.sleep()
    both.damage = lambda weight: weight + 1
    monkeypatch.setattr(both, "onload", onload)
    with pytest.raises(SyncError, match=r"canary .* disagree .* do not fit on the GPU together"):
        sync(1)


@pytest.mark.parametrize("error", [2e-3, math.nan])
def test_decoding_with_other_log_probs_than_scoring_ends_the_run(error: float) -> None:
    both = Accelerator()
    sync = make_sync(both)
    both.sleep()
    both.decoding_error = 5e-4
    assert sync(0).decode_gap == pytest.approx(5e-4, rel=1e-3)
    both.sleep()
    both.decoding_error = error
    with pytest.raises(SyncError, match=r"weights 1: decoded tokens .* engine ranks 0"):
        sync(1)


def test_an_engine_without_memory_to_wake_up_ends_the_run_with_the_config_key() -> None:
    both = Accelerator()
    sync = make_sync(both)
    both.sleep()
    both.wake_error = "engine.memory_fraction: too much"
    with pytest.raises(ConfigError, match=r"engine\.memory_fraction: too much"):
        sync(0)
    assert both.calls[-1] == "wake_cache"


# ------------------------------------------------------------------ the loop


class World:
    """The other parts of a run."""

    def __init__(self, both: Accelerator, error: Exception | None = None) -> None:
        self.both, self.error = both, error

    def collect(self, version: int, on_progress: Any) -> Rollouts:
        self.both.record(f"collect {version}", "engine weights", "engine cache")
        if self.error is not None and version == 1:
            raise self.error
        completions = (completion(0, 1, RIGHT), completion(1, 1, WRONG))
        groups = [group(1, *completions)]
        return Rollouts(described(groups, overlong()), tokens_of(groups, overlong()), {})

    def run(self) -> dict[str, float]:
        self.both.record("evaluate", "engine weights", "engine cache")
        return {}

    def stage(self) -> None:
        self.both.record("copy", "policy")

    def commit(
        self, step: int, state: Any, rollouts: Any, *, is_open: bool = False
    ) -> Callable[[], None]:
        self.both.record(f"save {step}")
        return lambda: None

    def wait(self) -> None:
        pass

    def due(self, step: int, last: int = 0) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        return {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged = metrics

    def snapshot(self) -> None:
        pass

    def sequence_diagnostics(self, *_: Any) -> None:
        pass

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        yield

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        pass

    @contextmanager
    def progress(self, num_groups: int) -> Iterator[Any]:
        yield None


def train(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> tuple[Any, World]:
    """Run two steps of the real loop, each on two mini-batches of one sequence."""
    both, ranks = Accelerator(), Ranks(0, 1, 0)
    world = World(both, error)
    sync = make_sync(both)
    both.sleep()
    both.calls.clear()
    monkeypatch.setattr(loop, "check_gap", lambda *_, **__: None)
    parts: Any = SimpleNamespace(
        policy=both, sync=sync, collector=world, evaluator=world, recorder=world,
        checkpoints=world, data_parallel=ONE_INDEX, loss=None,
        learning_rate=lambda step: 1e-4, check_stop=lambda: None,
        check_policy_stop=lambda: None, on_policy_ranks=lambda _, train: train(),
        instruments=StepInstruments(world, MemoryMeter(ranks), TimelineRecorder(ranks, every=0)),
    )  # fmt: skip
    config = tiny_config(train__rollout_steps=2)
    with suppress(StarvedError, Stopped):
        loop.train(config, parts, loop.Progress(), PartialStep(), started=time.time())
    return both, world


def test_the_loop_loads_only_one_model_outside_of_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    both, world = train(monkeypatch)
    step = ["sleep", "onload", "logprobs", "update", "update", "copy", *SYNC, "evaluate"]
    assert both.calls == [
        *SYNC, "evaluate",
        "collect 0", *step, "save 1",
        "collect 1", *step, "save 2",
    ]  # fmt: skip
    phases = ("generate", "logprobs", "update", "checkpoint", "sync", "evaluate")
    memory = {name for name in world.logged if name.startswith("memory/")}
    assert memory == {f"memory/{phase}_gib" for phase in phases}


@pytest.mark.parametrize("error", [StarvedError("none"), Stopped("by SIGUSR1")])
def test_a_run_that_ends_early_saves_the_reloaded_policy(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    both, _ = train(monkeypatch, error)
    assert both.calls[-5:] == ["collect 1", "sleep", "onload", "copy", "save 1"]
