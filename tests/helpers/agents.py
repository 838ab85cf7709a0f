"""Agents for tests. Each call of the model is logged with the tokens that the endpoint names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AGENTS = r'''
import asyncio
import json
import os
import random
import signal
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from openai import AsyncOpenAI, BadRequestError, OpenAI

LOG = Path("LOG_FILE")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}]


class Model:
    """The endpoint. Calls are logged."""

    def __init__(self, row, base_url, api_key):
        self.name = row["name"]
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(self, messages, tools=TOOLS, **options):
        response = await self.client.chat.completions.create(
            model="policy", messages=messages, tools=tools or None,
            extra_body={"return_token_ids": True}, **options)
        choice = response.choices[0]
        line = {"name": self.name, "process": os.getpid(), "finish": choice.finish_reason,
                "prompt": response.prompt_token_ids, "tokens": choice.token_ids,
                "messages": messages}
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")
        return choice.message.model_dump(exclude_none=True)


def results(message, start):
    """Return the answers to the calls of a message."""
    messages = []
    for call in message.get("tool_calls", []):
        number = json.loads(call["function"]["arguments"]).get("number", 0)
        start = start + number if isinstance(number, int) else start
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": f"total {start} <end>"})
    return messages


async def plain(row, base_url, api_key, rewrite=lambda messages, rng: messages):
    model, rng = Model(row, base_url, api_key), random.Random(row["name"])
    messages = [{"role": "user", "content": f"add to {row['start']}"}]
    for turn in range(4):
        message = await model.ask(messages)
        messages.append(message)
        if not (answers := results(message, row["start"])):
            break
        messages = rewrite(messages + answers, rng)
    return {"reward": float(len(messages) % 3 > 0), "turns": turn + 1}


plain.repeatable = True


async def once(row, base_url, api_key):
    return await plain(row, base_url, api_key)


def rewritten(messages, rng):
    """Return the conversation with some change that a careless agent makes."""
    change, messages = rng.choice(["space", "thinking", "order", "json", "none"]), list(messages)
    if change == "space":
        messages[1] = {**messages[1], "content": (messages[1].get("content") or "") + " "}
    elif change == "thinking":
        messages = [{**m, "content": ""} if m["role"] == "assistant" else m for m in messages]
    elif change == "order" and len(messages) > 4:
        messages[-1], messages[2] = messages[2], messages[-1]
    elif change == "json":  # means the same
        for message in messages:
            for call in message.get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=3)
    return messages


async def careless(row, base_url, api_key):
    return await plain(row, base_url, api_key, rewritten)


careless.repeatable = True


async def parallel(row, base_url, api_key):
    """Asks several questions at once, and again."""
    model = Model(row, base_url, api_key)
    questions = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]
    first = await asyncio.gather(*(model.ask(q, max_tokens=40) for q in questions))
    last = await model.ask([*questions[2], first[2], {"role": "user", "content": "and?"}])
    return 1.0


async def unruly(row, base_url, api_key):
    """Fails in every way, some of the time."""
    rng = random.Random(f"{row['name']} {os.getpid()}")
    model, question = Model(row, base_url, api_key), [{"role": "user", "content": "?"}]
    fault = rng.choice(["none", "none", "crash", "raise", "never", "hang", "bad", "leave", "cut",
                        "twice", "reward", "late"])
    if fault == "never":
        return 1.0
    await model.ask(question)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise RuntimeError("a fault of the agent")
    if fault == "hang":
        time.sleep(60)
    if fault == "bad":
        try:
            await model.ask([{"role": "user", "content": [{"type": "image_url",
                             "image_url": {"url": "x"}}]}])
        except BadRequestError:
            pass
    if fault == "cut":
        await model.ask(question, max_tokens=1)
    if fault == "twice":  # the client leaves, and asks again
        answered = []
        for _ in range(50):
            try:
                answered.append(await asyncio.wait_for(model.ask(question), 0.01))
                break
            except asyncio.TimeoutError:
                pass
    if fault == "leave":  # while the model answers
        asyncio.create_task(model.ask(question))
        await asyncio.sleep(0.02)
    return None if fault == "reward" else float(rng.random() < 0.5)


def bodies():
    """Yield bodies that are no calls."""
    question = {"role": "user", "content": "?"}
    function = {"name": "add", "description": "Add.", "parameters": {}}
    yield b"\xed\xa0\x80"
    yield '{"messages": "\ud800"}'.encode("utf-16", "surrogatepass")
    for arguments in ("[" * 100_000, '{"a": "\\ud800"}', "[}"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"messages": [question, said, question]}
    for more in ({"max_tokens": -1}, {"max_tokens": "7"}, {"max_tokens": 7.5}, {"stop": [""]},
                 {"stop": ""}, {"chat_template_kwargs": {"chat_template": "x"}},
                 {"chat_template_kwargs": {"tokenize": True}}, {"messages": []},
                 {"messages": [{"role": "assistant", "content": "last"}]},
                 {"messages": [{"role": "nobody", "content": "?"}]},
                 {"messages": [{"content": "?"}]}, {"messages": [question, 5]}):
        yield {"messages": [question], **more}


def hostile(row, base_url, api_key):
    """Sends what is no call, then tools of all kinds."""
    address = urlsplit(base_url)

    def status(body):
        connection = HTTPConnection(address.hostname, address.port)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/v1/chat/completions", content,
                           {"Authorization": f"Bearer {api_key}"})
        return connection.getresponse().status

    for body in bodies():
        if (answered := status(body)) != 400:
            raise RuntimeError(f"{answered} for {body!r:.200}")
    kinds = ({"type": ["integer", "null"]}, True, {"anyOf": []}, {})
    for parameters in (None, *({"type": "object", "properties": {"a": kind}} for kind in kinds)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        question = {"messages": [{"role": "user", "content": "?"}], "tools": [tool]}
        if status(question) != 200:
            raise RuntimeError(str(parameters))
    return 1.0


async def stubborn(row, base_url, api_key):
    model = Model(row, base_url, api_key)
    while True:
        try:
            await model.ask([{"role": "user", "content": "?"}], tools=None)
        except BadRequestError:
            pass


async def endless(row, base_url, api_key):
    model, messages = Model(row, base_url, api_key), [{"role": "user", "content": "go on"}]
    while True:
        messages.append(await model.ask(messages, tools=None))
        messages.append({"role": "user", "content": "go on " + "x" * 150 * (row["start"] % 3)})
'''


def write_agents(folder: Path, name: str) -> Path:
    """Write the agents as a module. Return the file of their calls."""
    log = folder / "agents.log"
    text = AGENTS.replace("LOG_FILE", str(log))
    (folder / f"{name}.py").write_text(text)
    return log


def calls_of(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the calls of a log."""
    for line in log.read_text().splitlines():
        yield json.loads(line)
