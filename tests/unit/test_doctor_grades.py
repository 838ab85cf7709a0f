"""`doctor grades` counts the verdicts on recorded answers that a grader of today changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_megatron.config.file import dump_config
from dapo_megatron.doctor import grades
from dapo_megatron.segments import Segment
from dapo_megatron.types import Completion, Finish, Grade, Group, Prompt
from tests.helpers.configs import tiny_config
from tests.helpers.groups import step_record


def write_run(folder: Path, recorded: dict[str, bool]) -> Path:
    """Write a run of one step with the truth 7, whose answers have these recorded verdicts."""
    config = tiny_config()
    source = next(iter(config.graders))
    prompt = Prompt(source, 0, (1, 2), "4 + 3 =", "7", {})
    answers = tuple(
        Completion(
            number,
            (3,),
            (-0.5,),
            text,
            Finish.STOP,
            (Segment(0, 1),),
            Grade(float(correct), correct, text),
        )
        for number, (text, correct) in enumerate(recorded.items())
    )
    step_record([(Group(5, prompt, answers), "trained")]).write(folder / "samples", 3)
    text = dump_config(config).replace("grader: reasoning_gym", "grader: dapo_math")
    (folder / "config.yaml").write_text(text)
    return folder


def test_changed_verdicts_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = write_run(tmp_path / "same", {"Answer: 7": True, "Answer: 8": False})
    assert grades.command(same, None)
    assert ": 2 graded, none changed" in capsys.readouterr().out
    wrong = {f"{'so ' * number}Answer: 7": False for number in range(5)}
    changed = write_run(tmp_path / "changed", {**wrong, "Answer: 8": True})
    assert not grades.command(changed, tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    [counts] = result["counts"].values()
    assert counts == {"graded": 6, "wrong before, right now": 5, "right before, wrong now": 1}
    assert len(result["examples"]) == grades.MAX_SHOWN + 1
    assert "--step 3 --ticket 5" in capsys.readouterr().out
