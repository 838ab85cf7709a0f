"""The order of calls in the training loop, which crash safety and memory depend on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_megatron import loop
from dapo_megatron.algo.mismatch import GapStatistics, TokenGap, check_gap
from dapo_megatron.rollout.checkpoint_files import CompletionsSnapshot
from dapo_megatron.rollout.partial_step import PartialStep
from dapo_megatron.rollout.replay import NoSync
from dapo_megatron.types import (
    EnginesLost,
    LogProbs,
    Rollouts,
    Segment,
    SequenceTokens,
    StarvedError,
    StepStats,
    Stopped,
    SyncError,
    SyncReport,
    TokenBatch,
    TrainingSequence,
)
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
        sampling_ahead=lambda version: nullcontext(),
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
        assert mini.old_logprobs is not None
        if check is not None:
            values = torch.where(mini.loss_mask, self._logprob, 0.0)
            check(LogProbs(values, torch.zeros_like(values)))
        self.calls.append("step")
        return StepStats(0.0, 0.0, lr, mini.num_loss_tokens, {"entropy": 0.0})


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("policy", ["logprobs", "update of 2", "step", "update of 2", "step"]),
        ("engine", ["update of 2, checked", "step", "update of 2", "step"]),
    ],
)
@pytest.mark.parametrize(("logprob", "is_refused"), [(-1.25, False), (-1.75, True)])
def test_the_mismatch_is_checked_before_the_first_optimizer_step(
    source: str, calls: list[str], logprob: float, is_refused: bool
) -> None:
    config = tiny_config(
        loss__old_logprobs=source,
        loss__tis_cap="null",
        rollout__prompts_per_step=3,
        train__updates_per_step=3,
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
    partial_step = PartialStep()
    partial_step.begin(Rollouts(sequences, tokens, {}))
    policy = CheckingPolicy(logprob)
    recorder = SimpleNamespace(sequence_diagnostics=lambda *_: None, trained=lambda *_: None)
    parts: Any = SimpleNamespace(
        policy=policy, recorder=recorder, sync=Journal(set()), instruments=Journal(set()),
        data_parallel=ONE_INDEX, check_stop=lambda: None,
        sampling_ahead=lambda version: nullcontext(), loss=None,
        learning_rate=lambda step: 1e-3,
    )  # fmt: skip
    if is_refused:
        with pytest.raises(SyncError, match=r"weights 4: .* disagree by 0.75 on ticket"):
            loop.train_step(config, parts, 5, partial_step)
        assert "step" not in policy.calls
        return
    metrics, num_tokens = loop.train_step(config, parts, 5, partial_step)
    assert policy.calls == calls
    assert num_tokens == 18
    assert metrics["mismatch/gap_max"] == metrics["mismatch/gap_mean"] == 0.25


@pytest.mark.parametrize(("updates", "version"), [([], 4), ([object()], None)])
def test_engines_do_not_sample_during_the_rest_of_a_step_that_began_before(
    updates: list[Any], version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are between two versions, so their tokens would have a wrong one."""
    monkeypatch.setattr(loop, "train_on_rollouts", lambda *_: ({}, 0))
    partial_step = PartialStep(sequences=[], updates=updates)
    versions: list[int] = []

    def sampling_ahead(version: int) -> AbstractContextManager[None]:
        versions.append(version)
        return nullcontext()

    parts: Any = SimpleNamespace(
        sync=Journal(set()), instruments=Journal(set()), sampling_ahead=sampling_ahead
    )
    loop.train_step(tiny_config(), parts, 5, partial_step)
    assert versions == ([] if version is None else [version])


def test_a_step_whose_engines_are_all_lost_goes_on_after_a_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "train_on_rollouts", lambda *_: ({}, 0))
    journal, losses = Journal(set()), [EnginesLost(), EnginesLost()]

    def collect(version: int, on_progress: object) -> Rollouts:
        journal.entries.append(f"collect {version}")
        if losses:
            raise losses.pop()
        return Rollouts([], {}, {})

    parts: Any = SimpleNamespace(
        sync=journal, instruments=journal, sampling_ahead=lambda version: nullcontext(),
        collector=SimpleNamespace(collect=collect),
        recorder=SimpleNamespace(progress=lambda _: nullcontext()),
    )  # fmt: skip
    loop.train_step(tiny_config(), parts, 5, PartialStep())
    assert journal.entries == [
        "collect 4", "sync 4", "collect 4", "sync 4", "collect 4", "switch to policy",
    ]  # fmt: skip
