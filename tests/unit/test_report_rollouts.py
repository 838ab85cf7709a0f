"""Rollouts in a report: which ones are chosen, the texts of their tokens, and the viewer's data."""

from __future__ import annotations

import json
import random
import shutil
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dapo_megatron.report import viewer_data
from dapo_megatron.report.choosing import ASKED, RANDOM, Pick, choose
from dapo_megatron.report.rollouts import Rollouts, Row, rollouts
from dapo_megatron.report.run_data import read_run
from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.rollout.record import COMPLETIONS, read_groups, step_folder
from dapo_megatron.tracking.policy_files import policy_files, policy_path, read_policy, write_policy
from dapo_megatron.types import Completion
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

TINY = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"
OUTCOMES = ("trained", "all_correct", "abstained")


# ---------------------------------------------------------------------------- choosing


@st.composite
def runs(draw: st.DrawFn) -> pd.DataFrame:
    """Completions of a small run, of every kind."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 5))
    steps = [step for step in range(1, draw(st.integers(2, 13))) for _ in range(rng.randint(0, 6))]
    return table(
        {**of_group, "sample": sample, **values(rng, of_group["step"])}
        for ticket, step in enumerate(steps)
        for of_group in [
            {
                "step": step,
                "ticket": ticket,
                "source": rng.choice("ab"),
                "outcome": rng.choice(OUTCOMES),
            }
        ]
        for sample in range(size)
    )


def values(rng: random.Random, step: int) -> dict[str, Any]:
    correct = rng.choice((None, True, False))
    num_tokens = rng.randint(0, 50)
    logprob = -rng.random() if num_tokens else None
    return {
        "score": None if correct is None else float(correct),
        "correct": correct,
        "parsed": None if correct is None else rng.random() < 0.8,
        "num_tokens": num_tokens,
        "finish": rng.choice(("stop", "length")),
        "oldest_version": rng.choice((None, step - 1, step - 4)),
        "logprob_mean": logprob,
        "logprob_min": logprob,
    }


def table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return completions as `summaries` does. Missing values are those of a usual completion."""
    usual = {"sample": 0, "source": "a", "outcome": "trained", "score": 1.0, "correct": True,
             "parsed": True, "num_tokens": 9, "finish": "stop", "oldest_version": 0,
             "logprob_mean": -0.1, "logprob_min": -0.2}  # fmt: skip
    return pd.DataFrame([{**usual, **row} for row in rows], columns=["step", "ticket", *usual])


def chosen(run: pd.DataFrame, num: int, tickets: Collection[int] = ()) -> list[Pick]:
    return choose(run, num, tickets, inspected=dict.fromkeys(run["step"], 2))


@settings(max_examples=15)
@given(run=runs(), most=st.integers(0, 80), asked=st.sets(st.integers(0, 80), max_size=3))
def test_whole_groups_are_chosen_within_the_budget_plus_requested_ones(
    run: pd.DataFrame, most: int, asked: set[int]
) -> None:
    picks = chosen(run, most, asked)
    sizes = Counter(run["ticket"].tolist())
    tickets = [pick.ticket for pick in picks]
    assert len(set(tickets)) == len(tickets)
    assert {pick.ticket for pick in picks if pick.is_asked} == asked & sizes.keys()
    assert {(pick.step, pick.ticket) for pick in picks} <= {*zip(run["step"], run["ticket"])}
    room = most - sum(sizes[ticket] for ticket in asked)
    taken = sum(sizes[pick.ticket] for pick in picks if not pick.is_asked)
    assert taken <= max(room, 0) or len(picks) == 1
    assert all(pick.why(sample) for pick in picks for sample in range(sizes[pick.ticket]))
    assert chosen(run, most, asked) == picks, "the choice is deterministic"


@settings(max_examples=15)
@given(run=runs())
def test_extreme_completions_are_chosen_with_their_reason(run: pd.DataFrame) -> None:
    picks = {pick.ticket: pick for pick in chosen(run, 10**6)}
    assert picks.keys() == {*run["ticket"]}, "all groups are chosen"
    run["why"] = [picks[ticket].why(sample) for ticket, sample in zip(run["ticket"], run["sample"])]
    run["age"] = run["step"] - 1 - run["oldest_version"]
    for reason, kind in {
        "longest": run["num_tokens"] == run["num_tokens"].max(),
        "lowest log-prob": run["logprob_min"] == run["logprob_min"].min(),
        "oldest weights": (run["age"] > 0) & (run["age"] == run["age"].max()),
        "no grade": run["score"].isna(),
        "no answer found": run["parsed"] == False,  # noqa: E712 - None is neither
        "truncated": run["finish"] == "length",
    }.items():
        assert not kind.any() or run["why"][kind].str.contains(reason).any(), reason


def test_the_only_wrong_completion_of_a_correct_group_is_chosen_among_many_groups() -> None:
    run = table(
        {"step": 1, "ticket": ticket, "sample": sample, "correct": not is_wrong}
        for ticket in range(200)
        for sample in range(8)
        for is_wrong in [sample == 5 if ticket == 137 else sample < 4]
    )
    [pick] = [pick for pick in chosen(run, 80) if pick.ticket == 137]
    assert "wrong among right" in pick.why(5)
    assert pick.why(4).startswith("sibling of sample 5")


def test_random_groups_are_spread_evenly_over_the_steps() -> None:
    run = table({"step": step, "ticket": step} for step in range(1, 301))
    steps = sorted(pick.step for pick in chosen(run, 50) if RANDOM in pick.why(0))
    assert len(steps) > 20
    assert max(after - before for before, after in zip([0, *steps], [*steps, 300])) < 30


def test_groups_with_policy_values_are_among_the_random_ones() -> None:
    run = table(
        {
            "step": 1,
            "ticket": ticket,
            "num_tokens": min(ticket, 9),
            "logprob_mean": -0.1 * ticket,
            "logprob_min": -0.2 * ticket,
        }
        for ticket in range(500)
    )
    picks = {pick.ticket: pick for pick in chosen(run, 60)}
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


def completion_of(folder: Path, row: Row) -> tuple[Completion, float | None]:
    """Return the recorded completion of a row of the table, and its reward."""
    path = step_folder(folder / "samples", row["step"]) / COMPLETIONS
    [recorded] = read_groups(path, [row["ticket"]])
    pairs = zip(recorded.group.completions, recorded.rewards, strict=True)
    return next(pair for pair in pairs if pair[0].sample == row["sample"])


def test_the_viewer_data_equal_the_recorded_samples(folder: Path) -> None:
    result = reported(folder)
    assert len(result.rows) == result.total == 3 * 6 * 4 + 3 * 4
    assert result.warnings == []
    for row in result.rows:
        blob, shown = opened(result, row)
        truth, reward = completion_of(folder, row)
        assert [blob["ids"][place] for place in shown["tokens"]] == list(truth.tokens)
        text = "".join(
            blob["pieces"][place] for place in shown["tokens"] if place not in blob["special"]
        )
        assert text == truth.text
        assert shown["logprob"] == [round(value, 3) for value in truth.logprobs]
        versions = [part.version for part in truth.segments for _ in range(part.num_tokens)]
        assert shown["version"] == versions
        assert row["num_tokens"] == truth.num_tokens == len(shown["version"])
        assert row["reward"] == reward
        assert (shown["gap"] is None) == (row["fate"] != "trained")


def test_policy_values_and_advantages_equal_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    for path in (run / "policy").iterdir():
        lowered = [
            replace(row, logprobs=row.logprobs and array("f", np.array(row.logprobs) - 0.25))
            for row in read_policy(path)
        ]
        write_policy(path, lowered)
    result = reported(run)
    row = next(row for row in result.rows if row["fate"] == "trained")
    blob, shown = opened(result, row)
    rows = read_policy(policy_path(run, row["step"], 0), [row["ticket"]])
    policy = next(values for values in rows if values.sample == shown["sample"])
    assert row["advantage"] == pytest.approx(policy.advantage, abs=1e-4)
    assert row["gap_max"] == pytest.approx(policy.gap_max, rel=1e-3)
    assert policy.entropy is not None and policy.logprobs is not None
    assert shown["entropy"] == [round(value, 3) for value in policy.entropy.tolist()]
    engine_logprobs = completion_of(run, row)[0].logprobs
    gaps = [engine - other for engine, other in zip(engine_logprobs, policy.logprobs)]
    assert shown["gap"] == pytest.approx(gaps, rel=5e-3)
    assert min(shown["gap"]) > 0.2, "engine minus policy"
    assert blob["largest_gap"] == max(gap for item in blob["completions"] for gap in item["gap"])


def test_small_gaps_keep_their_precision(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    path = policy_path(run, 1, 0)
    policy, *_ = read_policy(path)
    key = (policy.ticket, policy.sample)
    completion, _ = completion_of(run, {"step": 1, "ticket": key[0], "sample": key[1]})
    engine_logprobs = np.array(completion.logprobs, np.float32)
    lowered = array("f", engine_logprobs - np.float32(2e-6))
    write_policy(path, [replace(policy, logprobs=lowered)])
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
    folder: Path, steps: tuple[int, int | None]
) -> None:
    result = reported(folder, steps=steps, tickets=(0, 4711))
    outside = {(row["ticket"], row["step"]) for row in result.rows if row["step"] != 6}
    assert outside == {(0, 1)}
    assert len(result.rows) == result.total
    assert "ticket 4711" in result.note


def test_a_run_without_policy_values_shows_the_same_completions(
    folder: Path, tmp_path: Path
) -> None:
    old = copied(folder, tmp_path / "old")
    shutil.rmtree(old / "policy")
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


def test_without_a_tokenizer_texts_are_shown_unsplit(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    config = (bare / "config.yaml").read_text(encoding="utf-8")
    (bare / "config.yaml").write_text(config.replace("tiny_qwen3", "gone"), encoding="utf-8")
    result = reported(bare)
    _, shown = opened(result, result.rows[0])
    assert "tokens" not in shown
    assert "No tokenizer was found" in result.note
    assert shown["text"] == completion_of(bare, result.rows[0])[0].text


def test_damaged_files_are_reported_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    damaged = copied(folder, tmp_path / "hurt")
    files = {step: step_folder(damaged / "samples", step) / COMPLETIONS for step in range(1, 7)}
    files[2].unlink()
    files[3].write_text("{\n", encoding="utf-8")
    policy_path(damaged, 4, 0).write_text("{\n", encoding="utf-8")
    data = files[5].read_bytes()  # of which the texts are damaged, which only `read_groups` reads
    at = data.index(b"What is ")
    files[5].write_bytes(data[:at] + b"X" + data[at + 1 :])
    result = reported(damaged)
    assert steps_of(result) == {1, 4, 6}
    steps, groups = result.warnings
    assert steps == "samples: 2 steps cannot be read (step 2, 3)"
    assert groups == "samples: 3 groups cannot be read (ticket 14, 15, 16)"


def test_a_run_without_samples_has_no_rollouts(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    shutil.rmtree(bare / "samples")
    assert rollouts(read_run(bare)) is None


def test_the_middle_of_a_very_long_completion_is_cut_and_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_data, "MAX_TOKENS", 20)
    result = reported(folder)
    blob, shown = opened(result, result.rows[0])
    tokens = list(completion_of(folder, result.rows[0])[0].tokens)
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
def test_any_bytes_in_the_files_of_a_step_are_reported(
    folder: Path, junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = copied(folder, tmp_path_factory.mktemp("junk"))
    for path in [*step_folder(run / "samples", 2).iterdir(), *policy_files(run)[3]]:
        path.write_bytes(junk)
    result = reported(run)
    assert result.warnings == ["samples: 1 steps cannot be read (step 2)"]
    assert steps_of(result) == {1, 3, 4, 5, 6}
