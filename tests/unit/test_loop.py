"""The order of things in the loop that a crash depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron import loop
from tests.helpers.configs import tiny_config


class Journal:
    """Recorder, checkpoints, evaluator, sync and coordinator in one: notes who was called."""

    def __init__(self, due: set[int]) -> None:
        self.entries: list[str] = []
        self.states: list[Mapping[str, Any]] = []
        self._due = due

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entries.append(f"log {step}")

    def samples(self, step: int, groups: Any) -> None:
        self.entries.append(f"samples {step}")

    def save(self, step: int, state: Mapping[str, Any]) -> Callable[[], None]:
        self.entries.append(f"save {step}")
        self.states.append({**state, "progress": dict(state["progress"])})
        return lambda: self.entries.append(f"publish {step}")

    def due(self, step: int, last: int = 0) -> bool:
        return step in self._due and not last

    def state(self) -> dict[str, Any]:
        return {}

    def sync(self, version: int) -> None:
        self.entries.append(f"sync {version}")


def run(monkeypatch: pytest.MonkeyPatch, *, done: int, due: set[int]) -> Journal:
    journal = Journal(due)

    def step(config: Any, parts: Any, number: int, clock: Any) -> Any:
        journal.entries.append(f"step {number}")
        return SimpleNamespace(seen=[]), {"mismatch/gap_max": number * 1e-6}

    monkeypatch.setattr(loop, "train_step", step)
    parts: Any = SimpleNamespace(
        sync=journal.sync, evaluator=journal, recorder=journal, checkpoints=journal,
        coordinator=journal, policy=None,
    )  # fmt: skip
    config = tiny_config(train__rollout_steps=4)
    loop.train(config, parts, loop.Progress(step=done), started=time.time())
    return journal


def test_a_checkpoint_is_published_after_its_metrics_and_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = run(monkeypatch, done=2, due={3})
    assert journal.entries == [
        "sync 2",  # the engine has the resumed weights before it samples
        "step 3", "save 3", "samples 3", "log 3", "publish 3",
        "step 4", "samples 4", "log 4",
    ]  # fmt: skip
    [state] = journal.states
    assert state["progress"]["step"] == 3
    assert state["progress"]["max_gap"] == pytest.approx(3e-6)
    assert state["progress"]["seconds"] >= 0


def test_a_finished_run_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, done=4, due=set()).entries == ["sync 4"]
