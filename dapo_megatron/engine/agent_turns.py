"""Turns of an agent, which leads its conversation itself: its calls to an endpoint take the place
of answers, and a sampled turn is the answer to a call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dapo_megatron.config import Config
from dapo_megatron.engine.chat import Question, Renderer, Session
from dapo_megatron.engine.continuation import cut_off, observe
from dapo_megatron.engine.endpoint import ChatCall, ChatReply, Endpoint
from dapo_megatron.engine.talks import Key, Talk, Talks, end_of_turn
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.process import Answer
from dapo_megatron.segments import branches
from dapo_megatron.types import Completion, DapoError, Finish

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine

MAX_CALLS = 64
"""Number of calls of an agent that may wait for another one. Further ones are to come again."""
MAX_REFUSED = 32
"""Number of refused calls after which an agent that goes on calling is ended."""


class AgentTurns(Talks):
    """Completions that are led by agents, which call an endpoint on `host`."""

    def __init__(
        self, config: Config, engine: VllmEngine, pool: EnvironmentPool, host: str
    ) -> None:
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.tool_parsers  # noqa: F401 - takes seconds, in which agents would time out

        super().__init__(config, engine, pool)
        self._renderer = Renderer(self._plain, self._limits.tool_parser)
        self._endpoint = Endpoint(host)

    def take_calls(self) -> None:
        """Take the calls that have arrived."""
        for call in self._endpoint.calls():
            key: Key = call.owner
            talk = self._talks.get(key)
            if talk is None or (session := _session(talk)).api_key != call.api_key:
                call.refuse("the session has ended", "session_ended", 503)
            elif len(session.calls) >= MAX_CALLS:
                call.refuse("too many calls at once", "rate_limit_exceeded", 429)
            else:
                session.calls.append(call)
                self._pool.suspend(key)
                if not talk.is_kept:
                    self._take_next_call(key, talk)

    def collect(self, key: Key, answer: Answer) -> None:
        """Take the end of an agent, after the turn that is being sampled for it."""
        talk = self._talks.get(key)
        if talk is not None and not talk.is_waiting:
            talk.kept_answer = answer
        else:
            super().collect(key, answer)

    def _go_on(self, key: Key, talk: Talk) -> None:
        completion = talk.completion
        if completion is not None and not completion.num_sampled:
            version = self._engine.version
            talk.completion = observe(None, completion.tokens, completion.sample, version)
        if not talk.is_waiting:
            self._advance(key, talk)
        elif talk.kept_answer is not None:
            super()._go_on(key, talk)
        else:
            self._take_next_call(key, talk)

    def _keep(self, talk: Talk) -> bool:
        """Keep an agent whose first answer has not begun. The next phase begins its completion,
        which has no tokens for rank 0 yet."""
        talk.is_kept, is_first = True, not talk.is_kept
        return is_first

    def _was_seen(self, completion: Completion | None) -> bool:
        return completion is not None

    def _more_of_row(self, key: Key, talk: Talk) -> dict[str, Any]:
        self._end_session(talk)
        talk.session = Session(self._endpoint.open(key))
        return {"base_url": self._endpoint.base_url, "api_key": talk.session.api_key}

    def _drop(self, key: Key) -> None:
        self._end_session(self._talks[key])
        super()._drop(key)

    def _end_session(self, talk: Talk) -> None:
        """Refuse the calls of a session, now and later."""
        if talk.session is not None:
            self._endpoint.close(talk.session.api_key)
            talk.session.refuse_all("the session has ended")
            talk.session = None

    def _cut(self, key: Key, talk: Talk, limit: Finish) -> None:
        self._show(key, talk)

    def _refuse_tokens(self, key: Key, talk: Talk) -> None:
        self._refuse_at_limit(key, talk, Finish.LENGTH)

    def _take_next_call(self, key: Key, talk: Talk) -> None:
        """Begin to answer the next call, if there is one and none is being answered."""
        session = _session(talk)
        call = session.next_call()
        if call is None:
            return
        self.counts["waiting_seconds"] += time.monotonic() - talk.asked
        talk.is_waiting = False
        for item in session.unread:
            if item[0] == call.body:
                session.unread.remove(item)
                self._answer(talk, item[1])
                self._end_call(key, talk)
                return
        try:
            question = self._renderer.question(call)
            is_branch, tokens = self._new_tokens(talk, question)
        except Exception as error:  # noqa: BLE001 - no call may end the engine
            is_known = isinstance(error, ValueError | DapoError)
            text = str(error) if is_known else f"it is malformed: {error!r}"
            self._refuse(key, talk, text, "invalid_request")
            return
        if talk.num_turns >= self._limits.max_turns:
            self._refuse_at_limit(key, talk, Finish.TURNS)
            return
        session.question = question
        self._append(key, talk, tokens, is_branch=is_branch)

    def _new_tokens(self, talk: Talk, question: Question) -> tuple[bool, list[int]]:
        """Return whether a call starts a branch, and the tokens that it adds. Raises ValueError or
        DataError."""
        completion, so_far = talk.completion, _session(talk).so_far
        if completion is not None and so_far is not None and question.continues(so_far):
            last = completion.tokens[talk.num_seen - 1]
            return False, self._renderer.continued(question, so_far, last)
        is_branch = so_far is not None
        if is_branch and self._limits.rewrites == "refuse":
            raise ValueError(
                "messages: they do not repeat the conversation so far of this session, and "
                "rollout.turns.rewrites is refuse"
            )
        return is_branch, self._renderer.opening(question)

    def _refuse(self, key: Key, talk: Talk, text: str, code: str) -> None:
        session, completion = _session(talk), talk.completion
        assert session.call is not None
        session.call.refuse(text, code)
        session.call = None
        session.refused += 1
        self.counts["refused_calls"] += 1
        self.last_errors[talk.request.prompt.source] = f"environment: call refused: {text}"
        if session.refused < MAX_REFUSED:
            self._end_call(key, talk)
        elif session.limit and completion is not None and completion.num_sampled:
            self._end(key, talk, session.limit)
        else:
            self._fail(key, talk, "error", text)

    def _refuse_at_limit(self, key: Key, talk: Talk, limit: Finish) -> None:
        """Refuse the call because of a limit. If the agent ends now, it has not failed."""
        _session(talk).limit = limit
        if limit is Finish.TURNS:
            text = f"rollout.turns.max_turns: this session has had {talk.num_turns} turns"
            self._refuse(key, talk, text, "max_turns")
        else:
            text = f"rollout.max_response_tokens: {talk.request.max_tokens} tokens are too few"
            self._refuse(key, talk, text, "context_length_exceeded")

    def _sample(self, key: Key, talk: Talk) -> None:
        completion, call = talk.completion, _session(talk).call
        assert completion is not None and call is not None
        turn = completion.tokens[talk.num_seen :]
        limits = (self._limits.max_turn_tokens, call.max_tokens)
        rooms = [limit - len(turn) for limit in limits if limit is not None]
        room = min([*rooms, talk.request.max_tokens - completion.num_tokens + completion.start])
        if room <= 0 or self._is_stopped(call, turn):
            self._show(key, talk)  # it was cut off, but its agent did not get it
        else:
            # With the seed of a call alone, all completions of a group would be the same.
            seed = call.request.seed
            self._request(talk, room, call.stop, "" if seed is None else f"/{seed}")

    def _cut_after_stop(self, completion: Completion, start: int, call: ChatCall) -> Completion:
        """Return a completion without tokens after a text that ends its last turn. The engine does
        not see such a text if an interruption has split it."""
        turn = completion.tokens[start:]
        if self._is_stopped(call, turn[:-1]):
            stops = (end for end in range(1, len(turn)) if self._is_stopped(call, turn[:end]))
            return cut_off(completion, start + next(stops))
        return completion

    def _is_stopped(self, call: ChatCall, turn: Sequence[int]) -> bool:
        """Return whether a turn has a text that ends it."""
        text = self._engine.text(turn, is_raw=True) if call.stop else ""
        return any(stop in text for stop in call.stop)

    def _show(self, key: Key, talk: Talk) -> None:
        """Answer the call with the turn that was sampled for it."""
        completion, session = talk.completion, _session(talk)
        call, question = session.call, session.question
        assert completion is not None and call is not None and question is not None
        talk.completion = completion = self._cut_after_stop(completion, talk.num_seen, call)
        start, end = talk.num_seen, end_of_turn(completion, talk.num_seen)
        branch = max(first for first, _ in branches(completion.segments) if first <= start)
        turn, text = completion.tokens[start:end], self._engine.text
        talk.num_turns += 1
        message, finish = self._renderer.message(
            call, question, text(turn), text(turn, is_raw=True), f"{key}/{talk.num_turns}"
        )
        session.limit = session.cut = None
        if turn[-1] not in self._engine.stop_ids and not self._is_stopped(call, turn):
            finish = "length"
            if end - branch >= talk.request.max_tokens:
                session.cut = Finish.LENGTH
            elif len(turn) == self._limits.max_turn_tokens:
                session.cut = Finish.TURN_LENGTH
        reply = ChatReply(
            message,
            finish,
            prompt_tokens=completion.tokens[branch:start],
            tokens=turn,
            logprobs=completion.logprobs[start:end],
            texts=[text([t], is_raw=True) for t in turn] if call.request.logprobs else (),
        )
        session.so_far, talk.num_seen = question.with_answer(message), end
        self._answer(talk, reply)
        self._end_call(key, talk)

    def _answer(self, talk: Talk, reply: ChatReply) -> None:
        session = _session(talk)
        assert session.call is not None
        session.call.answer(reply)
        if session.call.is_gone:
            session.unread.append((session.call.body, reply))

    def _end_call(self, key: Key, talk: Talk) -> None:
        """Wait for the agent, after a call was answered."""
        session = _session(talk)
        session.call = None
        talk.is_waiting, talk.asked = True, time.monotonic()
        if talk.kept_answer is not None:
            answer, talk.kept_answer = talk.kept_answer, None
            self._take_answer(key, talk, answer)
        elif session.calls:
            self._take_next_call(key, talk)
        else:
            self._pool.resume(key)

    def _take(self, key: Key, talk: Talk, answer: Answer) -> None:
        """End a completion whose agent has ended."""
        completion, session = talk.completion, _session(talk)
        if answer.cause == "error" and session.limit is None:
            self._fail(key, talk, "error", answer.text)
        elif completion is None or not completion.num_sampled:
            text = answer.text or "it returned before the model answered a call"
            self._fail(key, talk, "error", text)
        elif talk.num_seen < completion.num_tokens:
            text = "it made fewer calls than before, although it says that it is repeatable"
            self._fail(key, talk, "diverged", text)
        else:
            talk.reward = answer.reward
            for name, number in answer.numbers.items():
                self.counts[f"agent/{name}"] += number
                self.counts[f"agents_with/{name}"] += 1
            limit = session.limit if answer.cause == "error" else None
            self._end(key, talk, limit or session.cut or Finish.DONE)


def _session(talk: Talk) -> Session:
    assert talk.session is not None
    return talk.session
