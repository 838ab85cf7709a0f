"""`samples RUN_FOLDER`: prints recorded groups, with the texts of their completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text

from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.report.rollouts import graded_as
from dapo_megatron.report.rollouts_table import SIGNS
from dapo_megatron.report.token_text import TokenPieces, find_tokenizer
from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.rollout.recorded import require_steps, step_completions, step_summaries
from dapo_megatron.rollout.sample_index import IndexedGroup, display_values, groups_of
from dapo_megatron.text import visible
from dapo_megatron.types import ConfigError

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
    chosen = list(_select(steps, selection))
    if not chosen:
        raise ConfigError(_nothing(steps, selection))
    checkpoints = sorted((run_folder / "checkpoints").glob("step_*"), reverse=True)
    pieces = find_tokenizer(run_folder, None, checkpoints) if with_tokens else None
    console = LiteralConsole(highlight=False, soft_wrap=True)
    for step, groups in groupby(chosen, key=lambda pair: pair[0]):
        tickets = [group.ticket for _, group in groups]
        rows = sorted(
            step_completions(steps[step], tickets),
            key=lambda row: (row.ticket, row.completion.sample),
        )
        for _, members in groupby(rows, key=lambda row: row.ticket):
            _print_group(console, step, list(members), pieces, with_tokens=with_tokens)


def _select(steps: dict[int, Path], selection: Selection) -> Iterator[tuple[int, IndexedGroup]]:
    """Yield the selected groups with their steps, by ticket within a step."""
    num_left = len({*selection.tickets}) or selection.num
    wanted = [selection.step] if selection.step is not None else list(steps)
    if selection.step is None and not selection.tickets:
        wanted = wanted[-1:]
    for step in wanted:
        if step not in steps:
            continue
        for group in groups_of(step_summaries(steps[step])):
            if not num_left:
                return
            if selection.tickets and group.ticket not in selection.tickets:
                continue
            if selection.outcome is not None and group.outcome != selection.outcome:
                continue
            num_left -= 1
            yield step, group


def _nothing(steps: dict[int, Path], selection: Selection) -> str:
    """Return the message for a selection without groups."""
    recorded = list(steps)
    if selection.step is not None and selection.step not in steps:
        return f"--step: {selection.step} is not recorded; choose {recorded[0]} to {recorded[-1]}"
    kind = f" with outcome {selection.outcome}" if selection.outcome else ""
    tickets = f" of ticket {', '.join(map(str, selection.tickets))}" if selection.tickets else ""
    step = f"step {selection.step}" if selection.step is not None else "the run"
    return f"no group{tickets}{kind} in {step}; leave out --ticket, --outcome or --step"


def _print_group(
    console: LiteralConsole,
    step: int,
    rows: Sequence[CompletionRow],
    pieces: TokenPieces | None,
    *,
    with_tokens: bool,
) -> None:
    first = rows[0]
    console.rule(
        Text(f"step {step}, ticket {first.ticket}: {first.outcome}, {first.prompt.source}"),
        align="left",
    )
    console.print(Text(visible(first.prompt.text), style="bold"))
    console.print(Text(f"truth: {visible(first.prompt.truth) or 'none'}"))
    for row in rows:
        console.print()
        console.print(_headline(step, row))
        if with_tokens:
            _print_tokens(console, row, pieces)
        else:
            console.print(Text(visible(row.completion.text)))
    console.print()


def _headline(step: int, row: CompletionRow) -> Text:
    completion = row.completion
    values = display_values(step, completion)
    graded = graded_as(completion.grade)
    facts = [
        f"{completion.num_tokens:,} tokens",
        completion.finish.value,
        f"age {values['age']}" if values["age"] is not None else "",
        f"log-prob {values['logprob_mean']}" if values["logprob_mean"] is not None else "",
        f"reward {row.reward:.3g}" if row.reward is not None else "",
        f"answer {visible(completion.grade.pred)!r}" if completion.grade is not None else "",
    ]
    return Text.assemble(
        f"sample {completion.sample}  ",
        (f"{SIGNS[graded]} {graded}", STYLES[graded]),
        "  ",
        ", ".join(filter(None, facts)),
    )


def _print_tokens(console: LiteralConsole, row: CompletionRow, pieces: TokenPieces | None) -> None:
    completion = row.completion
    tokens = completion.tokens.tolist()
    texts = pieces.split(tokens) if pieces is not None else [""] * len(tokens)
    versions = [
        part.version
        for part in completion.segments
        for _ in range(min(part.num_tokens, len(tokens)))
    ]
    columns = zip(tokens, texts, completion.logprobs, versions, strict=False)
    for token, text, logprob, version in columns:
        console.print(Text(f"{token:>8} {logprob:>10.4f}  v{version}  {visible(text)!r}"))
