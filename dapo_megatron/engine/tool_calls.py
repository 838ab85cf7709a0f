"""Reads the tool calls of a turn with vLLM's parsers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dapo_megatron.data.conversation import Conversation
from dapo_megatron.types import ConfigError, DataError

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser

AUTO = (
    *("hermes", "llama3_json", "glm45", "glm47", "qwen3_coder", "deepseek_v3", "deepseek_v31"),
    *("deepseek_v32", "kimi_k2", "mistral", "minimax_m2", "pythonic", "phi4_mini_json"),
)
"""Parsers that `auto` tries, in this order."""
_QUESTION = {"role": "user", "content": "?"}
_START_TOKENS = ("tool_call_start_token", "tool_calls_start_token", "bot_token")
"""Attributes of vLLM's parsers with the token that starts a call."""
_THINKING = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)
"""Thinking at the start of a turn. The same words further on are text."""
_MARKS = ("<tool_call>", "<arg_key>", "<arg_value>", "<function", "<parameter")
MAX_MARKS = 64
"""Maximum number of each of these marks in a turn. Some parsers take a time that grows with a high
power of it."""
_EXAMPLES = {"string": "12 * 34", "integer": 3, "number": 1.5, "boolean": True}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    tool: str
    arguments: dict[str, Any]


class CallReader:
    """Reads the calls of turns in conversations with tools. Raises ConfigError if vLLM's parser
    `name` is unknown, or does not read what the model's chat template writes."""

    def __init__(self, name: str, conversation: Conversation) -> None:
        from vllm.tool_parsers import ToolParserManager

        # A parser logs a stack trace for each broken call that a model writes.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        known = ToolParserManager.list_registered()
        if name != "auto" and name not in known:
            raise ConfigError(
                f"rollout.turns.tool_parser: vLLM has no parser {name!r}; it has {', '.join(known)}"
            )
        self._conversation = conversation
        call = _example(conversation)
        text = _rendered(conversation, call)
        prompt = conversation.render([_QUESTION], starts_turn=True)
        is_thinking = prompt.rfind("<think>") > prompt.rfind("</think>")
        self._begun = "<think>" if is_thinking else ""
        for candidate in AUTO if name == "auto" else (name,):
            self._parser = ToolParserManager.get_tool_parser(candidate)
            try:
                if self._read(text.rpartition("</think>")[2])[1] == [call]:
                    self.name = candidate
                    return
            except ValueError:
                continue
        reads = "none of vLLM's common parsers reads" if name == "auto" else f"{name} does not read"
        raise ConfigError(
            f"rollout.turns.tool_parser: {reads} the calls of tools that the model's chat template "
            f"writes, such as {text!r}; name one of {', '.join(known)}"
        )

    def calls(self, turn: str) -> list[Call]:
        """Return the calls of a turn, given with its special tokens. Calls in thinking do not
        count. Raises ValueError, with a text for the model, if a call cannot be read."""
        return self.read(turn)[1]

    def read(self, turn: str) -> tuple[str, list[Call]]:
        """Return the text of a turn without its calls, and the calls. See `calls`."""
        text = self._begun + turn
        thinking = _THINKING.match(text)
        start = thinking.end() if thinking else 0
        content, calls = self._read(text[start:])
        return (text[:start] + content).removeprefix(self._begun), calls

    def _read(self, answer: str) -> tuple[str, list[Call]]:
        """Return text and calls of a turn without its thinking."""
        if max(map(answer.count, _MARKS)) > MAX_MARKS:
            raise ValueError("too many calls of tools, or too many arguments")
        try:  # some parsers refuse a tokenizer that lacks their tokens
            parser = self._new_parser()
            parsed = parser.extract_tool_calls(answer, self._request)
        except Exception as error:  # a parser may raise anything for what a model writes
            raise ValueError("this call of a tool cannot be read") from error
        if not parsed.tools_called:
            starts = {getattr(parser, name, None) for name in _START_TOKENS} - {None, ""}
            if any(isinstance(start, str) and start in answer for start in starts):
                raise ValueError("this call of a tool cannot be read")
        calls = [_call(each.function.name, each.function.arguments) for each in parsed.tool_calls]
        return (parsed.content or "" if calls else answer), calls

    def _new_parser(self) -> ToolParser:
        """Return a parser for one turn. Parsers have state."""
        parser = self._parser(self._conversation.tokenizer, self._request.tools)
        # Some leave out calls of unknown tools. The environment answers them with an error.
        if (engine := getattr(parser, "_parser_engine", None)) is not None:
            settings = engine.parser_engine_config
            engine.parser_engine_config = replace(settings, validate_tool_names=False)
        return parser

    @cached_property
    def _request(self) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest(
            messages=[], tools=list(self._conversation.tools or ()), skip_special_tokens=False
        )


def _call(tool: str, arguments: str) -> Call:
    try:
        values = json.loads(arguments or "{}")
        json.dumps([tool, values], ensure_ascii=False).encode()  # halves of characters
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{tool}: its arguments are not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{tool}: its arguments must be a JSON object")
    return Call(tool, values)


def _example(conversation: Conversation) -> Call:
    """Return a call of the first tool with arguments of plain types."""
    function: Mapping[str, Any] = (conversation.tools or [{}])[0]["function"]
    arguments = {
        name: _EXAMPLES[kind]
        for name, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
        if isinstance(schema, dict) and isinstance(kind := schema.get("type"), str)
        if kind in _EXAMPLES
    }
    return Call(function["name"], arguments)


def _rendered(conversation: Conversation, call: Call) -> str:
    """Return a turn with a call, as the chat template writes it."""
    function = {"name": call.tool, "arguments": call.arguments}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    try:
        start = conversation.render([_QUESTION], starts_turn=False)
        return conversation.render([_QUESTION, turn], starts_turn=False).removeprefix(start)
    except DataError as error:
        raise ConfigError(f"the chat template cannot write calls of tools: {error}") from error
