"""Recording in the background: the writer's thread, a full disk, and the policy's values."""

from __future__ import annotations

import errno
import math
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.rollout.record import recorded_steps
from dapo_megatron.segments import Segment
from dapo_megatron.tracking.policy_files import (
    PolicyRow,
    policy_files,
    policy_path,
    read_policy,
    write_policy,
)
from dapo_megatron.tracking.recorder import RankRecorder, RunRecorder
from dapo_megatron.types import DataError, SequenceDiagnostics, TrainingSequence
from tests.helpers.batches import ONE_INDEX
from tests.helpers.console import Console
from tests.helpers.groups import step_record

EMPTY = step_record([])


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RankRecorder]:
    writer = RankRecorder(run=tmp_path, console=Console())
    yield writer
    writer.close()


class Waiting:
    """A record whose write waits until it may continue."""

    def __init__(self) -> None:
        self.may_continue = threading.Event()

    def write(self, samples: Path, step: int) -> None:
        assert self.may_continue.wait(60)
        EMPTY.write(samples, step)


# ---------------------------------------------------------------------------- the writer


def test_files_are_written_in_the_background_until_the_queue_is_full(tmp_path: Path) -> None:
    """The writer's thread waits inside the first file."""
    first: Any = Waiting()
    writer = RankRecorder(run=tmp_path, console=Console(), max_waiting=1)
    writer.record(1, first)

    def fill() -> None:
        for step in range(2, 6):
            writer.record(step, EMPTY)

    filling = threading.Thread(target=fill)
    filling.start()
    filling.join(0.05)
    assert filling.is_alive()
    assert list(tmp_path.iterdir()) == []
    first.may_continue.set()
    filling.join(60)
    writer.flush()
    assert [*recorded_steps(tmp_path / "samples")] == [1, 2, 3, 4, 5]
    writer.close()
    assert not any("rollout writer" in thread.name for thread in threading.enumerate())


def test_an_error_that_is_not_of_the_disk_is_raised_by_flush(writer: RankRecorder) -> None:
    writer.record(1, step_record([], state={1, 2}))  # JSON has no sets
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.flush()


def recorder(run: Path, console: Console) -> RunRecorder:
    return RunRecorder(run=run, console=console, trackers=[], num_devices=1)


def full_disk(after: int) -> Callable[[int], None]:
    """Return a replacement of os.fsync that fails after `after` files."""
    num_left = after

    def fsync(_: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_full_disk_is_a_warning_and_the_next_step_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    console = Console()
    recording = recorder(tmp_path, console)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(room))
        recording.record(1, EMPTY)
        recording.flush()
    assert not list((tmp_path / "samples").iterdir()), "partly written files are removed"
    reason = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    assert console.warnings == [f"samples of step 1 were not written: {reason}"]
    recording.record(2, EMPTY)
    recording.finish("FINISHED")
    assert [*recorded_steps(tmp_path / "samples")] == [2]


def test_a_step_with_metrics_is_on_disk(tmp_path: Path) -> None:
    """A run that is killed then repeats every step that it has logged."""
    logged_after: list[list[int]] = []

    class Watching(Console):
        def log(self, step: int, metrics: Any) -> None:
            logged_after.append([*recorded_steps(tmp_path / "samples")])

    recording = replace(recorder(tmp_path, Console()), trackers=[Watching()])
    delayed: Any = Waiting()
    recording.record(1, delayed)
    threading.Timer(0.05, delayed.may_continue.set).start()
    recording.log(1, {})
    assert logged_after == [[1]]
    recording.finish("FINISHED")
    assert [*recorded_steps(tmp_path / "samples")] == [1]


# ---------------------------------------------------------------------------- policy


def inspected(ticket: int, sample: int, **changes: Any) -> SequenceDiagnostics:
    values = torch.tensor([-0.12345678, -2.0])
    sequence = SequenceDiagnostics(
        ticket, sample, 0.70710678, 1.23456e-7, 0.0004567891, values, -values
    )
    return replace(sequence, **changes)


def test_the_policy_file_has_token_values_only_of_inspected_groups(
    writer: RankRecorder, tmp_path: Path
) -> None:
    sequences = [inspected(7, 3), inspected(7, 0), inspected(4, 1), inspected(9, 0)]
    tokens = torch.tensor([-1.5, -2.5])
    sequences.append(inspected(10, 0, logprobs=tokens))
    writer.policy(2, 1, iter(sequences), {7, 4, 10})
    tokens.zero_()  # the writer has its own copy
    writer.flush()
    path = policy_path(tmp_path, 2, 1)
    assert policy_files(tmp_path) == {2: [path]}
    rows = list(read_policy(path))
    assert [(row.ticket, row.sample) for row in rows] == [(4, 1), (7, 0), (7, 3), (9, 0), (10, 0)]
    first, *_, without, last = rows
    assert replace(first, logprobs=None, entropy=None) == PolicyRow(
        4, 1, 0.70710678, 1.23456e-7, 0.0004567891
    )
    assert first.logprobs is not None and first.entropy is not None and last.logprobs is not None
    assert first.logprobs.tolist() == sequences[0].logprobs.tolist()
    assert first.entropy.tolist() == sequences[0].entropy.tolist()
    assert last.logprobs.tolist() == [-1.5, -2.5]
    assert (without.logprobs, without.entropy) == (None, None)
    assert [row.sample for row in read_policy(path, [7])] == [0, 3]


def test_policy_values_are_restored_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "policy.parquet"
    values = array("f", [math.nan, -math.inf, -0.0, 1e-45])
    row = PolicyRow(2**63 - 1, 2**31 - 1, math.nan, math.inf, -0.0, values, values[:0])
    write_policy(path, [row])
    [read] = read_policy(path)
    assert repr(read) == repr(row)
    assert read.logprobs is not None
    assert read.logprobs.tobytes() == values.tobytes()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=f"^{path}: "):
        list(read_policy(path))


def sequences(*tickets: int) -> list[TrainingSequence]:
    return [
        TrainingSequence(ticket, sample, 1, 1, (Segment(0, 1),), 1.0, True, 1.0)
        for sample, ticket in enumerate(tickets)
    ]


def test_a_recorder_keeps_token_values_of_a_limited_number_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console()
    limited_recorder = replace(recorder(tmp_path, console), inspected_groups=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(0))
        limited_recorder.sequence_diagnostics(1, [inspected(7, 0)], sequences(7), ONE_INDEX)
        limited_recorder.flush()
    assert not policy_files(tmp_path)
    assert console.warnings[0].startswith("policy log-probs of step 1 were not written: ")
    values = [inspected(7, 0), inspected(8, 0), inspected(7, 1)]
    limited_recorder.sequence_diagnostics(2, values, sequences(7, 7, 8), ONE_INDEX)
    limited_recorder.flush()
    rows = read_policy(policy_path(tmp_path, 2, 0))
    assert [row.logprobs is None for row in rows] == [False, False, True]
    silent = replace(limited_recorder, run=None)
    silent.sequence_diagnostics(3, [inspected(7, 0)], sequences(7), ONE_INDEX)
    limited_recorder.finish("FINISHED")
    assert [*policy_files(tmp_path)] == [2]
