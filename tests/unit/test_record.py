"""The record of a step's rollouts: restored exactly, checked against damage, and repeated."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.files import replaced_by, sha256
from dapo_megatron.rollout import record
from dapo_megatron.rollout.record import (
    COMPLETIONS,
    OPEN,
    OpenGroups,
    RecordedGroup,
    StepRecord,
    check,
    forget_after,
    read_groups,
    read_open,
    read_state,
    recorded_steps,
    require_steps,
    step_folder,
    summaries,
    write_groups,
)
from dapo_megatron.run.folder import RunFolder
from dapo_megatron.run.resume import facts_of, repeated_steps
from dapo_megatron.segments import Segment
from dapo_megatron.types import (
    Completion,
    ConfigError,
    DataError,
    Finish,
    Grade,
    Group,
    Prompt,
    packed,
)
from tests.helpers.configs import tiny_config
from tests.helpers.groups import recorded_groups, step_record

FILES = [COMPLETIONS, "manifest.json", OPEN, "state.json"]


def group(ticket: int, num_samples: int = 2, *, text: str = "7") -> Group:
    prompt = Prompt("chain_sum", 17, (12, 9, 3), "4 + 3 =", "7", {"entry": {"a": [1.5]}})
    segments, grade = (Segment(3, 1), Segment(4, 1)), Grade(1.0, True, "7")
    return Group(
        ticket,
        prompt,
        tuple(
            Completion(sample, (9, 2), (-0.5, -0.25), text, Finish.STOP, segments, grade)
            for sample in range(num_samples)
        ),
    )


def a_record(text: str = "7") -> StepRecord:
    made = step_record([(group(1, text=text), "trained"), (group(2), "expired")])
    return replace(made, open=[RecordedGroup(group(5, 1))])


def exact(item: RecordedGroup) -> tuple[Any, ...]:
    """Return the content of a group so that equal values have equal bits."""
    return (
        item.group.ticket,
        repr(item.group.prompt),
        item.outcome,
        list(item.rewards) or [None] * len(item.group.completions),
        [
            (
                repr(replace(completion, tokens=(), logprobs=(), routes=None)),
                completion.tokens.tobytes(),
                completion.logprobs.tobytes(),
                None if routes is None else (routes.typecode, routes.tobytes()),
            )
            for completion in item.group.completions
            for routes in [completion.routes]
        ],
    )


def escaped(item: RecordedGroup) -> RecordedGroup:
    """Return a group as it is restored: escapes for lone surrogates."""

    def utf8(text: str) -> str:
        return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):x}", text)

    def restored(completion: Completion) -> Completion:
        grade = completion.grade
        grade = grade and replace(grade, pred=utf8(grade.pred))
        return replace(completion, text=utf8(completion.text), grade=grade)

    prompt = item.group.prompt
    texts = {name: utf8(getattr(prompt, name)) for name in ("source", "text", "truth")}
    completions = tuple(map(restored, item.group.completions))
    whole = Group(item.group.ticket, replace(prompt, **texts), completions)
    return replace(item, group=whole)


@settings(max_examples=60)
@given(groups=recorded_groups(), rows=st.integers(0, 4), data=st.data())
def test_groups_are_restored_exactly(
    groups: list[RecordedGroup], rows: int, data: st.DataObject
) -> None:
    expected = [exact(escaped(item)) for item in sorted(groups, key=lambda item: item.group.ticket)]
    tickets = [content[0] for content in expected]
    wanted = data.draw(st.sets(st.sampled_from([*tickets, 3])))
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "BATCH_BYTES", max(1, 2000 * rows))
        folder = Path(name)
        write_groups(folder / COMPLETIONS, groups)
        assert [*map(exact, read_groups(folder / COMPLETIONS))] == expected
        some = [*map(exact, read_groups(folder / COMPLETIONS, wanted))]
        assert some == [content for content in expected if content[0] in wanted]
        table = summaries(folder)
        snapshot = OpenGroups(groups)
        snapshot.write(folder)
        completions = read_open(folder)
        assert snapshot.checksums == ({OPEN: sha256(folder / OPEN)} if groups else {})
    assert tuple(table.columns) == record.SUMMARY
    keys = [(ticket, sample) for ticket in tickets for sample in samples_of(groups, ticket)]
    assert list(zip(table["ticket"], table["sample"], strict=True)) == keys
    assert list(completions) == keys


def samples_of(groups: list[RecordedGroup], ticket: int) -> list[int]:
    [item] = [item for item in groups if item.group.ticket == ticket]
    return [completion.sample for completion in item.group.completions]


def test_the_size_of_open_groups_is_not_underestimated(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [
        replace(
            completion,
            tokens=packed(rng.integers(0, 2**31 - 1, 2000, np.int32)),
            logprobs=packed(rng.random(2000, np.float32)),
            text="".join(map(chr, rng.integers(0x4E00, 0x9FFF, 2000))),
            routes=packed(rng.integers(0, 512, 8000, np.int16)),
        )
        for completion in group(1, 4).completions
    ]
    snapshot = OpenGroups([RecordedGroup(replace(group(1), completions=tuple(completions)))])
    snapshot.write(tmp_path)
    size = (tmp_path / OPEN).stat().st_size
    assert size <= snapshot.num_bytes < 2 * size


def test_other_programs_read_plain_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    right, wrong, open_ended = group(3, 3).completions
    wrong = replace(wrong, grade=Grade(-1.0, False, "", False), text="a \ud800")
    nothing = {"tokens": (), "logprobs": (), "segments": (), "grade": None}
    open_ended = replace(open_ended, finish=Finish.UNFINISHED, routes=array("B", [7]), **nothing)
    ended = [(replace(group(3), completions=(right, wrong, open_ended)), "expired")]
    step_record(ended, lambda made: made.grade and made.grade.score - 0.5).write(tmp_path, 1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = str(tmp_path / "*" / COMPLETIONS)
    rows = list(datasets.load_dataset("parquet", data_files=files, split="train"))
    whole = {"ticket": 3, "outcome": "expired", "verdict": "mixed", "num_prompt_tokens": 3}
    whole |= {"source": "chain_sum", "index": 17, "prompt": "4 + 3 =", "truth": "7"}
    whole |= {"extra": '{"entry": {"a": [1.5]}}', "prompt_tokens": [12, 9, 3]}
    segments = [{"version": version, "num_tokens": 1, "engine": 0} for version in (3, 4)]
    stopped = whole | {"num_tokens": 2, "oldest_version": 3, "segments": segments}
    stopped |= {"logprob_mean": -0.375, "logprob_min": -0.5, "finish": "stop", "tokens": [9, 2]}
    stopped |= {"logprobs": [-0.5, -0.25], "routes": None}
    graded = {"score": 1.0, "correct": True, "pred": "7", "parsed": True, "reward": 0.5}
    worse = {"score": -1.0, "correct": False, "pred": "", "parsed": False, "reward": -1.5}
    missing = dict.fromkeys((*graded, "oldest_version", "logprob_mean", "logprob_min"))
    missing |= {"finish": "unfinished", "num_tokens": 0, "routes": [7]}
    assert rows == [
        stopped | graded | {"sample": 0, "text": "7"},
        stopped | worse | {"sample": 1, "text": "a \\ud800"},
        whole | missing | {"sample": 2, "text": "7", "tokens": [], "logprobs": [], "segments": []},
    ]


# ---------------------------------------------------------------------------- folders


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "place", ["write_groups", "write_text", "write_manifest", "publish_folder", "rename"]
)
def test_a_kill_leaves_the_older_record_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    a_record("old").write(tmp_path, 3)
    folder = step_folder(tmp_path, 3)
    with monkeypatch.context() as patch:
        if place == "rename":  # between the two renames of `publish_folder`
            folder.rename(replaced_by(folder))
        else:
            patch.setattr(record, place, killed)
            with pytest.raises(Killed):
                a_record("new").write(tmp_path, 3)
            check(folder)
            assert next(read_groups(folder / COMPLETIONS)).group.completions[0].text == "old"
    a_record("new").write(tmp_path, 3)
    check(folder)
    assert next(read_groups(folder / COMPLETIONS)).group.completions[0].text == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_steps_are_listed_in_order_and_forgotten(tmp_path: Path) -> None:
    for step in (1_000_000, 2, 3):
        a_record().write(tmp_path, step)
    (tmp_path / ".step_000001.partial").mkdir()  # of a killed run
    others = {"notes", "step_000002_00001.parquet", "step_000003_00000.parquet"}  # in policy/
    for name in others:
        (tmp_path / name).touch()
    assert list(recorded_steps(tmp_path)) == [2, 3, 1_000_000]
    forget_after(tmp_path, 2)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == others - {"step_000003_00000.parquet"} | {"step_000002"}
    forget_after(tmp_path / "missing", 0)


def test_runs_without_records_and_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    message = f"^{tmp_path}/samples has no recorded steps; .* tracking.samples=true$"
    with pytest.raises(ConfigError, match=message):
        require_steps(tmp_path)
    folder = step_folder(tmp_path / "samples", 1)
    folder.mkdir(parents=True)
    (folder / "completions_00000.parquet").touch()
    with pytest.raises(ConfigError, match=f"^{folder}: recorded by .* use commit [0-9a-f]{{7}} to"):
        require_steps(tmp_path)
    a_record().write(tmp_path / "samples", 1)
    assert require_steps(tmp_path) == require_steps(tmp_path, tmp_path / "own") == {1: folder}
    with pytest.raises(ConfigError, match=f"^run.name: {tmp_path} is the run to replay"):
        require_steps(tmp_path, own=tmp_path / "samples" / "..")


# ---------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a recorded step."""
    samples = tmp_path_factory.mktemp("samples")
    a_record().write(samples, 1)
    files = {path.name: path.read_bytes() for path in step_folder(samples, 1).iterdir()}
    assert sorted(files) == FILES
    return files


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw what is left of a file: its first bytes, or all with another bit."""
    place = draw(st.integers(0, len(data) - 1))
    if draw(st.booleans()):
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1 << draw(st.integers(0, 7))]) + data[place + 1 :]


@settings(max_examples=250)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_every_damage_is_reported_with_its_file(
    written: dict[str, bytes], data: st.DataObject, name: str
) -> None:
    """Without a check a reader gets the recorded groups, or an error. Only the footer of a table
    has no checksum of its own."""
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for other, content in written.items():
            (folder / other).write_bytes(content)
        check(folder)
        path = folder / name
        damaged_content = data.draw(st.none() | damaged(written[name]))
        is_table = name in (COMPLETIONS, OPEN)
        if is_table:
            footer = pq.ParquetFile(path).metadata.serialized_size + 8
            expected = [*map(exact, read_groups(path))]
        path.unlink()
        if damaged_content is not None:
            path.write_bytes(damaged_content)
        with pytest.raises(DataError, match=f"^{path}: "):
            check(folder)
        if not is_table:
            return
        try:
            summaries(folder)
            groups = [*map(exact, read_groups(path))]
        except DataError as error:
            assert str(error).startswith(f"{path}: cannot be read (")
        else:
            assert damaged_content is not None
            end = len(written[name]) - footer
            assert groups == expected or damaged_content[:end] == written[name][:end]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("num_tokens", 3, "ticket 1, sample 1: tokens are missing"),
        ("tokens", [1], "ticket 1, sample 1: tokens are missing"),
        ("finish", "lost", "'lost' is not a valid Finish"),
        ("extra", "{", "the file is damaged"),
    ],
)
def test_values_that_contradict_each_other_are_a_data_error(
    tmp_path: Path, column: str, value: Any, message: str
) -> None:
    path = tmp_path / COMPLETIONS
    write_groups(path, [RecordedGroup(group(1))])
    table = pq.read_table(path)
    number = 0 if column == "extra" else 1
    values = table[column].to_pylist()
    values[number] = value
    place, field = table.schema.get_field_index(column), table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*{message}"):
        list(read_groups(path))


def test_other_files_are_a_data_error(tmp_path: Path) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign"
    text.write_text("{}\n")
    pq.write_table(pa.table({"ticket": [1]}), foreign)
    for path, why in ((foreign, ".*column ticket is of another type"), (tmp_path, ""), (text, "")):
        with pytest.raises(DataError, match=f"^{path}: cannot be read {why}"):
            list(read_groups(path))
    write_groups(text, [RecordedGroup(group(1))])
    table = pq.read_table(text)
    place, field = table.schema.get_field_index("text"), table.schema.field("text")
    no_utf8 = pa.array([b"7", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(table.set_column(place, field, no_utf8), text)
    with pytest.raises(DataError, match=f"^{text}: cannot be read .*Invalid UTF8"):
        list(read_groups(text))
    assert read_open(tmp_path) == {}
    with pytest.raises(DataError, match=f"^{tmp_path}/state.json: "):
        read_state(tmp_path)


# ---------------------------------------------------------------------------- repeated steps


def recorded_run(path: Path, *steps: int, **keys: Any) -> RunFolder:
    """Return the folder of a run on two ranks that recorded steps."""
    facts = facts_of(tiny_config(**keys), 2)
    for step in steps:
        step_record([(group(step), "trained")], facts=facts).write(path / "samples", step)
    return RunFolder(path)


def steps_again(
    folder: RunFolder, checkpoint: int | None, num_ranks: int = 2, **keys: Any
) -> tuple[list[int], list[str]]:
    config = tiny_config(**{"resume": "auto", **keys})
    source = None if checkpoint is None else folder.checkpoints / f"step_{checkpoint:06d}"
    repeated, notes = repeated_steps(config, folder, num_ranks, source)
    assert all(path == step_folder(folder.samples, step) for step, path in repeated.items())
    return list(repeated), notes


@given(
    steps=st.sets(st.integers(1, 6)),
    checkpoint=st.none() | st.integers(0, 6),
    other=st.none() | st.integers(1, 6),
    state=st.sampled_from(["", "{", json.dumps({"manifest": True}), "[]"]),
)
@settings(max_examples=40)
def test_steps_without_a_gap_after_the_checkpoint_are_repeated(
    steps: set[int], checkpoint: int | None, other: int | None, state: str
) -> None:
    """Up to one of another config, or with a state that cannot be read."""
    with TemporaryDirectory() as name:
        folder = recorded_run(Path(name), *steps)
        if other in steps:
            recorded_run(Path(name), other, optimizer__lr=0.5)
            if state:
                (step_folder(folder.samples, other) / "state.json").write_text(state)
        repeated, notes = steps_again(folder, checkpoint)
    first = step = (checkpoint or 0) + 1
    while step in steps and step != other:
        step += 1
    assert repeated == list(range(first, step))
    has_other = step in steps
    assert len(notes) == has_other + bool(repeated)
    assert not has_other or notes[0].startswith(f"step {step} is sampled again: {name}/samples/")
    assert not repeated or notes[-1] == f"trains again on what steps {first} to {step - 1} recorded"


@pytest.mark.parametrize(
    ("keys", "is_used"),
    [
        ({"optimizer__lr": 0.5}, False),
        ({"rollout__temperature": 0.5}, False),
        ({"num_ranks": 4}, False),
        ({"train__rollout_steps": 77, "tracking__mlflow": False, "checkpoint__keep": 9}, True),
        ({"resume": "runs/x/checkpoints/step_000000"}, False),
    ],
)
def test_a_changed_config_samples_again(
    tmp_path: Path, keys: dict[str, Any], is_used: bool
) -> None:
    repeated, notes = steps_again(recorded_run(tmp_path, 1, 2), None, **keys)
    assert repeated == ([1, 2] if is_used else [])
    is_chosen = "resume" in keys
    assert is_used or is_chosen or notes[0].endswith("of another config or number of ranks")
