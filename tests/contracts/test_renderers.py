"""The package `renderers` encodes, continues and reads conversations as is done here.

It implements the families in Python, without chat templates. So this also shows that the templates
of tests/helpers/templates.py are those of the families. `make test-contracts` installs it in
build/renderers; without it these tests are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapo_megatron.data.conversation import Conversation, Message
from dapo_megatron.engine.tool_calls import CallReader
from tests.helpers.templates import FAMILIES, TOOLS, family_conversation, sampled_turn

if importlib.util.find_spec("renderers") is None:
    pytest.skip("the package renderers is not on PYTHONPATH", allow_module_level=True)

RENDERERS = {
    "qwen3": ("qwen3:Qwen3Renderer", "Qwen3RendererConfig"),
    "llama3": ("llama_3:Llama3Renderer", "Llama3RendererConfig"),
    "glm45": ("glm45:GLM45Renderer", "GLM45RendererConfig"),
}
CASES = [
    *(("qwen3", True), ("qwen3", False)),
    ("llama3", True),
    *(("glm45", True), ("glm45", False)),
]
"""Family, and whether it may think."""
families = pytest.mark.parametrize(("family", "thinks"), CASES)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
values = {
    "number": st.integers(),
    "text": texts.map(str.strip),
    "numbers": st.lists(st.integers(), max_size=2),
    "options": st.dictionaries(texts, st.none() | st.booleans() | texts, max_size=2),
}
calls = st.fixed_dictionaries(
    {"number": values["number"]}, optional={name: values[name] for name in list(values)[1:]}
).map(
    lambda arguments: {
        "id": "1",
        "type": "function",
        "function": {"name": "add_all", "arguments": arguments},
    }
)


def both(family: str, thinks: bool, tools: list[Any] | None = TOOLS) -> tuple[Conversation, Any]:
    """Return a conversation, and the renderer with the same tokenizer."""
    kwargs = {"enable_thinking": thinks} if FAMILIES[family].thinks else {}
    talk = family_conversation(family, kwargs, tools)
    place, config = RENDERERS[family]
    module, _, kind = place.partition(":")
    renderer = getattr(importlib.import_module(f"renderers.{module}"), kind)
    configs = importlib.import_module("renderers.configs")
    # Sampled thinking stays, also when a user writes.
    return talk, renderer(
        talk.tokenizer, getattr(configs, config)(thinking_retention="all", **kwargs)
    )


@st.composite
def turns(draw: Any, family: str, thinks: bool) -> Message:
    """Return a turn of the model, which calls tools or does not."""
    turn: Message = {"role": "assistant", "content": draw(texts).strip()}
    most = 3 if FAMILIES[family].is_parallel else 1
    called = draw(st.lists(calls, max_size=most))
    if called:
        turn["tool_calls"] = called
        if family == "llama3" or len(called) > 1:
            # Llama shows no text next to a call. For GLM, `renderers` leaves out the line break
            # between calls after a text, which its template has.
            turn["content"] = ""
    if thinks and FAMILIES[family].thinks and draw(st.booleans()):
        turn["reasoning_content"] = draw(texts).strip()
    return turn


@st.composite
def histories(draw: Any, family: str, thinks: bool) -> list[Message]:
    """Return a conversation in which the next turn is the model's."""
    history: list[Message] = []
    if draw(st.booleans()):
        history.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 2))):
        history.append({"role": "user", "content": draw(texts)})
        for _ in range(draw(st.integers(0, 2))):
            turn = draw(turns(family, thinks))
            history += [turn, *draw(answers("tool", len(turn.get("tool_calls", [1]))))]
        if draw(st.booleans()):
            history += [draw(turns(family, thinks)), {"role": "user", "content": draw(texts)}]
    return history


def answers(role: str, number: int) -> st.SearchStrategy[list[Message]]:
    messages = texts.map(lambda text: {"role": role, "content": text})
    return st.lists(messages, min_size=number, max_size=number)


@families
@settings(max_examples=40)
@given(data=st.data())
def test_whole_conversations_are_rendered_alike(family: str, thinks: bool, data: Any) -> None:
    talk, renderer = both(family, thinks, data.draw(st.sampled_from([None, TOOLS])))
    history = data.draw(histories(family, thinks))
    tools = talk.tools and list(talk.tools)
    if family == "qwen3" and not thinks:
        # `renderers` keeps the empty thinking of earlier turns, which the template drops.
        history = [message for message in history if message["role"] != "assistant"]
    for starts_turn in (True, False):
        wanted = renderer.render_ids(history, tools=tools, add_generation_prompt=starts_turn)
        assert talk.encode(talk.render(history, starts_turn=starts_turn)) == wanted


@families
@settings(max_examples=40)
@given(data=st.data())
def test_turns_are_continued_alike(family: str, thinks: bool, data: Any) -> None:
    """Whatever a turn ends with: the token of the template, another stop token, or none."""
    talk, renderer = both(family, thinks)
    prompt = renderer.render_ids(
        data.draw(histories(family, thinks)), tools=TOOLS, add_generation_prompt=True
    )
    role = data.draw(st.sampled_from(["tool", "user"]))
    following = data.draw(answers(role, data.draw(st.integers(1, 3))))
    text = data.draw(texts)
    if thinks and FAMILIES[family].thinks:
        # A turn cut off in its thinking differs: `renderers` ends the thinking first. No such turn
        # is continued here.
        text = f"<think>\nhm\n</think>\n\n{text}"
    turn = talk.encode(f"{text}x")
    for end in ([], *([stop] for stop in talk.stop_ids)):
        inserted = talk.between([*turn, *end][-1], following)
        if family == "glm45" and not end:
            # `renderers` puts <|endoftext|> before the role. The template does not have it.
            inserted.insert(0, talk.tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        bridged = renderer.bridge_to_next_turn(prompt, [*turn, *end], following, tools=TOOLS)
        assert [*prompt, *turn, *end, *inserted] == bridged.token_ids


@families
@settings(max_examples=20)
@given(data=st.data())
def test_sampled_conversations_are_the_rendered_ones(family: str, thinks: bool, data: Any) -> None:
    """Turn by turn, with calls of tools and thinking: what `between` inserts is what stands in the
    whole conversation."""
    talk, renderer = both(family, thinks)
    history: list[Message] = [{"role": "user", "content": "?"}]
    tokens = talk.encode(talk.render(history, starts_turn=True))
    for _ in range(data.draw(st.integers(1, 3))):
        turn = data.draw(turns(family, thinks))
        if family == "qwen3" and thinks and not turn.get("reasoning_content"):
            turn["reasoning_content"] = "hm"  # empty thinking is shown in the last turn only
        following = data.draw(answers("tool", len(turn.get("tool_calls", [1]))))
        sampled = sampled_turn(talk, history, turn, following)
        tokens += [*sampled, *talk.between(sampled[-1], following)]
        history += [turn, *following]
    assert tokens == renderer.render_ids(history, tools=TOOLS, add_generation_prompt=True)


@families
@settings(max_examples=20)
@given(text=texts.map("q{}".format), system=st.booleans())
@example(text="2 \n", system=False)
@example(text="2/nothink", system=False)
def test_openings_complete_prompts(family: str, thinks: bool, text: str, system: bool) -> None:
    talk, renderer = both(family, thinks)
    before = [{"role": "system", "content": "be brief"}] * system
    prompt = talk.prompt_without_end([*before, {"role": "user", "content": "add to "}])
    whole = [*before, {"role": "user", "content": f"add to {text}"}]
    wanted = renderer.render_ids(whole, tools=TOOLS, add_generation_prompt=True)
    assert [*talk.encode(prompt), *talk.opening(text)] == wanted


@families
@settings(max_examples=40)
@given(data=st.data())
def test_calls_are_read_alike(family: str, thinks: bool, data: Any) -> None:
    talk, renderer = both(family, thinks)
    history = [{"role": "user", "content": "?"}]
    turn = data.draw(turns(family, thinks))
    sampled = sampled_turn(talk, history, turn, [{"role": "tool", "content": ""}])
    text = talk.tokenizer.decode(sampled[:-1])
    called = [call["function"] for call in turn.get("tool_calls", [])]
    read = reader(family, thinks).calls(text)
    assert [(call.tool, call.arguments) for call in read] == [
        (function["name"], function["arguments"]) for function in called
    ]
    parsed = renderer.parse_response(sampled, tools=TOOLS).tool_calls
    assert [(call.name, call.arguments) for call in parsed] == [
        (call.tool, call.arguments) for call in read
    ]


READERS: dict[tuple[str, bool], CallReader] = {}


def reader(family: str, thinks: bool) -> CallReader:
    if (family, thinks) not in READERS:
        READERS[family, thinks] = CallReader("auto", both(family, thinks)[0])
    return READERS[family, thinks]
