"""Turns between the model and the environments of completions.

A completion that calls a tool is unfinished, and waits for tokens that somebody else writes. When
its turn has been sampled, its calls go to its instance of the environment, and the answers are
appended to its tokens as observed ones. Then it is sampled on, like an interrupted completion.

A completion that has tokens after a turn was answered before. The same code then shows that turn to
the instance, and compares its answer instead of appending it.

An instance that is still here after a pause goes on where it was. Otherwise a new one is brought to
the same state: it gets the turns of the completion again, if the environment says that it is
repeatable, and must answer what it answered before.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dapo_megatron.config import ENVIRONMENT_GRADER, Config
from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.continuation import observe
from dapo_megatron.engine.messages import Sampling, sample_seed
from dapo_megatron.engine.tool_calls import Call, CallReader
from dapo_megatron.environments.pool import LOST, EnvironmentPool
from dapo_megatron.environments.process import Answer, Described, Request
from dapo_megatron.rewards.registry import as_grade
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest, Segment, turns

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine

logger = logging.getLogger(__name__)

RESTARTS = 2
"""Number of times that a completion is sampled anew because its environment failed. After that it
has no grade, and its group abstains."""

Key = tuple[str, int, int]
"""Name of the sampling, ticket, sample."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion that has ended. It has a grade if its environment gives it. `cause` says why it
    cannot have one, if its environment failed; else it is empty."""

    ticket: int
    prompt: Prompt
    completion: Completion
    cause: str = ""


@dataclass(slots=True)
class _Talk:
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
    asked: float = 0.0
    """Time of the last request to the instance, as time.monotonic()."""


class Turns:
    """The completions of an engine server that talk to environments. Call it from one thread."""

    def __init__(self, config: Config, engine: VllmEngine, pool: EnvironmentPool) -> None:
        self._limits, self._engine, self._pool = config.rollout.turns, engine, pool
        sources = (*config.data.train, *config.evaluation.sets)
        self._gives_reward = {s.name for s in sources if s.grader == ENVIRONMENT_GRADER}
        self._environments: dict[str, Described] = pool.described
        self._conversations = {
            name: Conversation(
                engine.tokenizer,
                engine.stop_ids,
                config.data.chat_template_kwargs,
                described.descriptions,
            )
            for name, described in pool.described.items()
        }
        self._readers = {
            name: CallReader(self._limits.tool_parser, self._conversations[name])
            for name, described in pool.described.items()
            if not described.has_step
        }
        self.sampling: Sampling | None = None
        """Sampling of the phase."""
        self._talks: dict[Key, _Talk] = {}
        self._to_sample: list[SampleRequest] = []
        self._ended: list[Ended] = []
        self._restarted: set[tuple[int, int]] = set()
        self._counts: dict[str, float] = {}
        self.last_errors: dict[str, str] = {}
        """Last failure of an environment, by data set."""

    def close(self) -> None:
        """Kill all instances."""
        self._pool.close()

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for their environment."""
        return sum(talk.is_waiting and not talk.is_kept for talk in self._talks.values())

    # ------------------------------------------------------------------ in

    def begin(self, request: SampleRequest) -> None:
        """Begin a completion, or go on with one that rank 0 has sent."""
        key = self._key(request)
        talk = self._talks.get(key)
        if talk is not None and _continues(request.so_far, talk):
            talk.request, talk.completion, talk.is_kept = request, request.so_far, False
            talk.asked = time.monotonic()
            answer, talk.kept_answer = talk.kept_answer, None
            if answer is not None:
                self._take_answer(key, talk, answer)
            elif not talk.is_waiting:
                self._advance(key, talk)
            return
        talk = self._talks[key] = _Talk(request, request.so_far)
        if self._was_shown(talk.completion) and not self._described(talk).is_repeatable:
            self._forget_tokens(talk)
        self._start(key, talk)

    def _was_shown(self, completion: Completion | None) -> bool:
        """Return whether an instance has got a turn of a completion."""
        if completion is None:
            return False
        kinds = [is_observed for is_observed, _, _ in turns(completion.segments)]
        return True in kinds[1:] or completion.tokens[-1] in self._engine.stop_ids

    def take(self, request: SampleRequest, completion: Completion) -> None:
        """Take a completion whose turn has been sampled."""
        key = self._key(request)
        talk = self._talks[key]
        talk.completion = completion
        if completion.finish is Finish.STOP:
            self._advance(key, talk)
        elif completion.num_tokens < request.max_tokens:
            self._end(key, talk, Finish.TURN_LENGTH)
        else:
            self._end(key, talk, Finish.LENGTH)

    def collect(self) -> tuple[list[SampleRequest], list[Ended]]:
        """Take the answers that have arrived. Return the requests to sample now, and the
        completions that have ended."""
        for key, answer in self._pool.collect():
            talk = self._talks.get(key)  # type: ignore[call-overload]
            if talk is None:
                continue
            if talk.is_kept and talk.is_waiting:
                talk.kept_answer = answer
            elif talk.is_waiting:
                self._take_answer(key, talk, answer)  # type: ignore[arg-type]
            else:
                talk.is_lost = answer.cause in LOST
        to_sample, self._to_sample = self._to_sample, []
        ended, self._ended = self._ended, []
        return to_sample, ended

    def interrupt(
        self, sampled: Sequence[tuple[SampleRequest, Completion]]
    ) -> tuple[list[tuple[SampleRequest, Completion]], list[Ended]]:
        """End the phase, in which the engine has `sampled` these unfinished completions. Return all
        unfinished completions, and those that have ended.

        Completions with tokens of the model keep their instances until the end of the next phase of
        this name. The others are begun anew.
        """
        for request, sampled_so_far in sampled:
            self._talks[self._key(request)].completion = sampled_so_far
        unfinished = []
        for key, talk in list(self._talks.items()):
            completion = talk.completion
            if key[0] != self._phase.name:
                continue
            if talk.is_kept or completion is None or not completion.num_sampled:
                self._drop(key)
                continue
            if talk.is_waiting:
                self._count("waiting_seconds", time.monotonic() - talk.asked)
            unfinished.append((talk.request, replace(completion, finish=Finish.UNFINISHED)))
            talk.is_kept = True
        ended, self._ended = self._ended, []
        self._to_sample.clear()
        return unfinished, ended

    def news(self) -> tuple[list[tuple[int, int]], dict[str, float]]:
        """Return (ticket, sample) of the completions that are sampled anew since the last call, and
        what was counted since then."""
        restarted, self._restarted = self._restarted, set()
        counts, self._counts = self._counts, {}
        return sorted(restarted), counts

    def _count(self, what: str, amount: float = 1.0) -> None:
        self._counts[what] = self._counts.get(what, 0.0) + amount

    def spoken(self, prompt: Prompt, completion: Completion) -> list[dict[str, str]]:
        """Return who said what, as messages with the keys `role` and `content`."""
        role = self._environments[prompt.environment].role
        return [
            {
                "role": role if is_observed else "assistant",
                "content": self._engine.text(completion.tokens[start:end]),
            }
            for is_observed, start, end in turns(completion.segments)
        ]

    # ------------------------------------------------------------------ the instance

    @property
    def _phase(self) -> Sampling:
        assert self.sampling is not None
        return self.sampling

    def _key(self, request: SampleRequest) -> Key:
        return self._phase.name, request.ticket, request.sample

    def _described(self, talk: _Talk) -> Described:
        return self._environments[talk.request.prompt.environment]

    def _conversation(self, talk: _Talk) -> Conversation:
        return self._conversations[talk.request.prompt.environment]

    def _start(self, key: Key, talk: _Talk) -> None:
        """Start an instance. It has not seen anything yet."""
        prompt = talk.request.prompt
        talk.num_seen = talk.num_turns = talk.num_calls = 0
        talk.messages, talk.calls, talk.reward, talk.is_lost = [], [], None, False
        talk.is_waiting, talk.asked = True, time.monotonic()
        self._pool.stop(key)
        self._pool.start(key, prompt.environment, {**prompt.extra, "truth": prompt.truth})

    def _ask(self, key: Key, talk: _Talk, request: Request) -> None:
        talk.is_waiting, talk.asked = True, time.monotonic()
        self._pool.ask(key, request)

    def _drop(self, key: Key) -> None:
        self._pool.stop(key)
        del self._talks[key]

    def _forget_tokens(self, talk: _Talk) -> None:
        """Let a completion be sampled anew."""
        request = talk.request
        seed = request.seed
        if seed is not None:  # with the same one the same would happen again
            name = f"{self._phase.name}/{talk.num_failures}"
            seed = sample_seed(name, request.ticket, request.sample)
        talk.request = replace(request, so_far=None, seed=seed)
        talk.completion = None
        self._restarted.add((request.ticket, request.sample))
        self._count("restarts")

    def _fail(self, key: Key, talk: _Talk, cause: str, text: str) -> None:
        """Go on after a failure of the environment: with another instance, if the process died and
        may be asked again; else sample the completion anew, or end it without a grade."""
        source = talk.request.prompt.source
        self._count(f"failed/{cause}")
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

    def _placeholder(self, talk: _Talk) -> Completion:
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

    def _advance(self, key: Key, talk: _Talk) -> None:
        """Show the instance the next turn that it has not seen, or have one sampled."""
        completion = talk.completion
        turn: Sequence[int] = ()
        if completion is not None:
            turn = completion.tokens[talk.num_seen : _end_of(completion, talk.num_seen)]
            is_last = talk.num_seen + len(turn) == completion.num_tokens
            if turn and is_last and turn[-1] not in self._engine.stop_ids:
                turn = ()  # it is not complete
        if not turn:
            self._sample(talk)
        elif talk.is_lost and (not talk.num_turns or self._described(talk).is_repeatable):
            self._start(key, talk)
        elif talk.is_lost:
            self._fail(key, talk, "crash", "its process has ended")
        else:
            self._show(key, talk, turn)

    def _sample(self, talk: _Talk) -> None:
        completion, limit = talk.completion, self._limits.max_turn_tokens
        num_tokens = 0 if completion is None else completion.num_tokens
        request = talk.request
        seed = request.seed
        if seed is not None and completion is not None:
            seed = sample_seed(self._phase.name, request.ticket, request.sample, num_tokens)
        max_new_tokens = None if limit is None else max(1, limit - (num_tokens - talk.num_seen))
        talk.is_waiting = False
        self._to_sample.append(
            replace(request, so_far=completion, seed=seed, max_new_tokens=max_new_tokens)
        )

    def _show(self, key: Key, talk: _Talk, turn: Sequence[int]) -> None:
        """Show the instance a turn: as a whole, or its calls."""
        talk.num_turns += 1
        if self._described(talk).has_step:
            self._ask(key, talk, Request("step", turn=self._engine.text(turn)))
            return
        name = talk.request.prompt.environment
        try:
            talk.calls = self._readers[name].calls(self._engine.text(turn, is_raw=True))
        except ValueError as error:
            self._count("unread_calls")
            talk.messages = [self._message(talk, f"error: {error}")]
        if self._described(talk).is_stateless and self._skip_answers(talk):
            self._advance(key, talk)
        elif not talk.calls and not talk.messages:
            self._end(key, talk, Finish.STOP)
        elif talk.num_turns >= self._limits.max_turns:
            self._end(key, talk, Finish.TURNS)
        elif talk.num_calls + len(talk.calls) > self._limits.max_calls:
            self._end(key, talk, Finish.CALLS)
        elif talk.calls:
            self._call(key, talk)
        else:
            self._answered(key, talk)

    def _skip_answers(self, talk: _Talk) -> bool:
        """Skip the answers to the current turn, if the completion has them already."""
        completion = talk.completion
        assert completion is not None
        end_of_turn = _end_of(completion, talk.num_seen)
        if end_of_turn == completion.num_tokens:
            return False
        talk.num_calls += len(talk.calls)
        talk.messages, talk.calls = [], []
        talk.num_seen = _end_of(completion, end_of_turn)
        return True

    def _call(self, key: Key, talk: _Talk) -> None:
        call = talk.calls[0]
        talk.num_calls += 1
        self._count("calls")
        self._ask(key, talk, Request("call", tool=call.tool, arguments=call.arguments))

    def _message(self, talk: _Talk, text: str) -> Message:
        return {"role": self._described(talk).role, "content": self._observation(talk, text)}

    def _observation(self, talk: _Talk, text: str) -> str:
        conversation = self._conversation(talk)
        limit = self._limits.max_observation_tokens
        return conversation.shortened(conversation.harmless(text), limit)

    def _take_answer(self, key: Key, talk: _Talk, answer: Answer) -> None:
        self._count("waiting_seconds", time.monotonic() - talk.asked)
        talk.is_waiting = False
        if answer.cause in LOST:
            self._fail(key, talk, answer.cause, answer.text)
        elif talk.num_turns == 0:
            self._take_opening(key, talk, answer)
        else:
            self._take_reply(key, talk, answer)

    def _take_opening(self, key: Key, talk: _Talk, answer: Answer) -> None:
        if answer.cause == "error":
            self._fail(key, talk, "error", f"reset: {answer.text}")
        elif self._described(talk).has_reset:
            text = self._observation(talk, answer.text)
            self._append(key, talk, self._conversation(talk).opening(text))
        else:
            self._advance(key, talk)

    def _take_reply(self, key: Key, talk: _Talk, answer: Answer) -> None:
        """Take the answer to a turn or to a call."""
        is_error = answer.cause == "error"
        self._count("tool_errors", is_error)
        talk.messages.append(self._message(talk, "error: " * is_error + answer.text))
        if answer.reward is not None:
            talk.reward = (talk.reward or 0.0) + answer.reward
        if answer.done:
            self._end(key, talk, Finish.DONE)
            return
        del talk.calls[:1]
        if talk.calls:
            self._call(key, talk)
        elif self._described(talk).has_step and talk.num_turns >= self._limits.max_turns:
            self._end(key, talk, Finish.TURNS)
        else:
            self._answered(key, talk)

    def _answered(self, key: Key, talk: _Talk) -> None:
        """Append the answers to a turn."""
        completion = talk.completion
        assert completion is not None
        talk.num_seen = _end_of(completion, talk.num_seen)
        last = completion.tokens[talk.num_seen - 1]
        tokens = self._conversation(talk).between(last, talk.messages)
        talk.messages = []
        self._append(key, talk, tokens)

    def _append(self, key: Key, talk: _Talk, tokens: Sequence[int]) -> None:
        """Append observed tokens. If the completion has them already, an earlier instance wrote
        them, and this one must have written the same."""
        completion, start = talk.completion, talk.num_seen
        talk.num_seen += len(tokens)
        if completion is not None and start < completion.num_tokens:
            if list(completion.tokens[start : _end_of(completion, start)]) == list(tokens):
                self._advance(key, talk)
            else:
                text = "it answered otherwise than before, although it says that it is repeatable"
                self._fail(key, talk, "diverged", text)
            return
        num_tokens = start + len(tokens)
        if num_tokens >= talk.request.max_tokens:
            if completion is None:
                self._fail(key, talk, "error", "reset: its text fills max_response_tokens")
            else:
                self._end(key, talk, Finish.LENGTH)
            return
        talk.completion = observe(
            completion, tokens, sample=talk.request.sample, version=self._engine.version
        )
        self._sample(talk)

    def _end(
        self,
        key: Key,
        talk: _Talk,
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
        self._ended.append(Ended(request.ticket, request.prompt, completion, cause))
        self._drop(key)


def _end_of(completion: Completion, start: int) -> int:
    """Return the end of the turn that starts at token `start`; `start` at the completion's end."""
    return next((end for _, first, end in turns(completion.segments) if first == start), start)


def _continues(so_far: Completion | None, talk: _Talk) -> bool:
    """Return whether an instance that is still here has seen what `so_far` begins with, and nothing
    else."""
    before = talk.completion
    if so_far is None or before is None or not talk.is_kept:
        return False
    if talk.is_waiting:
        return so_far.tokens == before.tokens
    return so_far.tokens[: talk.num_seen] == before.tokens[: talk.num_seen]
