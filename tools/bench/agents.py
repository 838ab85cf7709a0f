"""Measure what calls of agents cost an engine server: CPU per call, time to an answer, memory.

    python tools/bench/agents.py                       # 1,000 agents, five turns each
    python tools/bench/agents.py --agents 100 --slots 50

All agents run at once, each in a process of its own, through the endpoint, the chat template and
the tokenizer. Each call repeats the conversation so far. The engine is a script: it samples a turn
of the same length for each call, for as many calls at once as it has slots, oldest first. So the
CPU time is that of the endpoint, and of everything around the engine. Agents are small, and wait
for nothing but the model.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any

import psutil
import typer
from bench import finish, show

from dapo_megatron.config import TurnsConfig
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.engine.continuation import append_tokens
from dapo_megatron.engine.engine import VllmEngine
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.engine.turns import Turns
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.types import Completion, Finish, Prompt, SampleRequest

MODEL = Path(__file__).resolve().parents[2] / "model_configs" / "tiny_qwen3_tools"
AGENT = """
import json, time
from http.client import HTTPConnection
from urllib.parse import urlsplit

def run(row, base_url, api_key):
    address = urlsplit(base_url)
    connection = HTTPConnection(address.hostname, address.port)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    messages, seconds, started = [{"role": "user", "content": row["question"]}], [], time.time()
    for _ in range(row["turns"]):
        asked = time.time()
        body = json.dumps({"messages": messages})
        connection.request("POST", "/v1/chat/completions", body, headers)
        choice = json.loads(connection.getresponse().read())["choices"][0]
        seconds.append(time.time() - asked)
        messages += [choice["message"], {"role": "user", "content": row["question"]}]
    return {"reward": 1.0, "slowest": max(seconds), "mean": sum(seconds) / len(seconds),
            "seconds": time.time() - started}
"""


class ScriptedEngine:
    """Engine that samples the same turn for each request, some tokens in each step."""

    text, answer = VllmEngine.text, VllmEngine.answer

    def __init__(self, slots: int, turn_tokens: int, steps: int) -> None:
        self.tokenizer = load_tokenizer(MODEL, "model.path")
        self.stop_ids = self.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
        self.version, self._slots, self._steps = 0, slots, steps
        letter = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        self._turn = [*(turn_tokens - 1) * letter, *self.stop_ids]
        self._queue: deque[list[Any]] = deque()  # of [request, steps left]
        self.seconds = 0.0

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests."""
        self._queue += [[request, self._steps] for request in requests]

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Sample. Its own CPU time is counted apart."""
        started = time.thread_time()
        finished = []
        for item in list(self._queue)[: self._slots]:
            item[1] -= 1
            if not item[1]:
                logprobs = len(self._turn) * [-1.0]
                completion = append_tokens(item[0], self._turn, logprobs, 0, Finish.STOP)
                finished.append((item[0], completion))
        self._queue = deque(item for item in self._queue if item[1])
        self.seconds += time.thread_time() - started
        return finished


def measure(agents: int, turns: int, slots: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the figures of one run."""
    engine: Any = ScriptedEngine(slots, tokens, steps)
    with TemporaryDirectory() as folder:
        (Path(folder) / "agent_of_bench.py").write_text(AGENT)
        sys.path.insert(0, folder)
        name = "agent:agent_of_bench:run"
        source = SimpleNamespace(name="bench", grader="environment")
        config: Any = SimpleNamespace(
            rollout=SimpleNamespace(turns=TurnsConfig(max_turns=turns, call_seconds=120.0)),
            data=SimpleNamespace(train=[source], chat_template_kwargs={}),
            evaluation=SimpleNamespace(sets=[]),
        )
        with EnvironmentPool({name}, 120.0, 8192) as pool:
            talks = Turns(config, engine, pool)
            talks.set_sampling(Sampling("bench", 10**6, 1.0, 1.0, False))
            row = {"question": 40 * "7", "turns": turns}
            process = psutil.Process()
            started, cpu = time.time(), sum(process.cpu_times()[:2])
            for ticket in range(agents):
                prompt = Prompt("bench", ticket, (), "", "", row, name)
                talks.begin(SampleRequest(ticket, 0, prompt, None, 10**6, 1.0, 1.0))
            forked, forked_cpu = time.time() - started, sum(process.cpu_times()[:2])
            ended = 0
            while ended < agents:
                to_sample, just_ended = talks.collect()
                ended += len(just_ended)
                engine.submit(to_sample)
                for request, completion in engine.step():
                    talks.take(request, completion)
                if not to_sample:
                    time.sleep(0.002)  # as a server that waits
            counts = talks.take_counts()
            seconds, cpu_end = time.time() - started, sum(process.cpu_times()[:2])
            memory = process.memory_info().rss
    calls = agents * turns
    assert counts["agents_with/mean"] == agents, counts
    return {
        "agents": agents,
        "turns": turns,
        "slots": slots,
        "seconds": seconds,
        "seconds to start all": forked,
        "calls per second": calls / (seconds - forked),
        "ms of server CPU per call": 1000 * (cpu_end - forked_cpu - engine.seconds) / calls,
        "ms of server CPU per start": 1000 * (forked_cpu - cpu) / agents,
        "mean seconds of a call": counts["agent/mean"] / agents,
        "mean of the slowest call": counts["agent/slowest"] / agents,
        "mean seconds of an agent": counts["agent/seconds"] / agents,
        "server GiB": memory / 2**30,
        "errors": sum(n for name, n in counts.items() if name.startswith(("failed", "refused"))),
    }


def main(
    agents: Annotated[list[int], typer.Option(help="Agents at once.")] = [100, 1000],  # noqa: B006
    turns: Annotated[int, typer.Option(min=1, help="Calls of each agent.")] = 5,
    slots: Annotated[int, typer.Option(min=1, help="Calls that are sampled at once.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a turn.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Engine steps of a turn.")] = 10,
) -> None:
    """Measure calls of agents. The last line is JSON."""
    import vllm.entrypoints.openai.chat_completion.protocol
    import vllm.tool_parsers  # noqa: F401 - not part of the measurement

    rows = [measure(number, turns, slots, tokens, steps) for number in agents]
    show("calls of agents", rows)
    finish("agents", tokens=tokens, steps=steps, measured=rows)


if __name__ == "__main__":
    typer.run(main)
