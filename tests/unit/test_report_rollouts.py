"""Rollouts in a report: which ones are chosen, the texts of their tokens, and the viewer's data."""

from __future__ import annotations

import html
import json
import random
import shutil
import time
import zlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dapo_megatron.report import sample_files, viewer_data
from dapo_megatron.report.choosing import ASKED, RANDOM, Pick, choose, frames
from dapo_megatron.report.models import StepIndex
from dapo_megatron.report.page import Options, make_payload, render
from dapo_megatron.report.rollouts import Rollouts, Row, rollouts
from dapo_megatron.report.run_data import read_run
from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.rollout.completion_files import read_completions, write_completions
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import (
    policy_files,
    recorded_steps,
    step_completions,
    step_folder,
)
from dapo_megatron.rollout.sample_index import COMPLETION_COLUMNS, GROUP_COLUMNS
from dapo_megatron.tracking.policy_files import read_policy, write_policy
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

TINY = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"
OUTCOMES = ("trained", "all_correct", "abstained")


# ---------------------------------------------------------------------------- choosing


@st.composite
def runs(draw: st.DrawFn) -> list[StepIndex]:
    """Indexes of a small run with every kind of completion."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 5))
    ticket = 0
    made = []
    for _ in range(draw(st.integers(1, 12))):
        groups, completions = [], []
        for place in range(rng.randint(0, 6)):
            groups.append((ticket, rng.choice("ab"), rng.choice(OUTCOMES), None))
            ticket += 1
            completions += [completion(rng, place, sample) for sample in range(size)]
        made.append(index_of(groups, completions))
    return made


def completion(rng: random.Random, place: int, sample: int) -> tuple[Any, ...]:
    score = rng.choice((None, 1.0, -1.0))
    parsed = None if score is None else rng.random() < 0.8
    num_tokens = rng.randint(0, 50)
    logprob = -rng.random() if num_tokens else None
    return (
        *(
            place,
            sample,
            score,
            None if score is None else score > 0,
            parsed,
            num_tokens,
        ),
        *(rng.choice(("stop", "length")), rng.choice((None, 0, 3)), logprob, logprob),
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
def test_whole_groups_are_chosen_within_the_budget_plus_requested_ones(
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
    assert chosen(indexes, most, asked) == picks, "the choice is deterministic"


@settings(max_examples=15)
@given(indexes=runs())
def test_extreme_completions_are_chosen_with_their_reason(indexes: list[StepIndex]) -> None:
    picks = {pick.ticket: pick for pick in chosen(indexes, 10**6)}
    rows = [
        (index["groups"]["ticket"][place], *(index["completions"][name][row] for name in names))
        for index in indexes
        for row, place in enumerate(index["completions"]["group"])
        for names in [("sample", "num_tokens", "logprob_min", "score", "finish")]
    ]
    if not rows:
        return
    assert len(picks) == len({row[0] for row in rows}), "all groups are chosen"
    reasons = {(row[0], row[1]): picks[row[0]].why(row[1]) for row in rows}
    longest = max(row[2] for row in rows)
    assert any("longest" in reasons[row[0], row[1]] for row in rows if row[2] == longest)
    known = [row[3] for row in rows if row[3] is not None]
    assert not known or any(
        "lowest log-prob" in reasons[row[0], row[1]] for row in rows if row[3] == min(known)
    )
    for reason, place, value in (("no grade", 4, None), ("truncated", 5, "length")):
        kind = [row for row in rows if row[place] == value]
        assert not kind or any(reason in reasons[row[0], row[1]] for row in kind)


def test_the_only_wrong_completion_of_a_correct_group_is_chosen_among_many_groups() -> None:
    groups = [(ticket, "a", "trained", "mixed") for ticket in range(200)]
    rows = [
        (
            place,
            sample,
            *((-1.0, False) if lone else (1.0, True)),
            True,
            9,
            "stop",
            0,
            -0.1,
            -0.2,
        )
        for place in range(200)
        for sample in range(8)
        for lone in [sample == 5 if place == 137 else sample < 4]
    ]
    [pick] = [pick for pick in chosen([index_of(groups, rows)], 80) if pick.ticket == 137]
    assert "wrong among right" in pick.why(5)
    assert pick.why(4).startswith("sibling of sample 5")


def test_random_groups_are_spread_evenly_over_the_steps() -> None:
    rows = [(0, 0, 1.0, True, True, 9, "stop", 0, -0.1, -0.2)]
    indexes = [index_of([(step, "a", "trained", None)], rows) for step in range(1, 301)]
    steps = sorted(pick.step for pick in chosen(indexes, 50) if RANDOM in pick.why(0))
    assert len(steps) > 20
    assert max(after - before for before, after in zip([0, *steps], [*steps, 300])) < 30


def test_groups_with_policy_values_are_among_the_random_ones() -> None:
    groups = [(ticket, "a", "trained", None) for ticket in range(500)]
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
def test_pieces_of_an_encoded_text_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).ids
    pieces = TokenPieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)
    if tokenizer is BYTE_LEVEL:
        assert "".join(pieces) == text


@given(st.data())
def test_pieces_of_any_tokens_join_to_the_decoded_text(
    data: st.DataObject,
) -> None:
    tokenizer = data.draw(st.sampled_from([BYTE_LEVEL, TINY_TOKENIZER]))
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=80))
    pieces = TokenPieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_in_the_last_piece() -> None:
    tokens = BYTE_LEVEL.encode("é").ids
    assert TokenPieces(BYTE_LEVEL).split(tokens)[-1] == "é"
    letters = [BYTE_LEVEL.token_to_id(letter) for letter in ("Ã", "©", "h")]
    assert TokenPieces(BYTE_LEVEL).split(letters) == ["", "é", "h"]
    assert TokenPieces(BYTE_LEVEL).split(letters[:1]) == ["\N{REPLACEMENT CHARACTER}"]


def test_invalid_bytes_are_split_in_linear_time() -> None:
    broken = Tokenizer(models.WordLevel({"<0x80>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    broken.decoder = decoders.ByteFallback()
    started = time.process_time()
    pieces = TokenPieces(broken).split([0] * 20_000)
    assert time.process_time() - started < 20.0, "linear in the number of tokens"
    assert len(pieces) == 20_000
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}
    assert TokenPieces(broken).split([1, 0]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_listed() -> None:
    assert {TINY_TOKENIZER.id_to_token(token) for token in TokenPieces(TINY_TOKENIZER).special} == {
        "<pad>",
        "<eos>",
        "<unk>",
        "<answer>",
    }


# ---------------------------------------------------------------------------- a run folder


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
    result = rollouts(read_run(folder), **options)
    assert result is not None
    return result


def steps_of(result: Rollouts) -> set[int]:
    return {row["step"] for row in result.rows}


def opened(result: Rollouts, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the blob of a row of the table, and the row's completion in it."""
    blob = json.loads(result.blobs[row["ticket"]])
    return blob, next(item for item in blob["completions"] if item["sample"] == row["sample"])


def recorded_row(folder: Path, row: Row) -> CompletionRow:
    step = step_folder(folder / "samples", row["step"])
    rows = step_completions(step, [row["ticket"]])
    return next(each for each in rows if each.completion.sample == row["sample"])


def step_files(folder: Path, name: str) -> list[Path]:
    """Return the files of this name of all steps."""
    return sorted((folder / "samples").glob(f"step_*/{name}"))


def test_the_viewer_data_equal_the_recorded_samples(folder: Path) -> None:
    result = reported(folder)
    assert len(result.rows) == result.total == 3 * 6 * 4 + 3 * 4
    assert result.warnings == []
    for row in result.rows:
        blob, shown = opened(result, row)
        recorded = recorded_row(folder, row)
        truth = recorded.completion
        assert [blob["ids"][place] for place in shown["tokens"]] == list(truth.tokens)
        text = "".join(
            blob["pieces"][place] for place in shown["tokens"] if place not in blob["special"]
        )
        assert text == truth.text
        assert shown["logprob"] == [round(value, 3) for value in truth.logprobs]
        versions = [part.version for part in truth.segments for _ in range(part.num_tokens)]
        assert shown["version"] == versions
        assert row["num_tokens"] == truth.num_tokens == len(shown["version"])
        assert row["reward"] == recorded.reward
        assert (shown["gap"] is None) == (row["fate"] != "trained")


def test_policy_values_and_advantages_equal_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    for path in step_files(run, "policy_*.parquet"):
        rows = [
            replace(row, logprobs=None if row.logprobs is None else row.logprobs - 0.25)
            for row in read_policy(path)
        ]
        write_policy(path, rows)
    result = reported(run)
    row = next(row for row in result.rows if row["fate"] == "trained")
    blob, shown = opened(result, row)
    step = step_folder(run / "samples", row["step"])
    policy = sample_files.policy_of(step, row["ticket"])[shown["sample"]]
    assert row["advantage"] == pytest.approx(policy.advantage, abs=1e-4)
    assert row["gap_max"] == pytest.approx(policy.gap_max, rel=1e-3)
    assert policy.entropy is not None and policy.logprobs is not None
    assert shown["entropy"] == [round(value, 3) for value in policy.entropy.tolist()]
    engine_logprobs = recorded_row(run, row).completion.logprobs
    gaps = [engine - other for engine, other in zip(engine_logprobs, policy.logprobs.tolist())]
    assert shown["gap"] == pytest.approx(gaps, rel=5e-3)
    assert min(shown["gap"]) > 0.2, "engine minus policy"
    assert blob["largest_gap"] == max(gap for item in blob["completions"] for gap in item["gap"])


def test_small_gaps_keep_their_precision(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    step = step_folder(run / "samples", 1)
    [path] = policy_files(step)
    policy, *_ = read_policy(path)
    key = (policy.ticket, policy.sample)
    rows = step_completions(step, [policy.ticket])
    recorded = next(row for row in rows if row.completion.sample == policy.sample)
    engine_logprobs = np.array(recorded.completion.logprobs, np.float32)
    write_policy(path, [replace(policy, logprobs=engine_logprobs - np.float32(2e-6))])
    result = reported(run, steps=(1, 1))
    row = next(row for row in result.rows if (row["ticket"], row["sample"]) == key)
    assert opened(result, row)[1]["gap"] == pytest.approx([2e-6] * len(engine_logprobs), rel=0.1)


def test_largest_gaps_are_read_from_the_steps_with_the_largest_metric(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_POLICY_FILES", 1)
    metrics = read_run(folder).metrics
    gaps = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
    steps = {row["step"] for row in reported(folder).rows if "largest gap" in row["why"]}
    assert steps == {max(gaps, key=lambda step: gaps[step] or 0.0)}


def test_a_requested_ticket_is_shown_and_a_missing_one_is_reported(folder: Path) -> None:
    result = reported(folder, completions=4, tickets=(9, 4711))
    assert {row["why"] for row in result.rows if row["ticket"] == 9} == {ASKED}
    assert "ticket 4711" in result.note


def test_steps_outside_the_range_are_left_out(folder: Path) -> None:
    assert steps_of(reported(folder, steps=(2, 3))) == {2, 3}
    assert steps_of(reported(folder, steps=(None, 2))) == {1, 2}


def test_a_range_without_recorded_steps_is_reported(folder: Path) -> None:
    result = reported(folder, steps=(500, None))
    assert (result.rows, result.total, result.blobs) == ([], 0, {})
    assert "None was recorded of step 500 or later" in result.note
    assert "this run's completions are of steps 1 to 6" in result.note
    assert "None was recorded" not in reported(folder, steps=(6, None)).note


@pytest.mark.parametrize("steps", [(500, None), (6, 6)])
def test_a_requested_ticket_is_shown_for_any_range_of_steps(
    folder: Path, tmp_path: Path, steps: tuple[int, int | None]
) -> None:
    bare = copied(folder, tmp_path / "bare")
    for path in step_files(bare, "index.json"):
        path.unlink()
    for run in (folder, bare):
        result = reported(run, steps=steps, tickets=(0, 4711))
        outside = {(row["ticket"], row["step"]) for row in result.rows if row["step"] != 6}
        assert outside == {(0, 1)}
        assert len(result.rows) == result.total
        assert "ticket 4711" in result.note


def test_a_run_without_an_index_or_policy_values_shows_the_same_completions(
    folder: Path, tmp_path: Path
) -> None:
    old = copied(folder, tmp_path / "old")
    for name in ("index.json", "policy_*.parquet"):
        for path in step_files(old, name):
            path.unlink()
    (old / "tokenizer.json").unlink()
    key = ("step", "ticket", "sample", "graded", "num_tokens", "logprob_min", "age")
    result = reported(old)
    new_rows, old_rows = (
        [[row[name] for name in key] for row in shown_run.rows]
        for shown_run in (reported(folder), result)
    )
    assert new_rows == old_rows
    _, shown = opened(result, result.rows[0])
    assert shown["gap"] is None
    assert "tokens" in shown, "the tokenizer of model.path is used"


def test_an_index_made_from_the_completions_equals_the_recorded_one(
    folder: Path, tmp_path: Path
) -> None:
    bare = copied(folder, tmp_path / "bare")
    for path in step_files(bare, "index.json"):
        path.unlink()
    for step, recorded in recorded_steps(folder / "samples").items():
        index = sample_files.read_index(recorded, step)
        made = sample_files.read_index(step_folder(bare / "samples", step), step)
        assert index is not None and index == made


def test_a_group_in_several_files_is_shown_whole(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    for path in step_files(run, "completions_00000.parquet"):
        rows = list(read_completions(path))
        write_completions(path, [row for row in rows if row.completion.sample % 2])
        others = [row for row in rows if row.completion.sample % 2 == 0]
        write_completions(path.with_name("completions_00007.parquet"), others)
        path.with_name("index.json").unlink()
    result, expected = reported(run), reported(folder)
    assert result.rows == expected.rows
    assert result.blobs == expected.blobs


def test_without_a_tokenizer_texts_are_shown_unsplit(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    config = (bare / "config.yaml").read_text(encoding="utf-8")
    (bare / "config.yaml").write_text(config.replace("tiny_qwen3", "gone"), encoding="utf-8")
    result = reported(bare)
    _, shown = opened(result, result.rows[0])
    assert "tokens" not in shown
    assert "No tokenizer was found" in result.note
    assert shown["text"] == recorded_row(bare, result.rows[0]).completion.text


def test_damaged_files_are_reported_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    damaged = copied(folder, tmp_path / "hurt")
    files = {
        step: {path.name.partition("_")[0]: path for path in folder.iterdir()}
        for step, folder in recorded_steps(damaged / "samples").items()
    }
    files[2]["index.json"].write_text('{"step": 2, "groups"', encoding="utf-8")
    files[3]["completions"].write_text("{\n", encoding="utf-8")
    files[4]["policy"].write_text("{\n", encoding="utf-8")
    files[5]["completions"].write_bytes(files[6]["completions"].read_bytes())
    result = reported(damaged)
    assert steps_of(result) == {1, 4, 6}
    assert any("step 2" in warning for warning in result.warnings)
    assert any("groups cannot be read" in warning for warning in result.warnings)


def test_a_run_without_samples_has_no_rollouts(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    shutil.rmtree(bare / "samples")
    assert rollouts(read_run(bare)) is None


def test_a_run_with_samples_of_earlier_versions_is_shown_with_a_message(
    folder: Path, tmp_path: Path
) -> None:
    old = copied(folder, tmp_path / "old")
    shutil.rmtree(old / "samples")
    (old / "samples").mkdir()
    (old / "samples" / "step_000001.jsonl").write_text("{}\n", encoding="utf-8")
    payload = make_payload([read_run(old)], Options())
    [warning] = payload.views[0].warnings
    assert warning.startswith(f"{old}/samples/step_000001.jsonl: rollouts as JSON lines, which")
    assert warning in html.unescape(render(payload))


def test_the_middle_of_a_very_long_completion_is_cut_and_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_data, "MAX_TOKENS", 20)
    result = reported(folder)
    blob, shown = opened(result, result.rows[0])
    tokens = list(recorded_row(folder, result.rows[0]).completion.tokens)
    assert shown["cut"] == [10, len(tokens) - 20]
    assert [blob["ids"][place] for place in shown["tokens"]] == tokens[:10] + tokens[-10:]
    assert len(shown["logprob"]) == len(shown["gap"]) == len(shown["version"]) == 20


def test_rollouts_beyond_the_size_limit_are_left_out_and_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_BLOB_BYTES", 20_000)
    result = reported(folder)
    assert 0 < len(result.rows) < result.total
    sizes = [len(zlib.compress(blob, 1)) for blob in result.blobs.values()]
    assert sum(sizes[:-1]) < 20_000 <= sum(sizes)
    assert "no room for more" in result.note


@settings(max_examples=20)
@given(junk=st.binary(max_size=200))
def test_any_bytes_as_an_index_are_ignored(
    junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    for name in ("index.json", "completions_00000.parquet", "policy_00000.parquet"):
        (folder / name).write_bytes(junk)
    assert sample_files.read_index(folder, 1) is None
    assert sample_files.policy_of(folder, 1) == {}
    assert sample_files.read_group(folder, 1) is None
    (folder / "index.json").unlink()
    assert sample_files.read_index(folder, 1) is None
