"""The report is written for any damaged run folder: unreadable parts are left out and reported. The
folder is from a real run, tests/browser/recorded_run."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo_megatron.report.page import Contents, Options, contents, packed
from dapo_megatron.report.reading import read_run
from tests.helpers.configs import REPOSITORY

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"
FILES = sorted(path.relative_to(RECORDED) for path in RECORDED.rglob("*") if path.is_file())

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
ODD = st.sampled_from(
    [*(None, True, "", "x", "1e-5", "\ud800", "\u202e", "a\0b", -1, 0, 5, 0.5, 2**40, 10**400),
     *(1e308, -1e308, float("nan"), float("inf"), [], {}, [None], [1, "x"], {"a": 1}, NESTED)]
)  # fmt: skip
"""Values that damage puts in place of others."""


def report_of(folder: Path) -> Contents:
    """Make the report up to the parts that do not depend on the folder's content."""
    page = contents([read_run(folder)], Options(completions=60, tickets=(0,)))
    packed(page.figures)
    return page


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (dict or list, key or index) for every item inside a value."""
    keys = value if isinstance(value, dict) else range(len(value))
    return [
        place
        for key in list(keys)
        for place in (
            (value, key),
            *(places(value[key]) if isinstance(value[key], dict | list) else ()),
        )
    ]


def damaged(path: Path, data: st.DataObject) -> bytes:
    """Return the bytes of a file with one value replaced, or with bytes cut, changed or added."""
    raw = path.read_bytes()
    if raw and path.suffix != ".parquet" and data.draw(st.integers(0, 4)):
        *before, last = raw.splitlines() if path.suffix == ".jsonl" else [raw]
        value = yaml.safe_load(last) if path.suffix == ".yaml" else json.loads(last)
        inside, key = data.draw(st.sampled_from(places(value)))
        inside[key] = data.draw(ODD)
        text = yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value)
        return b"\n".join([*before, text.encode(errors="replace"), b""])
    first, last = (data.draw(st.integers(0, len(raw))) for _ in range(2))
    added = data.draw(st.sampled_from([b"", b"\0" * 9, b"[" * 5000, b"\xff{"]))
    return raw[:first] + added + raw[last:]


@settings(max_examples=30, suppress_health_check=[HealthCheck.large_base_example])
@given(data=st.data())
def test_no_damage_stops_a_report(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(RECORDED, Path(temporary) / "run"))
        for name in data.draw(st.sets(st.sampled_from(FILES), min_size=1, max_size=3)):
            (folder / name).write_bytes(damaged(RECORDED / name, data))
        report_of(folder)


def test_unreadable_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    samples = folder / "samples" / "step_000001" / "completions.parquet"
    samples.write_bytes(samples.read_bytes()[:500])
    (folder / "timeline" / "step_000020.json").write_text("{")
    (folder / "config.yaml").write_text("a: &a [*a]\n")
    (folder / "summary.json").write_text("[" * 2000)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = [*lines[:20], "broken\n", *lines[20:], '{"step": 41, "groups']
    (folder / "metrics.jsonl").write_text("".join(half))
    [view] = report_of(folder).views
    named = [re.split("[,:]", warning)[0] for warning in view.warnings]
    assert named == ["config.yaml", "metrics.jsonl", "summary.json", "samples"]
    assert "step_000020.json" in view.timeline_note and len(view.timelines) == 4
    assert view.run.last_step == 40
    assert view.rollouts is not None
    assert {row["step"] for row in view.rollouts.rows} <= {20, 39, 40}
