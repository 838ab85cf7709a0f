"""The data plane before it was rebuilt. It runs with PYTHONPATH set to a commit from before, with
that commit's own functions.

    python data_plane_before.py '{"processes": 16, "prompts": 64, ...}' RESULT

Every rank receives every completion, and assembles the whole batch. Rank 0 writes samples and state
as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dapo_megatron.tracking.samples import write_policy, write_samples
from data_plane_canned import MAX_TOKENS, Generator

from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.ranks import join
from dapo_megatron.config import OverlongConfig
from dapo_megatron.data.batch import assemble, diagnose, fresh_mask
from dapo_megatron.rollout.dispatch import OpenGroup
from dapo_megatron.rollout.driver import RankReport
from dapo_megatron.types import (
    Completion,
    Finish,
    Grade,
    Group,
    LogProbs,
    Segment,
)

NUM_EXCHANGES = 8
"""Exchanges of a step's completions. In a run there are more; each has its own padding."""
OVERLONG = OverlongConfig(
    max_tokens=MAX_TOKENS,
    buffer_tokens=4096,
    penalty=True,
    filter=False,
    filtered_in_mean=False,
)


def completion(generator: Generator, ticket: int, sample: int) -> Completion:
    """Return a finished completion."""
    length = generator.length(ticket, sample)
    key = ticket, sample, length
    tokens, logprobs = generator.values(length, key)
    return Completion(
        sample=sample,
        tokens=tokens,
        logprobs=logprobs,
        text=generator.text(length, key),
        finish=Finish.LENGTH if length == MAX_TOKENS else Finish.STOP,
        segments=(Segment(0, length),),
    )


def run(setting: dict[str, Any], result: Path) -> None:
    """Measure a step on this rank."""
    torch.set_num_threads(1)
    ranks, seconds = join("gloo"), {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        seconds[name] = time.process_time() - started

    generator = Generator(setting["mean_tokens"], setting["seed"])
    replica, place = divmod(ranks.rank, setting["engine_ranks"])
    replicas = setting["processes"] // setting["engine_ranks"]
    own = [
        (ticket, completion(generator, ticket, sample))
        for ticket in range(replica, setting["prompts"], replicas)
        for sample in range(setting["samples"])
        if not place
    ]
    ranks.barrier()
    forget_peak()
    idle = resident_bytes("VmRSS")
    everything: list[tuple[int, Completion]] = []
    with part("exchange"):
        size = -(-setting["prompts"] * setting["samples"] // replicas // NUM_EXCHANGES)
        for first in range(0, size * NUM_EXCHANGES, size):
            report = RankReport(replica, own[first : first + size], [], {}, 0.0, 0.0, "")
            for received in ranks.all_gather(report, RankReport):
                everything += received.sampled
    groups = []
    by_ticket: dict[int, list[Completion]] = {}
    for ticket, done in everything:
        grade = Grade(1.0, True, "42") if done.sample == 0 else Grade(-1.0, False, "41")
        by_ticket.setdefault(ticket, []).append(replace(done, grade=grade))
    prompts = {ticket: generator.prompt(ticket) for ticket in by_ticket}
    for ticket, completions in sorted(by_ticket.items()):
        groups.append(Group(ticket, prompts[ticket], tuple(completions)))
    with part("assemble"):
        batch = assemble(groups, overlong=OVERLONG, eps=1e-6)
    with part("fresh_mask"):
        fresh_mask(groups, version=0, overlong=OVERLONG)
    folder = result.parent / "before"
    if ranks.rank == 0:
        outputs = LogProbs(batch.engine_logprobs, batch.engine_logprobs)
        with part("samples"):
            _, index = write_samples(folder, 1, [(group, "trained") for group in groups])
            index.write(folder)
        with part("policy"):
            write_policy(folder, 1, diagnose(groups, batch, outputs, overlong=OVERLONG), 8)
        with part("checkpoint"):
            state = [_open(group).to_json() for group in groups]
            text = json.dumps(state)
        seconds["state_bytes"] = len(text)
        seconds["file_bytes"] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    peak = resident_bytes()
    figures = {
        **seconds,
        "rank": ranks.rank,
        "num_tokens": int(batch.lengths.sum()),
        "peak_bytes": peak - idle,
        "own_bytes": 8 * sum(len(done.tokens) for _, done in own),
    }
    gathered = ranks.all_gather(json.dumps(figures), str)
    if ranks.rank == 0:
        result.write_text(json.dumps([json.loads(text) for text in gathered]))
    ranks.barrier()


def _open(group: Group) -> OpenGroup:
    completions = {done.sample: done for done in group.completions}
    return OpenGroup(group.ticket, group.prompt, len(completions), completions)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if is_launched():
        run(options, Path(sys.argv[2]))
    else:
        raise SystemExit(launch([sys.executable, *sys.argv], options["processes"]))
