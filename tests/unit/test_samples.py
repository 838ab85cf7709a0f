"""Rollouts of a step on disk: the groups, bit for bit, an index of their places, and the policy's
values on the trained ones."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from dapo_megatron.rollout.serialization import group_from_json
from dapo_megatron.tracking.samples import (
    index_path,
    policy_path,
    samples_path,
    write_policy,
    write_samples,
)
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config import OverlongConfig
from dapo_megatron.run.record import total_reward
from dapo_megatron.tracking.console import RunConsole
from dapo_megatron.tracking.recorder import RunRecorder
from dapo_megatron.tracking.trackers import CompositeTracker
from dapo_megatron.types import (
    Completion,
    Finish,
    Grade,
    Group,
    Prompt,
    Segment,
    SequenceDiagnostics,
)
from tests.helpers.groups import GROUPS


def group() -> Group:
    older, newer = Segment(3, 1), Segment(4, 1)
    return Group(
        12,
        Prompt("chain_sum", 17, (12, 9, 3), "4 + 3 =", "7", {"entry": {}}),
        (
            Completion(
                0, (9, 2), (-0.125, -0.75), "7", Finish.STOP, (older, newer), Grade(1.0, True, "7")
            ),
            Completion(1, (8,), (-2.5,), "é", Finish.LENGTH, (older,), None),
        ),
    )


def test_samples_contain_all_fields_of_a_group(tmp_path: Path) -> None:
    path, _ = write_samples(tmp_path / "samples", 12, [(group(), "trained"), (group(), "expired")])
    assert list((tmp_path / "samples").iterdir()) == [path]
    assert path.name == "step_000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "fate": "trained",
        "verdict": "all_correct",
        "versions": [3, 4],
        "ticket": 12,
        "source": "chain_sum",
        "index": 17,
        "prompt": "4 + 3 =",
        "truth": "7",
        "extra": {"entry": {}},
        "prompt_tokens": [12, 9, 3],
        "completions": [
            {
                "sample": 0,
                "text": "7",
                "finish": "stop",
                "score": 1.0,
                "correct": True,
                "pred": "7",
                "parsed": True,
                "segments": [[3, 1], [4, 1]],
                "tokens": [9, 2],
                "logprobs": [-0.125, -0.75],
            },
            {
                "sample": 1,
                "text": "é",
                "finish": "length",
                "score": None,
                "correct": None,
                "pred": None,
                "parsed": None,
                "segments": [[3, 1]],
                "tokens": [8],
                "logprobs": [-2.5],
            },
        ],
    }
    assert second["fate"] == "expired"
    assert group_from_json(first) == group()


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    broken = group()
    broken = replace(
        broken, prompt=replace(broken.prompt, text="a \ud800 b \udcff", truth="\udc80")
    )
    path, _ = write_samples(tmp_path, 1, [(broken, "trained")])
    assert group_from_json(json.loads(path.read_text(encoding="utf-8"))) == broken


@pytest.mark.parametrize(
    ("correct", "verdict"),
    [
        ((True, False), "mixed"),
        ((True, None), "all_correct"),
        ((False, False), "all_wrong"),
        ((None, None), None),
    ],
)
def test_the_verdict_of_a_group_is_recorded(
    tmp_path: Path, correct: tuple[bool | None, ...], verdict: str | None
) -> None:
    first = group().completions[0]
    grades = [None if is_correct is None else Grade(1.0, is_correct, "7") for is_correct in correct]
    judged = replace(group(), completions=tuple(replace(first, grade=grade) for grade in grades))
    path, _ = write_samples(tmp_path, 1, [(judged, "abstained")])
    assert json.loads(path.read_text())["verdict"] == verdict


def test_samples_are_written_atomically(tmp_path: Path) -> None:
    old = write_samples(tmp_path, 1, [(group(), "mixed")])[0].read_bytes()

    def failing() -> Any:
        yield group(), "mixed"
        yield group(), "mixed"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path, 1, failing())
    assert (tmp_path / "step_000001.jsonl").read_bytes() == old


def test_the_reward_of_each_completion_is_recorded(tmp_path: Path) -> None:
    overlong = OverlongConfig(
        penalty=True, max_tokens=4, buffer_tokens=3, filter=False, filtered_in_mean=False
    )
    reward = partial(total_reward, overlong=overlong)
    path, _ = write_samples(tmp_path, 1, [(group(), "trained")], reward)
    [line] = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert [entry["reward"] for entry in line["completions"]] == [pytest.approx(1 - 1 / 3), None]
    assert group_from_json(line) == group()


def recorder(folder: Path, out: io.StringIO) -> RunRecorder:
    return RunRecorder(CompositeTracker(), RunConsole(num_steps=3, file=out), folder, num_devices=1)


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


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
    [(0, [], "samples"), (1, [Path("step_000001.jsonl")], "index entries")],
)
def test_a_full_disk_is_a_warning_and_the_next_step_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, kept: list[Path], left_out: str
) -> None:
    out = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(room))
        recorder(tmp_path, out).samples(1, [(group(), "mixed")])
    assert files_in(tmp_path) == kept, "partly written files are removed"
    assert out.getvalue().startswith(f"WARNING: {left_out} of step 1 were not written: ")
    recorder(tmp_path, out).samples(2, [(group(), "mixed")])
    assert set(files_in(tmp_path)) - set(kept) == {
        Path("step_000002.jsonl"),
        Path("index/step_000002.json"),
    }


# ---------------------------------------------------------------------------- index


def read_index(folder: Path, step: int) -> dict[str, Any]:
    index = json.loads(index_path(folder, step).read_text(), parse_constant=pytest.fail)
    assert isinstance(index, dict)
    return index


def test_the_index_has_a_row_per_completion(tmp_path: Path) -> None:
    other = replace(group(), ticket=13, prompt=replace(group().prompt, source="é"))
    path, index = write_samples(tmp_path, 6, [(group(), "trained"), (other, "expired")])
    assert index.write(tmp_path) == tmp_path / "index" / "step_000006.json"
    assert read_index(tmp_path, 6) == {
        "step": 6,
        "groups": {
            "offset": [0, path.read_bytes().index(b"\n") + 1],
            "ticket": [12, 13],
            "source": ["chain_sum", "é"],
            "fate": ["trained", "expired"],
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


@given(
    st.lists(st.tuples(GROUPS, st.sampled_from(["trained", "all_wrong", "expired"])), max_size=4)
)
def test_the_index_gives_offsets_and_columns_of_all_groups(groups: list[tuple[Group, str]]) -> None:
    with TemporaryDirectory() as folder:
        path, index = write_samples(Path(folder), 3, groups)
        index.write(Path(folder))
        columns = read_index(Path(folder), 3)
        with path.open("rb") as file:
            lines = [
                (file.seek(at) and b"") or file.readline() for at in columns["groups"]["offset"]
            ]
    read = [group_from_json(json.loads(line)) for line in lines]
    assert read == [written for written, _ in groups]
    assert columns["groups"]["fate"] == [fate for _, fate in groups]
    assert columns["groups"]["ticket"] == [group.ticket for group in read]
    completions = [
        (place, completion) for place, group in enumerate(read) for completion in group.completions
    ]
    rows = columns["completions"]
    assert rows["group"] == [place for place, _ in completions]
    assert rows["num_tokens"] == [len(completion.tokens) for _, completion in completions]
    assert rows["correct"] == [
        completion.grade and completion.grade.correct for _, completion in completions
    ]
    assert rows["age"] == [
        2 - completion.segments[0].version if completion.segments else None
        for _, completion in completions
    ]
    assert {len(column) for column in rows.values()} == {len(completions)}


def test_a_repeated_step_removes_the_files_of_the_first_attempt(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [(group(), "mixed")])[1].write(tmp_path)
    policy_path(tmp_path, 1).parent.mkdir()
    policy_path(tmp_path, 1).write_text("{}")
    write_samples(tmp_path, 1, [(group(), "mixed"), (group(), "mixed")])
    assert files_in(tmp_path) == [samples_path(Path(), 1)]


# ---------------------------------------------------------------------------- policy


def inspected(ticket: int, sample: int, **changes: Any) -> SequenceDiagnostics:
    values = torch.tensor([-0.12345678, -2.0])
    sequence = SequenceDiagnostics(
        ticket, sample, 0.70710678, 1.23456e-7, 0.0004567891, values, -values
    )
    return replace(sequence, **changes)


def read_policy(folder: Path, step: int) -> list[dict[str, Any]]:
    lines = policy_path(folder, step).read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_the_policy_file_has_token_values_only_of_the_first_groups(tmp_path: Path) -> None:
    sequences = [inspected(7, 0), inspected(7, 3), inspected(4, 1), inspected(9, 0)]
    assert write_policy(tmp_path, 2, sequences, 2) == tmp_path / "policy" / "step_000002.jsonl"
    lines = read_policy(tmp_path, 2)
    assert [(line["ticket"], line["sample"]) for line in lines] == [(7, 0), (7, 3), (4, 1), (9, 0)]
    assert lines[2] == {
        "ticket": 4,
        "sample": 1,
        "advantage": 0.7071,
        "gap_mean": 1.235e-7,
        "gap_max": 0.0004568,
        "logprobs": [-0.123457, -2.0],
        "entropy": [0.1235, 2.0],
    }
    assert lines[3] == {**lines[2], "ticket": 9, "sample": 0, "logprobs": None, "entropy": None}


def test_non_finite_values_are_null_in_the_policy_file(tmp_path: Path) -> None:
    sequence = inspected(1, 0, gap_max=math.inf, logprobs=torch.tensor([math.nan, -1.0]))
    write_policy(tmp_path, 2, [sequence], 1)
    [line] = read_policy(tmp_path, 2)
    assert line["gap_max"] is None
    assert line["logprobs"] == [None, -1.0]


def test_a_recorder_keeps_token_values_of_a_limited_number_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    limited_recorder = replace(recorder(tmp_path, out), inspected_groups=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(0))
        limited_recorder.sequence_diagnostics(1, [inspected(7, 0)])
    assert files_in(tmp_path) == []
    assert "WARNING: policy log-probs of step 1 were not written: " in out.getvalue()
    limited_recorder.sequence_diagnostics(2, [inspected(7, 0), inspected(8, 0)])
    assert [line["logprobs"] is None for line in read_policy(tmp_path, 2)] == [False, True]
    replace(limited_recorder, samples_folder=None).sequence_diagnostics(3, [inspected(7, 0)])
    assert files_in(tmp_path) == [policy_path(Path(), 2)]
