"""Turns that call tools, or that an environment answers as a whole."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dapo_megatron.config import Config
from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.talks import Key, Talk, Talks, end_of_turn, next_turn
from dapo_megatron.engine.tool_calls import CallReader
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.process import Answer, Request
from dapo_megatron.segments import turns
from dapo_megatron.types import Completion, Finish

if TYPE_CHECKING:
    from dapo_megatron.engine.engine import VllmEngine


class ToolTurns(Talks):
    """Completions whose environment has tools or the method `step`."""

    def __init__(self, config: Config, engine: VllmEngine, pool: EnvironmentPool) -> None:
        super().__init__(config, engine, pool)
        own = {name: each for name, each in pool.described.items() if not each.is_agent}
        self._conversations = {
            name: replace(self._plain, tools=each.descriptions) for name, each in own.items()
        }
        self._readers = {
            name: CallReader(self._limits.tool_parser, self._conversations[name])
            for name, each in own.items()
            if not each.has_step
        }

    def _was_seen(self, completion: Completion | None) -> bool:
        if completion is None:
            return False
        kinds = [is_observed for is_observed, _, _ in turns(completion.segments)]
        return True in kinds[1:] or completion.tokens[-1] in self._engine.stop_ids

    def _cut(self, key: Key, talk: Talk, limit: Finish) -> None:
        self._end(key, talk, limit)

    def _refuse_tokens(self, key: Key, talk: Talk) -> None:
        if talk.completion is None:
            self._fail(key, talk, "error", "reset: its text fills max_response_tokens")
        else:
            self._end(key, talk, Finish.LENGTH)

    def _take(self, key: Key, talk: Talk, answer: Answer) -> None:
        if talk.num_turns == 0:
            self._take_opening(key, talk, answer)
        else:
            self._take_reply(key, talk, answer)

    def _ask(self, key: Key, talk: Talk, request: Request) -> None:
        talk.is_waiting, talk.asked = True, time.monotonic()
        self._pool.ask(key, request)

    def _conversation(self, talk: Talk) -> Conversation:
        return self._conversations[talk.request.prompt.environment]

    def _show(self, key: Key, talk: Talk) -> None:
        assert talk.completion is not None
        turn = next_turn(talk.completion, talk.num_seen)
        talk.num_turns += 1
        if self._described(talk).has_step:
            self._ask(key, talk, Request("step", turn=self._engine.text(turn)))
            return
        name = talk.request.prompt.environment
        try:
            talk.calls = self._readers[name].calls(self._engine.text(turn, is_raw=True))
        except ValueError as error:
            self.counts["unread_calls"] += 1
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

    def _skip_answers(self, talk: Talk) -> bool:
        """Skip the answers to the current turn, if the completion has them already."""
        completion = talk.completion
        assert completion is not None
        end = end_of_turn(completion, talk.num_seen)
        if end == completion.num_tokens:
            return False
        talk.num_calls += len(talk.calls)
        talk.messages, talk.calls = [], []
        talk.num_seen = end_of_turn(completion, end)
        return True

    def _call(self, key: Key, talk: Talk) -> None:
        call = talk.calls[0]
        talk.num_calls += 1
        self.counts["calls"] += 1
        self._ask(key, talk, Request("call", tool=call.tool, arguments=call.arguments))

    def _message(self, talk: Talk, text: str) -> Message:
        return {"role": self._described(talk).role, "content": self._observation(talk, text)}

    def _observation(self, talk: Talk, text: str) -> str:
        conversation = self._conversation(talk)
        limit = self._limits.max_observation_tokens
        return conversation.shortened(conversation.harmless(text), limit)

    def _take_opening(self, key: Key, talk: Talk, answer: Answer) -> None:
        if answer.cause == "error":
            self._fail(key, talk, "error", f"reset: {answer.text}")
        elif self._described(talk).has_reset:
            text = self._observation(talk, answer.text)
            self._append(key, talk, self._conversation(talk).opening(text))
        else:
            self._advance(key, talk)

    def _take_reply(self, key: Key, talk: Talk, answer: Answer) -> None:
        """Take the answer to a turn or to a call."""
        is_error = answer.cause == "error"
        self.counts["tool_errors"] += is_error
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

    def _answered(self, key: Key, talk: Talk) -> None:
        """Append the answers to a turn."""
        completion = talk.completion
        assert completion is not None
        talk.num_seen = end_of_turn(completion, talk.num_seen)
        last = completion.tokens[talk.num_seen - 1]
        tokens = self._conversation(talk).between(last, talk.messages)
        talk.messages = []
        self._append(key, talk, tokens)
