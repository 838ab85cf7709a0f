"""Python time of a weight sync of a model with many tensors, without its data.

    python tools/bench/sync_overhead.py     # Qwen3-30B-A3B: 18,867 tensors; about two minutes

- *transfer*: rank 0 of the ranks of model_configs/qwen3_30b_a3b.yaml packs the boxes that it sends
  and puts the tensors together that it receives. All tensors are on the meta device, and the
  exchange does nothing.
- *fingerprints*: one number for each of as many tiny tensors as the engine's rank has. Seconds per
  GB are of one large tensor of bfloat16.
- *buckets*: a trainer rank sends all tensors of a model with the same layers and experts and tiny
  widths to the worker on its GPU. The time is that of both.
- *load*: a vLLM engine of one worker on CPU loads these tensors. *Packing* is the part that vLLM's
  CPU kernels need to pack layers. A GPU has no such step for unquantized weights.

Each figure is in CPU seconds, the least of several syncs. The last line is JSON.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from weight_sync import DTYPE, MODELS, Case, Layout, slices_of_ranks

from dapo_megatron.bridge.buckets import BucketSender, received
from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.bridge.verify import fingerprints
from dapo_megatron.config.file import load_config
from dapo_megatron.engine.engine import VllmEngine
from dapo_megatron.model import architecture, engine_slices, layout_of
from dapo_megatron.policy.shards import shards_of
from dapo_megatron.protocols import ReceivedTensor
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import TensorSlice, whole

REPOSITORY = Path(__file__).resolve().parents[2]
CASE = Case("TP4 EP8 -> TP4 x 4", "Qwen3-30B-A3B", Layout(tp=4, ep=8), engine_tp=4)
NUM_RANKS = 16
NARROW = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
}
TARGET_SECONDS = 1.0
SILENCE_SECONDS = 60.0


def fastest(sync: Callable[[], None], repeats: int) -> float:
    """CPU seconds of the fastest of `repeats` syncs."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        sync()
        seconds.append(time.process_time() - started)
    return min(seconds)


def measure_transfer(repeats: int) -> dict[str, float]:
    """Seconds of rank 0 to pack what it sends and to complete what it receives."""
    arch, meta = architecture(MODELS[CASE.model]), torch.device("meta")
    held, wanted = slices_of_ranks(CASE, NUM_RANKS)
    place = CASE.policy.places(arch, NUM_RANKS)[0]
    started = time.process_time()
    plan = make_plan(held, wanted)
    planning = time.process_time() - started
    params = {
        name: torch.empty(local_parameter.shape, dtype=DTYPE, device=meta)
        for name, local_parameter in layout_of(arch, place).items()
    }
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    started = time.process_time()
    transfer = Transfer(plan, shards_of(params, arch, place), wanted[0], 0, meta)
    preparing = time.process_time() - started
    seconds = fastest(lambda: [None for _ in transfer] and None, repeats)
    dist.destroy_process_group()
    return {
        "num_tensors": len({tensor_slice.name for tensor_slice in wanted[0]}),
        "num_boxes_sent": sum(
            source == 0 and box.target != 0
            for tensors in plan.rounds
            for tensor in tensors
            for box, source in tensor.routes.by_rank.get(0, ())
        ),
        "planning_seconds": planning,
        "preparing_seconds": preparing,
        "transfer_seconds": seconds,
    }


def measure_fingerprints(num_tensors: int, repeats: int) -> dict[str, float]:
    """Seconds of the fingerprints of tiny tensors, and of a GB of a large one."""
    tiny, large = torch.zeros(8, 8, dtype=DTYPE), torch.ones(4096, 8192, dtype=DTYPE)
    tensors = [(tiny, whole(tuple(tiny.shape)))] * num_tensors
    seconds = fastest(lambda: fingerprints([(large, whole(tuple(large.shape)))]) and None, repeats)
    return {
        "fingerprints_seconds": fastest(lambda: fingerprints(tensors) and None, repeats),
        "seconds_per_gb": seconds / (large.nbytes / 1e9),
    }


def measure_load(folder: Path, repeats: int) -> dict[str, float]:
    """Seconds of all tensors through buckets, and of a vLLM engine of one worker to load them,
    without packing."""
    tiny = REPOSITORY / "model_configs"
    for path in (tiny / "tiny_qwen3").iterdir():
        shutil.copy(path, folder)
    model = {**MODELS[CASE.model], **NARROW, "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**model, "dtype": "bfloat16"}))
    config = load_config(
        tiny / "tiny_cpu.yaml",
        [f"model.path={folder}", "policy.precision=bfloat16", "engine.tensor_parallel=1"],
    )
    engine = VllmEngine(config, is_empty=True)
    arch = architecture(model)
    offered = {p.name: (p.global_shape, p.dtype) for p in engine_slices(arch, 0, 1, DTYPE)}
    (slices,) = engine.trace(offered)
    weights: list[ReceivedTensor] = [
        (part.name, [(part.region, torch.zeros(part.region.shape, dtype=part.dtype))])
        for part in slices
    ]
    packing = time_packing(engine)

    def load() -> None:
        packing.clear()
        engine._llm.collective_rpc("load_slices", args=(weights,))
        rest.append(sum(packing))

    rest: list[float] = []
    started = [fastest(load, 1) - rest[-1] for _ in range(repeats)]
    engine.close()
    return {
        "buckets_seconds": fastest(through_buckets(folder, slices, weights), repeats),
        "load_seconds": min(started),
        "packing_seconds": min(rest),
    }


def through_buckets(
    folder: Path, slices: list[TensorSlice], weights: list[ReceivedTensor]
) -> Callable[[], None]:
    """Return a function that sends weights to another thread of this process."""
    sender = BucketSender(folder, torch.device("cpu"), SILENCE_SECONDS)
    sender.expect(slices)

    def send() -> None:
        address = sender.open()
        thread = threading.Thread(target=sender.send, args=(weights,))
        thread.start()
        num_tensors = sum(1 for _ in received(address, SILENCE_SECONDS))
        thread.join()
        assert num_tensors == len(weights)

    return send


def time_packing(engine: VllmEngine) -> list[float]:
    """Return a list to which every call of `process_weights_after_loading` adds its seconds."""
    seconds: list[float] = []

    def timed(process: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.process_time()
            result = process(*args)
            seconds.append(time.process_time() - started)
            return result

        return run

    def patch(model: torch.nn.Module) -> None:
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading = timed(method.process_weights_after_loading)

    engine._llm.apply_model(patch)
    return seconds


def main(
    repeats: Annotated[int, typer.Option(help="Syncs, of which the fastest counts.")] = 5,
) -> None:
    """Python time of a weight sync; the last line is JSON."""
    torch.set_num_threads(1)
    figures = measure_transfer(repeats)
    figures |= measure_fingerprints(int(figures["num_tensors"]), repeats)
    with tempfile.TemporaryDirectory() as folder:
        figures |= measure_load(Path(folder), repeats)
    total = sum(figures[f"{part}_seconds"] for part in ("transfer", "buckets", "load"))
    table = Table(
        "", "CPU seconds", title=f"{CASE.model}: Python time of a sync, one rank of {NUM_RANKS}"
    )
    parts = ("transfer", "buckets", "load", "packing", "fingerprints", "preparing", "planning")
    for name in parts:
        table.add_row(name, f"{figures[f'{name}_seconds']:.2f}")
    console = Console(soft_wrap=True, width=100)
    console.print(table)
    met = "met" if total < TARGET_SECONDS else "missed"
    console.print(f"transfer, buckets and load: {total:.2f} s; under {TARGET_SECONDS:g} s: {met}")
    console.print(f"fingerprints of large tensors: {figures['seconds_per_gb']:.1f} s per GB")
    print(json.dumps({**facts(), **figures, "total_seconds": total}))


if __name__ == "__main__":
    typer.run(main)
