"""The endpoint for agents: who may call it, and with what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from dapo_megatron.engine.endpoint import MAX_BODY_BYTES, ChatReply, Endpoint

QUESTION = {"messages": [{"role": "user", "content": "?"}]}
REPLY = ChatReply({"role": "assistant", "content": "4"}, "stop", [1, 2], [3], [-0.5], ["4"])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    import vllm.entrypoints.openai.chat_completion.protocol  # noqa: F401 - takes long

    yield Endpoint()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def post(endpoint: Endpoint, key: str, body: Any, path: str = "/v1/chat/completions") -> Any:
    address = urlsplit(endpoint.base_url)
    assert address.hostname is not None
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, json.loads(text) if text.startswith("{") else text


def wait_for_calls(endpoint: Endpoint, waiting: Future[Any], number: int = 1) -> list[Any]:
    calls: list[Any] = []
    while len(calls) < number and not waiting.done():
        calls += endpoint.calls()
        time.sleep(0.01)
    return calls


def test_a_key_is_of_one_session_until_it_ends(
    endpoint: Endpoint, threads: ThreadPoolExecutor
) -> None:
    first, second = endpoint.open(7), endpoint.open(7)
    for key in ("", "x", first[:-1], second.upper()):
        status, answer = post(endpoint, key, QUESTION)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    waiting = threads.submit(post, endpoint, first, QUESTION)
    (call,) = wait_for_calls(endpoint, waiting)
    assert call.api_key == first and call.owner == 7
    call.answer(REPLY)
    status, answer = waiting.result()
    assert status == 200 and answer["choices"][0]["message"]["content"] == "4"
    assert "prompt_token_ids" not in answer or answer["prompt_token_ids"] is None
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 1}
    endpoint.close(first)
    assert post(endpoint, first, QUESTION)[0] == 401
    assert post(endpoint, second, QUESTION, "/v1/sessions")[0] == 404
    assert not endpoint.calls()


def test_tokens_and_log_probs_are_those_of_the_reply(
    endpoint: Endpoint, threads: ThreadPoolExecutor
) -> None:
    body = {**QUESTION, "return_token_ids": True, "logprobs": True}
    waiting = threads.submit(post, endpoint, endpoint.open(7), body)
    (call,) = wait_for_calls(endpoint, waiting)
    call.answer(REPLY)
    _, answer = waiting.result()
    (choice,) = answer["choices"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [3])
    assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
        ("4", -0.5)
    ]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "Expecting"),
        (b"[]", "JSON object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
        ({"messages": "?"}, "messages"),
        ({**QUESTION, "n": 2}, "n: 2"),
        ({**QUESTION, "stream": True}, "stream"),
        ({**QUESTION, "top_k": 5}, "top_k"),
        ({**QUESTION, "presence_penalty": 0.5}, "presence_penalty"),
        ({**QUESTION, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**QUESTION, "response_format": {"type": "json_object"}}, "response_format"),
        ({**QUESTION, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        (
            {
                **QUESTION,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)
def test_what_would_change_the_distribution_is_refused_by_name(
    endpoint: Endpoint, body: Any, named: str
) -> None:
    status, answer = post(endpoint, endpoint.open(7), body)
    assert status == 400 and named in answer["error"]["message"], answer
    assert not endpoint.calls()


def test_parameters_without_effect_are_taken(
    endpoint: Endpoint, threads: ThreadPoolExecutor
) -> None:
    body = {
        **QUESTION,
        "temperature": 0.2,
        "top_p": 0.9,
        "n": 1,
        "stream": False,
        "presence_penalty": 0,
        "max_tokens": 7,
        "stop": "x",
        "user": "me",
        "response_format": {"type": "text"},
    }
    waiting = threads.submit(post, endpoint, endpoint.open(7), body)
    (call,) = wait_for_calls(endpoint, waiting)
    assert (call.max_tokens, call.stop) == (7, ("x",))
    call.refuse("too long", "context_length_exceeded")
    status, answer = waiting.result()
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_body_has_a_limit(endpoint: Endpoint) -> None:
    body = {"messages": [{"role": "user", "content": MAX_BODY_BYTES * "x"}]}
    assert post(endpoint, endpoint.open(7), body)[0] == 413
