"""Recorded rollouts for people: the command `samples`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_megatron.report.samples_command import Selection, samples
from dapo_megatron.rollout.record import COMPLETIONS, read_groups
from dapo_megatron.types import ConfigError
from tests.helpers.configs import REPOSITORY
from tests.helpers.made_run import MadeRun

RECORDED = REPOSITORY / "tests" / "browser" / "recorded_run"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def printed(
    capsys: pytest.CaptureFixture[str], selection: Selection, run: Path = RECORDED, **options: bool
) -> str:
    samples(run, selection, **options)
    return capsys.readouterr().out


def tickets_of(text: str) -> list[int]:
    heads = [line for line in text.splitlines() if line.startswith("step ")]
    return [int(head.split("ticket ")[1].split(":")[0]) for head in heads]


def test_a_group_is_printed_with_its_completions_and_grades(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, Selection(step=20, tickets=(626,)))
    [recorded] = read_groups(RECORDED / "samples" / "step_000020" / COMPLETIONS, [626])
    group, prompt = recorded.group, recorded.group.prompt
    assert text.startswith("step 20, ticket 626: trained, chain_sum ")
    assert prompt.text in text and f"truth: {prompt.truth}\n" in text
    for completion in group.completions:
        grade = completion.grade
        assert grade is not None
        mark = "✓ right" if grade.correct else "✗ wrong"
        head = f"sample {completion.sample}  {mark}  {completion.num_tokens} tokens, stop, age 1, "
        [at] = [at for at, line in enumerate(text.splitlines()) if line.startswith(head)]
        assert f"answer {grade.pred!r}" in text.splitlines()[at]
        assert text.splitlines()[at + 1] == completion.text


def test_groups_are_selected_by_step_ticket_and_outcome(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = printed(capsys, Selection())
    assert last.startswith("step 40, ") and len(tickets_of(last)) == 3  # all of the step
    assert tickets_of(printed(capsys, Selection(tickets=(1406, 626)))) == [626, 1406]
    outcome = printed(capsys, Selection(step=39, outcome="all_correct", num=2))
    assert outcome.count(": all_correct, ") == len(tickets_of(outcome)) > 0
    assert len(tickets_of(printed(capsys, Selection(step=1, num=1)))) == 1


def test_tokens_are_printed_with_their_pieces_and_log_probs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, Selection(step=20, tickets=(626,)), with_tokens=True)
    [recorded] = read_groups(RECORDED / "samples" / "step_000020" / COMPLETIONS, [626])
    completion = recorded.group.completions[0]
    version = completion.segments[0].version
    token, logprob = completion.tokens[-1], completion.logprobs[-1]
    assert f"{token:>8} {logprob:>10.4f}  v{version}  '<eos>'\n" in text


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(step=7), "--step: 7 is not recorded; choose 1 to 40"),
        (Selection(tickets=(5, 4711), step=40), "no group of ticket 5, 4711 in step 40; leave out"),
        (Selection(step=40, outcome="expired"), "no group with outcome expired in step 40; leave"),
    ],
)
def test_a_selection_without_groups_is_an_error(selection: Selection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        samples(RECORDED, selection)


def test_hidden_characters_are_printed_visibly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(num_steps=1, groups_per_step=6, samples_per_group=4, hostile=True)
    text = printed(capsys, Selection(num=6), run.write(tmp_path / "run"))
    assert len(tickets_of(text)) == 6
    assert not {"\x1b", "\x00", "\u202e", "\ud800"} & set(text)
