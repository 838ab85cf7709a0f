"""Conversations of agents with the model, as messages and as tokens.

An agent sends the whole conversation with each call. If it begins with the conversation so far,
word for word, only its new messages are rendered, and follow the tokens that were sampled.
Otherwise the call starts a new branch: the conversation is rendered as a whole, as observed tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.endpoint import ChatCall, ChatReply
from dapo_megatron.engine.tool_calls import Call, CallReader
from dapo_megatron.types import Finish

MAX_SETTINGS = 256
"""Number of different sets of tools whose templates are kept."""
ROLES = ("system", "developer", "user", "tool", "assistant")
"""Roles of messages."""


@dataclass(frozen=True, slots=True)
class Question:
    """A call's conversation. `settings` are its tools and template variables, as JSON."""

    messages: tuple[Message, ...]
    settings: str

    def continues(self, other: Question) -> bool:
        """Return whether this begins with all of `other`, and goes on."""
        start = self.messages[: len(other.messages)]
        return (
            self.settings == other.settings
            and start == other.messages
            and len(self.messages) > len(other.messages)
        )

    def with_answer(self, message: Message) -> Question:
        """Return the conversation with the answer of the model."""
        return replace(self, messages=(*self.messages, normalized(message)))


@dataclass(slots=True)
class Session:
    """The calls of an agent. They are answered one after the other.

    so_far    conversation of the last branch, with the model's answers
    call      that is being answered, and its conversation
    calls     that wait for that one
    unread    calls and their answers, for which the clients did not wait
    limit     why a call was refused, if a limit was the reason
    cut       limit that cut off the last turn
    refused   number of calls that were refused
    """

    api_key: str
    so_far: Question | None = None
    call: ChatCall | None = None
    question: Question | None = None
    calls: deque[ChatCall] = field(default_factory=deque)
    unread: list[tuple[dict[str, Any], ChatReply]] = field(default_factory=list)
    limit: Finish | None = None
    cut: Finish | None = None
    refused: int = 0

    def next_call(self) -> ChatCall | None:
        """Return the call to answer next, if none is being answered."""
        if self.call is not None and self.call.is_gone:  # clients ask again after a while
            again = (call for call in self.calls if call.body == self.call.body)
            if (same := next(again, None)) is not None:
                self.calls.remove(same)
                self.call = same
        while self.calls and self.calls[0].is_gone:  # nobody would read the answer
            self.calls.popleft()
        if self.call is not None or not self.calls:
            return None
        self.call = self.calls.popleft()
        return self.call

    def refuse_all(self, text: str) -> None:
        """Refuse all calls, because the session has ended."""
        for call in (self.call, *self.calls):
            if call is not None:
                call.refuse(text, "session_ended", 503)
        self.call = None
        self.calls.clear()


class Renderer:
    """Turns conversations into tokens, and turns of the model into messages, for any tools.

    plain        the model's conversations without tools
    tool_parser  see CallReader
    """

    def __init__(self, plain: Conversation, tool_parser: str) -> None:
        self._plain, self._tool_parser = plain, tool_parser
        template = inspect.signature(plain.tokenizer.apply_chat_template)
        self._reserved = template.parameters.keys()
        self._conversation = lru_cache(MAX_SETTINGS)(self._new_conversation)
        self._reader = lru_cache(MAX_SETTINGS)(self._new_reader)

    def question(self, call: ChatCall) -> Question:
        """Return the conversation of a call. Raises ValueError with a text for the agent, or
        ConfigError if no parser reads the calls that the template writes for its tools."""
        body = call.body
        try:
            messages = tuple(map(normalized, body["messages"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"messages: one is malformed ({error!r})") from error
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages: the last one must not be the assistant's")
        template_kwargs = body.get("chat_template_kwargs") or {}
        if taken := template_kwargs.keys() & self._reserved:
            raise ValueError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set")
        tools = body.get("tools") or None
        settings = json.dumps({"tools": tools, "template": template_kwargs})
        if tools:
            self._reader(settings)
        return Question(messages, settings)

    def opening(self, question: Question) -> list[int]:
        """Return the tokens of a whole conversation. Raises ValueError or DataError."""
        conversation = self._conversation(question.settings)
        text = conversation.render(_harmless(conversation, question.messages), starts_turn=True)
        if not (tokens := conversation.encode(text)):
            raise ValueError("messages: the chat template makes no tokens of them")
        return tokens

    def continued(self, question: Question, so_far: Question, last_token: int) -> list[int]:
        """Return the tokens from the end of the last turn to the start of the next one. Raises
        DataError."""
        conversation = self._conversation(question.settings)
        new = question.messages[len(so_far.messages) :]
        return conversation.between(last_token, _harmless(conversation, new))

    def message(
        self, call: ChatCall, question: Question, text: str, raw: str, seed: str
    ) -> tuple[Message, str]:
        """Return a turn of the model as a message, and its finish_reason, unless it was cut off.

        raw   the text with special tokens
        seed  makes the ids of its tool calls
        """
        for stop in call.stop:
            text, raw = text.partition(stop)[0], raw.partition(stop)[0]
        message: Message = {"role": "assistant", "content": text}
        if not call.request.tools or call.request.tool_choice == "none":
            return message, "stop"
        try:
            content, calls = self._reader(question.settings).read(raw)
        except ValueError:  # the agent sees what the model wrote
            return message, "stop"
        if not calls:
            return message, "stop"
        message["content"] = content or None
        message["tool_calls"] = [_tool_call(each, f"{seed}/{i}") for i, each in enumerate(calls)]
        return message, "tool_calls"

    def _new_conversation(self, settings: str) -> Conversation:
        values = json.loads(settings)
        template_kwargs = {**self._plain.template_kwargs, **values["template"]}
        return replace(self._plain, tools=values["tools"], template_kwargs=template_kwargs)

    def _new_reader(self, settings: str) -> CallReader:
        return CallReader(self._tool_parser, self._conversation(settings))


def normalized(message: Mapping[str, Any]) -> Message:
    """Return a message as templates take it and as it is compared: its text in one piece, arguments
    of calls as values, nothing empty. Raises ValueError for one that is not a text."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"messages: the role {role!r} is not one of {', '.join(ROLES)}")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("messages: only text; images and sound are not supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ValueError("messages: content is neither a text nor a list of texts")
    rest = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content", "tool_calls") and value not in (None, "", [], {})
    }
    result: Message = {"role": role, "content": content or "", **rest}
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_as_values(call) for call in calls]
    return result


def _as_values(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are values instead of JSON."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
        json.dumps(function, ensure_ascii=False).encode()  # halves of characters
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _tool_call(call: Call, seed: str) -> dict[str, Any]:
    """Return a call of a tool as OpenAI's API has it. Its id has nine letters and digits, as some
    templates require."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    number = hashlib.blake2b(seed.encode(), digest_size=5).hexdigest()[:9]
    function = {"name": call.tool, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def _harmless(conversation: Conversation, messages: Sequence[Message]) -> list[Message]:
    """Return messages without special tokens, except the marks of calls and thinking."""

    def harmless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: harmless(each) for key, each in value.items()}
        if isinstance(value, list):
            return list(map(harmless, value))
        return conversation.harmless(value) if isinstance(value, str) else value

    return [harmless(message) for message in messages]
