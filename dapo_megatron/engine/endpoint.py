"""An OpenAI-compatible endpoint for agents: `/v1/chat/completions` of an engine server.

A thread answers HTTP. It only parses requests and writes answers. Everything about tokens happens
in the server's own thread, which takes the calls with `calls` and answers each.
"""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from dapo_megatron.cluster.address import LOOPBACK
from dapo_megatron.cluster.processes import raise_file_limit
from dapo_megatron.types import DapoError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

MODEL = "policy"
"""Name of the model in answers. Calls may use any."""
MAX_BODY_BYTES = 8 * 2**20
"""Size of a call. Text of this size is tokenized in seconds, during which the engine waits."""
START_SECONDS = 30.0
_TAKEN = (
    *("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("seed", "logprobs", "top_logprobs", "chat_template_kwargs", "return_token_ids"),
    # Without effect, because training needs the temperature of the run.
    *("temperature", "top_p", "user", "parallel_tool_calls", "reasoning_effort"),
)
"""Parameters that may have any value."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Answer to a call.

    message        the assistant's message, with `content` and maybe `tool_calls`
    finish         finish_reason
    prompt_tokens  tokens that the turn follows
    tokens         of the turn, with the one that ends it
    logprobs       of the tokens
    texts          of the tokens, one by one; only if the call asks for log-probs
    """

    message: Mapping[str, Any]
    finish: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str] = ()


@dataclass(eq=False, slots=True)
class ChatCall:
    """A call that waits for its answer.

    owner       whose session it is, as given to `Endpoint.open`
    body        what the client sent
    request     the same, checked
    max_tokens  limit of the turn; None without one
    stop        texts that end the turn
    """

    api_key: str
    owner: Any
    body: dict[str, Any]
    request: ChatCompletionRequest
    max_tokens: int | None
    stop: tuple[str, ...]
    _http: web.Request
    _loop: asyncio.AbstractEventLoop
    _answer: asyncio.Future[web.Response | ChatReply] = field(init=False)

    def __post_init__(self) -> None:
        self._answer = self._loop.create_future()

    @property
    def is_gone(self) -> bool:
        """Whether the client no longer waits."""
        transport = self._http.transport
        return transport is None or transport.is_closing()

    def answer(self, reply: ChatReply) -> None:
        """Answer the call."""
        self._resolve(reply)

    def refuse(self, text: str, code: str = "invalid_request", status: int = 400) -> None:
        """Answer with an error."""
        self._resolve(_error(text, code, status))

    def _resolve(self, response: web.Response | ChatReply) -> None:
        self._loop.call_soon_threadsafe(self._answer.set_result, response)

    async def wait(self) -> web.Response:
        """Return the response, as soon as there is one."""
        answer = await self._answer
        return _response(self.request, answer) if isinstance(answer, ChatReply) else answer


class Endpoint:
    """Answers the calls of agents on `host`, on a free port. Each session has its own key.

    Raises DapoError if it cannot start. The thread ends with the process.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self._owners: dict[str, Hashable] = {}
        """Owner of each open session by its key."""
        self._calls: queue.SimpleQueue[ChatCall] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
        raise_file_limit()
        threading.Thread(target=self._run, name="endpoint", daemon=True).start()
        try:
            port = self._started.get(timeout=START_SECONDS)
        except queue.Empty:
            port = OSError("no answer")
        if isinstance(port, OSError):
            raise DapoError(f"rollout.turns.endpoint: cannot listen on {host}: {port}")
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def open(self, owner: Hashable) -> str:
        """Return the key of a new session."""
        api_key = secrets.token_urlsafe(32)
        self._owners[api_key] = owner
        return api_key

    def close(self, api_key: str) -> None:
        """Accept no more calls with a key."""
        self._owners.pop(api_key, None)

    def calls(self) -> list[ChatCall]:
        """Return the calls since the last time."""
        calls = []
        while not self._calls.empty():
            calls.append(self._calls.get())
        return calls

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self._host, 0, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            self._started.put(error)
            return
        self._started.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    def _session(self, http: web.Request) -> tuple[str, Hashable | None]:
        """Return the key of a request, and the owner of its session; None if it is not open."""
        api_key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        return api_key, self._owners.get(api_key)

    async def _models(self, http: web.Request) -> web.Response:
        if self._session(http)[1] is None:
            return _no_session()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dapo_megatron"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, http: web.Request) -> web.Response:
        api_key, owner = self._session(http)
        if owner is None:
            return _no_session()
        try:
            body, request = _parsed(await http.read())
        except ValueError as error:
            return _error(str(error))
        except ConnectionError:  # the client has left
            return web.Response(status=499)
        stop = request.stop or ()
        call = ChatCall(
            *(api_key, owner, body, request),
            body.get("max_completion_tokens") or body.get("max_tokens"),
            (stop,) if isinstance(stop, str) else tuple(stop),
            *(http, asyncio.get_running_loop()),
        )
        self._calls.put(call)
        return await call.wait()


def _parsed(content: bytes) -> tuple[dict[str, Any], ChatCompletionRequest]:
    """Return a request as it was sent, and checked. Raises ValueError."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        body = json.loads(content.decode())
        if b"\\u" in content:
            json.dumps(body, ensure_ascii=False).encode()  # halves of characters
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"{name}: must be a whole number of at least 1, not {limit!r:.100}")
    if "" in (body.get("stop"), *(body.get("stop") or ())):
        raise ValueError("stop: has an empty text")
    try:
        request = ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError("; ".join(faults)) from error
    defaults = ChatCompletionRequest.model_fields
    for name in body.keys() & defaults.keys() - set(_TAKEN):
        default = defaults[name].get_default(call_default_factory=True)
        neutral = (None, default, _NEUTRAL.get(name))
        if body[name] not in neutral:
            raise ValueError(
                f"{name}: {body[name]!r:.100} is not supported, because the model must be sampled "
                "as it is trained, one answer at a time and as a whole"
            )
    if request.tools and request.tool_choice not in ("auto", "none", None):
        raise ValueError("tool_choice: only auto and none, because the model must choose itself")
    if request.top_logprobs:
        raise ValueError("top_logprobs: only the log-probs of the sampled tokens are known")
    return body, request


_NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_k": -1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "stream_options": {},
}
"""Values without effect, besides the defaults."""


def _response(request: ChatCompletionRequest, reply: ChatReply) -> web.Response:
    from vllm.entrypoints.openai.chat_completion import protocol

    logprobs = None
    if request.logprobs:
        content = [
            protocol.ChatCompletionLogProbsContent(
                token=text, logprob=logprob, bytes=list(text.encode(errors="replace"))
            )
            for text, logprob in zip(reply.texts, reply.logprobs, strict=True)
        ]
        logprobs = protocol.ChatCompletionLogProbs(content=content)
    num_prompt, num_new = len(reply.prompt_tokens), len(reply.tokens)
    response = protocol.ChatCompletionResponse(
        model=request.model or MODEL,
        choices=[
            protocol.ChatCompletionResponseChoice(
                index=0,
                message=protocol.ChatMessage.model_validate(reply.message),
                logprobs=logprobs,
                finish_reason=reply.finish,
                token_ids=list(reply.tokens) if request.return_token_ids else None,
            )
        ],
        usage={
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
        prompt_token_ids=list(reply.prompt_tokens) if request.return_token_ids else None,
    )
    return web.Response(text=response.model_dump_json(), content_type="application/json")


def _no_session() -> web.Response:
    return _error("the key is not of an open session", "invalid_api_key", 401)


def _error(text: str, code: str = "invalid_request", status: int = 400) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
