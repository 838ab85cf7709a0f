"""Whatever is wrong with a run's files, its report is written: what cannot be read is left out and
told of. The base is a run that was really made (tests/browser/recorded_run)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_megatron.report.page import Options, Payload, make_payload, packed
from dapo_megatron.report.rollouts import Rollouts
from dapo_megatron.report.run_data import read_run
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"
NUM_DAMAGES = 20
ALL_DAMAGES = 200
"""With those marked long."""
NUM_HURT = 4
"""Places in each."""

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    *(None, True, "", "x", "1e-5", "\ud800", "\u202e", "a\0b", -1, 0, 5, 0.5, 2**40, 10**400),
    *(1e308, -1e308, float("nan"), float("inf"), [], {}, [None], [1, "x"], {"a": 1}, DEEP),
)
"""What stands in a place where it should not."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def written(folder: Path, options: Options | None = None) -> Payload:
    """The report, as far as it may depend on what is in the folder."""
    payload = make_payload([read_run(folder)], options or Options(tickets=(0,)))
    packed(payload.data)
    for blob in payload.blobs.values():
        json.loads(blob, parse_constant=pytest.fail)
    return payload


def rollouts_of(payload: Payload) -> Rollouts:
    kept = payload.views[0].rollouts
    assert kept is not None
    return kept


@pytest.fixture(scope="module")
def whole() -> Payload:
    """The report of the undamaged run."""
    return written(RECORDED)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A file with its object changed, or that of its last line: then no other one moves."""
    if path.suffix == ".yaml":
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(value)
        path.write_text(yaml.safe_dump(value), encoding="utf-8")
        return
    *before, last = path.read_text(encoding="utf-8").strip().splitlines()
    value = json.loads(last)
    change(value)
    path.write_text("\n".join([*before, json.dumps(value)]) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------- single damages

CONFIGS: dict[str, Any] = {
    "data.train": 5,
    "optimizer.lr": "1e-5",
    "loss.advantage_eps": None,
    "model.path": [1],
    "tracking.inspected_groups": "x",
    "rollout.prompts_per_step": 10**400,
    "sync.max_gap": {"a": 1},
    "run.name": {"a": [1]},
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_value_of_another_type_is_as_if_it_were_not_there(folder: Path, key: str) -> None:
    section, name = key.split(".")
    changed(folder / "config.yaml", lambda config: config[section].update({name: CONFIGS[key]}))
    assert rollouts_of(written(folder)).rows


# Each field is missing once, and has each wrong type once.
WRONG_FIELDS = [
    *((name, "gone") for name in ("segments", "pred", "parsed", "score", "finish", "text")),
    *((name, {"a": 1}) for name in ("segments", "pred", "tokens", "logprobs", "reward")),
    *(("score", value) for value in (float("nan"), 10**400, True)),
    *(("text", value) for value in (float("nan"), None)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS)
def test_a_group_that_cannot_be_shown_is_reported_and_the_others_are_shown(
    folder: Path, name: str, value: Any, whole: Payload
) -> None:
    def hurt(group: dict[str, Any]) -> None:
        completion = group["completions"][3]
        completion.pop(name, None)
        if value != "gone":
            completion[name] = value

    path = folder / "samples" / "step_000001.jsonl"
    ticket = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["ticket"]
    changed(path, hurt)
    payload = written(folder)
    assert f"samples: 1 groups cannot be read (ticket {ticket})" in payload.views[0].warnings
    shown, before = rollouts_of(payload), rollouts_of(whole)
    rows = [row for row in before.rows if row["ticket"] != ticket]
    assert len(rows) < len(before.rows)
    key = ("ticket", "sample")
    assert [[row[k] for k in key] for row in shown.rows] == [[row[k] for k in key] for row in rows]
    assert shown.blobs.keys() == {row["ticket"] for row in rows}


@pytest.mark.parametrize("name", ["advantage", "gap_max", "logprobs", "entropy"])
def test_damaged_policy_values_of_a_sequence_are_left_out(folder: Path, name: str) -> None:
    path = folder / "samples" / "policy" / "step_000001.jsonl"
    changed(path, lambda line: line.update({name: "x"}))
    payload = written(folder)
    assert payload.views[0].warnings == []
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    key = (last["ticket"], last["sample"])
    [row] = [row for row in rollouts_of(payload).rows if (row["ticket"], row["sample"]) == key]
    assert row["gap_max"] is None
    assert row["advantage"] is None


# Each wrong value in one column, and one wrong value in each column.
WRONG_COLUMNS = [
    *(("num_tokens", value) for value in ([], "x", float("nan"), 2**64, -1, None)),
    *((column, []) for column in ("sample", "score", "source", "offset", "verdict")),
]


@pytest.mark.parametrize(("column", "value"), WRONG_COLUMNS)
def test_an_index_with_a_value_of_another_type_is_left_out(
    folder: Path, column: str, value: Any
) -> None:
    path = folder / "samples" / "index" / "step_000001.json"

    def hurt(index: dict[str, Any]) -> None:
        part = "groups" if column in index["groups"] else "completions"
        index[part][column][0] = value

    changed(path, hurt)
    assert "samples: 1 steps cannot be read (step 1)" in written(folder).views[0].warnings


def test_what_is_nested_without_end_is_no_file_of_a_run(folder: Path) -> None:
    deep = "[" * 2000
    (folder / "config.yaml").write_text(deep, encoding="utf-8")
    for path in (folder / ".pulse").iterdir():
        path.write_text('{"rank": ' + deep, encoding="utf-8")
    (folder / "summary.json").write_text(deep, encoding="utf-8")
    warnings = written(folder).views[0].warnings
    assert [one.partition(":")[0] for one in warnings] == ["config.yaml", "summary.json"]
    (folder / "config.yaml").write_text("a: &a [*a]\n", encoding="utf-8")
    assert any("nested more than 64 deep" in one for one in written(folder).views[0].warnings)


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "a: !!int ''", "{1: a, b: c}", "a: " + "9" * 5000]
)
def test_yaml_that_makes_no_value_is_no_config(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert written(folder).data["runs"]


def test_a_step_or_a_time_beyond_all_bounds(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1000000000000000, "policy/loss": 1}\n')
    changed(folder / "attempts.jsonl", lambda attempt: attempt.update(time=1e30, end=["x"]))
    for path in (folder / ".pulse").iterdir():
        changed(path, lambda heartbeat: heartbeat.update(world_size=10**12))
    [accuracy] = written(folder).data["charts"]["accuracy"]
    assert accuracy["data"][0]["x"][-1] == 40


# ---------------------------------------------------------------------------- any damage


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(dict or list, key or position) of everything in a value."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def hurt_value(value: Any, chance: random.Random) -> Any:
    """With something gone, or something else in its place."""
    everywhere = list(places(value)) if isinstance(value, dict | list) else []
    if not everywhere:
        return chance.choice(ODD)
    # Few kinds of places are as many as tokens: first the name, then one of that name.
    names = sorted({str(key) for inside, key in everywhere if isinstance(inside, dict)})
    name = chance.choice(names) if names else None
    inside, key = chance.choice(
        [(inside, key) for inside, key in everywhere if isinstance(inside, list) or key == name]
        if chance.random() < 0.2
        else [one for one in everywhere if str(one[1]) == name] or everywhere
    )
    if chance.random() < 0.3:
        del inside[key]
    else:
        inside[key] = chance.choice(ODD)
    return value


def hurt_text(text: str, chance: random.Random) -> str:
    """Cut, or with characters of it gone, doubled or turned around."""
    first, last = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    middle = text[first:last][:40]
    return chance.choice(
        (
            text[:first],
            text[first:],
            text[:first] + text[first + len(middle) :],
            text[:first] + middle[::-1] + text[first + len(middle) :],
            text[:first] + middle * 2 + text[first:],
            text[:first] + "[" * 5000 + text[first:],
        )
    )


def hurt_lines(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(hurt_value(json.loads(lines[at]), chance))
    return "\n".join(lines) + "\n"


def hurt_file(path: Path, chance: random.Random) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        if chance.random() < 0.1 or not text:
            text = hurt_text(text, chance)
        elif path.suffix == ".jsonl":
            text = hurt_lines(text, chance)
        elif path.suffix == ".json":
            text = json.dumps(hurt_value(json.loads(text), chance))
        else:
            text = yaml.safe_dump(hurt_value(yaml.safe_load(text), chance))
    except (ValueError, yaml.YAMLError, RecursionError, AttributeError):  # hurt before
        text = hurt_text(text, chance)
    path.write_text(text, encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_DAMAGES),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_DAMAGES, ALL_DAMAGES)),
    ],
)
def test_no_damage_stops_a_report(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    if chance.random() < 0.5:  # with an index, groups that have moved are not looked at
        shutil.rmtree(folder / "samples" / "index")
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            by_kind.setdefault(path.parent.name + path.suffix, []).append(path)
            by_kind.setdefault(path.name if path.parent == folder else "", []).append(path)
    for _ in range(NUM_HURT):
        hurt_file(chance.choice(by_kind[chance.choice(sorted(by_kind))]), chance)
    try:
        written(folder)
    except ConfigError as error:
        pytest.fail(f"a run's folder is not known as one: {error}")
