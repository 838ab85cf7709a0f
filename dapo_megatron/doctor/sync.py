"""`doctor sync`: check that engines compute with the policy's weights after a sync, and report the
bytes that a sync moves.

Policy and engine are built as in a run. Nothing is sampled or trained. Both score the same random
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import join
from dapo_megatron.config import Config
from dapo_megatron.data.batch import assemble
from dapo_megatron.doctor.worlds import quiet_rank
from dapo_megatron.files import write_result
from dapo_megatron.model import read_architecture
from dapo_megatron.plan.layout import describe
from dapo_megatron.segments import Segment
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import SequenceTokens, Shard, SyncError, TokenBatch, TrainingSequence

NUM_SEQUENCES, NUM_TOKENS = 4, 32
FACTORS = (1.0, 1.125, 1 / 1.125)
"""Factors by which all weights are multiplied before each sync. They change even FP8 weights with 3
mantissa bits and unchanged power-of-two scales. Their product is 1."""


def command(config: Config, json_file: Path | None) -> None:
    """Run the syncs, on this rank of a launched job. Rank 0 prints the results and writes
    `json_file`.

    Raises SyncError naming tensor and ranks, and the errors of building policy and engine.
    """
    with quiet_rank("sync") as session:
        results = _measure(config, session.local_rank)
        if session.rank == 0:
            print(_text(config, results), file=session.terminal, flush=True)
            write_result(json_file, json.dumps(facts() | results))


def _measure(config: Config, local_rank: int) -> dict[str, Any]:
    """Run the syncs and return their results. A sync that finds a difference raises SyncError."""
    import torch.distributed as dist

    from dapo_megatron.policy.device import backend, claim
    from dapo_megatron.run.models import build_models, start_engines

    claim(local_rank)
    ranks = join(backend())
    verified = config.sync.model_copy(update={"fingerprint_every": 1})
    config = config.model_copy(update={"sync": verified})
    engines = start_engines(config, ranks)
    try:
        models = build_models(config, ranks, engines)
        syncs = []
        sequences = _sequences(read_architecture(config).vocab_size, config)
        for version, factor in enumerate(FACTORS):
            # As in a run, the engines sleep while the policy's weights change.
            models.sync.switch_to_policy()
            models.policy.rewrite(partial(_multiply, factor))
            expected = models.policy.logprobs(_batch(sequences), temperature=1.0).logprobs
            report = models.sync(version)
            scores = engines.call("score", sequences.tolist(), of=list[list[float]])
            gap = ranks.broadcast(_gap(expected, scores), float)
            if not gap <= config.sync.max_gap:
                raise SyncError(
                    f"sync {version}: fingerprints agree, but log-probs of policy and engine "
                    f"differ by {gap:.3g}; sync.max_gap is {config.sync.max_gap:g}"
                )
            syncs.append({**asdict(report), "gap": gap})
        route = models.sync.route
        assert route is not None
        results = {
            "model_path": config.model.path,
            "policy": describe(config.policy, ranks.world_size),
            "engine_tensor_parallel": config.engine_tensor_parallel,
            "num_ranks": ranks.world_size,
            "num_tensors": report.num_tensors,
            "num_bytes": models.sync.num_bytes,  # of the whole model
            "lower_bound_bytes": max(route.plan.missing),  # what the busiest rank must receive
            "num_rounds": len(route.plan.rounds),
            "syncs": syncs,
        }
    finally:
        engines.close()
    dist.destroy_process_group()
    return results


def _text(config: Config, results: Mapping[str, Any]) -> str:
    """Return the results as lines of text."""
    syncs, replicas = results["syncs"], config.num_replicas(results["num_ranks"])
    model, bound = _mib(results["num_bytes"]), _mib(results["lower_bound_bytes"])
    lines = [
        f"{config.model.path}: {results['num_tensors']} tensors, {model}",
        f"policy  {results['policy']}",
        f"engine  tensor {config.engine_tensor_parallel} x {replicas} replicas",
        f"plan    {results['num_rounds']} rounds; received by a rank: at most "
        f"{_mib(syncs[-1]['num_bytes'])}, least possible {bound}, whole model {model}",
    ]
    lines += [
        f"sync {sync['version']}  moved {sync['seconds']:.3f} s, verified "
        f"{sync['verify_seconds']:.3f} s: fingerprints equal; gap of log-probs "
        f"{sync['gap']:.2g} (allowed {config.sync.max_gap:g})"
        for sync in syncs
    ]
    unread = syncs[-1]["unread_tensors"]
    limit = f", except {unread} tensors that cannot be read back" if unread else ""
    return "\n".join([*lines, f"engines compute with the policy's weights{limit}"])


def _sequences(vocab: int, config: Config) -> Tensor:
    """Return random tokens, [sequences, tokens of each]."""
    num_tokens = max(2, min(NUM_TOKENS, config.rollout.max_prompt_tokens))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (NUM_SEQUENCES, num_tokens), generator=generator)


def _batch(sequences: Tensor) -> TokenBatch:
    """Return the sequences as a batch, their first token as the prompt."""
    num_tokens = sequences.shape[1] - 1
    described = [
        TrainingSequence(number, 0, 1, num_tokens, (Segment(0, num_tokens),), 0.0, False, 0.0)
        for number in range(len(sequences))
    ]
    zeros = torch.zeros(num_tokens).numpy()
    rows = enumerate(sequences.int().numpy())
    tokens = {number: SequenceTokens(row[:1], row[1:], zeros) for number, row in rows}
    return assemble(described, tokens)


def _gap(expected: Tensor, scores: Mapping[int, list[list[float]]]) -> float:
    """Return the largest gap of the scores, by replica, in nats. NaN counts as infinity."""
    actual = torch.tensor([*scores.values()], dtype=torch.float64)
    by_sequence = expected.double().view(actual.shape[1], -1)[:, 1:]
    return float((actual - by_sequence).abs().nan_to_num(nan=math.inf).max())


def _multiply(factor: float, shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.view.mul_(factor)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
