"""The ablation ladder of the DAPO paper: overlays of each rung, and tools/lab/ladder.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ladder
import pytest
import yaml

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


def write_finished_run(run: ladder.Run, accuracy: float = 0.5) -> None:
    """Write the files that a run with two steps leaves."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(dump_config(run.config))
    evaluation = {
        f"eval/held_out/{figure}@4{part}": accuracy
        for figure in ("avg", "pass", "cons")
        for part in ("", "_low", "_high")
    }
    evaluation |= {"eval/held_out/pass@2": 0.0, "eval/held_out/ungraded": 0.0}
    summary = {
        "evaluation_before": {name: value / 2 for name, value in evaluation.items()},
        "evaluation_after": evaluation,
    }
    (run.folder / "summary.json").write_text(json.dumps(summary))
    rows: list[dict[str, Any]] = [{"step": 0, **evaluation}]
    for step in (1, 2):
        rows.append({"step": step, **dict.fromkeys(ladder.COLUMNS, accuracy * step)})
    rows[1]["accuracy/raw"] = None  # no group was decided in this step
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    run = ladder.Run(tmp_path, RUNGS[0], 0)
    assert not run.is_done()
    write_finished_run(run)
    assert run.is_done() and run.do(1).evaluated("after", "avg") == 0.5
    for other in (
        replace(run, seed=1),
        replace(run, rung=RUNGS[1]),
        replace(run, overrides=("optimizer.lr=1e-3",)),
    ):
        assert not other.is_done()
    (run.folder / "config.yaml").write_text("seed: 0\n")  # of another version of the program
    assert not run.is_done()


def test_the_command_of_a_run_gives_its_config(tmp_path: Path) -> None:
    run = ladder.Run(tmp_path, RUNGS[3], 2, overrides=("optimizer.lr=1e-3",))
    command = run.command
    assert command[1:4] == ["-m", "dapo_megatron", "train"]
    assert command[5:7] == ["--overlay", str(RUNGS[3])]
    config = load_config(command[4], command[7:], [command[6]])
    assert config == run.config
    assert (config.seed, config.folder) == (2, tmp_path / "4_soft_overlong_punishment_seed2")
    assert config.optimizer.lr == 1e-3


def test_a_failing_run_is_reported_with_its_error(tmp_path: Path) -> None:
    run = ladder.Run(tmp_path, RUNGS[0], 0, overrides=("policy.tensor_parallel=3",))
    with pytest.raises(RuntimeError, match=r"1_naive_grpo_seed0 failed; see .*\n.*policy.tensor"):
        run.do(1)


def test_the_table_combines_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rung in (0, 5):
        for seed in (0, 1):
            write_finished_run(ladder.Run(tmp_path, RUNGS[rung], seed), 0.25 + 0.5 * seed)
    for only, rows in (("1_naive", 1), ("", 6)):
        for rung in RUNGS[1:5] if not only else ():
            for seed in (0, 1):
                write_finished_run(ladder.Run(tmp_path, rung, seed))
        ladder.main(seeds=2, only=only, directory=tmp_path)
        *lines, summary = capsys.readouterr().out.splitlines()
        assert len(lines) == 3 + rows and {line.count("|") for line in lines} == {13}
        assert "held out: avg@4" in lines[0]
        assert lines[3].startswith("| 1 naive grpo | 0.500 (0.250 to 0.750) |")
        assert lines[3].endswith("| 30 |")
        figures = json.loads(summary)["rungs"]["1_naive_grpo"]
        # Held out, the mean of the last steps, and a metric that was not measured in step 1.
        for name, value in (("avg_after", 0.75), ("policy/entropy", 1.125), ("accuracy/raw", 1.5)):
            assert figures[1][name] == value
