"""Completions that talk to environments: what is the same for all kinds of environments.

A completion that calls a tool is unfinished, and waits for tokens that somebody else writes. When
its turn has been sampled, its instance of the environment answers, and the answers are appended to
its tokens as observed ones. Then it is sampled on, like an interrupted completion.

A completion that has tokens after a turn was answered before. The same code then shows that turn to
the instance, and compares its answer instead of appending it.

An instance that is still here after a pause goes on where it was. Otherwise a new one is brought to
the same state: it gets the turns of the completion again, if the environment says that it is
repeatable, and must answer what it answered before.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import ENVIRONMENT_GRADER, Config
from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.chat import Session
from dapo_megatron.engine.continuation import observe
from dapo_megatron.engine.messages import Sampling, sample_seed
from dapo_megatron.engine.tool_calls import Call
from dapo_megatron.environments.interface import Described
from dapo_megatron.environments.pool import LOST, EnvironmentPool
from dapo_megatron.environments.process import Answer
from dapo_megatron.rewards.registry import as_grade
from dapo_megatron.segments import Segment, branches, turns
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine

logger = logging.getLogger(__name__)

RESTARTS = 2
"""Number of times that a completion is sampled again because its environment failed. After that it
has no grade, and its group abstains."""
Key = tuple[str, int, int]
"""Name of the sampling, ticket, sample."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion that has ended. It has a grade if its environment gives it. `cause` is why it
    cannot have one, if its environment failed; else it is empty."""

    ticket: int
    prompt: Prompt
    completion: Completion
    cause: str = ""


@dataclass(slots=True)
class Talk:
    """A completion and its instance.

    request     with the completion that rank 0 sent, if any
    completion  so far; None without tokens
    num_seen    number of its tokens that the instance has seen or written
    messages    answers to the current turn
    calls       calls of the current turn that are not answered; the instance works on the first
    """

    request: SampleRequest
    completion: Completion | None
    num_seen: int = 0
    num_turns: int = 0
    num_calls: int = 0
    messages: list[Message] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    is_waiting: bool = False
    reward: float | None = None
    """Sum of the rewards so far; None without any."""
    is_kept: bool = False
    """Whether it waits for the next phase."""
    kept_answer: Answer | None = None
    """Answer of the instance in the meantime."""
    is_lost: bool = False
    """Whether the instance died when it had nothing to answer."""
    turn_asked_again: int = -1
    """Number of the last turn at which the instance died."""
    num_failures: int = 0
    session: Session | None = None
    """Calls of the model, if the instance is an agent."""
    asked: float = 0.0
    """Time of the last request to the instance, as time.monotonic()."""


class Talks(ABC):
    """Completions of an engine server that talk to environments of one kind."""

    def __init__(self, config: Config, engine: VllmEngine, pool: EnvironmentPool) -> None:
        self._limits, self._engine, self._pool = config.rollout.turns, engine, pool
        sources = (*config.data.train, *config.evaluation.sets)
        self._gives_reward = {s.name for s in sources if s.grader == ENVIRONMENT_GRADER}
        self._plain = Conversation(
            engine.tokenizer, engine.stop_ids, config.data.chat_template_kwargs
        )
        self.sampling: Sampling | None = None
        """Sampling of the phase."""
        self._talks: dict[Key, Talk] = {}
        self.to_sample: list[SampleRequest] = []
        self.ended: list[Ended] = []
        self.counts: dict[str, float] = defaultdict(float)
        self.last_errors: dict[str, str] = {}

    @abstractmethod
    def _show(self, key: Key, talk: Talk) -> None:
        """Take the next turn that the instance has not seen."""

    @abstractmethod
    def _take(self, key: Key, talk: Talk, answer: Answer) -> None:
        """Take an answer of an instance that has not failed."""

    @abstractmethod
    def _was_seen(self, completion: Completion | None) -> bool:
        """Return whether a new instance would have to be brought to the state of a completion."""

    @abstractmethod
    def _cut(self, key: Key, talk: Talk, limit: Finish) -> None:
        """Take a turn that was cut off at a limit."""

    @abstractmethod
    def _refuse_tokens(self, key: Key, talk: Talk) -> None:
        """Go on after observed tokens that do not fit in the completion."""

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for their environment."""
        return sum(talk.is_waiting and not talk.is_kept for talk in self._talks.values())

    # ------------------------------------------------------------------ the server

    def begin(self, request: SampleRequest) -> None:
        """Begin a completion, or go on with one that rank 0 has sent."""
        key = self._key(request)
        talk = self._talks.get(key)
        if talk is not None and _continues(request.so_far, talk):
            talk.request, talk.is_kept = request, False
            talk.completion = request.so_far or talk.completion
            talk.asked = time.monotonic()
            self._go_on(key, talk)
            return
        if talk is not None:
            self._drop(key)
        talk = self._talks[key] = Talk(request, request.so_far)
        if self._was_seen(talk.completion) and not self._described(talk).is_repeatable:
            self._forget_tokens(talk)
        self._start(key, talk)

    def _go_on(self, key: Key, talk: Talk) -> None:
        """Go on after a pause."""
        answer, talk.kept_answer = talk.kept_answer, None
        if answer is not None:
            self._take_answer(key, talk, answer)
        elif not talk.is_waiting:
            self._advance(key, talk)

    def take(self, request: SampleRequest, completion: Completion) -> None:
        """Take a completion whose turn has been sampled."""
        key = self._key(request)
        talk = self._talks[key]
        talk.completion = completion
        if completion.finish is Finish.STOP:
            self._advance(key, talk)
        elif completion.num_tokens - completion.start < request.max_tokens:
            self._cut(key, talk, Finish.TURN_LENGTH)
        else:
            self._cut(key, talk, Finish.LENGTH)

    def collect(self, key: Key, answer: Answer) -> None:
        """Take an answer that has arrived, or keep it until the completion needs it."""
        talk = self._talks.get(key)
        if talk is None:
            pass
        elif talk.is_kept and talk.is_waiting:
            talk.kept_answer = answer
        elif talk.is_waiting:
            self._take_answer(key, talk, answer)
        else:
            talk.is_lost = answer.cause in LOST

    def interrupt(
        self, sampled: Sequence[tuple[SampleRequest, Completion]]
    ) -> list[tuple[SampleRequest, Completion]]:
        """End the phase, in which the engine has `sampled` these unfinished completions. Return all
        unfinished completions.

        Completions with tokens of the model keep their instances until the end of the next phase of
        this name, and agents keep theirs. The others start again.
        """
        for request, sampled_so_far in sampled:
            self._talks[self._key(request)].completion = sampled_so_far
        unfinished = []
        for key, talk in list(self._talks.items()):
            completion = talk.completion
            if key[0] != self._phase.name:
                continue
            if talk.is_kept or completion is None or not completion.num_sampled:
                if not self._keep(talk):
                    self._drop(key)
                continue
            if talk.is_waiting:
                self.counts["waiting_seconds"] += time.monotonic() - talk.asked
            unfinished.append((talk.request, replace(completion, finish=Finish.UNFINISHED)))
            talk.is_kept = True
        self.to_sample.clear()
        return unfinished

    def _keep(self, talk: Talk) -> bool:
        """Return whether to keep an instance whose completion rank 0 does not know."""
        return False

    # ------------------------------------------------------------------ the instance

    @property
    def _phase(self) -> Sampling:
        assert self.sampling is not None
        return self.sampling

    def _key(self, request: SampleRequest) -> Key:
        return self._phase.name, request.ticket, request.sample

    def _described(self, talk: Talk) -> Described:
        return self._pool.described[talk.request.prompt.environment]

    def _start(self, key: Key, talk: Talk) -> None:
        """Start an instance. It has not seen anything yet."""
        prompt = talk.request.prompt
        talk.num_seen = talk.num_turns = talk.num_calls = 0
        talk.messages, talk.calls, talk.reward, talk.is_lost = [], [], None, False
        talk.is_waiting, talk.asked, talk.kept_answer = True, time.monotonic(), None
        self._pool.stop(key)
        row = {**prompt.extra, "truth": prompt.truth, **self._more_of_row(key, talk)}
        self._pool.start(key, prompt.environment, row)

    def _more_of_row(self, key: Key, talk: Talk) -> dict[str, Any]:
        """Return what a new instance is told besides the columns of its row."""
        return {}

    def _drop(self, key: Key) -> None:
        """Forget a completion, and kill its instance."""
        self._pool.stop(key)
        del self._talks[key]

    def _forget_tokens(self, talk: Talk) -> None:
        """Let a completion be sampled again."""
        request = talk.request
        seed = request.seed
        if seed is not None:  # with the same one the same would happen again
            name = f"{self._phase.name}/{talk.num_failures}"
            seed = sample_seed(name, request.ticket, request.sample)
        talk.request = replace(request, so_far=None, seed=seed)
        talk.completion = None
        self.counts["restarts"] += 1

    def _fail(self, key: Key, talk: Talk, cause: str, text: str) -> None:
        """Go on after a failure of the environment: with another instance, if the process died and
        may be asked again; else sample the completion again, or end it without a grade."""
        source = talk.request.prompt.source
        self.counts[f"failed/{cause}"] += 1
        if source not in self.last_errors:
            logger.warning(
                "environment of %s failed (%s); further failures are only counted: %s",
                *(source, cause, text),
            )
        self.last_errors[source] = f"environment: {text}"
        is_new = talk.turn_asked_again != talk.num_turns  # else it is the call that kills it
        if cause == "crash" and is_new and self._described(talk).is_repeatable:
            talk.turn_asked_again = talk.num_turns
            self._start(key, talk)
            return
        talk.num_failures += 1
        if talk.num_failures <= RESTARTS:
            self._forget_tokens(talk)
            self._start(key, talk)
            return
        completion = talk.completion
        if completion is None or not completion.num_sampled:
            completion = self._placeholder(talk)
        self._end(key, talk, Finish.DONE, completion, cause)

    def _placeholder(self, talk: Talk) -> Completion:
        """Return a completion of one token, which stands for one that could not begin."""
        return Completion(
            sample=talk.request.sample,
            tokens=array("i", self._engine.stop_ids[:1]),
            logprobs=array("f", [0.0]),
            text="",
            finish=Finish.DONE,
            segments=(Segment(self._engine.version, 1),),
        )

    # ------------------------------------------------------------------ one turn

    def _advance(self, key: Key, talk: Talk) -> None:
        """Show the instance the next turn that it has not seen, or have one sampled."""
        completion = talk.completion
        turn: Sequence[int] = ()
        if completion is not None:
            turn = next_turn(completion, talk.num_seen)
            is_last = talk.num_seen + len(turn) == completion.num_tokens
            if turn and is_last and turn[-1] not in self._engine.stop_ids:
                turn = ()  # it is not complete
        if not turn:
            self._sample(key, talk)
        elif talk.is_lost and (not talk.num_turns or self._described(talk).is_repeatable):
            self._start(key, talk)
        elif talk.is_lost:
            self._fail(key, talk, "crash", "its process has ended")
        else:
            self._show(key, talk)

    def _sample(self, key: Key, talk: Talk) -> None:
        """Have the current turn sampled."""
        completion, limit = talk.completion, self._limits.max_turn_tokens
        num_tokens = 0 if completion is None else completion.num_tokens
        num_new = None if limit is None else max(1, limit - (num_tokens - talk.num_seen))
        self._request(talk, num_new)

    def _request(
        self, talk: Talk, max_new_tokens: int | None, stop: tuple[str, ...] = (), name: str = ""
    ) -> None:
        """Request a turn from the engine. `name` changes the seed."""
        request, completion = talk.request, talk.completion
        seed = request.seed
        if seed is not None and completion is not None:
            name = self._phase.name + name
            seed = sample_seed(name, request.ticket, request.sample, completion.num_tokens)
        talk.is_waiting = False
        self.to_sample.append(
            replace(request, so_far=completion, seed=seed, max_new_tokens=max_new_tokens, stop=stop)
        )

    def _take_answer(self, key: Key, talk: Talk, answer: Answer) -> None:
        self.counts["waiting_seconds"] += time.monotonic() - talk.asked
        talk.is_waiting = False
        if answer.cause in LOST:
            self._fail(key, talk, answer.cause, answer.text)
        else:
            self._take(key, talk, answer)

    def _append(
        self, key: Key, talk: Talk, tokens: Sequence[int], *, is_branch: bool = False
    ) -> None:
        """Append observed tokens. If the completion has them already, an earlier instance wrote
        them, and this one must have written the same."""
        completion, start = talk.completion, talk.num_seen
        if completion is not None and start < completion.num_tokens:
            talk.num_seen += len(tokens)
            known = list(next_turn(completion, start))
            was_branch = start in dict(branches(completion.segments)[1:])
            if known == list(tokens) and is_branch == was_branch:
                self._advance(key, talk)
            else:
                text = "it answered otherwise than before, although it says that it is repeatable"
                self._fail(key, talk, "diverged", text)
            return
        num_before = 0 if is_branch or completion is None else start - completion.start
        if num_before + len(tokens) >= talk.request.max_tokens:
            self._refuse_tokens(key, talk)
            return
        talk.num_seen += len(tokens)
        talk.completion = observe(
            completion,
            tokens,
            sample=talk.request.sample,
            version=self._engine.version,
            is_branch=is_branch,
        )
        self._sample(key, talk)

    def _end(
        self,
        key: Key,
        talk: Talk,
        finish: Finish,
        completion: Completion | None = None,
        cause: str = "",
    ) -> None:
        """End a completion, by default that of the talk."""
        completion = completion or talk.completion
        assert completion is not None
        request = talk.request
        grade = None
        if request.prompt.source in self._gives_reward and not cause:
            try:
                grade = as_grade(talk.reward or 0.0)
            except ValueError as error:
                cause, self.last_errors[request.prompt.source] = "error", f"environment: {error}"
        text = self._engine.answer(completion)
        completion = replace(completion, finish=finish, text=text, grade=grade)
        self.ended.append(Ended(request.ticket, request.prompt, completion, cause))
        self._drop(key)


def end_of_turn(completion: Completion, start: int) -> int:
    """Return the end of the turn that starts at token `start`; `start` at the completion's end."""
    return next((end for _, first, end in turns(completion.segments) if first == start), start)


def next_turn(completion: Completion, start: int) -> Sequence[int]:
    """Return the tokens of the turn that starts at token `start`; none at the completion's end."""
    return completion.tokens[start : end_of_turn(completion, start)]


def _continues(so_far: Completion | None, talk: Talk) -> bool:
    """Return whether an instance that is still here has seen what `so_far` begins with, and nothing
    else."""
    before = talk.completion
    if not talk.is_kept:
        return False
    if so_far is None:  # only an agent is kept without sampled tokens
        return before is None or not before.num_sampled
    if before is None:
        return False
    if talk.is_waiting:
        return so_far.tokens == before.tokens
    return so_far.tokens[: talk.num_seen] == before.tokens[: talk.num_seen]
