"""Calls of tools as model families write them, read with vLLM's parsers."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from dapo_megatron.data.conversation import Conversation
from dapo_megatron.engine.tool_calls import Call, CallReader
from dapo_megatron.types import ConfigError
from tests.helpers.templates import FAMILIES, TOOLS, family_conversation

PARSERS = {"qwen3": "hermes", "llama3": "llama3_json", "glm45": "glm45"}


def talk_of(family: str, **kwargs: Any) -> Conversation:
    return family_conversation(family, kwargs, TOOLS)


def written(family: str, tool: str, **arguments: Any) -> str:
    """Return a call as a model of the family writes it."""
    if family == "llama3":
        return json.dumps({"name": tool, "parameters": arguments})
    if family == "qwen3":
        call = json.dumps({"name": tool, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"
    pairs = "".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for name, value in arguments.items()
    )
    return f"<tool_call>{tool}\n{pairs}</tool_call>"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gets_its_parser(family: str) -> None:
    assert CallReader("auto", talk_of(family)).name == PARSERS[family]
    for other in set(PARSERS) - {family}:  # also where the tokenizer lacks the parser's tokens
        with pytest.raises(ConfigError, match=f"{PARSERS[other]} does not read"):
            CallReader(PARSERS[other], talk_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_unknown_tools_are_calls(family: str) -> None:
    """The environment answers them with an error."""
    read = CallReader("auto", talk_of(family)).calls
    (call,) = read(written(family, "no_such_tool", text="x"))
    assert call == Call("no_such_tool", {"text": "x"})
    if FAMILIES[family].is_parallel:
        both = read(written(family, "add", number=3) + "\n" + written(family, "sub", text="3"))
        assert both == [Call("add", {"number": 3}), Call("sub", {"text": "3"})]


@pytest.mark.parametrize("family", ["qwen3", "glm45"])
def test_calls_in_thinking_do_not_count(family: str) -> None:
    read = CallReader("auto", talk_of(family)).calls
    draft, call = written(family, "add", number=1), written(family, "add", number=2)
    wanted = [Call("add", {"number": 2})]
    assert read(f"<think>{draft}") == read(f"<think>{draft}</think>\nno") == []
    assert read(f"\n<think>{draft}</think>\n{call}") == wanted
    # A model whose template starts the thinking does not write its start.
    talk = talk_of(family)
    template = talk.tokenizer.chat_template
    talk.tokenizer.chat_template = template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    read = CallReader("auto", talk).calls
    assert read(f"{draft}</think>\n{call}") == wanted
    assert read(draft) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["</think>", "<think>", "a </think> b <think>", "\n"])
def test_arguments_may_name_the_marks_of_thinking(family: str, text: str) -> None:
    call = written(family, "add", text=text)
    for thinking in ("", "<think>hm</think>") if FAMILIES[family].thinks else ("",):
        calls = CallReader("auto", talk_of(family)).calls(thinking + call)
        assert calls == [Call("add", {"text": text})]


def test_a_broken_call_is_an_error() -> None:
    read = CallReader("auto", talk_of("qwen3")).calls
    with pytest.raises(ValueError, match="cannot be read"):
        read(written("qwen3", "add", number=3)[:-20])
    with pytest.raises(ValueError, match="must be a JSON object"):
        read('<tool_call>\n{"name": "add", "arguments": [3]}\n</tool_call>')
    assert read("no call") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_calls_are_errors_and_take_no_time(family: str) -> None:
    reader = CallReader("auto", talk_of(family))
    marks = "<tool_call>add\n" + "<arg_key>a</arg_key>\n<arg_value>" * 1000
    started = time.process_time()
    for text in (
        written(family, "add", number="HALF").replace("HALF", "\\ud800"),
        written(family, "add", number="NESTED").replace('"NESTED"', '{"a":' * 20_000),
        written(family, "add", number="NESTED").replace("NESTED", "[" * 20_000),
        marks,
    ):
        try:
            for call in reader.calls(text):
                msgspec.json.encode(call.arguments)  # what reaches the environment can be sent
        except ValueError:
            continue
    assert time.process_time() - started < 5.0
    if family == "glm45":
        with pytest.raises(ValueError, match="too many"):
            reader.calls(marks)
