"""The order of calls in the training loop, which crash safety and memory depend on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron import loop
from dapo_megatron.algo.mismatch import GapStatistics, TokenGap, check_gaps, merge
from dapo_megatron.rollout.replay import NoSync
from dapo_megatron.segments import Segment
from dapo_megatron.types import (
    DapoError,
    EnginesLost,
    LogProbs,
    RankError,
    Rollouts,
    SequenceTokens,
    StarvedError,
    StepStats,
    Stopped,
    SyncError,
    SyncReport,
    TokenBatch,
    TooFewEnginesError,
    TrainingSequence,
)
from tests.helpers.batches import ONE_INDEX
from tests.helpers.configs import tiny_config


class Journal:
    """Recorder, checkpoints, evaluator, sync and collector in one. Records the calls.

    errors  of the next call with this entry
    """

    def __init__(self, due: set[int], errors: Mapping[str, Exception] = MappingProxyType({})):
        self.entries: list[str] = []
        self.states: list[dict[str, Any]] = []
        self.logged: dict[int, Mapping[str, float]] = {}
        self._due, self._errors = due, dict(errors)

    def enter(self, entry: str) -> None:
        self.entries.append(entry)
        if error := self._errors.pop(entry, None):
            raise error

    def wait(self) -> None:
        self.enter("wait")

    def settle(self) -> None:
        self.enter("settle")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def begin(self, step: int) -> None:
        """Start a step of the instruments."""

    def metrics(self, num_tokens: int) -> dict[str, float]:
        return {"num_tokens": num_tokens}

    def stage(self) -> None:
        self.enter("copy")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.enter(f"log {step}")
        self.logged[step] = metrics

    def snapshot(self) -> str:
        return "open groups"

    def commit(self, step: int, state: Mapping[str, Any], parts: Any) -> Callable[[], None]:
        assert parts == ["open groups"]
        self.enter(f"save {step}")
        self.states.append(json.loads(json.dumps(state)))
        return lambda: self.enter(f"publish {step}")

    def due(self, step: int, last: int = 0) -> bool:
        return step in self._due and not last

    def state(self) -> dict[str, Any]:
        return {"position": 5}

    def check(self) -> None:
        self.enter("check")

    def __call__(self, version: int) -> SyncReport:
        self.enter(f"sync {version}")
        return NoSync()(version)

    def switch_to_policy(self) -> None:
        self.enter("switch to policy")


def train(monkeypatch: pytest.MonkeyPatch, journal: Journal, progress: loop.Progress) -> None:
    """Run the loop until step 4. Its last entry is the message of an error."""

    def step(config: Any, parts: Any, number: int) -> Any:
        journal.enter(f"step {number}")
        return {"accuracy": 0.5, "mismatch/gap_max": number * 1e-6}, 7

    monkeypatch.setattr(loop, "train_step", step)
    parts: Any = SimpleNamespace(
        sync=journal, evaluator=journal, recorder=journal, checkpoints=journal,
        collector=journal, instruments=journal, stop=journal,
    )  # fmt: skip
    config = tiny_config(train__rollout_steps=4)
    try:
        loop.train(config, parts, progress, started=time.time())
    except DapoError as raised:
        journal.entries.append(f"{type(raised).__name__}: {raised}")


def test_a_checkpoint_is_published_after_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal({3})
    train(monkeypatch, journal, loop.Progress(step=2))
    assert journal.entries == [
        "sync 2",  # the engine has the resumed weights before it samples
        "check", "step 3", "copy", "sync 3", "save 3", "log 3", "publish 3",
        "check", "step 4", "sync 4", "log 4", "wait",
    ]  # fmt: skip
    [state] = journal.states
    assert state["progress"]["step"] == 3 and state["coordinator"] == {"position": 5}
    assert state["progress"]["max_gap"] == pytest.approx(3e-6)
    assert state["progress"]["seconds"] >= 0
    assert state["progress"]["not_logged"] is None
    assert journal.logged[4].items() >= {"accuracy": 0.5, "num_tokens": 7}.items()
    finished = Journal({4})
    train(monkeypatch, finished, loop.Progress(step=4))
    assert finished.entries == ["sync 4", "wait"]


@pytest.mark.parametrize(
    "error", [StarvedError("0 of 4 mixed groups"), Stopped("by SIGUSR1"), TooFewEnginesError("0")]
)
@pytest.mark.parametrize("place", ["check", "step 4", "sync 4"])
def test_a_run_that_ends_early_is_saved_and_logs_each_step_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    """The step that the engines do not have yet is logged after the next start."""
    journal = Journal(set(), {place: error})
    progress = loop.Progress(step=3)
    train(monkeypatch, journal, progress)
    step = 4 if place == "sync 4" else 3
    assert journal.entries[-7:] == [
        place, "switch to policy", "copy",  # the policy has the accelerator again
        f"save {step}", f"publish {step}", "wait",
        f"{type(error).__name__}: {error}. Saved after step {step}; to continue, start with "
        "resume=auto",
    ]  # fmt: skip
    [state] = journal.states
    again = Journal({4})
    train(monkeypatch, again, loop.Progress(**state["progress"]))
    entries = ["copy", "sync 4", "save 4", "log 4", "publish 4", "wait"]
    assert again.entries == (entries if step == 4 else ["sync 3", "check", "step 4", *entries])
    assert not journal.logged and set(again.logged) == {4}
    assert again.logged[4].items() >= {"accuracy": 0.5, "num_tokens": 7}.items()
    assert again.states[0]["progress"]["max_gap"] == pytest.approx(4e-6)
    assert again.states[0]["progress"]["not_logged"] is None


@pytest.mark.parametrize(
    ("error", "last"), [(SyncError("canary"), "settle"), (RankError("rank 1"), "step 4")]
)
def test_other_errors_save_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, last: str
) -> None:
    journal = Journal(set(), {"step 4": error})
    train(monkeypatch, journal, loop.Progress(step=3))
    assert journal.states == [] and journal.entries[-2] == last


def test_the_engine_at_fault_is_named() -> None:
    """Also if its tokens are too few to change the mean of all much."""
    good = GapStatistics(total=1.0, max=0.8, num_tokens=4000)
    bad = GapStatistics(total=300.0, max=0.8, num_tokens=1000)
    few = GapStatistics(total=4.0, max=0.8, num_tokens=10)
    check_gaps({0: good, 1: few}, version=3, max_gap=1.0, max_mean_gap=0.1)
    with pytest.raises(SyncError, match=r"engine 1 and policy disagree by 0\.3 on") as caught:
        check_gaps({0: good, 1: bad}, version=3, max_gap=1.0, max_mean_gap=0.1)
    assert caught.value.engines == {1}
    with pytest.raises(SyncError, match=r"engine 0 and policy disagree by 0\.4 on"):
        check_gaps({0: few, 2: few}, version=3, max_gap=1.0, max_mean_gap=0.1)
    for at_bound in ({0: bad}, {0: few, 2: replace(few, total=0.0)}):
        check_gaps(at_bound, version=3, max_gap=1.0, max_mean_gap=merge([*at_bound.values()]).mean)
    worst = {5: replace(few, worst=TokenGap("7/1", 1, 8, -4.8, -4.0))}
    check_gaps(worst, version=3, max_gap=1.0, max_mean_gap=None)
    check_gaps(worst, version=3, max_gap=1.0, max_mean_gap=0.5)
    with pytest.raises(SyncError, match=r"engine 5 .* disagree by 0\.8 on 7/1, token 1") as caught:
        check_gaps(worst, version=3, max_gap=0.5, max_mean_gap=None)
    assert caught.value.engines == {5}
    with pytest.raises(SyncError, match=r"sync\.max_mean_gap is 0\.2"):
        check_gaps(worst, version=3, max_gap=0.5, max_mean_gap=0.2)


class CheckingPolicy:
    """Policy with fixed log-probs. Records its calls and the tokens on which updates are
    checked."""

    def __init__(self, logprob: float) -> None:
        self.calls: list[str] = []
        self._logprob = logprob

    def logprobs(self, batch: TokenBatch) -> LogProbs:
        self.calls.append("logprobs")
        values = torch.full_like(batch.engine_logprobs, self._logprob)
        return LogProbs(values, torch.zeros_like(values))

    def update(
        self, mini: TokenBatch, loss: Any, lr: float, *, check: Callable[[LogProbs], None] | None
    ) -> StepStats:
        self.calls.append(f"update of {mini.num_sequences}{', checked' if check else ''}")
        if check is not None:
            in_loss = mini.old_logprobs is None or mini.loss_mask
            values = torch.where(torch.as_tensor(in_loss), self._logprob, 0.0)
            values = values.expand_as(mini.engine_logprobs)
            check(LogProbs(values, torch.zeros_like(values)))
        self.calls.append("step")
        return StepStats(0.0, 0.0, lr, mini.num_loss_tokens, {"entropy": 0.0})


@pytest.mark.parametrize(
    ("source", "updates", "calls"),
    [
        ("policy", 3, ["logprobs", "update of 2", "step", "update of 2", "step"]),
        ("engine", 3, ["update of 2, checked", "step", "update of 2", "step"]),
        ("policy", 1, ["update of 6, checked", "step"]),
    ],
)
@pytest.mark.parametrize(("logprob", "is_refused"), [(-1.25, False), (-1.75, True)])
def test_the_mismatch_is_checked_before_the_first_optimizer_step(
    source: str, updates: int, calls: list[str], logprob: float, is_refused: bool
) -> None:
    config = tiny_config(
        loss__old_logprobs=source,
        loss__tis_cap="null",
        rollout__prompts_per_step=3,
        train__updates_per_step=updates,
        sync__max_gap=0.5,
    )
    # The first mini-batch has no loss tokens, and the second has one sequence of older weights.
    sequences = [
        TrainingSequence(
            ticket=ticket,
            sample=sample,
            prompt_tokens=1,
            response_tokens=2,
            segments=(Segment(3 if (ticket, sample) == (1, 1) else 4, 2),),
            advantage=1.0,
            in_loss=ticket > 0,
            reward=1.0,
        )
        for ticket in range(3)
        for sample in range(2)
    ]
    tokens = {
        index: SequenceTokens(
            np.array([1], np.int32),
            np.array([2, 3], np.int32),
            # Far from the policy's: only tokens of fresh weights may be compared.
            np.full(2, -9.0 if sequence.segments[0].version == 3 else -1.0, np.float32),
        )
        for index, sequence in enumerate(sequences)
    }
    policy = CheckingPolicy(logprob)
    collected = Rollouts(4, sequences, tokens, {})
    recorder = SimpleNamespace(
        sequence_diagnostics=lambda *_: None, trained=lambda *_: None,
        groups=lambda _: None,
    )  # fmt: skip
    parts: Any = SimpleNamespace(
        policy=policy, recorder=recorder, sync=Journal(set()), instruments=Journal(set()),
        data_parallel=ONE_INDEX, collector=SimpleNamespace(collect=lambda _: collected),
        ahead=None, loss=None,
    )  # fmt: skip
    if is_refused:
        with pytest.raises(SyncError, match=r"weights 4: .* disagree by 0.75 on ticket"):
            loop.train_step(config, parts, 5)
        assert "step" not in policy.calls
        return
    metrics, num_tokens = loop.train_step(config, parts, 5)
    assert policy.calls == calls
    assert num_tokens == 18
    assert metrics["mismatch/gap_max"] == metrics["mismatch/gap_mean"] == 0.25


def test_a_step_whose_engines_are_all_lost_goes_on_after_a_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "train_on_rollouts", lambda *_: ({}, 0))
    journal, losses = Journal(set()), [EnginesLost(), EnginesLost()]

    def collect(version: int) -> Rollouts:
        journal.entries.append(f"collect {version}")
        if losses:
            raise losses.pop()
        return Rollouts(version, [], {}, {})

    parts: Any = SimpleNamespace(
        sync=journal, instruments=journal, ahead=None,
        collector=SimpleNamespace(collect=collect),
        recorder=SimpleNamespace(groups=lambda _: None),
    )  # fmt: skip
    loop.train_step(tiny_config(), parts, 5)
    assert journal.entries == [
        "collect 4", "sync 4", "collect 4", "sync 4", "collect 4", "switch to policy",
    ]  # fmt: skip
