"""Engine servers in this process whose model follows a script: real turns, environments, dispatch
and coordinator, without vLLM's sampling."""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
from transformers import PreTrainedTokenizerBase

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.config import OverlongConfig, RolloutConfig, TurnsConfig
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.continuation import append_tokens, prompt_of, tokens_left
from dapo_megatron.engine.engine import VllmEngine
from dapo_megatron.engine.messages import GroupRequest, Order, OrderKind, Report, Sampling
from dapo_megatron.engine.server import EngineServer
from dapo_megatron.engine.turns import Turns
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.types import Collected, Completion, Finish, Prompt, SampleRequest
from tests.helpers.templates import byte_tokenizer

TEMPLATE = """
{%- if tools %}{{ '<start>system\n' + tools | tojson + '<end>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<start>user' }}{% endif %}
{{- '\n[result]\n' + m.content + '\n[/result]' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<end>\n' }}{% endif %}
{%- else %}
{{- '<start>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<end>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"""
ENVIRONMENTS = '''
import os
from pathlib import Path
from dapo_megatron.environments.interface import Reply

LOG = Path("LOG_FILE")


class Counter:
    """Adds numbers. Every call is logged."""

    repeatable = True

    def reset(self, row):
        self.name, self.total = row["name"], row["start"]
        return f" from {self.total}"

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what to add
        """
        with LOG.open("a") as log:
            log.write(f"{self.name} {os.getpid()} {number}\\n")
        if number == 13:
            raise ValueError("no 13 <end>")
        self.total += number
        return f"total {self.total}" + "!" * (number == 7) * 1000


class Once(Counter):
    repeatable = False


class Echo:
    """Has no state, and logs every call."""

    stateless = True

    def add(self, number: int) -> str:
        """Return a number.

        Args:
            number: what to return
        """
        with LOG.open("a") as log:
            log.write(f"echo {os.getpid()} {number}\\n")
        return f"total {number}"


class Talker:
    """Gives rewards by a protocol of its own."""

    repeatable = True

    def reset(self, row):
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        return Reply(f"more {self.turns}", "stop" in turn, 0.5 if "stop" in turn else -0.125)
'''
AGENTS_WITHOUT_TOOLS = ("parallel", "unruly", "endless", "hostile", "stubborn")
MAX_TURNS, MAX_TURN_TOKENS, MAX_TOKENS = 5, 300, 900
OVERLONG = OverlongConfig(
    max_tokens=MAX_TOKENS, buffer_tokens=10, penalty=False, filter=False, filtered_in_mean=False
)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes with two special tokens."""
    return byte_tokenizer(template, ["<end>", "<start>"])


def call(number: object) -> str:
    function = {"name": "add", "arguments": {"number": number}}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


def turn_of(name: str, kind: str, number: int, seen: str) -> str:
    """Return what the model says in turn `number` (from 0) of a completion, which depends on
    nothing but the completion's name and what it has `seen`."""
    rng = random.Random(f"{name}/{number}")
    if kind in AGENTS_WITHOUT_TOOLS:
        return f"hm {number} " + "y" * rng.randrange(60)
    totals = re.findall(r"total (-?\d+)", seen)
    if kind == "Talker":
        return "stop" if rng.random() < 0.3 else f"go on {number}"
    what = rng.choice(["one", "one", "two", "broken", "unknown", "thirteen", "flood", "answer"])
    return {
        "one": "hm" + call(rng.randrange(50)),
        "two": call(rng.randrange(50)) + "\n" + call(rng.randrange(50)),
        "broken": '<tool_call>\n{"name": "add", \n</tool_call>',
        "unknown": call(1).replace("add", "substract"),
        "thirteen": call(13) + call("x"),
        "flood": call(7),
        "answer": f"answer {totals[-1] if totals else 'none'}",
    }[what]


class ScriptedEngine:
    """Engine whose model says what `turn_of` returns, some tokens of each request in each step."""

    def __init__(self, seed: int, max_sequences: int) -> None:
        self.tokenizer = tokenizer()
        self.stop_ids = self.tokenizer.convert_tokens_to_ids(["<end>"])
        self.version, self.max_sequences = 0, max_sequences
        self._rng = random.Random(seed)
        self._running: dict[tuple[int, int], tuple[SampleRequest, list[int]]] = {}
        self.order: list[tuple[int, int]] = []
        """Submitted requests, as (ticket, sample)."""

    text, answer = VllmEngine.text, VllmEngine.answer

    @property
    def requests(self) -> list[SampleRequest]:
        return [request for request, _ in self._running.values()]

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            key = request.ticket, request.sample
            assert key not in self._running, key
            self.order.append(key)
            self._running[key] = request, []

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        finished = []
        for key, (request, tokens) in list(self._running.items()):
            whole = self._turn(request)
            left = min(tokens_left(request), request.max_new_tokens or MAX_TOKENS)
            tokens += whole[len(tokens) :][: self._rng.randrange(60)]
            del tokens[left:]
            if tokens == whole or len(tokens) == left:
                del self._running[key]
                finish = Finish.STOP if tokens == whole else Finish.LENGTH
                completion = self._completion(request, tokens, finish)
                finished.append((request, completion))
        return finished

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        running, self._running = self._running, {}
        return [
            (request, self._completion(request, tokens, Finish.UNFINISHED))
            for request, tokens in running.values()
            if tokens or request.so_far
        ]

    def _turn(self, request: SampleRequest) -> list[int]:
        """Return what the model has still to say in this turn."""
        context = self.text(prompt_of(request), is_raw=True)
        *history, begun = re.split(r"<start>assistant\n", context)
        name = f"{request.prompt.index}/{request.sample}"
        kind = request.prompt.environment.rpartition(":")[2]
        turn = turn_of(name, kind, len(history) - 1, context)
        assert turn.startswith(begun), (turn, begun)
        return [
            *self.tokenizer(turn[len(begun) :], add_special_tokens=False)["input_ids"],
            *self.stop_ids,
        ]

    def _completion(
        self, request: SampleRequest, tokens: Sequence[int], finish: Finish
    ) -> Completion:
        logprobs = array("f", (-0.01 * (1 + token % 7) for token in tokens))
        return append_tokens(request, list(tokens), list(logprobs), self.version, finish)


@dataclass
class TalkingDriver:
    """Driver (rollout/dispatch.py) of engine servers in this process.

    pools  of environments, one for each replica; they start slowly, so they outlast the servers
    """

    pools: Sequence[EnvironmentPool]
    rng: random.Random
    max_sequences: int = 6
    version: int = 0
    rewards: Mapping[str, str] = field(default_factory=dict)
    rewrites: Literal["branch", "refuse"] = "branch"
    stop_signal: str = ""
    is_deterministic: bool = False
    lost: set[int] = field(default_factory=set)
    last_errors: dict[str, str] = field(default_factory=dict)
    grade_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.num_replicas = len(self.pools)
        self._servers: dict[int, tuple[EngineServer, SimpleNamespace]] = {}
        self._sampling: Sampling | None = None

    def name(self, replica: int) -> str:
        return f"server {replica}"

    def start(self, sampling: Sampling) -> None:
        """Start a phase, with new servers in the place of lost ones."""
        self._sampling = sampling
        self.lost.clear()
        for replica in range(self.num_replicas):
            if replica not in self._servers:
                self._servers[replica] = self._new_server(self.pools[replica])

    def advance(self, requests: Sequence[Sequence[GroupRequest]]) -> list[tuple[int, Report]]:
        reports = []
        for replica, (server, link) in self._servers.items():
            server._engine.version = self.version
            order = Order(
                OrderKind.SAMPLE,
                sampling=self._sampling,
                requests=decode(encode(list(requests[replica])), list[GroupRequest], "a test"),
                num_steps=8 if self.is_deterministic else 0,
            )
            server._obey(order)
            if not self.is_deterministic:
                server._advance()
            reports += self._sent(replica, link)
        return reports

    def interrupt(self) -> list[tuple[int, Report]]:
        reports = []
        for replica, (server, link) in self._servers.items():
            server._obey(Order(OrderKind.INTERRUPT))
            reports += self._sent(replica, link)
        return reports

    def lose(self, replica: int) -> None:
        """Lose a server with all processes."""
        if replica in self._servers:
            del self._servers[replica]
            for key in list(self.pools[replica]._instances):
                self.pools[replica].stop(key)
            self.lost.add(replica)

    def kill_an_instance(self, rng: random.Random) -> bool:
        """Kill the process of some completion's environment, wherever it is in its turn. Return
        whether there was any."""
        nursery = rng.choice(self.pools)._nursery
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if instances := psutil.Process(nursery.pid).children():
                rng.choice(instances).kill()
                return True
        return False

    def close(self) -> None:
        for replica in list(self._servers):
            self.lose(replica)

    def _new_server(self, pool: EnvironmentPool) -> tuple[EngineServer, SimpleNamespace]:
        engine: Any = ScriptedEngine(self.rng.randrange(10**6), self.max_sequences)
        sources = [SimpleNamespace(name=n, grader=g) for n, g in self.rewards.items()]
        limits = TurnsConfig(
            max_turns=MAX_TURNS,
            max_turn_tokens=MAX_TURN_TOKENS,
            max_calls=6,
            max_observation_tokens=40,
            tool_parser="hermes",
            rewrites=self.rewrites,
        )
        config: Any = SimpleNamespace(
            rollout=SimpleNamespace(turns=limits),
            data=SimpleNamespace(train=sources, chat_template_kwargs={}),
            evaluation=SimpleNamespace(sets=[]),
        )
        sent: list[Report] = []
        link: Any = SimpleNamespace(sent=sent, send=sent.append, sent_at=float("inf"))
        grading: Any = AnswerGrading()
        server = EngineServer(engine, grading, Turns(config, engine, pool), link, 0.0)
        return server, link

    def _sent(self, replica: int, link: SimpleNamespace) -> list[tuple[int, Report]]:
        reports, link.sent[:] = list(link.sent), []
        for report in reports:
            self.last_errors |= report.errors
        return [(replica, decode(encode(r), Report, "a server")) for r in reports if r.is_news]


def disturb(driver: TalkingDriver) -> None:
    """Kill instances often, and a server with its instances now and then."""
    if driver.rng.random() < 0.5:
        driver.kill_an_instance(driver.rng)
    if driver.rng.random() < 0.05 and not driver.lost:
        driver.lose(driver.rng.randrange(2))


class TalkingRun(ABC):
    """A run of a coordinator and two servers. A subclass has `start`, which calls `start_with`."""

    def __init__(
        self,
        kind: str,
        seed: int,
        rewrites: Literal["branch", "refuse"] = "branch",
        **rollout: Any,
    ) -> None:
        self.kind, self.rewrites, self.rollout = kind, rewrites, rollout
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.collected: list[Collected] = []
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Start servers, and the coordinator at the first prompt."""

    def start_with(
        self,
        pools: Sequence[EnvironmentPool],
        prompts: Sequence[Prompt],
        rewards: Mapping[str, str],
    ) -> None:
        self.driver = TalkingDriver(
            pools,
            self.rng,
            rewards=rewards,
            rewrites=self.rewrites,
            is_deterministic=self.rollout.get("deterministic", False),
        )
        stream = PromptStream(prompts, seed=0, shuffle=False)
        config = rollout_config(**self.rollout)
        self.coordinator = Coordinator(config, OVERLONG, stream, self.driver, seed=3)

    def step(self, disturb: Any = lambda driver: None) -> Collected:
        """Collect a step. `disturb` is called each time that completions have ended: at any moment
        of the others, and not more often on a busy machine."""
        advance, have_ended = self.driver.advance, False

        def disturbed(requests: Any) -> Any:
            nonlocal have_ended
            if have_ended:
                disturb(self.driver)
            reports = advance(requests)
            have_ended = any(report.returned for _, report in reports)
            return reports

        self.driver.advance = disturbed  # type: ignore[method-assign]
        self.driver.version = len(self.collected)
        try:
            collected = self.coordinator.collect(len(self.collected), lambda done: None)
        finally:
            self.driver.advance = advance  # type: ignore[method-assign]
        self.collected.append(collected)
        self.counts.update(collected.turn_counts)  # type: ignore[arg-type]
        return collected

    def resume(self) -> None:
        """Kill everything, and go on from what was saved."""
        state, completions = self.coordinator.save_point()
        self.driver.close()
        self.start()
        self.coordinator.restore(json.loads(json.dumps(state)), completions)


class AnswerGrading:
    """Pool of graders that finds an even number right."""

    def __init__(self) -> None:
        self.last_errors: dict[str, str] = {}
        self._done: list[tuple[Any, Any, str]] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, key: Any, source: str, response: str, truth: str, extra: Any) -> None:
        from dapo_megatron.types import Grade

        number = re.search(r"answer (\d+)", response)
        assert "turns" not in extra or extra["turns"][-1] == {
            "role": "assistant",
            "content": response,
        }
        is_right = number is not None and int(number[1]) % 2 == 0
        grade = Grade(1.0 if is_right else -1.0, is_right, number[1] if number else "")
        self._done.append((key, grade, "graded"))

    def collect(self, wait: bool) -> list[tuple[Any, Any, str]]:
        done, self._done = self._done, []
        return done

    def drop_queued(self) -> None:
        self._done.clear()


def write_environments(folder: Path, name: str) -> Path:
    """Write the environments as a module. Return the file of their calls."""
    log = folder / "calls.log"
    (folder / f"{name}.py").write_text(ENVIRONMENTS.replace("LOG_FILE", str(log)))
    return log


def rollout_config(**keys: Any) -> RolloutConfig:
    settings = {
        "prompts_per_step": 3,
        "samples_per_prompt": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_prompt_tokens": 300,
        "max_response_tokens": MAX_TOKENS,
        "on_policy": False,
        "dynamic_sampling": False,
    }
    return RolloutConfig(**{**settings, **keys})
