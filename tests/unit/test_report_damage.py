"""Whatever is wrong with a run's files, its report is written: what cannot be read is left out and
told of. The base is a run that was really made (tests/browser/recorded_run)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_megatron.report.folder import read_run
from dapo_megatron.report.page import packed
from dapo_megatron.report.payload import Options, Payload, make_payload
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"
NUM_DAMAGES = 120
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


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_no_damage_stops_a_report(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
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
