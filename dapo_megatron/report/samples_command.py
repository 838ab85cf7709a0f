"""`samples RUN_FOLDER`: prints recorded groups, with the texts of their completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.text import Text

from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.report.rollouts import SIGNS, age_of, graded_as
from dapo_megatron.report.token_text import TokenPieces, find_tokenizer
from dapo_megatron.report.viewer_data import versions_of
from dapo_megatron.report.wording import significant
from dapo_megatron.rollout.record import COMPLETIONS, RecordedGroup, read_groups, require_steps
from dapo_megatron.segments import branches
from dapo_megatron.text import visible
from dapo_megatron.types import Completion, ConfigError

STYLES = {"right": "green", "wrong": "red", "no answer": "yellow", "no grade": "yellow"}


@dataclass(frozen=True)
class Selection:
    """Groups to print.

    step       only of this step; None: the last recorded one, or any step with `tickets`
    tickets    only these; empty: all
    outcome    only with this outcome; None: all
    num        maximum number of groups, unless `tickets` are given
    """

    step: int | None = None
    tickets: tuple[int, ...] = ()
    outcome: str | None = None
    num: int = 4


def samples(run_folder: Path, selection: Selection, *, with_tokens: bool = False) -> None:
    """Print the selected groups of a run. `with_tokens` adds a line per token: its number, piece of
    text, log-prob and version.

    Raises ConfigError if the run has no such groups, and DataError for a damaged file.
    """
    steps = require_steps(run_folder)
    num = len({*selection.tickets}) or selection.num
    chosen = list(islice(_select(steps, selection), num))
    if not chosen:
        raise ConfigError(_nothing(steps, selection))
    checkpoints = sorted((run_folder / "checkpoints").glob("step_*"), reverse=True)
    pieces = find_tokenizer(run_folder, None, checkpoints)
    console = LiteralConsole(highlight=False, soft_wrap=True)
    for step, recorded in chosen:
        group, prompt = recorded.group, recorded.group.prompt
        title = f"step {step}, ticket {group.ticket}: {recorded.outcome}, {prompt.source}"
        console.rule(Text(title), align="left")
        console.print(Text(visible(prompt.text), style="bold"))
        console.print(Text(f"truth: {visible(prompt.truth) or 'none'}"))
        for completion, reward in zip(group.completions, recorded.rewards, strict=True):
            console.print()
            console.print(_headline(step, completion, reward))
            text = _tokens if with_tokens else _conversation
            console.print(Text(text(completion, pieces)))
        console.print()


def _select(steps: dict[int, Path], selection: Selection) -> Iterator[tuple[int, RecordedGroup]]:
    """Yield the selected groups with their steps, by ticket within a step."""
    wanted = [selection.step] if selection.step is not None else list(steps)
    if selection.step is None and not selection.tickets:
        wanted = wanted[-1:]
    for step in wanted:
        if step in steps:
            for recorded in read_groups(steps[step] / COMPLETIONS, selection.tickets or None):
                if selection.outcome in (None, recorded.outcome):
                    yield step, recorded


def _nothing(steps: dict[int, Path], selection: Selection) -> str:
    """Return the message for a selection without groups."""
    recorded = list(steps)
    if selection.step is not None and selection.step not in steps:
        return f"--step: {selection.step} is not recorded; choose {recorded[0]} to {recorded[-1]}"
    kind = f" with outcome {selection.outcome}" if selection.outcome else ""
    tickets = f" of ticket {', '.join(map(str, selection.tickets))}" if selection.tickets else ""
    step = f"step {selection.step}" if selection.step is not None else "the run"
    return f"no group{tickets}{kind} in {step}; leave out --ticket, --outcome or --step"


def _headline(step: int, completion: Completion, reward: float | None) -> Text:
    age, logprob = age_of(completion, step), significant(completion.logprob_mean)
    graded, num_branches = graded_as(completion.grade), len(branches(completion.segments))
    facts = [
        f"{completion.num_tokens:,} tokens",
        completion.finish.value,
        f"{num_branches} branches" if num_branches > 1 else "",
        f"age {age}" if age is not None else "",
        f"log-prob {logprob}" if logprob is not None else "",
        f"reward {reward:.3g}" if reward is not None else "",
        f"answer {visible(completion.grade.pred)!r}" if completion.grade is not None else "",
    ]
    return Text.assemble(
        f"sample {completion.sample}  ",
        (f"{SIGNS[graded]} {graded}", STYLES[graded]),
        "  ",
        ", ".join(filter(None, facts)),
    )


def _conversation(completion: Completion, pieces: TokenPieces | None) -> str:
    """Return the text of a completion: all turns, and what its environment wrote."""
    if pieces is None or not any(segment.is_observed for segment in completion.segments):
        return visible(completion.text)
    return visible("".join(pieces.split(completion.tokens)))


def _tokens(completion: Completion, pieces: TokenPieces | None) -> str:
    """Return a line per token."""
    tokens = completion.tokens
    texts = pieces.split(tokens) if pieces is not None else [""] * len(tokens)
    columns = zip(tokens, texts, completion.logprobs, versions_of(completion), strict=False)
    return "\n".join(
        f"{token:>8} {'observed':>10}  --  {visible(text)!r}"
        if version is None
        else f"{token:>8} {logprob:>10.4f}  v{version}  {visible(text)!r}"
        for token, text, logprob, version in columns
    )
