"""Compare the weight sync by a transfer plan with a gather of whole tensors.

    python tools/bench/weight_sync.py          # 4 processes, models of about 100 M parameters
    python tools/bench/weight_sync.py --no-measure             # only the bytes, from the plan

Both methods start at the policy's shards and end in the engine's tensors. They take turns in the
same processes, with buckets of the same size. The gather brings every whole HF tensor to every
rank, as most systems do: within each replica of the model, one of its holders broadcasts each
slice. It does not send what all ranks of the replica hold already.

Bytes are those received from other ranks, by the rank that receives most. The lower bound is what
that rank needs and does not hold. Seconds are medians of a whole sync. Memory is the largest
increase of a rank above the weights of its policy and engine.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from full_gather import FullGather
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dapo_megatron.bridge.islands import RankSlices
from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.model import (
    Architecture,
    ChunkPlace,
    Groups,
    architecture,
    engine_slices,
    layout_of,
    place_engines,
)
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import Region, Shard, TensorSlice, whole

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
NUM_PROCESSES = 4
NODE_RANKS = 8
MIB, GIB = 2**20, 2**30
MAX_RATIO = 1.05
MIN_GAIN = 2.0
Engine = dict[tuple[str, Region], Tensor]
Carry = Callable[[], tuple[int, int]]
"""Runs one sync and returns (tensors that arrived here, bytes received from other ranks)."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of the policy. The remaining factor of the ranks is data-parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def places(self, arch: Architecture, num_ranks: int) -> list[ChunkPlace]:
        """Return the place of each rank.

        Tensor-parallel ranks are consecutive, then come data-parallel and pipeline ranks. Expert
        groups divide the ranks of a pipeline stage independently of that.
        """
        per_stage, layers = num_ranks // self.pp, arch.num_layers // self.pp
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

    def replicas(self, num_ranks: int) -> list[list[int]]:
        """Return groups of ranks that together hold the model. Each rank is in one group."""
        per_stage = num_ranks // self.pp
        size = max(self.tp, self.ep)
        return [
            [rank for rank in range(num_ranks) if rank % per_stage // size == number]
            for number in range(per_stage // size)
        ]


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    policy: Layout
    engine_tp: int
    whole_experts: bool = False
    """Whether engines distribute complete experts over their ranks."""

    def engines(self, num_ranks: int) -> Groups:
        """Return the ranks of each engine, on nodes of NODE_RANKS ranks."""
        return place_engines(
            architecture(MODELS[self.model]),
            num_ranks,
            self.engine_tp,
            policy_tp=self.policy.tp,
            policy_ep=self.policy.ep,
            whole_experts=self.whole_experts,
            ranks_per_node=NODE_RANKS,
        )

    def engine_ranks(self, num_ranks: int) -> list[int]:
        """Return the tensor-parallel rank that each rank has in its engine."""
        engine_rank = {
            rank: at for group in self.engines(num_ranks) for at, rank in enumerate(group)
        }
        return [engine_rank[rank] for rank in range(num_ranks)]

    def needed(self, engine_rank: int) -> list[TensorSlice]:
        """Return the slices that a tensor-parallel rank of an engine needs."""
        return engine_slices(
            architecture(MODELS[self.model]),
            engine_rank,
            self.engine_tp,
            DTYPE,
            expert_parallel=self.whole_experts,
        )


def config(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
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
    "dense": config("qwen3", 768, 2048, 8, (12, 4), 32_768, head_dim=64),
    "MoE": config("qwen3_moe", 512, 1536, 8, (12, 4), 16_384, head_dim=64, **experts(16, 4, 384)),
    "Qwen2.5-32B": config("qwen2", 5120, 27_648, 64, (40, 8), 152_064),
    "Qwen3-30B-A3B": config(
        "qwen3_moe", 2048, 6144, 48, (32, 4), 151_936, head_dim=128, **experts(128, 8, 768)
    ),
}
MEASURED = [
    Case("TP4 -> TP2 x 2", "dense", Layout(tp=4), 2),
    Case("TP2 PP2 -> TP2 x 2", "dense", Layout(tp=2, pp=2), 2),
    Case("PP4 -> TP1 x 4", "dense", Layout(pp=4), 1),
    Case("PP4 -> TP4", "dense", Layout(pp=4), 4),
    Case("DP2 TP2 -> TP2 x 2", "dense", Layout(tp=2), 2),
    Case("DP2 TP2 -> TP4", "dense", Layout(tp=2), 4),
    Case("TP4 -> TP4", "dense", Layout(tp=4), 4),
    Case("EP4 -> TP4", "MoE", Layout(ep=4), 4),
]
COMPUTED = [
    Case("TP8 DP4 -> TP4 x 8", "Qwen2.5-32B", Layout(tp=8), 4),
    Case("TP2 PP2 EP8 -> TP4 x 8", "Qwen3-30B-A3B", Layout(tp=2, pp=2, ep=8), 4),
]

CLUSTERS = (32, 128, 2048)


@torch.no_grad()
def make_shards(arch: Architecture, place: ChunkPlace) -> list[Shard]:
    """Return the policy's parameters on one rank. Replicas are equal."""
    params = {
        name: torch.zeros(local_parameter.shape, dtype=DTYPE)
        for name, local_parameter in layout_of(arch, place).items()
    }
    shards = shards_of(params, arch, place)
    for shard in shards:
        generator = torch.Generator().manual_seed(zlib.crc32(shard.tensor_slice.name.encode()))
        values = torch.randn(shard.tensor_slice.global_shape, generator=generator, dtype=DTYPE)
        shard.write(values[shard.tensor_slice.region.slices])
    return shards


def planned(transfer: Transfer, engine: Engine) -> Carry:
    """Return a sync by the plan."""

    def carry() -> tuple[int, int]:
        num = 0
        for name, regions in transfer:
            for region, value in regions:
                engine[name, region].copy_(value)
            num += 1
        return num, transfer.nbytes_received

    return carry


def gathered(gather: FullGather, engine: Engine) -> Carry:
    """Return a sync that gathers whole tensors and copies the engine's regions of them."""
    regions: dict[str, list[Region]] = {}
    for name, region in engine:
        regions.setdefault(name, []).append(region)

    def carry() -> tuple[int, int]:
        num = 0
        for name, value in gather:
            for region in regions.get(name, []):
                engine[name, region].copy_(value[region.slices])
            num += 1
        return num, gather.nbytes_received

    return carry


def run_once(carry: Carry, ranks: Ranks) -> dict[str, float]:
    """Run one sync. Return the maximum over ranks of each value."""
    # Return freed memory to the system, so that `before` does not include it.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    forget_peak()
    before = resident_bytes("VmRSS")
    ranks.barrier()
    started, processor = time.perf_counter(), time.process_time()
    num_tensors, received = carry()
    processor = time.process_time() - processor
    ranks.barrier()
    seconds = time.perf_counter() - started
    peak = resident_bytes() - before
    values = (seconds, processor, received, peak, num_tensors)
    worst = zip(*ranks.all_gather(values, tuple[float, float, int, int, int]))
    names = ("seconds", "processor_seconds", "received_bytes", "peak_bytes", "num_tensors")
    return dict(zip(names, map(max, worst)))


def measure(case: Case, ranks: Ranks, repeats: int, bucket: int) -> dict[str, Any]:
    """Run both methods once to check that they agree, then measure `repeats` runs each, in turns.

    Raises AssertionError if the methods differ.
    """
    arch = architecture(MODELS[case.model])
    places = case.policy.places(arch, ranks.world_size)
    shards = make_shards(arch, places[ranks.rank])
    wanted = case.needed(case.engine_ranks(ranks.world_size)[ranks.rank])
    engine = {(p.name, p.region): torch.empty(p.region.shape, dtype=DTYPE) for p in wanted}
    started = time.perf_counter()
    held = ranks.all_gather([shard.tensor_slice for shard in shards], list[TensorSlice])
    plan = make_plan(held, ranks.all_gather(wanted, list[TensorSlice]), bucket_bytes=bucket)
    planning = time.perf_counter() - started
    transfer = Transfer(plan, shards, wanted, ranks.rank, CPU)
    gather = FullGather(shards, ranks, case.policy.replicas(ranks.world_size), bucket)
    methods = {"plan": planned(transfer, engine), "gather": gathered(gather, engine)}
    results = []
    for carry in methods.values():
        for tensor in engine.values():
            tensor.fill_(torch.nan)
        carry()
        results.append({key: tensor.clone() for key, tensor in engine.items()})
    if not all(torch.equal(results[0][key], results[1][key]) for key in engine):
        raise AssertionError(f"{case.name}: the two methods differ")
    del results
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, carry in methods.items():
            runs[method].append(run_once(carry, ranks))
    medians = {
        method: {key: statistics.median(run[key] for run in runs_of) for key in runs_of[0]}
        for method, runs_of in runs.items()
    }
    pairs = zip(runs["plan"], runs["gather"])
    return {
        **asdict(case),
        "lower_bound_bytes": max(plan.missing),
        "num_rounds": plan.num_rounds,
        "planning_seconds": planning,
        "speedup": statistics.median(b["seconds"] / a["seconds"] for a, b in pairs),
        **medians,
    }


def slices_of_ranks(case: Case, num_ranks: int) -> tuple[RankSlices, RankSlices]:
    """Return what each rank's policy holds and what its engine wants."""
    arch = architecture(MODELS[case.model])
    places = case.policy.places(arch, num_ranks)
    numbers: dict[ChunkPlace, int] = {}
    list_of_rank = [numbers.setdefault(place, len(numbers)) for place in places]
    held = [
        [
            TensorSlice(part.name, part.global_shape, DTYPE, part.region)
            for local_parameter in layout_of(arch, place).values()
            for part in local_parameter.parts
        ]
        for place in numbers
    ]
    wanted = [case.needed(engine_rank) for engine_rank in range(case.engine_tp)]
    return (
        RankSlices(held, list_of_rank),
        RankSlices(wanted, case.engine_ranks(num_ranks)),
    )


def plan_cluster(case: Case, num_ranks: int) -> dict[str, Any]:
    """Measure what every rank of a cluster does once: decode the lists of slices, and plan."""
    held, wanted = slices_of_ranks(case, num_ranks)
    messages = [encode(list(slices)) for slices in (*held.lists, *wanted.lists)]
    forget_peak()
    before, started = resident_bytes("VmRSS"), time.process_time()
    lists = [decode(message, list[TensorSlice], "rank 0") for message in messages]
    decoded = time.process_time()
    num_held = len(held.lists)
    plan = make_plan(
        RankSlices(lists[:num_held], held.list_of_rank),
        RankSlices(lists[num_held:], wanted.list_of_rank),
    )
    return {
        **asdict(case),
        "num_ranks": num_ranks,
        "num_islands": len(plan.islands),
        "message_bytes": sum(map(len, messages)),
        "decode_seconds": decoded - started,
        "plan_seconds": time.process_time() - decoded,
        "peak_bytes": resident_bytes() - before,
        "lower_bound_bytes": max(plan.missing),
    }


def show_planning(clusters: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row per cluster."""
    table = Table(
        *("ranks", "islands", "messages, MiB", "decoded, CPU s", "planned, CPU s", "memory, MiB"),
        title="what a rank does once, Qwen3-30B-A3B",
    )
    for cluster in clusters:
        table.add_row(
            f"{cluster['num_ranks']:,}",
            str(cluster["num_islands"]),
            f"{cluster['message_bytes'] / MIB:.1f}",
            f"{cluster['decode_seconds']:.2f}",
            f"{cluster['plan_seconds']:.2f}",
            f"{cluster['peak_bytes'] / MIB:.0f}",
        )
    return table


def compute(case: Case, num_ranks: int = 32) -> dict[str, Any]:
    """Compute the bytes of both methods from their plans, without running them."""
    held, wanted = slices_of_ranks(case, num_ranks)
    started = time.perf_counter()
    plan = make_plan(held, wanted)
    planning = time.perf_counter() - started
    shapes = {
        tensor_slice.name: tensor_slice.global_shape
        for tensor_slices in wanted.lists
        for tensor_slice in tensor_slices
    }
    everything = [TensorSlice(name, shape, DTYPE, whole(shape)) for name, shape in shapes.items()]
    plans = {"plan": plan, "gather": make_plan(held, [everything] * num_ranks)}
    return {
        **asdict(case),
        "num_ranks": num_ranks,
        "model_bytes": sum(tensor_slice.nbytes for tensor_slice in everything),
        "lower_bound_bytes": max(plan.missing),
        "num_rounds": plan.num_rounds,
        "planning_seconds": planning,
        "most_sent_bytes": max(plan.sent),
        **{method: {"received_bytes": max(plans[method].missing)} for method in plans},
    }


def ratio(of: float, to: float) -> float | None:
    """Return of / to; None if `to` is 0."""
    return of / to if to else None


def show(cases: Sequence[Mapping[str, Any]], unit: int, title: str) -> Table:
    """Return a table with two rows per case. `unit` is the number of bytes in a MiB or GiB."""
    heads = (
        "received",
        "lower\nbound",
        "ratio",
        "seconds",
        "CPU\nseconds",
        "peak\nmemory",
        "tensors/s",
    )
    table = Table("layouts", "model", "way", *heads, title=title)
    for case in cases:
        for method in ("plan", "gather"):
            values, bound = case[method], case["lower_bound_bytes"]
            over_bound = ratio(values["received_bytes"], bound)
            cells = [f"{values['received_bytes'] / unit:,.2f}", f"{bound / unit:,.2f}"]
            cells.append("-" if over_bound is None else f"{over_bound:.3f}")
            if "seconds" in values:
                rate = values["num_tensors"] / values["seconds"]
                cells += [f"{values[key]:.3f}" for key in ("seconds", "processor_seconds")]
                cells += [f"{values['peak_bytes'] / unit:,.1f}", f"{rate:,.0f}"]
            is_last = method == "gather"
            table.add_row(case["name"], case["model"], method, *cells, end_section=is_last)
    return table


def verdict(case: Mapping[str, Any]) -> str:
    """Return a line with the targets, met or missed.

    The layouts allow at most (bytes of the gather) / (lower bound) times fewer bytes. If that is
    below MIN_GAIN, there is no target for the gain.
    """
    plan, gather = (case[method]["received_bytes"] for method in ("plan", "gather"))
    allowed = ratio(gather, case["lower_bound_bytes"])
    parts = [
        f"{MAX_RATIO} x the lower bound: {_met(plan <= MAX_RATIO * case['lower_bound_bytes'])}"
    ]
    if allowed is None:
        parts.append("no bytes at all")
    else:
        parts.append(f"{gather / plan:.2f} x fewer bytes; the layouts allow {allowed:.2f} x")
    gains = [gather / plan if plan else MIN_GAIN]
    if "speedup" in case:
        parts.append(f"{case['speedup']:.2f} x less time")
        gains.append(case["speedup"])
    if allowed is None or allowed >= MIN_GAIN:
        parts.append(f"at least {MIN_GAIN:.0f} x: {_met(min(gains) >= MIN_GAIN)}")
    return f"{case['name']} ({case['model']}): " + "; ".join(parts)


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main(
    repeats: Annotated[int, typer.Option(help="Measurements of each method.")] = 7,
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
    # Wider than many terminals, because truncated figures are useless.
    console = Console(soft_wrap=True, width=160)
    if measured:
        ranks = join("gloo")
        results = [measure(case, ranks, repeats, bucket_mib * MIB) for case in MEASURED]
        ranks.barrier()
        dist.destroy_process_group()
        if ranks.rank:
            return
        console.print(
            show(results, MIB, f"{NUM_PROCESSES} processes, buckets of {bucket_mib} MiB; MiB")
        )
    computed = [compute(case) for case in COMPUTED]
    console.print(show(computed, GIB, "32 ranks, computed from the plan; GiB"))
    clusters = [plan_cluster(COMPUTED[1], num_ranks) for num_ranks in CLUSTERS]
    console.print(show_planning(clusters))
    print(*map(verdict, [*results, *computed]), sep="\n")
    sizes = {"repeats": repeats, "bucket_bytes": bucket_mib * MIB, "num_ranks": NUM_PROCESSES}
    print(
        json.dumps(
            {**facts(), **sizes, "measured": results, "computed": computed, "clusters": clusters}
        )
    )


if __name__ == "__main__":
    typer.run(main)
