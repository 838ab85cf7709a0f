"""Measure what the tokens of a rollout step cost rank 0 and the other trainers.

    python tools/bench/data_plane.py            # 41 M tokens from 8 servers to 4 trainers, no GPU
    python tools/bench/data_plane.py --quick    # seconds

Each server is the product's (engine/server.py) with an engine that makes completions up, and
without graders. Pool, coordinator, plan and delivery are the product's; there is no policy. Seconds
are of CPU time, of all threads of a process, so they hardly depend on what else the machine does.
A second measurement has 256 engines, as threads of as many processes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench import Meter, finish, show

from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.config import Config
from dapo_megatron.config.file import load_config
from dapo_megatron.data.owners import DataParallelRanks
from dapo_megatron.data.packing import plan_microbatches
from dapo_megatron.data.prompts import PromptStream
from dapo_megatron.engine.messages import Facts, Hello, OrderKind, Report
from dapo_megatron.engine.server import EngineServer, Left, Link
from dapo_megatron.rollout.collector import StepPlan, step_plan
from dapo_megatron.rollout.coordinator import Coordinator
from dapo_megatron.rollout.delivery import Delivery
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.types import Completion, Finish, Grade, Prompt, SampleRequest, Segment

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = b"data plane".ljust(32)
MAX_TOKENS, PROMPT_TOKENS = 32_768, 200
MANY = 256
FINISHED_PER_STEP = 4


@dataclass(frozen=True)
class Size:
    """Size of a measured step."""

    prompts: int
    samples: int
    mean_tokens: int


class CannedEngine:
    """Engine that finishes some requests in each step."""

    def __init__(self, mean_tokens: int) -> None:
        self.requests: list[SampleRequest] = []
        self._mean_tokens = mean_tokens
        self._rng = random.Random(os.getpid())
        self._noise = os.urandom(4 * MAX_TOKENS)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests."""
        self.requests += requests

    def step(self) -> list[tuple[SampleRequest, Completion]]:
        """Finish some requests."""
        finished, self.requests = (
            self.requests[:FINISHED_PER_STEP],
            self.requests[FINISHED_PER_STEP:],
        )
        return [(request, self._completion(request)) for request in finished]

    def interrupt(self) -> list[tuple[SampleRequest, Completion]]:
        """Drop all requests, which have no tokens yet."""
        self.requests = []
        return []

    def _completion(self, request: SampleRequest) -> Completion:
        length = 1 + min(int(self._rng.expovariate(1 / self._mean_tokens)), MAX_TOKENS - 2)
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(self._noise[: 4 * length])
        logprobs.frombytes(self._noise[: 4 * length])
        segments = (Segment(0, length),)
        return Completion(request.sample, tokens, logprobs, "7", Finish.STOP, segments)


class CannedGrading:
    """Grading pool that has graded at once. Every group is mixed."""

    def __init__(self) -> None:
        self.last_errors: Mapping[str, str] = {}
        self._graded: list[tuple[Any, Grade | None, str]] = []
        self._numbers = count()

    @property
    def pending(self) -> int:
        """Number of gradings not collected yet."""
        return len(self._graded)

    def submit(self, key: Any, *_: object) -> None:
        """Grade a completion."""
        is_correct = next(self._numbers) % 2 == 0
        self._graded.append((key, Grade(float(is_correct), is_correct, "7"), "graded"))

    def collect(self, wait: bool) -> list[tuple[Any, Grade | None, str]]:
        """Return all grades."""
        graded, self._graded = self._graded, []
        return graded

    def drop_queued(self) -> None:
        """Forget all gradings."""
        self._graded = []


def serve(address: str, mean_tokens: int, engines: int) -> None:
    """Serve rank 0 as some engines."""
    threads = [threading.Thread(target=_serve, args=(address, mean_tokens)) for _ in range(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(address: str, mean_tokens: int) -> None:
    link = Link(address, SECRET)
    link.send(Report(hello=Hello(None, f"process {os.getpid()}", {})))
    engine: Any = CannedEngine(mean_tokens)
    grading: Any = CannedGrading()
    try:
        while all(order.kind is not OrderKind.WELCOME for order in link.orders(1.0)):
            pass
        link.send(Report(ready={}))
        EngineServer(engine, grading, link, 0.02).serve()
    except Left:
        pass


class Trainers:
    """The ranks that train. Rank 0 also has pool and coordinator."""

    def __init__(self, size: Size, num_servers: int, num_engines: int) -> None:
        self.ranks, self.num_engines = _joined(), num_engines
        self.config = _config(size)
        data_parallel = DataParallelRanks.join(self.ranks, self.ranks.rank, _plan, 1)
        self._delivery = Delivery(data_parallel, self.ranks.subgroup([self.ranks.rank]))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pool: Pool | None = None
        self._coordinator: Coordinator | None = None
        if self.ranks.rank == 0:
            self._pool = self._start(size, num_servers)
            prompts = [
                Prompt("sums", row, tuple(range(PROMPT_TOKENS)), "4 + 3 =", "7")
                for row in range(4 * size.prompts)
            ]
            rollout, overlong = self.config.rollout, self.config.overlong
            stream = PromptStream(prompts, seed=0, shuffle=False)
            self._coordinator = Coordinator(rollout, overlong, stream, self._pool, seed=0)

    def _start(self, size: Size, num_servers: int) -> Pool:
        pool = Pool(
            "tcp://127.0.0.1:0", SECRET, {}, Facts({}, {}), num_replicas=self.num_engines,
            max_sequences=-(-size.prompts * size.samples // self.num_engines),
            deterministic=False, silence_seconds=300.0,
        )  # fmt: skip
        command = [sys.executable, __file__, "--serve", pool.address]
        command += ["--mean-tokens", str(size.mean_tokens)]
        command += ["--engines", str(self.num_engines // num_servers)]
        self._processes = [subprocess.Popen(command) for _ in range(num_servers)]
        while len(pool.ready) < self.num_engines:
            pool.wait(0.2)
        pool.note_sync(range(self.num_engines))
        return pool

    def step(self) -> dict[str, float]:
        """Collect the groups of a step and deliver them. Return its figures, the same on every
        rank."""
        self.ranks.barrier()
        with Meter() as collecting:
            train = []
            plan: StepPlan | None = None
            if self._coordinator is not None:
                collected = self._coordinator.collect(0, lambda num_ready: None)
                train, plan = collected.train, step_plan(self.config, collected)
        plan = self.ranks.broadcast(plan, StepPlan | None)
        assert plan is not None
        with Meter() as delivering:
            assert len(self._delivery(plan.sequences, train))
        # Other ranks wait while rank 0 collects.
        seconds = delivering.cpu_seconds + (0.0 if self.ranks.rank else collecting.cpu_seconds)
        by_rank = self.ranks.all_gather(seconds, float)
        figures = {
            "engines": self.num_engines,
            "completions": len(plan.sequences),
            "tokens": sum(sequence.num_tokens for sequence in plan.sequences),
            "rank 0": by_rank[0],
            "of it delivery": delivering.cpu_seconds,
            "other trainers": max(by_rank[1:]),
            "seconds to collect": collecting.seconds,
        }
        return self.ranks.broadcast(figures, dict[str, float])

    def close(self) -> None:
        """End the servers."""
        if self._pool is not None:
            self._pool.close()
        for process in self._processes:
            process.wait(30)
        self.ranks.barrier()


@cache
def _joined() -> Ranks:
    return join("gloo")


def _plan(lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    return plan_microbatches(lengths, num_ranks, max_tokens=MAX_TOKENS + PROMPT_TOKENS)


def _config(size: Size) -> Config:
    return load_config(
        REPOSITORY / "model_configs" / "tiny_cpu.yaml",
        [
            f"rollout.prompts_per_step={size.prompts}",
            f"rollout.samples_per_prompt={size.samples}",
            f"rollout.max_response_tokens={MAX_TOKENS}",
            f"overlong.max_tokens={MAX_TOKENS}",
            "rollout.deterministic=false",
            "rollout.lookahead=1.0",
            "rollout.expected_keep_rate=1.0",
        ],
    )


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A small step.")] = False,
    servers: Annotated[int, typer.Option(help="Processes with engines.")] = 8,
    trainers: Annotated[int, typer.Option(min=2, help="Ranks that train.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps. The last one is reported.")] = 2,
    prompts: Annotated[int, typer.Option(help="Groups of 16 in a step.")] = 512,
    mean_tokens: Annotated[int, typer.Option(help="Mean length of a completion.")] = 5000,
    engines: Annotated[int, typer.Option(help="Engines of the second measurement.")] = MANY,
    serve_at: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure CPU seconds of a step. The last line is JSON."""
    if serve_at:
        serve(serve_at, mean_tokens, engines)
        return
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], trainers))
    size = Size(16, 4, 50) if quick else Size(prompts, 16, mean_tokens)
    measured = []
    for num_engines in (servers, engines // servers * servers):
        world = Trainers(size, servers, num_engines)
        measured.append([world.step() for _ in range(steps)][-1])
        world.close()
    torch.distributed.destroy_process_group()
    if world.ranks.rank == 0:
        show(f"CPU seconds of a step, {trainers} trainers", measured)
        finish("data_plane", trainers=trainers, servers=servers, measured=measured)


if __name__ == "__main__":
    typer.run(main)
