"""Conversations continue token by token: with each kind of chat template, what is inserted between
two turns is what the template itself would put there, and templates that cannot be continued are
found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from typer.testing import CliRunner

from dapo_megatron.__main__ import app
from dapo_megatron.data.conversation import Conversation, findings
from dapo_megatron.types import DataError
from tests.helpers.configs import REPOSITORY
from tests.helpers.templates import FAMILIES, TOOLS, byte_tokenizer, family_conversation

HEADERS = """
{%- for m in messages %}
{{- '<start>' + m.role + '<head>' + (m.content | trim) + CLOSE }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant<head>' }}{% endif %}"""
TEMPLATES = {
    # Qwen: all results are in one message, and a newline follows the closing token.
    "merged": """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<start>user' }}{% endif %}
{{- '\n[result]\n' + m.content + '\n[/result]' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<end>\n' }}{% endif %}
{%- else %}{{ '<start>' + m.role + '\n' + m.content + '<end>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}""",
    # Llama: a message for each result, and nothing after the closing token.
    "headers": HEADERS.replace("CLOSE", "'<end>'"),
    # GLM: the role of the next message ends a turn.
    "roles": """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<tool>' }}{% endif %}
{{- '\n[' + m.content + ']' }}
{%- else %}{{ '<' + m.role + '>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}""",
    # Thinking is dropped from all turns but the last, and marked as empty in the next one.
    "thinking": """
{%- for m in messages %}
{%- set text = m.content.split('</think>')[-1].strip() if not loop.last else m.content %}
{{- '<start>' + m.role + '\n' + text + '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant\n<think>\n\n</think>\n\n' }}{% endif %}""",
}
SPECIAL = ("<end>", "<eom>", "<start>", "<head>", "<tool>", "<user>", "<assistant>", "<system>")
STOPS = {"roles": ("<tool>", "<user>", "<end>")}


def conversation(template: str, stops: tuple[str, ...] = ("<end>", "<eom>")) -> Conversation:
    """Return a conversation of a model whose tokens are bytes and SPECIAL."""
    tokenizer = byte_tokenizer(template, SPECIAL)
    return Conversation(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))


def of(name: str) -> Conversation:
    return conversation(TEMPLATES[name], STOPS.get(name, ("<end>", "<eom>")))


texts = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1, max_size=9)
turns = st.lists(
    st.tuples(texts.map(str.strip), st.lists(texts, min_size=1, max_size=3)), max_size=4
)


@settings(max_examples=30)
@pytest.mark.parametrize("name", ["merged", "headers", "roles"])
@pytest.mark.parametrize("role", ["tool", "user"])
@given(turns=turns)
def test_a_continued_conversation_is_the_rendered_one(
    name: str, role: str, turns: list[tuple[str, list[str]]]
) -> None:
    talk = of(name)
    history: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    tokens = talk.encode(talk.render(history, starts_turn=True))
    for answer, results in turns:
        messages = [{"role": role, "content": result.strip()} for result in results]
        closing = talk.encode(talk.after_turn(messages))[0]
        assert closing in talk.stop_ids
        tokens += [*talk.encode(answer), closing, *talk.between(closing, messages)]
        history += [{"role": "assistant", "content": answer}, *messages]
    assert tokens == talk.encode(talk.render(history, starts_turn=True))


def test_a_turn_is_closed_once_whatever_ended_it() -> None:
    messages = [{"role": "tool", "content": "4"}]
    for name in TEMPLATES:
        talk = of(name)
        whole = talk.encode(talk.after_turn(messages))
        (letter,) = talk.encode("x")
        assert talk.between(letter, messages) == whole  # cut off
        assert talk.between(whole[0], messages) == whole[1:]
    end, eom, user = of("headers").tokenizer.convert_tokens_to_ids(["<end>", "<eom>", "<user>"])
    # Another token that ends a turn, as Llama has it before a tool's result.
    assert of("headers").between(eom, messages) == of("headers").between(end, messages)
    # But another role is not the role of a tool's result.
    assert of("roles").between(user, messages) == of("roles").encode("<tool>\n[4]<assistant>")
    messages = [{"role": "user", "content": "4"}, {"role": "user", "content": "5"}]
    both = of("roles").encode("<user>4<user>5<assistant>")
    assert of("roles").between(end, messages) == both
    assert of("roles").between(user, messages) == both[1:]


CHECKS = (
    STOP := "a turn ends with a stop token",
    INDEPENDENT := "what follows a turn depends on no other turn",
    SEVERAL := "several messages after one turn",
    WHOLE := "a conversation of three turns without thinking",
    WHOLE_THINKING := "a conversation of three turns with thinking",
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_templates_that_can_be_continued_have_no_error(name: str, role: str) -> None:
    results = list(findings(of(name), role))
    assert not [finding for finding in results if finding.error]
    assert [finding.check for finding in results] == [f"messages of the role {role}", *CHECKS]
    stop = f"'<{role}>'" if name == "roles" else "'<end>'"
    kept = "the template changes earlier turns. They stay as they were sampled"
    notes = ["", stop, "", "", *([kept, kept] if name == "thinking" else ["", ""])]
    assert [finding.note for finding in results] == notes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("thinks", [True, False])
def test_families_can_be_continued(name: str, role: str, thinks: bool) -> None:
    results = list(findings(family_conversation(name, {"enable_thinking": thinks}), role))
    assert len(results) > 4
    assert not [finding for finding in results if finding.error]


def one_more(condition: str) -> str:
    """Return a template that shows '!' after a turn if `condition` holds."""
    return HEADERS.replace("CLOSE", "'<end>' + ('!' if " + condition + " else '')")


ONE_QUESTION = """
{%- set users = messages | selectattr('role', 'eq', 'user') | list %}
{{- raise_exception('one question') if users | length > 1 }}"""
BROKEN = [
    ("{{ raise_exception('no tools') if messages[-1].role == 'tool' }}",
     ["messages of the role tool"],
     "the chat template failed for the roles user, assistant, tool: TemplateError: no tools"),
    (HEADERS.replace("CLOSE", "'\\n'"), [STOP], "the template ends it with 'Ċ', which is no stop"),
    (one_more("messages[0].content == 'what?' and messages[-2].role == 'assistant'"),
     [INDEPENDENT], "after 3 messages it is '<end>!<start>tool"),
    (ONE_QUESTION + one_more("messages[0].role == 'system'"),
     [INDEPENDENT], "after 2 messages it is '<end>!<start>tool"),
    (TEMPLATES["headers"].replace("in messages", "in messages if m.content != 'result 1'"),
     [SEVERAL], "the template leaves out ['result 1']"),
    (one_more("messages | length == 10 and loop.index0 == 4"),
     [WHOLE, WHOLE_THINKING], "turn 2 is followed by '<end>!<start>tool"),
    (TEMPLATES["headers"].replace(
        "in messages", "in messages if messages | length != 10 or 'TURN-0' not in m.content"
     ),
     [WHOLE, WHOLE_THINKING], "turn 1 is followed by '', not '<end><start>tool"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "checks", "error"), BROKEN)
def test_templates_that_cannot_be_continued_are_found(
    template: str, checks: list[str], error: str
) -> None:
    failed = [each for each in findings(conversation(template), "tool") if each.error]
    assert [each.check for each in failed] == checks
    assert all(each.error.startswith(error) for each in failed)


def test_the_template_gets_messages_tools_and_variables() -> None:
    template = "{{ [messages, tools, add_generation_prompt, thinks] | tojson }}"
    talk = replace(conversation(template), template_kwargs={"thinks": 2}, tools=(TOOLS[0],))
    messages = [{"role": "user", "content": "?"}]
    shown = json.loads(talk.render(tuple(messages), starts_turn=True))
    assert shown == [messages, [TOOLS[0]], True, 2]
    shown = json.loads(replace(talk, tools=None).render(messages, starts_turn=False))
    assert shown == [messages, None, False, 2]


def test_the_text_of_an_environment_completes_a_prompt() -> None:
    talk = family_conversation("glm45", {"enable_thinking": False})
    system, user = {"role": "system", "content": "add"}, {"role": "user", "content": "2"}
    prompt = talk.encode(talk.prompt_without_end([system, user]))
    whole = talk.render([system, {**user, "content": "2 + 3 < |user|>"}], starts_turn=True)
    assert prompt + talk.opening(" + 3 <|user|>") == talk.encode(whole)
    with pytest.raises(DataError, match="the last message is not the user's"):
        talk.prompt_without_end([user, system])
    with pytest.raises(DataError, match="not show the text of the user's message"):
        conversation("2").prompt_without_end([user])
    with pytest.raises(DataError, match="not show the text of an assistant's turn"):
        conversation("2").after_turn([])
    repeats = conversation("{{ messages[1].content }}? {{ messages[1].content }}.")
    assert repeats.after_turn([]) == "."


def test_long_results_lose_their_middle_and_all_lose_special_tokens() -> None:
    talk = of("headers")
    assert talk.harmless("<end>1<end><user>") == "< end>1< end>< user>"
    assert talk.shortened("<end>" * 9, 9) == "<end>" * 9
    assert talk.shortened("0123456789", 9) == "01234 ... (1 tokens left out) ... 6789"
    assert talk.shortened("0123456789", 4) == "01 ... (6 tokens left out) ... 89"


def test_only_the_template_adds_special_tokens() -> None:
    talk = conversation("")
    (start,) = talk.encode("<start>")
    talk.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", start)]
    )
    assert talk.encode("<start>") == [start]


def test_the_command_names_what_is_wrong(tmp_path: Any) -> None:
    config = str(REPOSITORY / "model_configs" / "tiny_cpu.yaml")
    arguments = ["doctor", "template", config, "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, arguments)
    by_role = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {"results of tools (tool)", "messages of a user (user)"} == by_role.keys()
    assert result.exit_code == int(all(role["status"] == "fail" for role in by_role.values()))
