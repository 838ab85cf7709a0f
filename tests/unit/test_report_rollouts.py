"""Rollouts in the report: their selection, the data of the viewer, and the pieces of tokens."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dapo_megatron.report.reading import read_run
from dapo_megatron.report.rollouts import (
    ASKED,
    LONGEST,
    RANDOM,
    UNGRADED,
    UNLIKELY,
    Rollouts,
    Row,
    choose,
    rollouts,
)
from dapo_megatron.report.token_text import TokenPieces
from dapo_megatron.rollout.record import COMPLETIONS, RecordedGroup, read_groups, step_folder
from dapo_megatron.tracking.policy_files import policy_path, read_policy
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

TINY = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"


def table(num_groups: int, size: int, **at: dict[str, Any]) -> pd.DataFrame:
    """Usual completions of 10 groups a step. `at` changes some: t3={"num_tokens": 9}."""
    rows = [
        {"step": ticket // 10 + 1, "ticket": ticket, "sample": sample, "num_tokens": 9,
         "logprob_mean": -0.1, "parsed": True, "inspected": ticket % 10 == 0,
         **at.get(f"t{ticket}", {})}
        for ticket in range(num_groups) for sample in range(size)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@settings(max_examples=40)
@given(
    num_groups=st.integers(1, 60),
    size=st.integers(1, 5),
    num=st.integers(0, 120),
    tickets=st.sets(st.integers(0, 80), max_size=3),
)
def test_whole_groups_are_chosen_within_the_budget_plus_requested_ones(
    num_groups: int, size: int, num: int, tickets: set[int]
) -> None:
    picks = choose(table(num_groups, size), num, tickets)
    asked = {ticket for ticket in tickets if ticket < num_groups}
    assert asked <= {*picks} and all(picks[ticket][None] == ASKED for ticket in asked)
    assert {*picks} <= {*range(num_groups)}
    others = len(picks) - len(asked)
    assert others * size <= max(num - len(asked) * size, size if not asked and num else 0)
    if num >= num_groups * size:
        assert len(picks) == num_groups


def test_unusual_completions_are_chosen_with_their_reason() -> None:
    completions = table(
        500, 4, t7={"num_tokens": 90}, t300={"logprob_mean": -9.0}, t450={"parsed": None}
    )
    picks = choose(completions, 100)
    assert LONGEST in picks[7].values()
    assert UNLIKELY in picks[300].values()
    assert UNGRADED in picks[450].values()
    random = [ticket for ticket, reasons in picks.items() if RANDOM in reasons.values()]
    steps = Counter(ticket // 100 for ticket in random)
    assert len(steps) >= 4, "from the whole run"
    assert sum(ticket % 10 == 0 for ticket in random) >= len(random) // 3, "with policy values"


# ---------------------------------------------------------------------------- a run folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeRun(num_steps=6, groups_per_step=3, samples_per_group=4).write(
        tmp_path_factory.mktemp("made") / "run"
    )


def reported(folder: Path, num: int = 2000, **options: Any) -> Rollouts:
    result = rollouts(read_run(folder), num, **options)
    assert result is not None
    return result


def group_of(result: Rollouts, ticket: int) -> Any:
    return json.loads(gzip.decompress(result.groups[ticket]))


def recorded_of(folder: Path, row: Row) -> RecordedGroup:
    path = step_folder(folder / "samples", row["step"]) / COMPLETIONS
    [recorded] = read_groups(path, [row["ticket"]])
    return recorded


def test_table_and_viewer_show_the_recorded_values(folder: Path) -> None:
    result = reported(folder)
    assert len(result.rows) == 3 * 6 * 4 + 3 * 4
    assert result.warnings == []
    for row in result.rows:
        data, recorded = group_of(result, row["ticket"]), recorded_of(folder, row)
        truth, shown = recorded.group.completions[row["sample"]], data["completions"][row["sample"]]
        assert [data["ids"][place] for place in shown["tokens"]] == list(truth.tokens)
        places = [place for place in shown["tokens"] if place not in data["special"]]
        assert "".join(data["pieces"][place] for place in places) == truth.text
        assert shown["logprob"] == pytest.approx(truth.logprobs, abs=5e-4)
        versions = [part.version for part in truth.segments for _ in range(part.num_tokens)]
        assert shown["version"] == versions
        assert row["tokens"] == truth.num_tokens
        assert row["reward"] == recorded.rewards[row["sample"]]
        assert row["outcome"] == recorded.outcome.replace("_", " ")
        assert (shown["gap"] is None) == (row["outcome"] != "trained")
        if row["outcome"] == "trained":
            values = list(read_policy(policy_path(folder, row["step"], 0), [row["ticket"]]))
            policy = next(value for value in values if value.sample == row["sample"])
            assert row["advantage"] == pytest.approx(policy.advantage, rel=1e-3)
            assert row["gap"] == pytest.approx(policy.gap_max, rel=1e-3)
            assert policy.entropy is not None and policy.logprobs is not None
            assert shown["entropy"] == pytest.approx(list(policy.entropy), abs=5e-4)
            gaps = [a - b for a, b in zip(truth.logprobs, policy.logprobs, strict=True)]
            assert shown["gap"] == pytest.approx(gaps, rel=5e-3)


def test_tickets_and_steps_select_groups(folder: Path) -> None:
    assert {row["step"] for row in reported(folder, steps=(2, 3)).rows} == {2, 3}
    assert {row["step"] for row in reported(folder, steps=(5, None)).rows} == {5, 6}
    asked = reported(folder, 0, tickets=(4, 99), steps=(5, None))
    assert {row["ticket"] for row in asked.rows} == {4}
    assert "Not recorded: ticket 99" in asked.note
    assert reported(folder, steps=(7, 9)).rows == []


def test_missing_files_leave_out_only_what_they_held(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    shutil.rmtree(run / "policy")
    assert reported(run).rows[0]["gap"] is None
    (run / "tokenizer.json").unlink()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("model_configs/tiny_qwen3", "none"))
    result = reported(run)
    data, recorded = group_of(result, result.rows[0]["ticket"]), recorded_of(run, result.rows[0])
    assert [shown["text"] for shown in data["completions"]] == [
        completion.text for completion in recorded.group.completions
    ]
    assert "No tokenizer was found" in result.note
    shutil.rmtree(run / "samples")
    assert rollouts(read_run(run), 10) is None


def test_rollouts_beyond_the_size_limit_are_left_out_and_reported(folder: Path) -> None:
    result = reported(folder, max_bytes=4000)
    assert 0 < len(result.groups) < 21
    assert result.warnings == ["samples: the page has no room for more completions"]


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


@given(st.data())
def test_pieces_of_any_tokens_join_to_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([BYTE_LEVEL, TINY_TOKENIZER]))
    any_tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=80)
    of_text = st.text(max_size=60).map(lambda text: tokenizer.encode(text).ids)
    tokens = data.draw(any_tokens | of_text)
    pieces = TokenPieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_in_the_last_piece() -> None:
    letters = [BYTE_LEVEL.token_to_id(letter) for letter in ("Ã", "©", "h")]
    assert TokenPieces(BYTE_LEVEL).split(letters) == ["", "é", "h"]
    assert TokenPieces(BYTE_LEVEL).split(letters[:1]) == ["\N{REPLACEMENT CHARACTER}"]
    broken = Tokenizer(models.WordLevel({"<0x80>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    broken.decoder = decoders.ByteFallback()
    assert set("".join(TokenPieces(broken).split([0] * 999))) == {"\N{REPLACEMENT CHARACTER}"}
