"""Which rollouts a report shows, the text of their tokens, and how their grades are explained."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dapo_megatron.report import recorded, viewer_data
from dapo_megatron.report.choosing import ASKED, RANDOM, Chooser, Wanted, spread
from dapo_megatron.report.folder import RunData, read_run
from dapo_megatron.report.grades import MINUS, explain, grader_of
from dapo_megatron.report.recorded import StepIndex
from dapo_megatron.report.rollouts import Rollouts, rollouts
from dapo_megatron.report.token_text import Pieces
from dapo_megatron.rewards import dapo_math
from dapo_megatron.rollout.serialization import COMPLETION_COLUMNS, GROUP_COLUMNS
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

TINY = REPOSITORY / "model_configs" / "tiny_qwen3" / "tokenizer.json"
FATES = ("trained", "all_correct", "abstained")


# ---------------------------------------------------------------------------- choosing


@st.composite
def runs(draw: st.DrawFn) -> list[StepIndex]:
    """The indexes of a small run, with every kind of completion."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 5))
    ticket = 0
    made = []
    for step in range(1, draw(st.integers(1, 12)) + 1):
        groups, completions = [], []
        for place in range(chance.randint(0, 6)):
            groups.append((100 * place, ticket, chance.choice("ab"), chance.choice(FATES), None))
            ticket += 1
            completions += [completion(chance, place, sample) for sample in range(size)]
        made.append(
            StepIndex(
                step, columns(GROUP_COLUMNS, groups), columns(COMPLETION_COLUMNS, completions)
            )
        )
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


def columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def chooser_of(indexes: list[StepIndex], wanted: Wanted) -> Chooser:
    chooser = Chooser(wanted, num_steps=len(indexes))
    for index in indexes:
        chooser.see(index, has_policy=True)
    return chooser


@given(indexes=runs(), most=st.integers(0, 80), asked=st.sets(st.integers(0, 80), max_size=3))
def test_whole_groups_within_the_budget_and_those_asked_for(
    indexes: list[StepIndex], most: int, asked: set[int]
) -> None:
    wanted = Wanted(completions=most, tokens=10**6, tickets=frozenset(asked), inspected=2)
    chooser = chooser_of(indexes, wanted)
    picks = chooser.choose()
    sizes = {
        index.groups["ticket"][place]: index.completions["group"].count(place)
        for index in indexes
        for place in range(len(index.groups["ticket"]))
    }
    tickets = [pick.group.ticket for pick in picks]
    assert len(set(tickets)) == len(tickets)
    assert all(pick.group.num_completions == sizes[pick.group.ticket] for pick in picks)
    assert set(tickets) >= asked & sizes.keys()
    assert set(chooser.missing) == asked - sizes.keys()
    others = [pick for pick in picks if pick.group.ticket not in asked]
    room = most - sum(sizes.get(ticket, 0) for ticket in asked)
    taken = sum(pick.group.num_completions for pick in others)
    assert taken <= max(room, 0) or len(picks) == 1
    assert all(pick.why(sample) for pick in picks for sample in range(pick.group.num_completions))
    assert chooser_of(indexes, wanted).choose() == picks, "a second look chooses the same"


@given(indexes=runs())
def test_with_room_for_all_each_extreme_of_the_run_is_named(indexes: list[StepIndex]) -> None:
    picks = chooser_of(indexes, Wanted(completions=10**6, tokens=10**9)).choose()
    said = {
        (pick.group.ticket, sample): pick.why(sample)
        for pick in picks
        for sample in range(pick.group.num_completions)
    }
    rows = [
        (index.groups["ticket"][place], *(index.completions[name][row] for name in names))
        for index in indexes
        for row, place in enumerate(index.completions["group"])
        for names in [("sample", "num_tokens", "logprob_min", "score", "finish")]
    ]
    if not rows:
        return
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
    index = StepIndex(1, columns(GROUP_COLUMNS, groups), columns(COMPLETION_COLUMNS, rows))
    picks = chooser_of([index], Wanted(completions=80, tokens=10**6)).choose()
    (found,) = [pick for pick in picks if pick.group.ticket == 137]
    assert "wrong among right" in found.why(5)
    assert found.why(4).startswith("beside sample 5")


def test_a_spread_of_few_groups_lies_evenly_over_many_steps() -> None:
    rows = [(0, 0, 1.0, True, True, 9, "stop", 0, -0.1, -0.2)]
    indexes = [
        StepIndex(
            step,
            columns(GROUP_COLUMNS, [(0, step, "a", "trained", None)]),
            columns(COMPLETION_COLUMNS, rows),
        )
        for step in range(1, 1001)
    ]
    picks = chooser_of(indexes, Wanted(completions=50, tokens=10**6)).choose()
    steps = sorted(pick.group.step for pick in picks if RANDOM in pick.why(0))
    assert len(steps) > 20
    assert max(after - before for before, after in zip([0, *steps], [*steps, 1000])) < 100


@given(num=st.integers(0, 300), first=st.integers(1, 300))
def test_any_beginning_of_a_spread_is_even(num: int, first: int) -> None:
    order = spread(num)
    assert sorted(order) == list(range(num))
    chosen = sorted(order[:first])
    if chosen:
        gaps = [after - before for before, after in zip([-1, *chosen], [*chosen, num])]
        assert max(gaps) <= 4 * num / len(chosen) + 1


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
    pieces = Pieces(tokenizer).split(tokens)
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
    pieces = Pieces(tokenizer).split(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_stands_in_the_last_of_them() -> None:
    tokens = BYTE_LEVEL.encode("é").ids
    assert Pieces(BYTE_LEVEL).split(tokens)[-1] == "é"
    letters = [BYTE_LEVEL.token_to_id(letter) for letter in ("Ã", "©", "h")]
    assert Pieces(BYTE_LEVEL).split(letters) == ["", "é", "h"]
    assert Pieces(BYTE_LEVEL).split(letters[:1]) == ["\N{REPLACEMENT CHARACTER}"]


@pytest.mark.timeout(20)
def test_bytes_that_are_no_text_cost_no_more_than_others() -> None:
    broken = Tokenizer(models.WordLevel({"<0x80>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    broken.decoder = decoders.ByteFallback()
    pieces = Pieces(broken).split([0] * 20_000)
    assert len(pieces) == 20_000
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}
    assert Pieces(broken).split([1, 0]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_told_apart() -> None:
    assert {TINY_TOKENIZER.id_to_token(token) for token in Pieces(TINY_TOKENIZER).special} == {
        "<pad>",
        "<eos>",
        "<unk>",
        "<answer>",
    }


# ---------------------------------------------------------------------------- grades


def graded(score: float | None, num_tokens: int = 5) -> dict[str, Any]:
    return {
        "sample": 0, "text": "", "score": score, "correct": None if score is None else score > 0,
        "pred": "7", "parsed": True, "finish": "stop", "tokens": [1] * num_tokens,
    }  # fmt: skip


def test_an_answer_that_dapo_math_did_not_look_at_is_pointed_out() -> None:
    text = "Answer: 7" + " and on and on" * 40
    one = graded(-1.0) | {"text": text, "pred": dapo_math.INVALID, "parsed": False}
    group = {"completions": [one], "truth": "7", "fate": "all_wrong"}
    facts = dict(explain("dapo_math", group, 0, None))
    assert f"{len(text)} characters before the end" in facts["Answer read"]
    assert facts["Verdict"] == "Wrong."
    assert "all its completions are wrong" in facts["Group"]


def test_reward_and_advantage_are_explained_as_recorded() -> None:
    shaped = graded(1.0, 16) | {"reward": 0.5}
    group = {"completions": [shaped, graded(-1.0)], "truth": "7", "fate": "trained"}
    facts = dict(explain("mine:grade", group, 0, 0.7071))
    assert facts["Grader"].startswith("mine:grade, a function of this run's owner")
    assert facts["Reward"].replace(MINUS, "-").startswith("1 - 0.5 = 0.5: the score, less")
    assert "16 tokens" in facts["Reward"]
    assert facts["Advantage"].startswith("0.7071: its reward less the mean of its group")
    older = dict(explain("mine:grade", group, 1, None))
    assert "Reward" not in older
    assert older["Advantage"].startswith("None recorded.")


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
    found = rollouts(read_run(folder), **options)
    assert found is not None
    return found


def opened(found: Rollouts, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blob of a row of the table, and its completion in it."""
    place = found.table["rows"]["group"][row]
    blob = json.loads(found.blobs[found.table["blobs"][place]])
    sample = found.table["rows"]["sample"][row]
    group = blob["groups"][str(place)]
    return blob, next(one for one in group["completions"] if one["sample"] == sample)


def recorded_completion(folder: Path, step: int, ticket: int, sample: int) -> dict[str, Any]:
    lines = (folder / "samples" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    group = next(group for group in map(json.loads, lines) if group["ticket"] == ticket)
    found: dict[str, Any] = group["completions"][sample]
    return found


def test_what_the_page_gets_is_what_was_recorded(folder: Path) -> None:
    found = reported(folder)
    rows = found.table["rows"]
    assert found.table["kept"] == found.table["total"] == len(rows["why"]) == 3 * 6 * 4 + 3 * 4
    assert found.warnings == []
    for row in range(found.table["kept"]):
        blob, one = opened(found, row)
        truth = recorded_completion(folder, rows["step"][row], rows["ticket"][row], one["sample"])
        assert [blob["ids"][place] for place in one["tokens"]] == truth["tokens"]
        text = "".join(
            blob["pieces"][place] for place in one["tokens"] if place not in blob["special"]
        )
        assert text == truth["text"]
        assert one["logprob"] == [round(1000 * value) for value in truth["logprobs"]]
        assert rows["num_tokens"][row] == len(truth["tokens"]) == one["num_tokens"]
        assert rows["reward"][row] == one["reward"] == truth["reward"]
        assert (one["gap"] is None) == (rows["fate"][row] != "trained")


def test_policy_values_and_advantages_are_those_recorded(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, tmp_path / "run")
    for path in (run / "samples" / "policy").iterdir():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line["logprobs"] = [round(value - 0.25, 4) for value in line["logprobs"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = reported(run)
    rows = found.table["rows"]
    row = next(row for row, fate in enumerate(rows["fate"]) if fate == "trained")
    _, one = opened(found, row)
    path = run / "samples" / "policy" / f"step_{rows['step'][row]:06d}.jsonl"
    policy = recorded.policy_of(path, rows["ticket"][row])[one["sample"]]
    assert (
        one["advantage"] == rows["advantage"][row] == pytest.approx(policy["advantage"], abs=1e-4)
    )
    assert rows["gap_max"][row] == pytest.approx(policy["gap_max"], rel=1e-3)
    assert one["entropy"] == [round(1000 * value) for value in policy["entropy"]]
    ours = recorded_completion(run, rows["step"][row], rows["ticket"][row], one["sample"])
    gaps = [own - other for own, other in zip(ours["logprobs"], policy["logprobs"])]
    assert one["gap"] == [round(10_000 * gap) for gap in gaps]
    assert min(one["gap"]) > 2000, "engine less policy"


@pytest.mark.parametrize(("size", "decimals"), [(2e-6, 6), (3e-3, 6), (0.02, 5), (0.5, 4), (4, 4)])
def test_gaps_keep_the_digits_of_the_largest_of_their_group(
    folder: Path, tmp_path: Path, size: float, decimals: int
) -> None:
    run = copied(folder, tmp_path / "run")
    path = run / "samples" / "policy" / "step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        ours = recorded_completion(run, 1, line["ticket"], line["sample"])["logprobs"]
        # In a group with one large gap the others are as small as they were.
        gaps = [size if line["sample"] == at == 0 else 1e-6 for at in range(len(ours))]
        line["logprobs"] = [own - gap for own, gap in zip(ours, gaps)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = reported(run, steps=(1, 1))
    for row, sample in enumerate(found.table["rows"]["sample"]):
        blob, one = opened(found, row)
        group = blob["groups"][str(found.table["rows"]["group"][row])]
        assert group["gap_decimals"] == decimals
        ends = [round(gap * 10**decimals) for gap in (size if sample == 0 else 1e-6, 1e-6)]
        assert [one["gap"][0], one["gap"][-1]] == ends


def test_the_most_frequent_pieces_have_the_shortest_numbers(folder: Path) -> None:
    for data in reported(folder).blobs.values():
        blob = json.loads(data)
        counts = [0] * len(blob["ids"])
        for group in blob["groups"].values():
            for one in group["completions"]:
                for place in one["tokens"]:
                    counts[place] += 1
        assert counts == sorted(counts, reverse=True)


def test_the_largest_gaps_are_looked_for_where_the_metrics_show_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_POLICY_BYTES", 1)
    metrics = read_run(folder).metrics
    gaps = dict(zip(metrics.steps, metrics.column("mismatch/gap_max")))
    rows = reported(folder).table["rows"]
    found = {step for step, why in zip(rows["step"], rows["why"]) if "largest gap" in why}
    assert found == {max(gaps, key=lambda step: gaps[step] or 0.0)}


def test_a_ticket_asked_for_is_there_and_one_that_is_not_is_told_of(folder: Path) -> None:
    found = reported(folder, completions=4, tickets=(9, 4711))
    assert 9 in found.table["rows"]["ticket"]
    whys = {
        why for t, why in zip(found.table["rows"]["ticket"], found.table["rows"]["why"]) if t == 9
    }
    assert whys == {ASKED}
    assert "ticket 4711" in found.table["note"]


def test_steps_outside_the_range_stay_out(folder: Path) -> None:
    assert set(reported(folder, steps=(2, 3)).table["rows"]["step"]) == {2, 3}
    assert set(reported(folder, steps=(None, 2)).table["rows"]["step"]) == {1, 2}


def test_steps_that_were_not_recorded_are_told_of(folder: Path) -> None:
    found = reported(folder, steps=(500, None))
    assert (found.table["kept"], found.table["total"], found.blobs) == (0, 0, {})
    assert "None was recorded of step 500 or later" in found.table["note"]
    assert "this run's completions are of steps 1 to 6" in found.table["note"]
    assert "None was recorded" not in reported(folder, steps=(6, None)).table["note"]


@pytest.mark.parametrize("steps", [(500, None), (6, 6)])
def test_a_ticket_is_there_whatever_the_steps(
    folder: Path, tmp_path: Path, steps: tuple[int, int | None]
) -> None:
    bare = copied(folder, tmp_path / "bare")
    for path in (bare / "samples" / "index").iterdir():
        path.unlink()
    for run in (folder, bare):
        found = reported(run, steps=steps, tickets=(0, 4711))
        rows = found.table["rows"]
        outside = {(t, s) for t, s in zip(rows["ticket"], rows["step"]) if s != 6}
        assert outside == {(0, 1)}
        assert found.table["kept"] == found.table["total"]
        assert "ticket 4711" in found.table["note"]


def test_a_run_without_an_index_or_policy_values_shows_the_same_completions(
    folder: Path, tmp_path: Path
) -> None:
    old = copied(folder, tmp_path / "old")
    for name in ("index", "policy"):
        for path in (old / "samples" / name).iterdir():
            path.unlink()
    (old / "tokenizer.json").unlink()
    new_table, old_table = reported(folder).table, reported(old).table
    key = ("step", "ticket", "sample", "score", "num_tokens", "logprob_min", "age")
    assert sorted(zip(*(old_table["rows"][name] for name in key))) == sorted(
        zip(*(new_table["rows"][name] for name in key))
    )
    _, one = opened(reported(old), 0)
    assert one["gap"] is None
    assert "tokens" in one, "the tokenizer of model.path serves"


def test_the_index_made_of_samples_is_the_one_that_a_run_records(folder: Path) -> None:
    samples = folder / "samples"
    for step, path in recorded.step_files(samples, ".jsonl").items():
        index = recorded.read_index(samples / "index" / f"step_{step:06d}.json", step)
        assert index == recorded.index_of_samples(path, step)


def test_of_too_many_samples_without_an_index_some_steps_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = copied(folder, tmp_path / "old")
    for path in (old / "samples" / "index").iterdir():
        path.unlink()
    num_bytes = sum(path.stat().st_size for path in (old / "samples").glob("*.jsonl"))
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_READ_BYTES", num_bytes // 2 + 1)
    table = reported(old).table
    assert set(table["rows"]["step"]) == {1, 3, 5}
    assert "3 of 6 steps were not read" in table["note"]


def test_without_a_tokenizer_texts_are_whole(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    config = (bare / "config.yaml").read_text(encoding="utf-8")
    (bare / "config.yaml").write_text(config.replace("tiny_qwen3", "gone"), encoding="utf-8")
    found = reported(bare)
    _, one = opened(found, 0)
    assert "tokens" not in one
    assert "No tokenizer was found" in found.table["note"]
    rows = found.table["rows"]
    truth = recorded_completion(bare, rows["step"][0], rows["ticket"][0], one["sample"])
    assert one["text"] == truth["text"]


def test_damaged_files_are_told_of_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    hurt = copied(folder, tmp_path / "hurt")
    samples = hurt / "samples"
    (samples / "index" / "step_000002.json").write_text('{"step": 2, "groups"', encoding="utf-8")
    (samples / "step_000003.jsonl").write_text("{\n", encoding="utf-8")
    (samples / "policy" / "step_000004.jsonl").write_text("{\n", encoding="utf-8")
    replaced = samples / "step_000005.jsonl"  # after the index was read
    replaced.write_bytes(b"".join(reversed(replaced.read_bytes().splitlines(keepends=True))))
    found = reported(hurt)
    assert set(found.table["rows"]["step"]) == {1, 4, 6}
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
    blob, one = opened(found, 0)
    rows = found.table["rows"]
    truth = recorded_completion(folder, rows["step"][0], rows["ticket"][0], one["sample"])
    tokens = truth["tokens"]
    assert one["cut"] == [10, len(tokens) - 20]
    assert [blob["ids"][place] for place in one["tokens"]] == tokens[:10] + tokens[-10:]
    assert len(one["logprob"]) == len(one["gap"]) == 20


def test_a_page_that_is_full_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.MAX_BLOB_BYTES", 20_000)
    monkeypatch.setattr("dapo_megatron.report.rollouts.BYTES_PER_TOKEN", 1)
    monkeypatch.setattr("dapo_megatron.report.rollouts._GROUPS_PER_BLOB", 1)
    found = reported(folder)
    assert 0 < found.table["kept"] < found.table["total"]
    assert sum(map(len, found.blobs.values())) < 200_000
    assert "no room for more" in found.table["note"]


def test_a_choice_without_room_for_more_tokens_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_megatron.report.rollouts.BYTES_PER_TOKEN", 10_000)
    table = reported(folder).table
    assert 0 < table["kept"] < table["total"]
    assert "no room for more" in table["note"]
    assert sum(table["rows"]["num_tokens"]) <= 1800


def run_with(train: list[dict[str, Any]], folder: Path) -> RunData:
    run = read_run(folder)
    run.config["data"]["train"] = train
    return run


def test_the_grader_is_that_of_the_source_or_of_its_row(folder: Path) -> None:
    run = run_with(
        [
            {"name": "one", "grader": "code"},
            {"name": "two", "grader": {"aime": "dapo_math", "gsm": "math_verify"}},
        ],
        folder,
    )
    assert grader_of(run, {"source": "one", "extra": {}}) == "code"
    assert grader_of(run, {"source": "two", "extra": {"data_source": "gsm"}}) == "math_verify"
    assert grader_of(run, {"source": "gone", "extra": {}}) is None


@settings(max_examples=20)
@given(junk=st.binary(max_size=200))
def test_no_bytes_in_place_of_an_index_stop_a_report(
    junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("junk") / "step_000001.json"
    path.write_bytes(junk)
    assert recorded.read_index(path, 1) is None
    assert recorded.policy_of(path, 1) == {}
