"""Measure what the tokens of a rollout step cost rank 0 and the other trainers.

    python tools/bench/data_plane.py            # 41 M tokens from 8 servers to 4 trainers, no GPU
    python tools/bench/data_plane.py --quick    # seconds

Each server is the product's (engine/server.py) with an engine that makes completions up, and
without graders. Pool, coordinator, plan and delivery are the product's; there is no policy. Seconds
are of CPU time, of all threads of a process, so they hardly depend on what else the machine does.
A second measurement has 256 engines, as threads of as many processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import join
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
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import Completion, Finish, Grade, Prompt, SampleRequest, Segment

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = b"data plane".ljust(32)
TARGETS = {"rank 0": 2.5, "other trainers": 0.5}
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


def measure(size: Size, num_servers: int, num_engines: int, steps: int) -> None:
    """Run this rank's part. Rank 0 prints its figures as JSON, one line per step."""
    ranks = join("gloo")
    config = load_config(REPOSITORY / "model_configs" / "tiny_cpu.yaml").model_copy()
    config = _sized(config, size)

    def plan(lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        return plan_microbatches(lengths, num_ranks, max_tokens=MAX_TOKENS + PROMPT_TOKENS)

    data_parallel = DataParallelRanks.join(ranks, ranks.rank, plan, 1)
    delivery = Delivery(data_parallel, ranks.subgroup([ranks.rank]))
    pool = coordinator = None
    processes = []
    if ranks.rank == 0:
        capacity = -(-size.prompts * size.samples // num_engines)
        pool = Pool(
            "tcp://127.0.0.1:0", SECRET, {}, Facts({}, {}), num_replicas=num_engines,
            max_sequences=capacity, deterministic=False, silence_seconds=300.0,
        )  # fmt: skip
        words = [sys.executable, __file__, "--serve", pool.address]
        words += ["--mean-tokens", str(size.mean_tokens)]
        words += ["--engines", str(num_engines // num_servers)]
        processes = [subprocess.Popen(words) for _ in range(num_servers)]
        while len(pool.ready) < num_engines:
            pool.wait(0.2)
        pool.note_sync(range(num_engines))
        prompts = [
            Prompt("sums", row, tuple(range(PROMPT_TOKENS)), "4 + 3 =", "7")
            for row in range(4 * size.prompts)
        ]
        stream = PromptStream(prompts, seed=0, shuffle=False)
        coordinator = Coordinator(config.rollout, config.overlong, stream, pool, seed=0)
    for _ in range(steps):
        ranks.barrier()
        started, began = time.process_time(), time.monotonic()
        train = []
        plan_of_step: StepPlan | None = None
        if coordinator is not None:
            collected = coordinator.collect(0, lambda num_ready: None)
            train, plan_of_step = collected.train, step_plan(config, collected)
        collected_at, waited = time.process_time(), time.monotonic() - began
        plan_of_step = ranks.broadcast(plan_of_step, StepPlan | None)
        assert plan_of_step is not None
        if ranks.rank:
            started = collected_at = time.process_time()  # it waited, and looked for messages
        tokens = delivery(plan_of_step.sequences, train)
        delivered = time.process_time() - collected_at
        by_rank = ranks.all_gather((time.process_time() - started, delivered), tuple[float, float])
        num_tokens = sum(sequence.num_tokens for sequence in plan_of_step.sequences)
        assert len(tokens) and ranks.world_size > 1
        if ranks.rank == 0:
            figures = {
                "engines": num_engines,
                "tokens": num_tokens,
                "completions": len(plan_of_step.sequences),
                "rank 0": by_rank[0][0],
                "of it delivery": by_rank[0][1],
                "other trainers": max(seconds for seconds, _ in by_rank[1:]),
                "seconds to collect": waited,
            }
            print(json.dumps(figures), flush=True)
    if pool is not None:
        pool.close()
    for process in processes:
        process.wait(30)
    torch.distributed.destroy_process_group()


def _sized(config: Config, size: Size) -> Config:
    rollout = config.rollout.model_copy(
        update={
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
            "max_response_tokens": MAX_TOKENS,
            "deterministic": False,
            "lookahead": 1.0,
            "expected_keep_rate": 1.0,
        }
    )
    overlong = config.overlong.model_copy(update={"max_tokens": MAX_TOKENS})
    return config.model_copy(update={"rollout": rollout, "overlong": overlong})


def main(
    quick: Annotated[bool, typer.Option("--quick")] = False,
    servers: Annotated[int, typer.Option()] = 8,
    trainers: Annotated[int, typer.Option(min=2)] = 4,
    steps: Annotated[int, typer.Option()] = 2,
    prompts: Annotated[int, typer.Option()] = 512,
    mean_tokens: Annotated[int, typer.Option()] = 5000,
    engines: Annotated[int, typer.Option(help="Engines of the second measurement.")] = MANY,
    serve_at: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure, and print tables and one line of JSON."""
    if serve_at:
        serve(serve_at, mean_tokens, engines)
        return
    size = Size(16 if quick else prompts, 4 if quick else 16, 50 if quick else mean_tokens)
    if is_launched():
        measure(size, servers, int(os.environ["BENCH_ENGINES"]), steps)
        return
    console = Console(highlight=False)
    measured = []
    for number in (servers, engines // servers * servers):
        os.environ["BENCH_ENGINES"] = str(number)
        measured.append(_run(trainers))
        table = Table("CPU seconds", "measured", "target")
        for name, seconds in measured[-1].items():
            table.add_row(name, f"{seconds:,.3g}", str(TARGETS.get(name, "")))
        console.print(table)
    print(json.dumps({**facts(), "measured": measured}))


def _run(trainers: int) -> dict[str, float]:
    """Return the figures of the last step, which finds everything warm."""
    reading, writing = os.pipe()
    saved = os.dup(1)
    os.dup2(writing, 1)
    try:
        code = launch([sys.executable, *sys.argv], trainers)
    finally:
        os.dup2(saved, 1)
        os.close(writing)
    if code:
        raise typer.Exit(code)
    lines = os.fdopen(reading).read().splitlines()
    figures: dict[str, float] = json.loads([line for line in lines if line.startswith("{")][-1])
    return figures


if __name__ == "__main__":
    typer.run(main)
