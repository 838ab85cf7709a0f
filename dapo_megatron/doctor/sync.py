"""One rank of `doctor sync`: in the layouts of a config, do engines compute with the policy's
weights after a sync, and what does a sync cost?

The model itself is built, policy and engine, as a run builds them; nothing is sampled or trained.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.cluster.ranks import join
from dapo_megatron.config import Config
from dapo_megatron.plan.layout import describe
from dapo_megatron.run.context import redirect_output
from dapo_megatron.types import DapoError, SyncReport

if TYPE_CHECKING:
    from dapo_megatron.bridge.sync import WeightSync
    from dapo_megatron.cluster.ranks import Ranks
    from dapo_megatron.types import Shard

FACTORS = (1.0, 1.125, 1 / 1.125)
"""What every weight is multiplied by before each sync: seen even in FP8 of 3 bits whose scales stay
(powers of two), harmless in the end."""


def sync(config: Config, json_file: Path | None) -> None:
    """Prove it, on this rank of a launched job; figures on the terminal of rank 0 and in
    `json_file`. Raises SyncError naming tensor and ranks, and whatever building the parts raises;
    both are told on the terminal."""
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory(prefix="doctor_sync_") as folder:
        log = Path(folder) / f"rank_{rank}.log"
        terminal = redirect_output(log)
        try:
            proof = _prove(config)
            if rank == 0:
                print(proof.text(), file=terminal, flush=True)
                if json_file is not None:
                    json_file.write_text(json.dumps(proof.to_json()), encoding="utf-8")
        except DapoError as error:
            if rank == 0:
                print(f"error: {error}", file=terminal, flush=True)
            raise
        finally:
            if isinstance(sys.exc_info()[1], Exception) and not isinstance(
                sys.exc_info()[1], DapoError
            ):
                print(log.read_text(errors="replace")[-2000:], file=terminal, flush=True)


@dataclass
class Proof:
    """Syncs of one config, all of them verified: what did not agree was raised as an error."""

    config: Config
    num_ranks: int
    num_tensors: int
    num_bytes: int
    """Of the whole model."""
    bound: int
    """Bytes that the rank which lacks most lacks: what no plan can do without."""
    num_rounds: int
    reports: list[SyncReport]

    def text(self) -> str:
        """The figures as lines."""
        config, world = self.config, self.num_ranks
        engine = config.engine_tensor_parallel
        moved = self.reports[-1].num_bytes
        lines = [
            f"{config.model.path}: {self.num_tensors} tensors, {_mib(self.num_bytes)}",
            f"policy  {describe(config.policy, world)}",
            f"engine  tensor {engine} x {world // engine} replicas",
            f"plan    {self.num_rounds} rounds; received by a rank: at most {_mib(moved)}, "
            f"least possible {_mib(self.bound)}, whole model {_mib(self.num_bytes)}",
        ]
        for report in self.reports:
            lines.append(
                f"sync {report.version}  moved {report.seconds:.3f} s, verified "
                f"{report.verify_seconds:.3f} s: fingerprints equal; gap on fixed sequences "
                f"{report.canary_gap:.2g} (allowed {config.sync.max_gap:g})"
            )
        unread = self.reports[-1].unread_tensors
        but = f", as far as can be seen: {unread} tensors cannot be read back" if unread else ""
        return "\n".join([*lines, f"engines hold and compute with what the policy holds{but}"])

    def to_json(self) -> dict[str, Any]:
        """The figures, with what they were made with."""
        from dapo_megatron.doctor.facts import facts

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
            "syncs": [asdict(report) for report in self.reports],
        }


def _prove(config: Config) -> Proof:
    import torch.distributed as dist

    from dapo_megatron.policy.device import backend, claim
    from dapo_megatron.run import build

    claim(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    ranks = join(backend())
    every = config.sync.model_copy(update={"fingerprint_every": 1})
    policy, engine, weight_sync = build.build_models(
        config.model_copy(update={"sync": every}), ranks
    )
    reports = []
    for version, factor in enumerate(FACTORS):
        # As in a run: the engine sleeps, the policy moves on.
        engine.sleep()
        policy.onload()
        policy.rewrite(partial(_multiply, factor))
        reports.append(weight_sync(version))
    proof = _proof(config, ranks, weight_sync, reports)
    dist.destroy_process_group()
    return proof


def _multiply(factor: float, shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.view.mul_(factor)


def _proof(
    config: Config, ranks: Ranks, weight_sync: WeightSync, reports: list[SyncReport]
) -> Proof:
    plan = weight_sync.plan
    return Proof(
        config=config,
        num_ranks=ranks.world_size,
        num_tensors=plan.num_tensors,
        num_bytes=weight_sync.num_bytes,
        bound=max(plan.missing),
        num_rounds=plan.num_rounds,
        reports=reports,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
