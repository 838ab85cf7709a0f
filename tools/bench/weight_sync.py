"""Weights from the policy's layout into the engine's: the plan beside a gather of whole tensors.

    python tools/bench/weight_sync.py          # 4 processes, models of about 100 M parameters
    python tools/bench/weight_sync.py --no-measure             # only what the plan alone says

Both ways start at the policy's shards and end in the engine's tensors, in the same processes, by
turns, with buckets of the same size. The gather brings every HF tensor whole to every rank, as most
systems do: within each replica of the model, every slice is broadcast by one of its holders. What
all its ranks hold already is not sent. Bytes are those received from other ranks, of the rank with
the most; the lower bound is what that rank wants and does not hold. Seconds are medians of a whole
sync; memory is the largest of a rank above its policy's and its engine's weights.
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

from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.cluster.launch import is_launched, launch
from dapo_megatron.cluster.processes import forget_peak, resident_bytes
from dapo_megatron.cluster.ranks import Ranks, join
from dapo_megatron.model import Architecture, ChunkPlace, architecture, engine_slices, layout_of
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import Region, Shard, TensorSlice, whole

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
NUM_PROCESSES = 4
MIB, GIB = 2**20, 2**30
MAX_RATIO = 1.05
MIN_GAIN = 2.0
Engine = dict[tuple[str, Region], Tensor]
Carry = Callable[[], tuple[int, int]]
"""One sync; (tensors brought here, bytes received from other ranks)."""


@dataclass(frozen=True)
class Layout:
    """How the policy is cut; what is left of the ranks is data-parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def places(self, arch: Architecture, num_ranks: int) -> list[ChunkPlace]:
        """By rank: tensor fastest, then data, then pipeline. The ranks of a pipeline stage are
        dealt anew into expert groups."""
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
        """The ranks that hold the model together, each of them once."""
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


def config(
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    """A config.json; `heads` for queries and for keys."""
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


def experts(num: int, taken: int, ffn: int) -> dict[str, Any]:
    """Of a config.json."""
    return {
        "num_experts": num,
        "num_experts_per_tok": taken,
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


@torch.no_grad()
def make_shards(arch: Architecture, place: ChunkPlace) -> list[Shard]:
    """The policy's parameters on one rank; replicas are equal."""
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
    """A sync by the plan."""

    def carry() -> tuple[int, int]:
        num = 0
        for name, regions in transfer:
            for region, value in regions:
                engine[name, region].copy_(value)
            num += 1
        return num, transfer.nbytes_received

    return carry


def gathered(gather: FullGather, engine: Engine) -> Carry:
    """A sync by whole tensors, of which the engine takes its regions."""
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
    """Seconds until the last rank is done; of the worst rank, bytes received and memory on top."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is not counted as there before
    forget_peak()
    before = resident_bytes("VmRSS")
    ranks.barrier()
    started, processor = time.perf_counter(), time.process_time()
    num_tensors, received = carry()
    processor = time.process_time() - processor
    ranks.barrier()
    seconds = time.perf_counter() - started
    peak = resident_bytes() - before
    mine = (seconds, processor, received, peak, num_tensors)
    worst = zip(*ranks.all_gather(mine, tuple[float, float, int, int, int]))
    names = ("seconds", "processor_seconds", "received_bytes", "peak_bytes", "num_tensors")
    return dict(zip(names, map(max, worst)))


def measure(case: Case, ranks: Ranks, repeats: int, bucket: int) -> dict[str, Any]:
    """Both ways by turns, `repeats` times each after one that is only checked."""
    arch = architecture(MODELS[case.model])
    places = case.policy.places(arch, ranks.world_size)
    shards = make_shards(arch, places[ranks.rank])
    wanted = engine_slices(arch, ranks.rank % case.engine_tp, case.engine_tp, DTYPE)
    engine = {(p.name, p.region): torch.empty(p.region.shape, dtype=DTYPE) for p in wanted}
    started = time.perf_counter()
    held = ranks.all_gather([shard.tensor_slice for shard in shards], list[TensorSlice])
    plan = make_plan(held, ranks.all_gather(wanted, list[TensorSlice]), bucket_bytes=bucket)
    planning = time.perf_counter() - started
    transfer = Transfer(plan, shards, wanted, ranks.rank, CPU)
    gather = FullGather(shards, ranks, case.policy.replicas(ranks.world_size), bucket)
    ways = {"plan": planned(transfer, engine), "gather": gathered(gather, engine)}
    results = []
    for carry in ways.values():
        for tensor in engine.values():
            tensor.fill_(torch.nan)
        carry()
        results.append({key: tensor.clone() for key, tensor in engine.items()})
    if not all(torch.equal(results[0][key], results[1][key]) for key in engine):
        raise AssertionError(f"{case.name}: the two ways differ")
    del results
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, carry in ways.items():
            runs[way].append(run_once(carry, ranks))
    found = {
        way: {key: statistics.median(r[key] for r in of) for key in of[0]}
        for way, of in runs.items()
    }
    pairs = zip(runs["plan"], runs["gather"])
    return {
        **asdict(case),
        "lower_bound_bytes": max(plan.missing),
        "num_rounds": plan.num_rounds,
        "planning_seconds": planning,
        "speedup": statistics.median(b["seconds"] / a["seconds"] for a, b in pairs),
        **found,
    }


def compute(case: Case, num_ranks: int = 32) -> dict[str, Any]:
    """Bytes by the plan alone."""
    arch = architecture(MODELS[case.model])
    held = []
    for place in case.policy.places(arch, num_ranks):
        parts = [
            part
            for local_parameter in layout_of(arch, place).values()
            for part in local_parameter.parts
        ]
        held.append([TensorSlice(p.name, p.global_shape, DTYPE, p.region) for p in parts])
    by_place = [engine_slices(arch, rank, case.engine_tp, DTYPE) for rank in range(case.engine_tp)]
    wanted = [by_place[rank % case.engine_tp] for rank in range(num_ranks)]
    started = time.perf_counter()
    plan = make_plan(held, wanted)
    planning = time.perf_counter() - started
    shapes = {
        tensor_slice.name: tensor_slice.global_shape
        for tensor_slices in by_place
        for tensor_slice in tensor_slices
    }
    everything = [TensorSlice(name, shape, DTYPE, whole(shape)) for name, shape in shapes.items()]
    ways = {"plan": plan, "gather": make_plan(held, [everything] * num_ranks)}
    return {
        **asdict(case),
        "num_ranks": num_ranks,
        "model_bytes": sum(tensor_slice.nbytes for tensor_slice in everything),
        "lower_bound_bytes": max(plan.missing),
        "num_rounds": plan.num_rounds,
        "planning_seconds": planning,
        "most_sent_bytes": max(plan.sent),
        **{way: {"received_bytes": max(one.missing)} for way, one in ways.items()},
    }


def ratio(of: float, to: float) -> float | None:
    """None where there is nothing to divide by."""
    return of / to if to else None


def show(found: Sequence[Mapping[str, Any]], unit: int, title: str) -> Table:
    """Two rows per case."""
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
    for case in found:
        for way in ("plan", "gather"):
            one, bound = case[way], case["lower_bound_bytes"]
            over = ratio(one["received_bytes"], bound)
            cells = [f"{one['received_bytes'] / unit:,.2f}", f"{bound / unit:,.2f}"]
            cells.append("-" if over is None else f"{over:.3f}")
            if "seconds" in one:
                rate = one["num_tensors"] / one["seconds"]
                cells += [f"{one[key]:.3f}" for key in ("seconds", "processor_seconds")]
                cells += [f"{one['peak_bytes'] / unit:,.1f}", f"{rate:,.0f}"]
            table.add_row(case["name"], case["model"], way, *cells, end_section=way == "gather")
    return table


def verdict(case: Mapping[str, Any]) -> str:
    """Targets met or missed. The layouts allow as many times fewer bytes as the gather moves beyond
    the lower bound; below MIN_GAIN that target is not set."""
    ours, theirs = (case[way]["received_bytes"] for way in ("plan", "gather"))
    allowed = ratio(theirs, case["lower_bound_bytes"])
    parts = [
        f"{MAX_RATIO} x the lower bound: {_met(ours <= MAX_RATIO * case['lower_bound_bytes'])}"
    ]
    if allowed is None:
        parts.append("no bytes at all")
    else:
        parts.append(f"{theirs / ours:.2f} x fewer bytes of {allowed:.2f} x that the layouts allow")
    gains = [theirs / ours if ours else MIN_GAIN]
    if "speedup" in case:
        parts.append(f"{case['speedup']:.2f} x less time")
        gains.append(case["speedup"])
    if allowed is None or allowed >= MIN_GAIN:
        parts.append(f"at least {MIN_GAIN:.0f} x: {_met(min(gains) >= MIN_GAIN)}")
    return f"{case['name']} ({case['model']}): " + "; ".join(parts)


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main(
    repeats: Annotated[int, typer.Option(help="Measurements of each way.")] = 7,
    bucket_mib: Annotated[int, typer.Option(help="Most that a rank receives at once.")] = 16,
    measured: Annotated[bool, typer.Option("--measure/--no-measure", help="Run it.")] = True,
) -> None:
    """Bytes, seconds and memory of a weight sync; the last line is JSON."""
    if measured and not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], NUM_PROCESSES))
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    # As wide as it needs, whatever the terminal: figures cut short are worth nothing.
    console = Console(soft_wrap=True, width=160)
    if measured:
        joined = join("gloo")
        found = [measure(case, joined, repeats, bucket_mib * MIB) for case in MEASURED]
        joined.barrier()
        dist.destroy_process_group()
        if joined.rank:
            return
        console.print(
            show(found, MIB, f"{NUM_PROCESSES} processes, buckets of {bucket_mib} MiB; MiB")
        )
    computed = [compute(case) for case in COMPUTED]
    console.print(show(computed, GIB, "32 ranks, by the plan alone; GiB"))
    print(*map(verdict, [*found, *computed]), sep="\n")
    sizes = {"repeats": repeats, "bucket_bytes": bucket_mib * MIB, "num_ranks": NUM_PROCESSES}
    print(json.dumps({**facts(), **sizes, "measured": found, "computed": computed}))


if __name__ == "__main__":
    typer.run(main)
