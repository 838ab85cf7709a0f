"""Which rollouts a report shows, the text of their tokens, and what the page gets of them."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dapo_megatron.report import sample_files, viewer_data
from dapo_megatron.report.choosing import ASKED, RANDOM, Pick, choose, frames
from dapo_megatron.report.models import StepIndex
from dapo_megatron.report.rollouts import Rollouts, Row, rollouts
from dapo_megatron.report.run_data import read_run
from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.rollout.serialization import COMPLETION_COLUMNS, GROUP_COLUMNS
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

TINY = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"
OUTCOMES = ("trained", "all_correct", "abstained")


# ---------------------------------------------------------------------------- choosing


@st.composite
def runs(draw: st.DrawFn) -> list[StepIndex]:
    """The indexes of a small run, with every kind of completion."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 5))
    ticket = 0
    made = []
    for _ in range(draw(st.integers(1, 12))):
        groups, completions = [], []
        for place in range(chance.randint(0, 6)):
            groups.append((100 * place, ticket, chance.choice("ab"), chance.choice(OUTCOMES), None))
            ticket += 1
            completions += [completion(chance, place, sample) for sample in range(size)]
        made.append(index_of(groups, completions))
    return made


def completion(chance: random.Random, place: int, sample: int) -> tuple[Any, ...]:
    score = chance.choice((None, 1.0, -1.0))
    parsed = None if score is None else chance.random() < 0.8
    num_tokens = chance.randint(0, 50)
    logprob = -chance.random() if num_tokens else None
    return (
        *(place, sample, score, None if score is None else score > 0, parsed, num_tokens),
        *(chance.choice(("stop", "length")), chance.choice((None, 0, 3)), logprob, logprob),
    )


def index_of(groups: list[tuple[Any, ...]], completions: list[tuple[Any, ...]]) -> StepIndex:
    value = {
        name: {column: [row[place] for row in rows] for place, column in enumerate(columns)}
        for name, columns, rows in (
            ("groups", GROUP_COLUMNS, groups),
            ("completions", COMPLETION_COLUMNS, completions),
        )
    }
    return msgspec.convert(value, StepIndex)


def chosen(indexes: list[StepIndex], num: int, tickets: Collection[int] = ()) -> list[Pick]:
    by_step = dict(enumerate(indexes, 1))
    groups, completions = frames(by_step, inspected=2, policy_steps=by_step)
    return choose(groups, completions, num, tickets)


@settings(max_examples=15)
@given(indexes=runs(), most=st.integers(0, 80), asked=st.sets(st.integers(0, 80), max_size=3))
def test_whole_groups_within_the_budget_and_those_asked_for(
    indexes: list[StepIndex], most: int, asked: set[int]
) -> None:
    picks = chosen(indexes, most, asked)
    sizes = {
        ticket: index["completions"]["group"].count(place)
        for index in indexes
        for place, ticket in enumerate(index["groups"]["ticket"])
    }
    tickets = [pick.ticket for pick in picks]
    assert len(set(tickets)) == len(tickets)
    assert {pick.ticket for pick in picks if pick.is_asked} == asked & sizes.keys()
    room = most - sum(sizes.get(ticket, 0) for ticket in asked)
    taken = sum(sizes[pick.ticket] for pick in picks if not pick.is_asked)
    assert taken <= max(room, 0) or len(picks) == 1
    assert all(pick.why(sample) for pick in picks for sample in range(sizes[pick.ticket]))
    for pick in picks:
        groups = indexes[pick.step - 1]["groups"]
        assert groups["offset"][groups["ticket"].index(pick.ticket)] == pick.offset
    assert chosen(indexes, most, asked) == picks, "a second look chooses the same"


@settings(max_examples=15)
@given(indexes=runs())
def test_with_room_for_all_each_extreme_of_the_run_is_named(indexes: list[StepIndex]) -> None:
    picks = {pick.ticket: pick for pick in chosen(indexes, 10**6)}
    rows = [
        (index["groups"]["ticket"][place], *(index["completions"][name][row] for name in names))
        for index in indexes
        for row, place in enumerate(index["completions"]["group"])
        for names in [("sample", "num_tokens", "logprob_min", "score", "finish")]
    ]
    if not rows:
        return
    assert len(picks) == len({row[0] for row in rows}), "all groups are there"
    said = {(row[0], row[1]): picks[row[0]].why(row[1]) for row in rows}
    longest = max(row[2] for row in rows)
    assert any("longest" in said[row[0], row[1]] for row in rows if row[2] == longest)
    known = [row[3] for row in rows if row[3] is not None]
    assert not known or any(
        "lowest log-prob" in said[row[0], row[1]] for row in rows if row[3] == min(known)
    )
    for reason, place, value in (("no grade", 4, None), ("truncated", 5, "length")):
        kind = [row for row in rows if row[place] == value]
        assert not kind or any(reason in said[row[0], row[1]] for row in kind)


def test_a_single_wrong_one_among_right_ones_is_found_among_many() -> None:
    groups = [(0, ticket, "a", "trained", "mixed") for ticket in range(200)]
    rows = [
        (place, sample, *((-1.0, False) if lone else (1.0, True)), True, 9, "stop", 0, -0.1, -0.2)
        for place in range(200)
        for sample in range(8)
        for lone in [sample == 5 if place == 137 else sample < 4]
    ]
    [pick] = [pick for pick in chosen([index_of(groups, rows)], 80) if pick.ticket == 137]
    assert "wrong among right" in pick.why(5)
    assert pick.why(4).startswith("sibling of sample 5")


def test_a_spread_of_few_groups_lies_evenly_over_many_steps() -> None:
    rows = [(0, 0, 1.0, True, True, 9, "stop", 0, -0.1, -0.2)]
    indexes = [index_of([(0, step, "a", "trained", None)], rows) for step in range(1, 301)]
    steps = sorted(pick.step for pick in chosen(indexes, 50) if RANDOM in pick.why(0))
    assert len(steps) > 20
    assert max(after - before for before, after in zip([0, *steps], [*steps, 300])) < 30


def test_groups_with_policy_values_are_in_the_spread() -> None:
    groups = [(0, ticket, "a", "trained", None) for ticket in range(500)]
    rows = [
        (place, 0, 1.0, True, True, min(place, 9), "stop", 0, -0.1 * place, -0.2 * place)
        for place in range(500)
    ]
    picks = {pick.ticket: pick for pick in chosen([index_of(groups, rows)], 60)}
    assert RANDOM in picks[0].why(0) and RANDOM in picks[1].why(0)


# ---------------------------------------------------------------------------- pieces


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<|end of turn|>"],
    )
    tokenizer.train_from_iterator(["the answer is forty two; 答え é 🤯"] * 4, trainer)
    tokenizer.add_tokens(["ß→"])
    return tokenizer


BYTE_LEVEL = byte_level()
TINY_TOKENIZER = Tokenizer.from_file(str(TINY))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, TINY_TOKENIZER], ids=["byte level", "tiny"])
@given(text=st.text(max_size=60))
def test_pieces_of_a_text_add_up_to_it(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).ids
    pieces = TokenPieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)
    if tokenizer is BYTE_LEVEL:
        assert "".join(pieces) == text


@given(st.data())
def test_pieces_of_any_tokens_add_up_to_what_the_tokenizer_makes_of_them(
    data: st.DataObject,
) -> None:
    tokenizer = data.draw(st.sampled_from([BYTE_LEVEL, TINY_TOKENIZER]))
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=80))
    pieces = TokenPieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_stands_in_the_last_of_them() -> None:
    tokens = BYTE_LEVEL.encode("é").ids
    assert TokenPieces(BYTE_LEVEL).split(tokens)[-1] == "é"
    letters = [BYTE_LEVEL.token_to_id(letter) for letter in ("Ã", "©", "h")]
    assert TokenPieces(BYTE_LEVEL).split(letters) == ["", "é", "h"]
    assert TokenPieces(BYTE_LEVEL).split(letters[:1]) == ["\N{REPLACEMENT CHARACTER}"]


@pytest.mark.timeout(20)
def test_bytes_that_are_no_text_cost_no_more_than_others() -> None:
    broken = Tokenizer(models.WordLevel({"<0x80>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    broken.decoder = decoders.ByteFallback()
    pieces = TokenPieces(broken).split([0] * 20_000)
    assert len(pieces) == 20_000
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}
    assert TokenPieces(broken).split([1, 0]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_told_apart() -> None:
    assert {TINY_TOKENIZER.id_to_token(token) for token in TokenPieces(TINY_TOKENIZER).special} == {
        "<pad>",
        "<eos>",
        "<unk>",
        "<answer>",
    }


# ---------------------------------------------------------------------------- a run's folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeRun(num_steps=6, groups_per_step=3, samples_per_group=4).write(
        tmp_path_factory.mktemp("made") / "run"
    )


def copied(folder: Path, target: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())
    return target


def reported(folder: Path, **options: Any) -> Rollouts:
    kept = rollouts(read_run(folder), **options)
    assert kept is not None
    return kept


def steps_of(kept: Rollouts) -> set[int]:
    return {row["step"] for row in kept.rows}


def opened(kept: Rollouts, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blob of a row of the table, and its completion in it."""
    blob = json.loads(kept.blobs[row["ticket"]])
    return blob, next(one for one in blob["completions"] if one["sample"] == row["sample"])


def recorded_completion(folder: Path, row: Row) -> dict[str, Any]:
    path = folder / "samples" / f"step_{row['step']:06d}.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    group = next(group for group in lines if group["ticket"] == row["ticket"])
    completion: dict[str, Any] = group["completions"][row["sample"]]
    return completion


def test_what_the_page_gets_is_what_was_recorded(folder: Path) -> None:
    kept = reported(folder)
    assert len(kept.rows) == kept.total == 3 * 6 * 4 + 3 * 4
    assert kept.warnings == []
    for row in kept.rows:
        blob, one = opened(kept, row)
        truth = recorded_completion(folder, row)
        assert [blob["ids"][place] for place in one["tokens"]] == truth["tokens"]
        text = "".join(
            blob["pieces"][place] for place in one["tokens"] if place not in blob["special"]
        )
        assert text == truth["text"]
        assert one["logprob"] == [round(value, 3) for value in truth["logprobs"]]
        assert one["version"] == [v for v, num in truth["segments"] for _ in range(num)]
        assert row["num_tokens"] == len(truth["tokens"]) == len(one["version"])
        assert row["reward"] == truth["reward"]
        assert (one["gap"] is None) == (row["fate"] != "trained")


def test_policy_values_and_advantages_are_those_recorded(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    for path in (run / "samples" / "policy").iterdir():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line["logprobs"] = [round(value - 0.25, 4) for value in line["logprobs"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    kept = reported(run)
    row = next(row for row in kept.rows if row["fate"] == "trained")
    blob, one = opened(kept, row)
    path = run / "samples" / "policy" / f"step_{row['step']:06d}.jsonl"
    policy = sample_files.policy_of(path, row["ticket"])[one["sample"]]
    assert row["advantage"] == pytest.approx(policy["advantage"], abs=1e-4)
    assert row["gap_max"] == pytest.approx(policy["gap_max"], rel=1e-3)
    assert one["entropy"] == [round(value, 3) for value in policy["entropy"]]
    ours = recorded_completion(run, row)["logprobs"]
    gaps = [own - other for own, other in zip(ours, policy["logprobs"])]
    assert one["gap"] == pytest.approx(gaps, rel=5e-3)
    assert min(one["gap"]) > 0.2, "engine less policy"
    assert blob["largest_gap"] == max(gap for one in blob["completions"] for gap in one["gap"])


def test_small_gaps_keep_their_digits(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    path = run / "samples" / "policy" / "step_000001.jsonl"
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    ours = recorded_completion(run, line | {"step": 1})["logprobs"]
    line["logprobs"] = [own - 2e-6 for own in ours]
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    kept = reported(run, steps=(1, 1))
    key = line["ticket"], line["sample"]
    row = next(row for row in kept.rows if (row["ticket"], row["sample"]) == key)
    assert opened(kept, row)[1]["gap"] == pytest.approx([2e-6] * len(ours), rel=0.01)


def test_the_largest_gaps_are_looked_for_where_the_metrics_show_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_POLICY_BYTES", 1)
    metrics = read_run(folder).metrics
    gaps = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
    steps = {row["step"] for row in reported(folder).rows if "largest gap" in row["why"]}
    assert steps == {max(gaps, key=lambda step: gaps[step] or 0.0)}


def test_a_ticket_asked_for_is_there_and_one_that_is_not_is_told_of(folder: Path) -> None:
    kept = reported(folder, completions=4, tickets=(9, 4711))
    assert {row["why"] for row in kept.rows if row["ticket"] == 9} == {ASKED}
    assert "ticket 4711" in kept.note


def test_steps_outside_the_range_stay_out(folder: Path) -> None:
    assert steps_of(reported(folder, steps=(2, 3))) == {2, 3}
    assert steps_of(reported(folder, steps=(None, 2))) == {1, 2}


def test_steps_that_were_not_recorded_are_told_of(folder: Path) -> None:
    found = reported(folder, steps=(500, None))
    assert (found.rows, found.total, found.blobs) == ([], 0, {})
    assert "None was recorded of step 500 or later" in found.note
    assert "this run's completions are of steps 1 to 6" in found.note
    assert "None was recorded" not in reported(folder, steps=(6, None)).note


@pytest.mark.parametrize("steps", [(500, None), (6, 6)])
def test_a_ticket_is_there_whatever_the_steps(
    folder: Path, tmp_path: Path, steps: tuple[int, int | None]
) -> None:
    bare = copied(folder, tmp_path / "bare")
    for path in (bare / "samples" / "index").iterdir():
        path.unlink()
    for run in (folder, bare):
        found = reported(run, steps=steps, tickets=(0, 4711))
        outside = {(row["ticket"], row["step"]) for row in found.rows if row["step"] != 6}
        assert outside == {(0, 1)}
        assert len(found.rows) == found.total
        assert "ticket 4711" in found.note


def test_a_run_without_an_index_or_policy_values_shows_the_same_completions(
    folder: Path, tmp_path: Path
) -> None:
    old = copied(folder, tmp_path / "old")
    for name in ("index", "policy"):
        for path in (old / "samples" / name).iterdir():
            path.unlink()
    (old / "tokenizer.json").unlink()
    key = ("step", "ticket", "sample", "graded", "num_tokens", "logprob_min", "age")
    found = reported(old)
    new_rows, old_rows = (
        [[row[name] for name in key] for row in kept.rows] for kept in (reported(folder), found)
    )
    assert new_rows == old_rows
    _, one = opened(found, found.rows[0])
    assert one["gap"] is None
    assert "tokens" in one, "the tokenizer of model.path serves"


def test_the_index_made_of_samples_is_the_one_that_a_run_records(folder: Path) -> None:
    samples = folder / "samples"
    for step, path in sample_files.step_files(samples, ".jsonl").items():
        index = sample_files.read_index(samples / "index" / f"step_{step:06d}.json")
        assert index is not None and index == sample_files.index_of_samples(path, step)


def test_of_too_many_samples_without_an_index_some_steps_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = copied(folder, tmp_path / "old")
    for path in (old / "samples" / "index").iterdir():
        path.unlink()
    num_bytes = sum(path.stat().st_size for path in (old / "samples").glob("*.jsonl"))
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_READ_BYTES", num_bytes // 2 + 1)
    found = reported(old)
    assert steps_of(found) == {1, 3, 5}
    assert "3 of 6 steps were not read" in found.note


def test_without_a_tokenizer_texts_are_whole(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    config = (bare / "config.yaml").read_text(encoding="utf-8")
    (bare / "config.yaml").write_text(config.replace("tiny_qwen3", "gone"), encoding="utf-8")
    found = reported(bare)
    _, one = opened(found, found.rows[0])
    assert "tokens" not in one
    assert "No tokenizer was found" in found.note
    assert one["text"] == recorded_completion(bare, found.rows[0])["text"]


def test_damaged_files_are_told_of_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    hurt = copied(folder, tmp_path / "hurt")
    samples = hurt / "samples"
    (samples / "index" / "step_000002.json").write_text('{"step": 2, "groups"', encoding="utf-8")
    (samples / "step_000003.jsonl").write_text("{\n", encoding="utf-8")
    (samples / "policy" / "step_000004.jsonl").write_text("{\n", encoding="utf-8")
    replaced = samples / "step_000005.jsonl"  # after the index was read
    replaced.write_bytes(b"".join(reversed(replaced.read_bytes().splitlines(keepends=True))))
    found = reported(hurt)
    assert steps_of(found) == {1, 4, 6}
    assert any("step 2" in one for one in found.warnings)
    assert any("groups cannot be read" in one for one in found.warnings)


def test_a_run_without_samples_has_no_rollouts(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    for path in (bare / "samples").glob("*.jsonl"):
        path.unlink()
    assert rollouts(read_run(bare)) is None


def test_of_a_very_long_completion_the_middle_is_left_out_with_a_mark(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_data, "MAX_TOKENS", 20)
    found = reported(folder)
    blob, one = opened(found, found.rows[0])
    tokens = recorded_completion(folder, found.rows[0])["tokens"]
    assert one["cut"] == [10, len(tokens) - 20]
    assert [blob["ids"][place] for place in one["tokens"]] == tokens[:10] + tokens[-10:]
    assert len(one["logprob"]) == len(one["gap"]) == len(one["version"]) == 20


def test_a_page_that_is_full_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_BLOB_BYTES", 20_000)
    found = reported(folder)
    assert 0 < len(found.rows) < found.total
    sizes = [len(zlib.compress(blob, 1)) for blob in found.blobs.values()]
    assert sum(sizes[:-1]) < 20_000 <= sum(sizes)
    assert "no room for more" in found.note


@settings(max_examples=20)
@given(junk=st.binary(max_size=200))
def test_no_bytes_in_place_of_an_index_stop_a_report(
    junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("junk") / "step_000001.json"
    path.write_bytes(junk)
    assert sample_files.read_index(path) is None
    assert sample_files.policy_of(path, 1) == {}
