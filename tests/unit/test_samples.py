"""Rollouts of a step on disk: written in the background, with an index and the policy's values, and
how a reader notices a step that was not recorded completely."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config import OverlongConfig
from dapo_megatron.data import batch
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import (
    check_complete,
    completion_files,
    forget_after,
    old_samples,
    policy_path,
    recorded_steps,
    step_completions,
    step_folder,
    step_summaries,
)
from dapo_megatron.rollout.sample_index import (
    IndexedGroup,
    display_values,
    groups_of,
    index_of,
    verdict_of,
)
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.policy_files import PolicyRow, read_gaps, read_policy, write_policy
from dapo_megatron.tracking.recorder import RunRecorder
from dapo_megatron.tracking.rollout_writer import RolloutWriter
from dapo_megatron.tracking.trackers import CompositeTracker
from dapo_megatron.types import (
    Completion,
    DataError,
    Finish,
    Grade,
    Group,
    Prompt,
    Segment,
    SequenceDiagnostics,
    TrainingSequence,
)
from tests.helpers.batches import ONE_INDEX
from tests.helpers.groups import GROUPS, record_groups


def group(ticket: int = 12) -> Group:
    older, newer = Segment(3, 1), Segment(4, 1)
    return Group(
        ticket,
        Prompt("chain_sum", 17, (12, 9, 3), "4 + 3 =", "7", {"entry": {}}),
        (
            Completion(
                0, (9, 2), (-0.125, -0.75), "7", Finish.STOP, (older, newer), Grade(1.0, True, "7")
            ),
            Completion(1, (8,), (-2.5,), "é", Finish.LENGTH, (older,), None),
        ),
    )


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RolloutWriter]:
    writer = RolloutWriter(tmp_path, pytest.fail)
    yield writer
    writer.close()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_index(folder: Path, step: int) -> dict[str, Any]:
    path = step_folder(folder, step) / "index.json"
    index = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert isinstance(index, dict)
    return index


# ---------------------------------------------------------------------------- the writer


def test_a_step_has_rows_of_all_groups_and_an_index(writer: RolloutWriter, tmp_path: Path) -> None:
    overlong = OverlongConfig(
        penalty=True, max_tokens=4, buffer_tokens=3, filter=False, filtered_in_mean=False
    )

    def reward(completion: Completion) -> float | None:
        parts = batch.reward(completion, overlong)
        return None if parts is None else parts.total

    record_groups(writer, 12, [(group(13), "expired"), (group(12), "trained")], reward)
    writer.flush()
    assert files_in(tmp_path) == [
        "step_000012/completions_00000.parquet",
        "step_000012/index.json",
    ]
    rows = list(step_completions(step_folder(tmp_path, 12)))
    assert rows == [
        CompletionRow(
            ticket, group().prompt, completion, outcome, "all_correct", reward(completion)
        )
        for ticket, outcome in ((12, "trained"), (13, "expired"))
        for completion in group().completions
    ]
    assert [row.reward for row in rows[:2]] == [pytest.approx(1 - 1 / 3), None]
    check_complete(step_folder(tmp_path, 12))


def test_files_are_written_in_the_background(tmp_path: Path) -> None:
    """The writer's thread waits inside the first file; until it continues, the caller does not."""
    may_continue, warnings = threading.Event(), list[str]()
    writer = RolloutWriter(tmp_path, warnings.append, max_waiting=4)

    def rows() -> Iterator[CompletionRow]:
        assert may_continue.wait(60)
        yield CompletionRow(1, group().prompt, group().completions[0], "trained")

    writer.completions(1, rows())
    record_groups(writer, 2, [(group(), "trained")])
    assert files_in(tmp_path) == []
    may_continue.set()
    writer.flush()
    assert len(files_in(tmp_path)) == 3
    writer.close()
    record_groups(writer, 3, [(group(), "trained")])  # a closed writer starts again
    writer.close()
    assert [*recorded_steps(tmp_path)] == [1, 2, 3]
    assert not any(thread.name == "rollout writer" for thread in threading.enumerate())
    assert warnings == []


def test_a_full_queue_makes_the_caller_wait_for_the_disk(tmp_path: Path) -> None:
    may_continue = threading.Event()
    writer = RolloutWriter(tmp_path, pytest.fail, max_waiting=1)
    writer.completions(1, (may_continue.wait(60) and row for row in ()))

    def rows() -> Iterator[CompletionRow]:
        assert may_continue.wait(60)
        yield from ()

    def fill() -> None:
        for step in range(2, 6):
            writer.completions(step, rows())

    filling = threading.Thread(target=fill)
    filling.start()
    filling.join(0.05)
    assert filling.is_alive()
    may_continue.set()
    filling.join(60)
    writer.close()
    assert [*recorded_steps(tmp_path)] == [1, 2, 3, 4, 5]


def test_an_error_that_is_not_of_the_disk_is_raised_by_flush(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, pytest.fail)
    record_groups(writer, 1, [(group(), "trained"), (group(), "trained")])
    with pytest.raises(ValueError, match="ticket 12, sample 0: two rows"):
        writer.flush()
    writer.close()


def recorder(writer: RolloutWriter | None, out: io.StringIO) -> RunRecorder:
    console = RunConsole(num_steps=3, file=out)
    return RunRecorder(writer, tracker=CompositeTracker(), console=console, num_devices=1)


def record_step(recording: RunRecorder, step: int, recorded: Any) -> None:
    rows = [CompletionRow(recorded.ticket, recorded.prompt, c) for c in recorded.completions]
    recording.completions(step, rows)
    recording.ended(step, [(recorded, "trained")])


def full_disk(after: int) -> Callable[[int], None]:
    """Return a replacement of os.fsync that fails after `after` files."""
    num_left = after

    def fsync(_: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


@pytest.mark.parametrize(
    ("room", "kept", "left_out"),
    [
        (0, [], ["samples", "index entries"]),
        (1, ["step_000001/completions_00000.parquet"], ["index entries"]),
    ],
)
def test_a_full_disk_is_a_warning_and_the_next_step_is_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    kept: list[str],
    left_out: list[str],
) -> None:
    out, warnings = io.StringIO(), list[str]()
    recording = recorder(RolloutWriter(tmp_path, warnings.append), out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(room))
        record_step(recording, 1, group())
        recording.flush()
    assert files_in(tmp_path) == kept, "partly written files are removed"
    message = f"of step 1 were not written: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    assert warnings == [f"{files} {message}" for files in left_out]
    record_step(recording, 2, group())
    recording.finish("FINISHED")
    assert set(files_in(tmp_path)) - set(kept) == {
        "step_000002/completions_00000.parquet",
        "step_000002/index.json",
    }


# ---------------------------------------------------------------------------- index


def test_the_index_has_a_row_per_completion(writer: RolloutWriter, tmp_path: Path) -> None:
    other = replace(group(13), prompt=replace(group().prompt, source="é"))
    record_groups(writer, 6, [(group(), "trained"), (other, "expired")])
    writer.flush()
    assert read_index(tmp_path, 6) == {
        "step": 6,
        "groups": {
            "ticket": [12, 13],
            "source": ["chain_sum", "é"],
            "outcome": ["trained", "expired"],
            "verdict": ["all_correct", "all_correct"],
        },
        "completions": {
            "group": [0, 0, 1, 1],
            "sample": [0, 1, 0, 1],
            "score": [1.0, None, 1.0, None],
            "correct": [True, None, True, None],
            "parsed": [True, None, True, None],
            "num_tokens": [2, 1, 2, 1],
            "finish": ["stop", "length", "stop", "length"],
            "age": [2, 2, 2, 2],
            "logprob_mean": [-0.4375, -2.5, -0.4375, -2.5],
            "logprob_min": [-0.75, -2.5, -0.75, -2.5],
        },
    }


@settings(max_examples=30)
@given(st.lists(GROUPS, max_size=4, unique_by=lambda group: group.ticket))
def test_an_index_made_from_the_files_equals_the_written_one(
    groups: list[Group],
) -> None:
    with TemporaryDirectory() as name:
        folder = step_folder(Path(name), 3)
        writer = RolloutWriter(Path(name), pytest.fail)
        rows, indexed = list[CompletionRow](), []
        for made in sorted(groups, key=lambda group: group.ticket):
            verdict = verdict_of(completion.grade for completion in made.completions)
            completions = [replace(c, sample=place) for place, c in enumerate(made.completions)]
            rows += [
                CompletionRow(made.ticket, made.prompt, completion, "trained", verdict)
                for completion in completions
            ]
            indexed.append(
                IndexedGroup(made.ticket, made.prompt.source, "trained", verdict, completions)
            )
        writer.completions(3, rows)
        writer.index(3, indexed)
        writer.close()
        columns = read_index(Path(name), 3)
        check_complete(folder)
        read = groups_of(step_summaries(folder))
    # A group without completions is in no file of completions.
    assert [(made.ticket, len(made.completions)) for made in read] == [
        (made.ticket, len(made.completions)) for made in indexed if made.completions
    ]
    if all(made.completions for made in indexed):
        assert json.loads(json.dumps(index_of(3, read))) == columns
    assert {len(column) for column in columns["completions"].values()} == {
        sum(map(len, (made.completions for made in indexed)))
    }


def test_values_that_json_lacks_are_null_in_the_index() -> None:
    summary = replace(group().completions[0], logprobs=(-math.inf, -1.0), segments=())
    values = display_values(5, summary)
    assert (values["logprob_mean"], values["logprob_min"], values["age"]) == (None, None, None)


@pytest.mark.parametrize(
    ("correct", "verdict"),
    [
        ((True, False), "mixed"),
        ((True, None), "all_correct"),
        ((False, False), "all_wrong"),
        ((None, None), None),
    ],
)
def test_the_verdict_ignores_missing_grades(
    correct: tuple[bool | None, ...], verdict: str | None
) -> None:
    grades = [None if is_correct is None else Grade(1.0, is_correct, "7") for is_correct in correct]
    assert verdict_of(grades) == verdict


# ---------------------------------------------------------------------------- steps of a run


def test_steps_after_the_checkpoint_are_forgotten(writer: RolloutWriter, tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        record_groups(writer, step, [(group(), "trained")])
    writer.flush()
    (tmp_path / "step_000003.jsonl").touch()
    (tmp_path / "notes").mkdir()
    forget_after(tmp_path, 3)
    assert [*recorded_steps(tmp_path)] == [1, 2, 3]
    forget_after(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step_000001",
        "step_000003.jsonl",
    ]
    forget_after(tmp_path / "missing", 0)


def test_a_step_without_an_index_or_a_file_is_incomplete(
    writer: RolloutWriter, tmp_path: Path
) -> None:
    folder = step_folder(tmp_path, 1)
    record_groups(writer, 1, [(group(), "trained")])
    writer.flush()
    (folder / ".completions_00000.parquet.7.partial").touch()  # of a killed process
    assert [path.name for path in completion_files(folder)] == ["completions_00000.parquet"]
    check_complete(folder)
    (folder / "completions_00000.parquet").unlink()
    with pytest.raises(DataError, match=r"0 completions in completions_00000.parquet, but index"):
        check_complete(folder)
    (folder / "index.json").unlink()
    with pytest.raises(DataError, match=r"no index\.json, because the run was killed"):
        check_complete(folder)


def test_json_lines_of_earlier_versions_are_named(tmp_path: Path) -> None:
    assert old_samples(tmp_path) is None
    (tmp_path / "step_000001.jsonl").touch()
    message = old_samples(tmp_path)
    assert message is not None
    assert message.startswith(f"{tmp_path}/step_000001.jsonl: rollouts as JSON lines, which this ")
    step_folder(tmp_path, 2).mkdir()
    assert old_samples(tmp_path) is None


# ---------------------------------------------------------------------------- policy


def inspected(ticket: int, sample: int, **changes: Any) -> SequenceDiagnostics:
    values = torch.tensor([-0.12345678, -2.0])
    sequence = SequenceDiagnostics(
        ticket, sample, 0.70710678, 1.23456e-7, 0.0004567891, values, -values
    )
    return replace(sequence, **changes)


def test_the_policy_file_has_token_values_only_of_inspected_groups(
    writer: RolloutWriter, tmp_path: Path
) -> None:
    sequences = [inspected(7, 3), inspected(7, 0), inspected(4, 1), inspected(9, 0)]
    tokens = torch.tensor([-1.5, -2.5])
    sequences.append(inspected(10, 0, logprobs=tokens))
    writer.policy(2, 1, iter(sequences), {7, 4, 10})
    tokens.zero_()  # the writer has its own copy
    writer.flush()
    path = policy_path(step_folder(tmp_path, 2), 1)
    assert files_in(tmp_path) == ["step_000002/policy_00001.parquet"]
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
    assert read_gaps(path)[0] == (0.0004567891, 4, 1)


def test_policy_values_are_restored_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "policy.parquet"
    values = np.array([math.nan, -math.inf, -0.0, 1e-45], np.float32)
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
    warnings: list[str] = []
    writer = RolloutWriter(tmp_path, warnings.append)
    limited_recorder = replace(recorder(writer, io.StringIO()), inspected_groups=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(0))
        limited_recorder.sequence_diagnostics(1, [inspected(7, 0)], sequences(7), ONE_INDEX)
        limited_recorder.flush()
    assert files_in(tmp_path) == []
    assert warnings[0].startswith("policy log-probs of step 1 were not written: ")
    values = [inspected(7, 0), inspected(8, 0), inspected(7, 1)]
    limited_recorder.sequence_diagnostics(2, values, sequences(7, 7, 8), ONE_INDEX)
    limited_recorder.flush()
    rows = read_policy(policy_path(step_folder(tmp_path, 2), 0))
    assert [row.logprobs is None for row in rows] == [False, False, True]
    silent = replace(limited_recorder, writer=None)
    silent.sequence_diagnostics(3, [inspected(7, 0)], sequences(7), ONE_INDEX)
    limited_recorder.finish("FINISHED")
    assert [*recorded_steps(tmp_path)] == [1, 2]
