"""`doctor sync`: check that engines compute with the policy's weights after a sync, and report the
bytes that a sync moves.

Policy and engine are built as in a run. Nothing is sampled or trained. Both score the same random
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import (
    Segment,
    SequenceTokens,
    Shard,
    SyncError,
    SyncReport,
    TokenBatch,
    TrainingSequence,
)

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
        proof = _prove(config, session.local_rank)
        if session.rank == 0:
            print(proof.text(), file=session.terminal, flush=True)
            write_result(json_file, json.dumps(proof.to_dict()))


@dataclass
class SyncProof:
    """Verified syncs of one config. (A sync that finds a difference raises SyncError.)"""

    config: Config
    num_ranks: int
    num_tensors: int
    num_bytes: int
    """Bytes of the whole model."""
    bound: int
    """Lower bound of the bytes that the busiest rank must receive."""
    num_rounds: int
    reports: list[SyncReport]
    gaps: list[float]
    """Largest gap of any engine's log-probs to the policy's after each sync, in nats."""

    def text(self) -> str:
        """Return the results as lines of text."""
        config, world = self.config, self.num_ranks
        engine = config.engine_tensor_parallel
        moved = self.reports[-1].num_bytes
        lines = [
            f"{config.model.path}: {self.num_tensors} tensors, {_mib(self.num_bytes)}",
            f"policy  {describe(config.policy, world)}",
            f"engine  tensor {engine} x {config.num_replicas(world)} replicas",
            f"plan    {self.num_rounds} rounds; received by a rank: at most {_mib(moved)}, "
            f"least possible {_mib(self.bound)}, whole model {_mib(self.num_bytes)}",
        ]
        for report, gap in zip(self.reports, self.gaps, strict=True):
            lines.append(
                f"sync {report.version}  moved {report.seconds:.3f} s, verified "
                f"{report.verify_seconds:.3f} s: fingerprints equal; gap of log-probs {gap:.2g} "
                f"(allowed {config.sync.max_gap:g})"
            )
        unread = self.reports[-1].unread_tensors
        limit = f", except {unread} tensors that cannot be read back" if unread else ""
        return "\n".join([*lines, f"engines compute with the policy's weights{limit}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the results, with commit, machine and versions."""
        return {
            **facts(),
            "model_path": self.config.model.path,
            "policy": describe(self.config.policy, self.num_ranks),
            "engine_tensor_parallel": self.config.engine_tensor_parallel,
            "num_ranks": self.num_ranks,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "lower_bound_bytes": self.bound,
            "num_rounds": self.num_rounds,
            "syncs": [
                {**asdict(report), "gap": gap}
                for report, gap in zip(self.reports, self.gaps, strict=True)
            ],
        }


def _prove(config: Config, local_rank: int) -> SyncProof:
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
        reports, gaps = [], []
        sequences = _sequences(read_architecture(config).vocab_size, config)
        for version, factor in enumerate(FACTORS):
            # As in a run, the engines sleep while the policy's weights change.
            models.sync.switch_to_policy()
            models.policy.rewrite(partial(_multiply, factor))
            expected = models.policy.logprobs(_batch(sequences), temperature=1.0).logprobs
            reports.append(models.sync(version))
            scores = engines.call("score", sequences.tolist(), of=list[list[float]])
            gaps.append(ranks.broadcast(_gap(expected, scores), float))
            if not gaps[-1] <= config.sync.max_gap:
                raise SyncError(
                    f"sync {version}: fingerprints agree, but log-probs of policy and engine "
                    f"differ by {gaps[-1]:.3g}; sync.max_gap is {config.sync.max_gap:g}"
                )
        route = models.sync.route
        assert route is not None
        proof = SyncProof(
            config=config,
            num_ranks=ranks.world_size,
            num_tensors=route.plan.num_tensors,
            num_bytes=models.sync.num_bytes,
            bound=max(route.plan.missing),
            num_rounds=route.plan.num_rounds,
            reports=reports,
            gaps=gaps,
        )
    finally:
        engines.close()
    dist.destroy_process_group()
    return proof


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
