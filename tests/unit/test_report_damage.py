"""The report is written for any damaged run folder: unreadable parts are left out and reported.
The folder is that of a real run, tests/browser/recorded_run."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from dapo_megatron.report.command import report
from dapo_megatron.report.page import Options, Payload, make_payload, packed
from dapo_megatron.report.rollouts import Rollouts
from dapo_megatron.report.run_data import read_run
from dapo_megatron.rollout.record import COMPLETIONS
from dapo_megatron.tracking.policy_files import policy_path
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"
NUM_DAMAGES = 20
ALL_DAMAGES = 200
"""Including those marked as long."""
NUM_PLACES = 4
"""Damaged places per folder."""

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
ODD: tuple[Any, ...] = (
    *(None, True, "", "x", "1e-5", "\ud800", "\u202e", "a\0b", -1, 0, 5, 0.5, 2**40, 10**400),
    *(1e308, -1e308, float("nan"), float("inf"), [], {}, [None], [1, "x"], {"a": 1}, NESTED),
)
"""Values that damage puts in place of others."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def report_of(folder: Path, options: Options | None = None) -> Payload:
    """Make the report up to the parts that do not depend on the folder's content."""
    payload = make_payload([read_run(folder)], options or Options(tickets=(0,)))
    packed(payload.data)
    for blob in payload.blobs.values():
        json.loads(blob, parse_constant=pytest.fail)
    return payload


def rollouts_of(payload: Payload) -> Rollouts:
    rollouts = payload.views[0].rollouts
    assert rollouts is not None
    return rollouts


@pytest.fixture(scope="module")
def undamaged() -> Payload:
    """The report of the undamaged run."""
    return report_of(RECORDED)


def change_object(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the object of a file, or of its last line, so that no other line moves."""
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
def test_a_config_value_of_a_wrong_type_is_ignored(folder: Path, key: str) -> None:
    section, name = key.split(".")
    change_object(
        folder / "config.yaml", lambda config: config[section].update({name: CONFIGS[key]})
    )
    assert rollouts_of(report_of(folder)).rows


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def overwrite(data: bytes) -> bytes:
    """Overwrite bytes of the first columns."""
    return data[:64] + bytes(byte ^ 1 for byte in data[64:128]) + data[128:]


@pytest.mark.parametrize("damage", [cut, overwrite, lambda _: b""], ids=["cut", "bytes", "empty"])
def test_unreadable_completions_are_reported_and_the_other_steps_are_shown(
    folder: Path, damage: Callable[[bytes], bytes], undamaged: Payload
) -> None:
    path = folder / "samples" / "step_000001" / COMPLETIONS
    path.write_bytes(damage(path.read_bytes()))
    payload = report_of(folder)
    shown, before = rollouts_of(payload), rollouts_of(undamaged)
    rows = [row for row in before.rows if row["step"] != 1]
    assert payload.views[0].warnings == ["samples: 1 steps cannot be read (step 1)"]
    key = ("ticket", "sample")
    assert [[row[column] for column in key] for row in shown.rows] == [
        [row[column] for column in key] for row in rows
    ]
    assert shown.blobs.keys() == {row["ticket"] for row in rows}


@pytest.mark.parametrize("damage", [cut, overwrite], ids=["cut", "bytes"])
def test_damaged_policy_values_of_a_step_are_left_out(
    folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = policy_path(folder, 1, 0)
    path.write_bytes(damage(path.read_bytes()))
    payload = report_of(folder)
    assert payload.views[0].warnings == []
    rows = [row for row in rollouts_of(payload).rows if row["fate"] == "trained"]
    assert {row["gap_max"] is None for row in rows if row["step"] == 1} == {True}
    assert {row["advantage"] is None for row in rows if row["step"] != 1} == {False}


WRONG_TABLES: dict[str, Callable[[Any], Any]] = {
    "of another program": lambda _: pa.table({"x": [1]}),
    "column missing": lambda table: table.drop_columns(["logprobs"]),
    "numbers as text": lambda table: cast(table, "sample", pa.string()),
    "nullable": lambda table: cast(table, "ticket", pa.int64()),
}


def cast(table: Any, column: str, kind: Any) -> Any:
    at = table.column_names.index(column)
    return table.set_column(at, column, table[column].cast(kind))


@pytest.mark.parametrize("wrong", WRONG_TABLES)
@pytest.mark.parametrize("name", ["completions", "policy"])
def test_tables_of_other_columns_are_left_out_and_reported(
    folder: Path, name: str, wrong: str
) -> None:
    path = folder / "samples" / "step_000001" / COMPLETIONS
    if name == "policy":
        path = policy_path(folder, 1, 0)
    parquet.write_table(WRONG_TABLES[wrong](parquet.read_table(path)), path)
    payload = report_of(folder)
    warning = "samples: 1 steps cannot be read (step 1)"
    assert payload.views[0].warnings == [warning] * (name == "completions")
    of_first = [row for row in rollouts_of(payload).rows if row["step"] == 1]
    assert {row["gap_max"] for row in of_first} <= {None}


def test_deeply_nested_files_are_left_out_and_reported(folder: Path) -> None:
    deep = "[" * 2000
    (folder / "config.yaml").write_text(deep, encoding="utf-8")
    for path in (folder / ".pulse").iterdir():
        path.write_text('{"rank": ' + deep, encoding="utf-8")
    (folder / "summary.json").write_text(deep, encoding="utf-8")
    warnings = report_of(folder).views[0].warnings
    assert [warning.partition(":")[0] for warning in warnings] == ["config.yaml", "summary.json"]
    (folder / "config.yaml").write_text("a: &a [*a]\n", encoding="utf-8")
    warnings = report_of(folder).views[0].warnings
    assert any("anchors (&x) and aliases (*x)" in warning for warning in warnings)


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "a: !!int ''", "{1: a, b: c}", "a: " + "9" * 5000]
)
def test_a_config_with_invalid_yaml_values_is_ignored(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert report_of(folder).data["runs"]


MERGED = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)]
BOMBS = {
    "merge keys": "\n".join(["a0: &a0 {x: 1}", *MERGED]),
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "itself": "a: &a [*a]",
    "tag": "a: !!python/object/apply:os.system [id]",
    "deep": "[" * 1000,
    "long": "a: " + "x" * 1_000_000,
    "many keys": "\n".join(f"k{n}: 1" for n in range(100_000)),
    "digits": "a: " + "9" * 5000,
    "repeated": "run: {name: a}\nrun: {name: b}",
    "dates": "a: 2001-99-99\nb: !!timestamp x",
    "binary": "\0\1\2",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_that_would_take_long_is_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(BOMBS[name], encoding="utf-8")
    started = time.monotonic()
    run = read_run(tmp_path)
    assert time.monotonic() - started < 10.0
    if name != "dates":  # text to YAML 1.2, except for the tag
        assert not run.config
    assert "config.yaml" in run.warnings[0]


FILES = (
    *("config.yaml", "metrics.jsonl", "attempts.jsonl", "summary.json", "plan.json"),
    *(
        "provenance.json",
        "tokenizer.json",
        ".pulse/rank_00000.json",
        "samples/step_000001/completions.parquet",
    ),
    *("policy/step_000001_00000.parquet", "timeline/step_000001.json"),
)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "FIFO": lambda path, _: os.mkfifo(path),
    "endless": lambda path, _: path.symlink_to("/dev/zero"),
    "a terabyte": lambda path, _: (path.touch(), os.truncate(path, 10**12)),
    "folder": lambda path, _: path.mkdir(),
    "private": lambda path, secret: (path.symlink_to(secret), os.lchown(path, 65534, 65534)),
}


@pytest.mark.parametrize("keeps_config", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_another_kind_are_left_out(folder: Path, kind: str, keeps_config: bool) -> None:
    if kind == "private" and os.geteuid() != 0:
        pytest.skip("needs root, to make links of another user")
    secret = folder.parent / "netrc"
    secret.write_text('{"password": "hunter2"}', encoding="utf-8")
    for name in FILES[keeps_config:]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path, secret)
    started = time.monotonic()
    payload = report_of(folder)
    assert time.monotonic() - started < 10.0
    assert "hunter2" not in json.dumps([payload.data, payload.blobs], default=str)
    left_out = {warning.partition(":")[0] for warning in payload.views[0].warnings}
    assert {"metrics.jsonl", "attempts.jsonl", "summary.json", "plan.json"} <= left_out


def test_the_report_of_another_users_run_is_written_to_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report([folder], None, Options())
    assert (folder / "report.html").exists()
    if os.geteuid() == 0:
        (folder / "report.html").unlink()
        os.chown(folder, 65534, 65534)
        report([folder], None, Options())
        assert (tmp_path / "report.html").exists()
        assert not (folder / "report.html").exists()


def test_absurd_steps_times_and_world_sizes_do_not_stop_the_report(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1000000000000000, "policy/loss": 1}\n')
    change_object(folder / "attempts.jsonl", lambda attempt: attempt.update(time=1e30, end=["x"]))
    for path in (folder / ".pulse").iterdir():
        change_object(path, lambda heartbeat: heartbeat.update(world_size=10**12))
    [accuracy] = report_of(folder).data["charts"]["accuracy"]
    assert accuracy["data"][0]["x"][-1] == 40


# ---------------------------------------------------------------------------- any damage


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (dict or list, key or index) for every item inside a value."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def damage_value(value: Any, rng: random.Random) -> Any:
    """Remove or replace one item of a value, chosen at random."""
    everywhere = list(places(value)) if isinstance(value, dict | list) else []
    if not everywhere:
        return rng.choice(ODD)
    # Choose a name first, then a place of that name: most places are tokens.
    names = sorted({str(key) for inside, key in everywhere if isinstance(inside, dict)})
    name = rng.choice(names) if names else None
    inside, key = rng.choice(
        [(inside, key) for inside, key in everywhere if isinstance(inside, list) or key == name]
        if rng.random() < 0.2
        else [place for place in everywhere if str(place[1]) == name] or everywhere
    )
    if rng.random() < 0.3:
        del inside[key]
    else:
        inside[key] = rng.choice(ODD)
    return value


def damage_text(text: str, rng: random.Random) -> str:
    """Truncate a text, or remove, repeat, reverse or insert characters."""
    first, last = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    middle = text[first:last][:40]
    return rng.choice(
        (
            text[:first],
            text[first:],
            text[:first] + text[first + len(middle) :],
            text[:first] + middle[::-1] + text[first + len(middle) :],
            text[:first] + middle * 2 + text[first:],
            text[:first] + "[" * 5000 + text[first:],
        )
    )


def damage_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(damage_value(json.loads(lines[at]), rng))
    return "\n".join(lines) + "\n"


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Truncate bytes, or change, remove or insert some."""
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        (
            data[:at],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data[:at] + data[at + rng.randrange(1, 40) :],
            data[:at] + rng.randbytes(40) + data[at:],
        )
    )


def damage_file(path: Path, rng: random.Random) -> None:
    if path.suffix == ".parquet":
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        if rng.random() < 0.1 or not text:
            text = damage_text(text, rng)
        elif path.suffix == ".jsonl":
            text = damage_lines(text, rng)
        elif path.suffix == ".json":
            text = json.dumps(damage_value(json.loads(text), rng))
        else:
            text = yaml.safe_dump(damage_value(yaml.safe_load(text), rng))
    except (ValueError, yaml.YAMLError, RecursionError, AttributeError):  # damaged already
        text = damage_text(text, rng)
    path.write_text(text, encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_DAMAGES),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_DAMAGES, ALL_DAMAGES)),
    ],
)
def test_no_damage_stops_a_report(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            by_kind.setdefault(path.name.partition("_")[0] + path.suffix, []).append(path)
            by_kind.setdefault(path.name if path.parent == folder else "", []).append(path)
    for _ in range(NUM_PLACES):
        damage_file(rng.choice(by_kind[rng.choice(sorted(by_kind))]), rng)
    try:
        report_of(folder)
    except ConfigError as error:
        pytest.fail(f"the folder is not recognized as a run: {error}")
