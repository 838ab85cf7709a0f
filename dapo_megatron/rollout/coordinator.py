"""Dynamic sampling as a reorder buffer: issue ahead, finish in any order, train in ticket order.

Prompts get tickets in the order of the stream. A forecast of the keep rate sets how many are in
flight. Completions are graded as they finish, and a group is decided by its last grade. A step
ends as soon as its N mixed groups can be committed. The engines are then interrupted, and their
unfinished completions continue in the next step with the next weights. Nothing waits for a batch,
and nothing that could be trained on is lost.

`on_policy` selects the paper's rule: strict ticket order, and every group that is open at the end
of a step expires. docs/rollout.md has a diagram.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dapo_megatron.config import OverlongConfig, RolloutConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.rollout.dispatch import Dispatcher, Driver, Events
from dapo_megatron.rollout.forecast import KeepRate
from dapo_megatron.rollout.grader_health import GraderHealth
from dapo_megatron.rollout.judge import check_lengths, judge
from dapo_megatron.rollout.ledger import Ledger, TicketState
from dapo_megatron.rollout.open_group import Completions, OpenGroup, StepEvents
from dapo_megatron.rollout.staleness import StalenessBound
from dapo_megatron.types import (
    Collected,
    Completion,
    Finish,
    Outcome,
    StarvedError,
    Stopped,
)

logger = logging.getLogger(__name__)

SavePoint = tuple[dict[str, Any], Completions]
"""State of the coordinator, and the completions that it refers to."""

BOUND = 30
"""Default of rollout.max_prompts_per_step, in units of prompts_per_step."""


class Coordinator:
    """Collects the groups of each step. Rank 0 has the only one, and with it the tokens of all open
    groups."""

    def __init__(
        self,
        config: RolloutConfig,
        overlong: OverlongConfig,
        stream: PromptStream,
        driver: Driver,
        seed: int,
    ) -> None:
        self.ledger = Ledger()
        self.groups: dict[int, OpenGroup] = {}
        """Groups of all open tickets, in ticket order."""
        self.keep_rate = KeepRate(
            prior=config.expected_keep_rate if config.dynamic_sampling else 1.0,
            prior_weight=max(4, config.prompts_per_step / 8),
        )
        self._config = config
        self._overlong = overlong
        self._stream = stream
        self._driver = driver
        sampling = Sampling(
            name=f"{seed}/train",
            max_tokens=config.max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            is_seeded=config.deterministic,
        )
        self._dispatcher = Dispatcher(driver, sampling, self.groups)
        self._ended: list[tuple[OpenGroup, Outcome]] = []  # not returned by `collect` yet
        self._outcomes: dict[str, Counter[str]] = {}  # counts by data set, over the whole run
        self._graders = GraderHealth(config.prompts_per_step)
        self._step = StepEvents()  # since the last step, also in `sample_ahead`
        self._bound = config.max_prompts_per_step or BOUND * config.prompts_per_step
        self._max_overtake = 0 if config.on_policy else config.max_overtake
        self._staleness = StalenessBound(config.max_staleness, config.prompts_per_step)

    def collect(self, version: int, on_progress: Callable[[int], None]) -> Collected:
        """Collect the groups of one step. `version` is the version of the current weights; a
        carried group may contain tokens of earlier versions.

        Raises EnginesLost if no engine is left; after a sync it can be called again.

        Raises StarvedError if the prompt bound is reached with too few groups (`at_bound: fail`)
        or with none (`train_partial`), or if no completion of a data set can be graded. Raises
        Stopped if a rank was asked to stop. After either error `state` can be saved.
        """
        step = self._step = replace(self._step, version=version)
        start = self.save_point() if self._config.deterministic else None
        grade_seconds = self._driver.grade_seconds
        self._expire(step)
        self._dispatcher.start(version)
        for group in self.groups.values():
            self._submit(group)
        while (chosen := self._commit(step)) is None:
            self._top_up(step, self._config.prompts_per_step)
            events = self._dispatcher.advance()
            self._handle(events, step)
            if self._dispatcher.is_broken:
                self._go_on_without_lost(step)
            if events.stop:
                raise self._stopped(events.stop, step, start)
            if failure := self._graders.failure(self._driver.last_errors):
                raise self._starved(failure, step)
            on_progress(min(self._num_ready(), self._config.prompts_per_step))
        self._interrupt(step)
        return self._close(step, chosen, self._driver.grade_seconds - grade_seconds)

    def sample_ahead(self, version: int, is_over: Callable[[], bool]) -> None:
        """Sample with weights `version` until `is_over`, while the policy trains on what `collect`
        returned. What is then ready for the next step counts as in flight, so groups do not become
        older than without training."""
        step = self._step = replace(self._step, version=version)
        self._dispatcher.start(version)
        for group in self.groups.values():
            self._submit(group)
        stop = ""
        while not is_over() and not stop:
            self._top_up(step, 0)
            events = self._dispatcher.advance()
            self._handle(events, step)
            if self._dispatcher.is_broken:
                self._go_on_without_lost(step)
            stop = events.stop  # the loop asks all ranks after the training
        self._interrupt(step)

    def state(self) -> dict[str, Any]:
        """Return JSON-compatible state for a checkpoint, which needs `completions` too.

        While engines run, the tokens sampled since their last interruption are missing from it.
        """
        return {
            "position": self._stream.position,
            "ledger": self.ledger.state(),
            "groups": [group.to_json() for group in self.groups.values()],
            "keep_rate": [self.keep_rate.kept, self.keep_rate.decided],
            "ended": [[group.to_json(), outcome.value] for group, outcome in self._ended],
            "fates": {source: dict(counts) for source, counts in self._outcomes.items()},
            "ahead": self._step.to_json(),
        }

    def known_groups(self) -> list[OpenGroup]:
        """Return the open groups, and those that have ended since the last step."""
        return [*self.groups.values(), *(group for group, _ in self._ended)]

    def completions(self) -> dict[tuple[int, int], Completion]:
        """Return all completions that `state` refers to, by (ticket, sample)."""
        return {
            (group.ticket, sample): completion
            for group in self.known_groups()
            for sample, completion in group.completions.items()
        }

    def save_point(self) -> SavePoint:
        """Return what `restore` continues from."""
        return self.state(), self.completions()

    def restore(self, state: Mapping[str, Any], completions: Completions) -> None:
        """Continue from `state` and its `completions`. Raises CheckpointError naming a completion
        that is missing."""
        self._stream.seek(state["position"])
        self.ledger = Ledger.from_state(state["ledger"])
        groups = [OpenGroup.from_json(group, completions) for group in state["groups"]]
        self.groups.clear()
        self.groups.update((group.ticket, group) for group in groups)
        self.ledger.audit(self._open_groups())
        check_lengths(groups, self._config.max_response_tokens)
        self.keep_rate.kept, self.keep_rate.decided = state["keep_rate"]
        self._ended = [
            (OpenGroup.from_json(group, completions), Outcome(outcome))
            for group, outcome in state["ended"]
        ]
        self._outcomes = {source: Counter(counts) for source, counts in state["fates"].items()}
        self._step = StepEvents.from_json(state["ahead"], self.known_groups())

    # ------------------------------------------------------------------ issuing

    def _top_up(self, step: StepEvents, num_leaving: int) -> None:
        """Issue as many prompts as are wanted in flight and fit into the engines. The step will
        train on `num_leaving` of the ready groups."""
        room = math.ceil(self._dispatcher.room / self._config.samples_per_prompt)
        left = math.inf if self._config.at_bound == "wait" else self._bound - step.issued
        in_time = self._staleness.room(len(self.groups) - num_leaving)
        num_prompts = int(min(self._num_wanted(num_leaving), room, left, in_time))
        if num_prompts <= 0:
            return
        before, step.issued = step.issued, step.issued + num_prompts
        if before < self._bound <= step.issued and self._config.at_bound == "wait":
            logger.warning("%s; going on (rollout.at_bound: wait)", self._shortage(step))
        tickets = self.ledger.issue(num_prompts)
        for ticket, prompt in zip(tickets, self._stream.take(num_prompts), strict=True):
            group = OpenGroup(ticket, prompt, self._config.samples_per_prompt, step.version)
            self.groups[ticket] = group
            self._submit(group)

    def _num_wanted(self, num_leaving: int) -> int:
        """Return how many prompts to issue now if the engines have room; may be negative."""
        num_ready = self._num_ready()
        undecided = len(self.groups) - num_ready
        wanted = self._config.prompts_per_step
        if self._config.on_policy:
            return self.keep_rate.prompts_for(wanted - num_ready) - undecided
        # Little's law: with `lookahead` steps' worth of groups in flight, a group spends about
        # `lookahead` steps in flight. The ready groups that this step trains on have left; further
        # ready groups still count.
        ahead = self._config.lookahead * wanted - max(0, num_ready - num_leaving)
        return math.ceil(ahead / self.keep_rate.mean) - undecided

    def _submit(self, group: OpenGroup) -> None:
        if self._dispatcher.submit(group):
            self.ledger.move(group.ticket, TicketState.RUNNING)

    # ------------------------------------------------------------------ events

    def _handle(self, events: Events, step: StepEvents) -> None:
        for ticket, completion in events.sampled:
            group = self.groups[ticket]
            group.completions[completion.sample] = completion
            if group.is_sampled:
                self.ledger.move(ticket, TicketState.GRADING)
        for ticket, sample, grade, grading in events.graded:
            if ticket not in self.groups:  # expired at the end of an on_policy step
                continue
            group = self.groups[ticket]
            group.set_grade(sample, grade)
            source = group.prompt.source
            step.gradings[source, "unparsed" if grade and not grade.parsed else grading] += 1
            if grade is not None:
                self._graders.graded(source)
            if group.is_decided:
                self._decide(group, step)
        step.turn_counts.update(events.turn_counts)

    def _decide(self, group: OpenGroup, step: StepEvents) -> None:
        """Decide whether a group is trained on, after its last grade."""
        finished = group.group()
        outcome = (
            Outcome.ABSTAINED if group.ungradable else judge(finished, self._config, self._overlong)
        )
        if outcome is Outcome.ABSTAINED:
            self._graders.abstained(group.prompt.source)
        step.decided.append(finished)
        self.keep_rate.observe(outcome is None)
        if outcome is None:
            group.is_ready = True
            self.ledger.move(group.ticket, TicketState.READY)
        else:
            self._end(group, outcome)

    # ------------------------------------------------------------------ ending a step

    def _commit(self, step: StepEvents) -> list[OpenGroup] | None:
        """Return the groups to train on, or None if the step has to collect more."""
        wanted, num_ready = self._config.prompts_per_step, self._num_ready()
        if num_ready >= wanted:
            return self._first_ready(wanted, step.version)
        undecided = len(self.groups) - num_ready
        if undecided or step.issued < self._bound or self._config.at_bound == "wait":
            return None
        if num_ready and self._config.at_bound == "train_partial":
            return list(self.groups.values())
        raise self._starved(self._shortage(step) + _ADVICE, step)

    def _first_ready(self, wanted: int, version: int) -> list[OpenGroup] | None:
        """Return the first `wanted` ready groups in ticket order, or None if they must wait.

        A group that is not ready can be overtaken in at most `max_overtake` steps. After that, all
        later groups wait for it. Slow groups are never dropped, because that would bias training
        towards short answers.
        """
        chosen: list[OpenGroup] = []
        for group in self.groups.values():
            if group.is_ready:
                chosen.append(group)
                if len(chosen) == wanted:
                    return chosen if self._staleness.allows(chosen, self.groups, version) else None
            elif group.overtaken >= self._max_overtake:
                return None
        return None

    def _close(self, step: StepEvents, chosen: list[OpenGroup], grade_seconds: float) -> Collected:
        train = [group.group() for group in chosen]
        for group in chosen:
            self._end(group, Outcome.TRAINED)
        for ticket, group in list(self.groups.items()):
            if self._config.on_policy:
                self._end(group, Outcome.EXPIRED)
            elif not group.is_ready and ticket < chosen[-1].ticket:
                group.overtaken += 1
        forecast = self.keep_rate.mean
        self.keep_rate.forget()
        self._step = StepEvents()
        ended, self._ended = self._ended, []
        return Collected(
            train=train,
            ended=sorted(
                ((group.group(), outcome) for group, outcome in ended),
                key=lambda item: item[0].ticket,
            ),
            decided=step.decided,
            version=step.version,
            counts=self.ledger.close_step(self._open_groups()),
            gradings=step.gradings,
            turn_counts=step.turn_counts,
            keep_rate=forecast,
            interrupted=sum(
                completion.finish is Finish.UNFINISHED
                for group in self.groups.values()
                for completion in group.completions.values()
            ),
            grade_seconds=grade_seconds,
        )

    def _go_on_without_lost(self, step: StepEvents) -> None:
        """Go on after a replica was lost. Raises EnginesLost, after which `collect` can be called
        again, if it was the last one."""
        self._interrupt(step)
        self._dispatcher.restart()
        for group in self.groups.values():
            self._submit(group)

    def _interrupt(self, step: StepEvents) -> None:
        """Stop the engines, handle their last events, and store unfinished completions in their
        groups. Groups with requests that lost replicas had are sampled again as a whole, because
        those that had finished elsewhere tend to be short."""
        events = self._dispatcher.interrupt()
        self._handle(events, step)
        for ticket, completion in events.unfinished:
            self.groups[ticket].completions[completion.sample] = completion
        for ticket, state in self.ledger.open.items():
            if state is TicketState.RUNNING:
                self.ledger.move(ticket, TicketState.ISSUED)
        for ticket in sorted(events.orphans & self.groups.keys()):
            self.groups[ticket].reset()
            self.ledger.reissue(ticket)

    def _expire(self, step: StepEvents) -> None:
        """Expire ready groups that are older than `max_age` versions, but no unfinished group.

        With on_policy, also expire unfinished groups with tokens of older weights, which a resumed
        run may have.
        """
        on_policy = self._config.on_policy
        max_age = 0 if on_policy else self._config.max_age
        for group in list(self.groups.values()):
            may_expire = group.is_ready or (on_policy and group.completions)
            if may_expire and step.version - group.oldest_version > max_age:
                self._end(group, Outcome.EXPIRED)

    def _end(self, group: OpenGroup, outcome: Outcome) -> None:
        self.ledger.close_ticket(group.ticket, outcome)
        self._outcomes.setdefault(group.prompt.source, Counter())[outcome.value] += 1
        self._ended.append((group, outcome))
        del self.groups[group.ticket]

    def _open_groups(self) -> dict[int, bool]:
        """Return whether each open group is ready, by ticket, for `Ledger.audit`."""
        return {ticket: group.is_ready for ticket, group in self.groups.items()}

    def _num_ready(self) -> int:
        return self.ledger.num_ready

    # ------------------------------------------------------------------ errors

    def _starved(self, message: str, step: StepEvents) -> StarvedError:
        """Stop the engines, so that `state` is complete, and return the error to raise."""
        self._interrupt(step)
        self._step = StepEvents()  # a resumed run has the whole bound again
        return StarvedError(message)

    def _stopped(self, by: str, step: StepEvents, start: SavePoint | None) -> Stopped:
        """Stop the engines and return the error to raise.

        All tokens sampled so far are carried. A deterministic run returns to the start of the step
        instead, because an interrupted completion continues with other random numbers.
        """
        self._interrupt(step)
        self._step = StepEvents()
        if start is not None:
            self.restore(*start)
        return Stopped(f"stopped by {by}")

    def _shortage(self, step: StepEvents) -> str:
        by_source = "; ".join(
            f"{source}: "
            + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            for source, counts in self._outcomes.items()
        )
        return (
            f"dynamic sampling: {self._num_ready()} of {self._config.prompts_per_step} mixed "
            f"groups after {step.issued} prompts (rollout.max_prompts_per_step). "
            f"Groups ended in the run so far, by data set: {by_source or 'none'}"
        )


_ADVICE = (
    ". If nearly all groups are all_wrong, the data set is too hard for the model or its grader "
    "rejects the answer format (see samples/): change data.train or its grader; if all_correct, "
    "it is too easy: change data.train"
)
