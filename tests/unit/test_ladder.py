"""The ablation ladder of the DAPO paper: overlays of each rung, and tools/lab/ladder.py."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import ladder
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ladder_plot import HEIGHT, LEFT, TOP, WIDTH, Panel, svg

from dapo_megatron.config import Config
from dapo_megatron.config.file import dump_config, load_config

CONFIGS = sorted(ladder.CONFIG.parent.glob("*.yaml"))
RUNGS = sorted(ladder.RUNGS.glob("*.yaml"))
PAPER_CLIP = (0.2, 0.28)

# ------------------------------------------------------------------------ overlays


def techniques(config: Config) -> dict[str, Any]:
    """Return the settings that the ladder varies."""
    return {
        "dynamic sampling": config.rollout.dynamic_sampling,
        "filter": config.overlong.filter,
        "penalty": config.overlong.penalty,
        "clip": (config.loss.clip_low, config.loss.clip_high),
        "aggregation": config.loss.aggregation,
    }


def test_each_rung_changes_what_the_paper_changes() -> None:
    """The steps are those of Table 1. Soft punishment replaces filtering."""
    rung_settings = [techniques(load_config(ladder.CONFIG, overlays=[rung])) for rung in RUNGS]
    current = {
        "dynamic sampling": False,
        "filter": False,
        "penalty": False,
        "clip": (0.2, 0.2),
        "aggregation": "sequence",
    }
    steps: list[dict[str, Any]] = [
        {},
        {"filter": True},
        {"clip": PAPER_CLIP},
        {"filter": False, "penalty": True},
        {"aggregation": "token"},
        {"dynamic sampling": True},
    ]
    expected = []
    for step in steps:
        current = current | step
        expected.append(current)
    assert rung_settings == expected
    assert [rung.stem for rung in RUNGS] == list(ladder.PAPER)


def test_every_rung_sets_the_same_keys() -> None:
    def keys(tree: dict[str, Any]) -> set[str]:
        return {f"{section}.{key}" for section, below in tree.items() for key in below}

    stated = [keys(yaml.safe_load(rung.read_text())) for rung in RUNGS]
    assert all(keys == stated[0] for keys in stated)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda path: path.stem)
def test_a_rung_gives_the_same_result_on_any_config_and_overlay(config: Path, rung: Path) -> None:
    first, last = RUNGS[0], RUNGS[-1]
    expected = techniques(load_config(ladder.CONFIG, overlays=[rung]))
    for below in ([], [first], [last]):
        assert techniques(load_config(config, overlays=[*below, rung])) == expected


def test_the_last_rung_equals_the_config() -> None:
    assert load_config(ladder.CONFIG, overlays=[RUNGS[-1]]) == load_config(ladder.CONFIG)


# ------------------------------------------------------------------------ runs


def write_finished_run(ladder_run: ladder.Run, directory: Path, *, accuracy: float = 0.5) -> Path:
    """Write the files that a run with two steps leaves. Return its folder."""
    folder = directory / ladder_run.name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(ladder_run.config(directory)))
    evaluation = {
        f"eval/held_out/{figure}@4{part}": accuracy
        for figure in ("avg", "pass", "cons")
        for part in ("", "_low", "_high")
    }
    evaluation |= {"eval/held_out/pass@2": 0.0, "eval/held_out/ungraded": 0.0}
    summary = {
        "evaluation_before": {name: value / 2 for name, value in evaluation.items()},
        "evaluation_after": evaluation,
        "steps": 2,
        "seed": ladder_run.seed,
        "seconds": 10.4 + ladder_run.seed,
        "commit": "0123456789abcdef-dirty",
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows: list[dict[str, Any]] = [{"step": 0, **evaluation}]
    for step in (1, 2):
        rows.append({"step": step, **dict.fromkeys(ladder.COLUMNS, accuracy * step)})
    rows[1]["accuracy/raw"] = None  # no group was decided in this step
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ladder_run(rung: int = 0, seed: int = 0, *overrides: str) -> ladder.Run:
    return ladder.Run(RUNGS[rung], seed, ladder.CONFIG, overrides)


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    assert not ladder.is_done(ladder_run(), tmp_path)
    folder = write_finished_run(ladder_run(), tmp_path)
    assert ladder.is_done(ladder_run(), tmp_path)
    assert ladder.do(ladder_run(), tmp_path, 2) == "1_naive_grpo_seed0: done before"
    # Another seed, rung or setting makes another run.
    assert not ladder.is_done(ladder_run(0, 1), tmp_path)
    assert not ladder.is_done(ladder_run(1), tmp_path)
    assert not ladder.is_done(ladder_run(0, 0, "optimizer.lr=1e-3"), tmp_path)
    (folder / "config.yaml").write_text("seed: 0\n")
    assert not ladder.is_done(ladder_run(), tmp_path), (
        "the config is of another version of the program"
    )
    (folder / "summary.json").unlink()
    assert not ladder.is_done(ladder_run(), tmp_path)


def test_the_command_of_a_run_gives_its_config(tmp_path: Path) -> None:
    command = ladder_run(3, 2, "optimizer.lr=1e-3").command(tmp_path)
    assert command[1:4] == ["-m", "dapo_megatron", "train"]
    assert command[5:7] == ["--overlay", str(RUNGS[3])]
    config = load_config(command[4], command[7:], [command[6]])
    assert config == ladder_run(3, 2, "optimizer.lr=1e-3").config(tmp_path)
    assert (config.seed, config.folder) == (2, tmp_path / "4_soft_overlong_punishment_seed2")
    assert config.optimizer.lr == 1e-3


def test_a_run_may_have_no_overlay_and_a_perturbed_engine(tmp_path: Path) -> None:
    run = ladder.Run(None, 1, ladder.CONFIG, (), noise=0.01)
    command = run.command(tmp_path)
    assert Path(command[1]).name == "perturbed_engine.py"
    assert command[2:4] == [str(ladder.CONFIG), "--noise=0.01"]
    assert "--overlay" not in command
    assert load_config(command[2], command[4:]) == run.config(tmp_path)
    assert run.config(tmp_path).folder == tmp_path / "no_overlay_seed1"


def test_a_failing_run_is_reported_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"1_naive_grpo_seed0 failed; see .*\n.*policy.tensor"):
        ladder.do(ladder_run(0, 0, "policy.tensor_parallel=3"), tmp_path, 2)


# ------------------------------------------------------------------------ tables and plots


def write_outcomes(directory: Path) -> dict[str, list[ladder.RungRun]]:
    """Write runs of two rungs with two seeds. Return their outcomes by rung."""
    outcomes_by_rung: dict[str, list[ladder.RungRun]] = {}
    for rung in (0, 5):
        for seed in (0, 1):
            seed_run = ladder_run(rung, seed)
            write_finished_run(seed_run, directory, accuracy=0.25 + 0.5 * seed)
            outcomes_by_rung.setdefault(seed_run.rung.stem, []).append(
                ladder.read(seed_run, directory)
            )
    return outcomes_by_rung


def test_table_and_curves_combine_all_seeds(tmp_path: Path) -> None:
    outcomes_by_rung = write_outcomes(tmp_path)
    lines = ladder.table(outcomes_by_rung)
    assert "held out: avg@4" in lines[0]
    assert "0.250 (0.125 to 0.375)" in lines[2]  # before training
    assert lines[3].startswith("| 1 naive grpo | 0.500 (0.250 to 0.750) |")
    assert lines[4].startswith("| 6 + dynamic sampling |")
    assert lines[4].endswith("| 50 |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    runs = outcomes_by_rung["1_naive_grpo"]
    assert ladder.curve(runs, "policy/entropy") == [(1, 0.25, 0.5, 0.75), (2, 0.5, 1.0, 1.5)]
    assert ladder.curve(runs, "accuracy/raw") == [(2, 0.5, 1.0, 1.5)]  # not measured in step 1
    assert ladder.figures(outcomes_by_rung)["1_naive_grpo"]["avg@4_after"] == [0.25, 0.75]
    facts = ladder.about(outcome for runs in outcomes_by_rung.values() for outcome in runs)
    assert facts == {
        "seeds": 2,
        "steps": 2,
        "commit": "0123456789ab-dirty",
        "seconds of the longest run": 11,
    }


def test_other_overlays_have_no_column_of_the_paper(tmp_path: Path) -> None:
    runs = write_outcomes(tmp_path)["1_naive_grpo"]
    lines = ladder.table({"no overlay": runs, "token_tis": runs})
    assert "paper" not in lines[0]
    assert lines[3].startswith("| no overlay | 0.500")
    assert lines[4].startswith("| token tis | 0.500")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_handwritten_text_of_the_page_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "ladder.md"
    page.write_text(f"# The ladder\n\nOur words.\n\n{ladder.MARK}\n\nold figures\n")
    ladder.write(tmp_path, write_outcomes(tmp_path / "runs"), {"seeds": 2})
    text = page.read_text()
    assert text.startswith(f"# The ladder\n\nOur words.\n\n{ladder.MARK}\n\nMade by `make ladder`")
    assert "old figures" not in text
    assert "(ladder.svg)" in text
    ET.fromstring((tmp_path / "ladder.svg").read_text())
    before = page.read_text()
    ladder.write(tmp_path, write_outcomes(tmp_path / "again"), {"seeds": 2})
    assert page.read_text() == before


def test_the_page_of_the_repository_has_the_marker() -> None:
    assert (ladder.DOCS / "ladder.md").read_text(encoding="utf-8").count(ladder.MARK) == 1


VALUE = st.floats(-1e6, 1e6)


@given(
    st.lists(
        st.tuples(st.integers(1, 500), VALUE, st.floats(0, 1e3), st.floats(0, 1e3)),
        max_size=8,
        unique_by=lambda point: point[0],
    )
)
def test_a_plot_is_well_formed_and_stays_in_its_panel(
    points: list[tuple[int, float, float, float]],
) -> None:
    curve = [(step, low, low + up, low + up + more) for step, low, up, more in sorted(points)]
    text = svg([Panel("a < b", {"one & two": curve})], ["one & two", "three"], "step")
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    for polyline in re.findall(r'points="([^"]*)"', text):
        for point in polyline.split():
            x, y = map(float, point.split(","))
            assert LEFT <= x <= WIDTH
            assert TOP <= y <= HEIGHT
