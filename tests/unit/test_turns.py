"""Policy and engine take turns in the accelerator's memory: the order of calls, and who is loaded.

The sync and the loop are the real ones. A fake stands for both policy and engines. It refuses calls
that sleeping engines or an offloaded policy could not serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dapo_megatron import loop
from dapo_megatron.bridge.sync import WeightSync
from dapo_megatron.bridge.verify import fingerprints
from dapo_megatron.cluster.instruments import MemoryMeter, StepInstruments, TimelineRecorder
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.config import SyncConfig
from dapo_megatron.types import (
    ConfigError,
    EnginesLost,
    LogProbs,
    Rollouts,
    Shard,
    StepStats,
    SyncError,
    TensorSlice,
    TokenBatch,
    TooFewEnginesError,
    whole,
)
from tests.helpers.batches import ONE_INDEX, described, tokens_of
from tests.helpers.configs import tiny_config
from tests.unit.test_batch import RIGHT, WRONG, completion, group, overlong

NAME = "model.norm.weight"
SYNC = ["onload", "wake weights", "load", "fingerprints", "offload", "wake kv_cache"]


class Accelerator:
    """`protocols.Policy` and `protocols.Engines` of a model with one tensor of 6 elements.

    connected  replicas that could take part in the next sync
    """

    def __init__(self, *connected: int) -> None:
        self.connected = list(connected or (0,))
        self.present: dict[int, int] = {}
        self.lost: list[tuple[list[int], str]] = []
        self.failures: dict[str, list[Exception]] = {}
        """Errors of the next calls, by name."""
        self.calls: list[str] = []
        self.loaded = {"policy", "engine weights", "engine cache"}
        self.weight = torch.arange(6.0)
        self.kept = self.weight.clone()
        self.engine_weight = torch.zeros(6)
        self.wrong: set[int] = set()
        """Replicas that hold other weights than they were given."""

    def record(self, call: str, *needed: str) -> None:
        assert set(needed) <= self.loaded, f"{call} while only {self.loaded} are loaded"
        self.calls.append(call)
        if self.failures.get(call):
            raise self.failures[call].pop(0)

    # ---------------------------------------------------------------- the policy

    @property
    def tensor_slice(self) -> TensorSlice:
        return TensorSlice(NAME, (6,), torch.float32, whole((6,)))

    def shards(self) -> list[Shard]:
        return [Shard(self.tensor_slice, self.weight)]

    def onload(self) -> None:
        assert "engine cache" not in self.loaded or "policy" in self.loaded
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

    # ---------------------------------------------------------------- the engines

    def await_ready(self) -> None:
        if not self.connected:
            raise TooFewEnginesError("0 of at least 1 engines")
        self.present = dict.fromkeys(self.connected, 1)

    def places(self) -> dict[int, list[int]]:
        return {replica: [place] for place, replica in enumerate(self.present)}

    def connect(self, meeting: Any, slices: Any) -> None:
        """Do nothing: no engine is on another GPU."""

    def lose(self, replicas: Sequence[int], why: str) -> None:
        self.lost.append((list(replicas), why))
        self.connected = [number for number in self.connected if number not in replicas]

    def note_sync(self) -> None:
        self.synced = dict(self.present)

    def call(self, method: str, *arguments: Any, of: object) -> dict[int, Any]:
        result = getattr(self, method)(*arguments)
        return {
            replica: result[replica] if isinstance(result, dict) else result
            for replica in self.present
        }

    def trace(self, offered: Any) -> list[list[TensorSlice]]:
        return [[self.tensor_slice]]

    def sleep(self) -> None:
        self.record("sleep")
        self.loaded -= {"engine weights", "engine cache"}
        self.engine_weight = torch.full((6,), torch.nan)

    def wake(self, part: str) -> None:
        if part == "weights":
            self.record("wake weights", "policy")
            self.loaded.add("engine weights")
            return
        assert "policy" not in self.loaded
        self.record("wake kv_cache", "engine weights")
        self.loaded.add("engine cache")

    def load(self, weights: Iterable[Any], version: int) -> None:
        if len(self.present) > 1:  # a transfer to engines of other ranks needs these ranks
            self.engine_weight = self.weight.clone()
        else:
            for _, [(_, value)] in weights:
                self.engine_weight = value.clone()
        self.record("load", "policy", "engine weights")

    def fingerprints(self) -> dict[int, list[list[tuple[int, int]]]]:
        self.record("fingerprints", "policy", "engine weights")
        by_replica = {}
        for replica in self.present:
            weight = self.engine_weight + (replica in self.wrong)
            [number] = fingerprints([(weight, whole((6,)))])
            by_replica[replica] = [[(0, number)]]
        return by_replica


def make_sync(both: Any, fingerprint_every: int = 1) -> WeightSync:
    config = SyncConfig(max_gap=1e-3, fingerprint_every=fingerprint_every)
    cpu = torch.device("cpu")
    return WeightSync(both, both, Ranks(0, 1, 0), config, ranks_per_node=1, device=cpu)


def test_a_sync_moves_weights_while_both_models_are_loaded_then_offloads_the_policy() -> None:
    both = Accelerator()
    sync = make_sync(both)
    for version in range(3):
        both.calls.clear()
        both.sleep()
        report = sync(version)
        assert both.calls == ["sleep", *SYNC]
        assert both.loaded == {"engine weights", "engine cache"}
        assert report.turn_seconds >= 0
        both.sleep()
        both.onload()
        both.weight += 1


def test_fingerprints_are_compared_at_first_then_every_so_many_syncs_and_with_new_engines() -> None:
    both = Accelerator(0)
    sync = make_sync(both, fingerprint_every=3)
    compared = []
    for version in range(8):
        if version == 5:
            both.connected = [0, 1]
        sync.switch_to_policy()
        compared.append(sync(version).fingerprinted)
    assert compared == [True, False, False, True, False, True, False, False]


# ------------------------------------------------------------------ lost engines


def asleep(*connected: int) -> tuple[Accelerator, WeightSync]:
    """Return engines that sleep, as after a training step, and their sync."""
    both = Accelerator(*connected)
    both.sleep()
    both.calls.clear()
    return both, make_sync(both)


@pytest.mark.parametrize("place", ["load", "fingerprints", "wake kv_cache"])
def test_a_sync_whose_engines_are_lost_begins_again_with_others(place: str) -> None:
    both, sync = asleep(0, 1)
    both.failures[place] = [EnginesLost("no engine is left")]
    sync(3)
    until = SYNC[: SYNC.index(place) + 1]
    # A transfer ends on the policy's side, which may have been offloaded since.
    assert both.calls == [*until, "sleep", "onload", *SYNC]
    assert both.synced == {0: 1, 1: 1} and both.lost == []
    assert both.loaded == {"engine weights", "engine cache"}


def test_only_engines_at_fault_are_left_out_unless_all_are() -> None:
    both, sync = asleep(0, 1, 2)
    both.wrong = {1}
    sync(3)
    [(replicas, why)] = both.lost
    assert replicas == [1] and NAME in why
    assert both.synced == {0: 1, 2: 1}
    both, sync = asleep(0, 1)
    both.wrong = {0, 1}
    with pytest.raises(SyncError, match=NAME):
        sync(3)
    assert both.lost == []


@pytest.mark.parametrize(
    ("place", "failures", "error"),
    [
        ("load", [EnginesLost(f"loss {number}") for number in range(99)],
         TooFewEnginesError(r"10 syncs in a row failed, .* loss 9")),
        ("wake kv_cache", [ConfigError("memory_fraction: too much")], ConfigError("memory_frac")),
    ],
)  # fmt: skip
def test_syncs_that_fail_again_and_again_or_cannot_be_made_end_the_run(
    place: str, failures: list[Exception], error: Exception
) -> None:
    both, sync = asleep(0)
    both.failures[place] = list(failures)
    with pytest.raises(type(error), match=str(error)):
        sync(3)
    assert place in both.calls


# ------------------------------------------------------------------ the loop


def test_the_loop_loads_only_one_model_outside_of_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two steps of the real loop, each on two mini-batches of one sequence."""
    both, ranks, world = Accelerator(), Ranks(0, 1, 0), MagicMock()
    sync = make_sync(both)
    both.sleep()
    both.calls.clear()
    groups = [group(1, completion(0, 1, RIGHT), completion(1, 1, WRONG))]
    rollouts = Rollouts(0, described(groups, overlong()), tokens_of(groups, overlong()), {})

    engine = ("engine weights", "engine cache")
    world.collect.side_effect = lambda version: (
        both.record(f"collect {version}", *engine) or replace(rollouts, version=version)
    )
    world.run.side_effect = lambda version: both.record("evaluate", *engine) or {}
    world.stage.side_effect = lambda: both.record("copy", "policy")
    world.commit.side_effect = lambda step, *_: both.record(f"save {step}") or (lambda: None)
    world.state.return_value = {}
    monkeypatch.setattr(loop, "check_gaps", lambda *_, **__: None)
    parts: Any = SimpleNamespace(
        policy=both, sync=sync, collector=world, evaluator=world, recorder=world,
        checkpoints=world, data_parallel=ONE_INDEX, loss=None, stop=world, ahead=None,
        instruments=StepInstruments(world, MemoryMeter(ranks), TimelineRecorder(ranks, every=0)),
    )  # fmt: skip
    config = tiny_config(train__rollout_steps=2)
    loop.train(config, parts, loop.Progress(), started=time.time())
    step = ["sleep", "onload", "logprobs", "update", "update", "copy", *SYNC, "evaluate"]
    assert both.calls == [
        *SYNC, "evaluate",
        "collect 0", *step, "save 1",
        "collect 1", *step, "save 2",
    ]  # fmt: skip
    phases = ("generate", "logprobs", "update", "checkpoint", "sync", "evaluate")
    memory = {name for name in world.log.call_args.args[1] if name.startswith("memory/")}
    assert memory == {f"memory/{phase}_gib" for phase in phases}
