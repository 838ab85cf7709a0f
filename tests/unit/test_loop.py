"""The order of calls in the training loop, which crash safety and memory depend on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron import loop
from dapo_megatron.algo.mismatch import GapStatistics, TokenGap, check_gap
from dapo_megatron.rollout.checkpoint_files import CompletionsSnapshot
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.rollout.replay import NoSync
from dapo_megatron.types import Rollouts, StarvedError, Stopped, SyncError, SyncReport
from tests.helpers.batches import ONE_INDEX
from tests.helpers.configs import tiny_config


class Journal:
    """Recorder, checkpoints, evaluator, sync and collector in one. Records the calls."""

    def __init__(self, due: set[int]) -> None:
        self.entries: list[str] = []
        self.states: list[Mapping[str, Any]] = []
        self._due = due

    def wait(self) -> None:
        self.entries.append("wait")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def begin(self, step: int) -> None:
        """Start a step of the instruments."""

    def metrics(self, num_tokens: int) -> dict[str, float]:
        assert num_tokens == 7
        return {}

    def stage(self) -> None:
        self.entries.append("copy")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entries.append(f"log {step}")

    def ended(self, step: int, groups: Any) -> None:
        self.entries.append(f"samples {step}")

    def snapshot(self) -> str:
        return "carried"

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        rollouts: Sequence[Any],
        *,
        is_open: bool = False,
    ) -> Callable[[], None]:
        assert rollouts[0] == "carried" and isinstance(rollouts[1], CompletionsSnapshot)
        self.entries.append(f"save {step}" + (" open" if is_open else ""))
        self.states.append({**state, "progress": dict(state["progress"])})
        return lambda: self.entries.append(f"publish {step}")

    def due(self, step: int, last: int = 0) -> bool:
        return step in self._due and not last

    def state(self) -> dict[str, Any]:
        return {}

    def __call__(self, version: int) -> SyncReport:
        self.entries.append(f"sync {version}")
        return NoSync()(version)

    def switch_to_policy(self) -> None:
        self.entries.append("switch to policy")


def train(
    monkeypatch: pytest.MonkeyPatch,
    *,
    done: int,
    due: set[int],
    error: Exception | None = None,
    error_at: int = 0,
) -> Journal:
    journal = Journal(due)

    def step(config: Any, parts: Any, number: int, partial_step: PartialStep) -> Any:
        journal.entries.append(f"step {number}")
        partial_step.begin(Rollouts([], {}, {"accuracy/raw": 0.5}))
        if error is not None and number == error_at:
            raise error
        journal.ended(number, [])
        return {"mismatch/gap_max": number * 1e-6}, 7

    monkeypatch.setattr(loop, "train_step", step)
    parts: Any = SimpleNamespace(
        sync=journal, evaluator=journal, recorder=journal, checkpoints=journal,
        collector=journal, instruments=journal, data_parallel=ONE_INDEX, check_stop=lambda: None,
    )  # fmt: skip
    config = tiny_config(train__rollout_steps=4)
    try:
        loop.train(config, parts, loop.Progress(step=done), PartialStep(), started=time.time())
    except (StarvedError, Stopped) as raised:
        journal.entries.append(str(raised))
        assert type(raised) is type(error)
    return journal


def test_a_checkpoint_is_published_after_its_metrics_and_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = train(monkeypatch, done=2, due={3})
    assert journal.entries == [
        "sync 2",  # the engine has the resumed weights before it samples
        "step 3", "samples 3", "copy", "sync 3", "save 3", "log 3", "publish 3",
        "step 4", "samples 4", "sync 4", "log 4", "wait",
    ]  # fmt: skip
    [state] = journal.states
    assert state["progress"]["step"] == 3
    assert state["progress"]["max_gap"] == pytest.approx(3e-6)
    assert state["progress"]["seconds"] >= 0
    assert state["open_step"] is None


def test_a_finished_run_only_syncs_and_waits_for_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(monkeypatch, done=4, due=set()).entries == ["sync 4", "wait"]


@pytest.mark.parametrize(
    "error", [StarvedError("0 of 4 mixed groups"), Stopped("stopped by SIGUSR1")]
)
def test_a_step_that_cannot_finish_is_saved_before_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    journal = train(monkeypatch, done=2, due=set(), error=error, error_at=4)
    assert journal.entries[-6:] == [
        "switch to policy", "copy",  # the policy has the accelerator again
        "save 3 open", "publish 3", "wait",
        f"{error}. Saved after step 3; to continue, start with resume=auto",
    ]  # fmt: skip
    assert journal.states[-1]["open_step"]["metrics"] == {"accuracy/raw": 0.5}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_gap": 1.0}, None),
        ({"max_gap": 0.5}, "disagree by 0.8 on 7/1, token 1"),
        ({"max_gap": 1.0, "max_mean_gap": 0.3}, None),
        ({"max_gap": 1.0, "max_mean_gap": 0.2}, "disagree by 0.25 on the mean of 4 tokens"),
        ({"max_gap": 0.5, "max_mean_gap": 0.2}, "sync.max_mean_gap is 0.2"),
    ],
)
def test_the_gap_between_engine_and_policy_is_bounded(
    bounds: dict[str, float], message: str | None
) -> None:
    worst = TokenGap("7/1", 1, 8, -4.8, -4.0)
    gap = GapStatistics(total=1.0, max=0.8, kl_total=0.1, num_tokens=4, worst=worst)
    bounds = {"max_mean_gap": None, **bounds}
    if message is None:
        check_gap(gap, version=3, **bounds)
    else:
        with pytest.raises(SyncError, match=re.escape(message)):
            check_gap(gap, version=3, **bounds)
