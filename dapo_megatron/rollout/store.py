"""Completions that the leader of a replica holds: tokens, log-probs and texts of open tickets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from dapo_megatron.rollout.completion_rows import CompletionRow
from dapo_megatron.types import Completion, DapoError, Grade, Prompt


class CompletionStore:
    """Completions of open tickets that one replica has sampled, finished or not. Its leader alone
    has a filled one."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}
        self._completions: dict[int, dict[int, Completion]] = {}
        self._saved = self._copy()

    def put(self, ticket: int, prompt: Prompt, completion: Completion) -> None:
        """Store a completion, or replace it by its continuation."""
        self._prompts[ticket] = prompt
        self._completions.setdefault(ticket, {})[completion.sample] = completion

    def get(self, ticket: int, sample: int) -> Completion:
        """Return a completion. Raises DapoError if it is not here."""
        completion = self._completions.get(ticket, {}).get(sample)
        if completion is None:
            raise DapoError(f"ticket {ticket}, sample {sample}: this replica does not hold it")
        return completion

    def num_tokens(self, ticket: int, sample: int) -> int:
        """Return the number of tokens of a completion; 0 if it is not here."""
        completion = self._completions.get(ticket, {}).get(sample)
        return 0 if completion is None else completion.num_tokens

    def prompt(self, ticket: int) -> Prompt:
        """Return the prompt of a ticket. Raises KeyError if no completion of it is here."""
        return self._prompts[ticket]

    def set_grade(self, ticket: int, sample: int, grade: Grade | None) -> None:
        """Add a grade. Does nothing if the ticket is closed."""
        completions = self._completions.get(ticket, {})
        if sample in completions:
            completions[sample] = replace(completions[sample], grade=grade)

    def take(self, ticket: int, sample: int) -> Completion:
        """Remove and return a completion that continues on another replica. Raises DapoError if it
        is not here."""
        completion = self.get(ticket, sample)
        del self._completions[ticket][sample]
        if not self._completions[ticket]:
            del self._completions[ticket], self._prompts[ticket]
        return completion

    def close(self, ticket: int) -> list[CompletionRow]:
        """Remove and return the completions of a ticket; none if it has none here."""
        completions = self._completions.pop(ticket, {})
        prompt = self._prompts.pop(ticket, None)
        return [
            CompletionRow(ticket, prompt, completion)
            for _, completion in sorted(completions.items())
            if prompt is not None
        ]

    def rows(self) -> list[CompletionRow]:
        """Return all completions, sorted by ticket and sample. The rows share their tokens."""
        return [
            CompletionRow(ticket, self._prompts[ticket], completion)
            for ticket, completions in sorted(self._completions.items())
            for _, completion in sorted(completions.items())
        ]

    def inventory(self) -> list[tuple[int, int, int]]:
        """Return (ticket, sample, number of tokens) of every completion."""
        return [
            (ticket, sample, completion.num_tokens)
            for ticket, completions in self._completions.items()
            for sample, completion in completions.items()
        ]

    def keep(self, wanted: Collection[tuple[int, int]]) -> None:
        """Drop all completions but those `wanted`, given as (ticket, sample)."""
        self.fill(row for row in self.rows() if (row.ticket, row.completion.sample) in wanted)

    def fill(self, rows: Iterable[CompletionRow]) -> None:
        """Replace all completions."""
        self._prompts, self._completions = {}, {}
        for row in rows:
            self.put(row.ticket, row.prompt, row.completion)

    def save_point(self) -> None:
        """Remember the current completions for `roll_back`."""
        self._saved = self._copy()

    def forget_save_point(self) -> None:
        """Free what only `roll_back` would need."""
        self._saved = ({}, {})

    def roll_back(self) -> None:
        """Return to the completions at `save_point`."""
        self._prompts, self._completions = self._saved
        self.save_point()

    def _copy(self) -> tuple[dict[int, Prompt], dict[int, dict[int, Completion]]]:
        completions = {ticket: dict(samples) for ticket, samples in self._completions.items()}
        return dict(self._prompts), completions
