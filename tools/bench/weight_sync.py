"""Measure a weight sync: bytes, seconds and memory.

    python tools/bench/weight_sync.py               # 4 processes, models of about 100 M parameters
    python tools/bench/weight_sync.py --no-measure  # only the bytes of large models, from the plan

A sync starts at the policy's shards and ends in the tensors of the engine's workers, on the same
ranks. `received` are the bytes from other ranks of the rank that receives most. `bound` is what
that rank needs and does not hold, the least that any sync can bring. `sent` is by the rank that
sends most. `whole tensors` is what a rank receives if it gets every HF tensor, as in a gather.
Memory is the largest increase of a rank above the weights of its policy and engine.
"""

from __future__ import annotations

import statistics
import sys
import zlib
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from bench import GIB, MIB, Meter, finish, show

from dapo_megatron.bridge.islands import RankSlices
from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    architecture,
    engine_slices,
    layout_of,
    place_engines,
)
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.types import Shard, TensorSlice, whole

DTYPE = torch.bfloat16
NUM_PROCESSES = 4
NODE_RANKS = 8
CLUSTERS = (32, 2048)


def hf_config(
    model_type: str, hidden: int, ffn: int, layers: int, heads: tuple[int, int], vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a config.json. `heads` is (query heads, key-value heads)."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **more,
    }


def experts(num: int, per_token: int, ffn: int) -> dict[str, Any]:
    """Return the expert fields of a config.json."""
    return {
        "num_experts": num,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
    }


MODELS = {
    "dense": hf_config("qwen3", 768, 2048, 8, (12, 4), 32_768, head_dim=64),
    "MoE": hf_config(
        "qwen3_moe", 512, 1536, 8, (12, 4), 16_384, head_dim=64, **experts(16, 4, 384)
    ),
    "Qwen2.5-32B": hf_config("qwen2", 5120, 27_648, 64, (40, 8), 152_064),
    "Qwen3-30B-A3B": hf_config(
        "qwen3_moe", 2048, 6144, 48, (32, 4), 151_936, head_dim=128, **experts(128, 8, 768)
    ),
}


@dataclass(frozen=True)
class Case:
    """A model, and the parallel sizes of policy and engine. What is left of the ranks is
    data-parallel."""

    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    engine_tp: int = 1

    @property
    def name(self) -> str:
        """Layouts as text."""
        return f"TP{self.tp} PP{self.pp} EP{self.ep} -> TP{self.engine_tp}"

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        return architecture(MODELS[self.model])

    def places(self, num_ranks: int) -> list[ChunkPlace]:
        """Return the place of each rank in the policy: tensor-parallel ranks are consecutive, then
        come data-parallel and pipeline ranks."""
        per_stage, layers = num_ranks // self.pp, self.architecture.num_layers // self.pp
        return [
            ChunkPlace(
                tp_rank=rank % self.tp,
                tp_size=self.tp,
                first_layer=rank // per_stage * layers,
                num_layers=layers,
                has_embedding=rank < per_stage,
                has_head=rank >= num_ranks - per_stage,
                ep_rank=rank % per_stage % self.ep,
                ep_size=self.ep,
            )
            for rank in range(num_ranks)
        ]

    def engine_ranks(self, num_ranks: int) -> list[int]:
        """Return the tensor-parallel rank that each rank has in its engine."""
        engines = place_engines(
            self.architecture,
            num_ranks,
            self.engine_tp,
            policy_tp=self.tp,
            policy_ep=self.ep,
            whole_experts=False,
            ranks_per_node=NODE_RANKS,
        )
        engine_rank = {rank: at for group in engines for at, rank in enumerate(group)}
        return [engine_rank[rank] for rank in range(num_ranks)]

    def wanted(self, engine_rank: int) -> list[TensorSlice]:
        """Return the slices that a worker of an engine wants."""
        return engine_slices(self.architecture, engine_rank, self.engine_tp, DTYPE)


MEASURED = [
    Case("dense", tp=4, engine_tp=2),
    Case("dense", tp=2, pp=2, engine_tp=2),
    Case("dense", pp=4, engine_tp=1),
    Case("dense", tp=2, engine_tp=4),
    Case("dense", tp=4, engine_tp=4),
    Case("MoE", ep=4, engine_tp=4),
]
COMPUTED = [
    Case("Qwen2.5-32B", tp=8, engine_tp=4),
    Case("Qwen3-30B-A3B", tp=2, pp=2, ep=8, engine_tp=4),
]


@torch.no_grad()
def make_shards(arch: Architecture, place: ChunkPlace) -> list[Shard]:
    """Return the policy's parameters on one rank. Replicas are equal."""
    params = {
        name: torch.zeros(local_parameter.shape, dtype=DTYPE)
        for name, local_parameter in layout_of(arch, place).items()
    }
    shards = shards_of(params, arch, place)
    for shard in shards:
        shard.write(values_of(shard.tensor_slice))
    return shards


def values_of(part: TensorSlice) -> torch.Tensor:
    """Return the values of a slice, which depend on the tensor's name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
    values = torch.randn(part.global_shape, generator=generator, dtype=DTYPE)
    return values[part.region.slices]


def measure(case: Case, ranks: Ranks, repeats: int, bucket: int) -> dict[str, Any]:
    """Run `repeats` syncs after one that is checked. Return medians of the slowest rank.

    Raises AssertionError if a tensor arrives with other values.
    """
    shards = make_shards(case.architecture, case.places(ranks.world_size)[ranks.rank])
    wanted = case.wanted(case.engine_ranks(ranks.world_size)[ranks.rank])
    engine = {(part.name, part.region): torch.empty(part.region.shape, dtype=DTYPE)
              for part in wanted}  # fmt: skip
    held = ranks.all_gather([shard.tensor_slice for shard in shards], list[TensorSlice])
    plan = make_plan(held, ranks.all_gather(wanted, list[TensorSlice]), bucket_bytes=bucket)
    transfer = Transfer(plan, shards, wanted, ranks.rank, torch.device("cpu"))
    runs = []
    for repeat in range(repeats + 1):
        ranks.barrier()
        with Meter() as meter:
            for name, regions in transfer:
                for region, value in regions:
                    engine[name, region].copy_(value)
            ranks.barrier()
        values = (meter.seconds, meter.cpu_seconds, meter.peak_bytes, transfer.nbytes_received)
        worst = zip(*ranks.all_gather(values, tuple[float, float, int, int]))
        runs.append([max(column) for column in worst])
        if repeat == 0:
            for part in wanted:
                assert torch.equal(engine[part.name, part.region], values_of(part)), part
    seconds, cpu_seconds, peak, received = map(statistics.median, zip(*runs[1:]))
    return {
        "layouts": case.name,
        "model": case.model,
        "received MiB": received / MIB,
        "bound MiB": max(plan.missing) / MIB,
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
        "peak MiB": peak / MIB,
    }


def compute(case: Case, num_ranks: int) -> dict[str, Any]:
    """Plan a sync of a cluster, without running it. Seconds and memory are what planning takes on
    every rank, once."""
    places: dict[ChunkPlace, int] = {}
    list_of_rank = [places.setdefault(place, len(places)) for place in case.places(num_ranks)]
    slices = [
        [
            TensorSlice(part.name, part.global_shape, DTYPE, part.region)
            for local_parameter in layout_of(case.architecture, place).values()
            for part in local_parameter.parts
        ]
        for place in places
    ]
    wanted = [case.wanted(engine_rank) for engine_rank in range(case.engine_tp)]
    held = RankSlices(slices, list_of_rank)
    with Meter() as meter:
        plan = make_plan(held, RankSlices(wanted, case.engine_ranks(num_ranks)))
    shapes = {part.name: part.global_shape for parts in wanted for part in parts}
    everything = [TensorSlice(name, shape, DTYPE, whole(shape)) for name, shape in shapes.items()]
    gather = make_plan(held, RankSlices([everything], [0] * num_ranks))
    return {
        "layouts": case.name,
        "model": case.model,
        "ranks": num_ranks,
        "bound GiB": max(plan.missing) / GIB,
        "sent GiB": max(plan.sent) / GIB,
        "whole tensors GiB": max(gather.missing) / GIB,
        "planning, CPU seconds": meter.cpu_seconds,
        "planning, MiB": meter.peak_bytes / MIB,
    }


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Syncs of each layout.")] = 5,
    bucket_mib: Annotated[int, typer.Option(help="Most MiB that a rank receives at once.")] = 16,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run syncs, or only compute bytes.")
    ] = True,
) -> None:
    """Measure bytes, seconds and memory of a weight sync. The last line is JSON."""
    if measured and not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], NUM_PROCESSES))
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    if measured:
        ranks = join("gloo")
        results = [measure(case, ranks, repeats, bucket_mib * MIB) for case in MEASURED]
        ranks.barrier()
        dist.destroy_process_group()
        if ranks.rank:
            return
        show(f"{NUM_PROCESSES} processes, buckets of {bucket_mib} MiB", results)
    computed = [compute(case, num_ranks) for case in COMPUTED for num_ranks in CLUSTERS]
    show("computed from the plan", computed)
    finish("weight_sync", repeats=repeats, bucket_mib=bucket_mib, measured=results,
           computed=computed)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
