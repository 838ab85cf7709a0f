"""Move weights, sliced at random on both sides, between four gloo ranks: bitwise exact."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dapo_megatron.bridge.plan import make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.types import Region, Shard, TensorSlice, whole
from tests.helpers.ranks import run_ranks

NUM_RANKS = 4
CPU = torch.device("cpu")
BUCKET_BYTES = 4096  # several rounds, and some tensors larger than a bucket


@dataclass(frozen=True)
class Layout:
    """The slices that each rank holds and wants."""

    held: list[list[TensorSlice]]
    wanted: list[list[TensorSlice]]


def cut(shape: tuple[int, ...], num: int, dim: int, rng: random.Random) -> list[Region]:
    """Cut a tensor into `num` slabs along `dim`, of random sizes that may be 0."""
    ends = [0, *sorted(rng.randint(0, shape[dim]) for _ in range(num - 1)), shape[dim]]
    slabs = []
    for first, last in pairwise(ends):
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = first, last - first
        slabs.append(Region(tuple(start), tuple(size)))
    return slabs


def random_layout(num_tensors: int = 40, seed: int = 0) -> Layout:
    """Make a layout with row slices, column slices, whole tensors and replicas, in float32 and
    bfloat16, including scalars and vectors. Rank 3 holds nothing, rank 0 wants nothing."""
    rng = random.Random(seed)
    layout = Layout([[] for _ in range(NUM_RANKS)], [[] for _ in range(NUM_RANKS)])
    for number in range(num_tensors):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.choice([0, 1, 2, 2, 2, 3])))
        dtype = rng.choice([torch.float32, torch.bfloat16])
        name = f"model.layers.{number // 4}.part_{number}.weight"

        def deal(tensor_slices: list[list[TensorSlice]], ranks: list[int], num: int) -> None:
            """Deal slabs to `num` of `ranks`. The other ranks repeat them."""
            rng.shuffle(ranks)
            dim = rng.randrange(len(shape)) if shape else 0  # noqa: B023
            regions = cut(shape, num, dim, rng) if shape else [whole(())]  # noqa: B023
            for position, rank in enumerate(ranks):
                region = regions[position % len(regions)]
                tensor_slices[rank].append(TensorSlice(name, shape, dtype, region))  # noqa: B023

        deal(layout.held, [0, 1, 2], rng.randint(1, 3))
        deal(layout.wanted, [1, 2, 3], rng.randint(1, 3))
    return layout


def contents(tensor_slice: TensorSlice, version: int) -> Tensor:
    """Return the whole tensor at this version, the same in every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, tensor_slice.name)) + 1000 * version)
    return torch.randn(tensor_slice.global_shape, generator=generator).to(tensor_slice.dtype)


def make_shards(tensor_slices: list[TensorSlice]) -> list[Shard]:
    """Make shards surrounded by NaN. Every other shard is strided."""
    shards = []
    for number, tensor_slice in enumerate(tensor_slices):
        numel, gap = tensor_slice.region.numel, 1 + number % 2
        memory = torch.full((16 + gap * numel + 16,), torch.nan, dtype=tensor_slice.dtype)
        shards.append(Shard(tensor_slice, memory[16 : 16 + gap * numel : gap]))
    return shards


def fill(shards: list[Shard], version: int) -> None:
    """Write the elements of this version into the shards."""
    for shard in shards:
        shard.write(contents(shard.tensor_slice, version)[shard.tensor_slice.region.slices])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes, dtypes and all bits are equal, also of NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return a.shape == b.shape and a.dtype == b.dtype and a.view(bits).equal(b.view(bits))


def carry(rank: int) -> dict[str, object]:
    """Sync twice with the same Transfer, with other weights each time."""
    layout = random_layout()
    plan = make_plan(layout.held, layout.wanted, bucket_bytes=BUCKET_BYTES, ranks_per_node=2)
    shards = make_shards(layout.held[rank])
    transfer = Transfer(plan, shards, layout.wanted[rank], rank, CPU)
    wrong: list[str] = []
    for version in (1, 2):
        fill(shards, version)
        left = {
            (tensor_slice.name, tensor_slice.region): tensor_slice
            for tensor_slice in layout.wanted[rank]
        }
        # Compare after the last round: buffers must not be reused.
        kept = [(name, *regions[0]) for name, regions in transfer]
        for name, region, tensor in kept:
            tensor_slice = left.pop((name, region))
            if not same_bits(tensor, contents(tensor_slice, version)[region.slices]):
                wrong.append(f"{name} {region} at version {version}")
        wrong += [f"{name} {region} did not arrive" for name, region in left]
    return {
        "wrong": wrong,
        "nbytes": transfer.nbytes_received,
        "planned": plan.missing[rank],
        "rounds": len(plan.rounds),
        "moves": sum(
            1
            for tensors in plan.rounds
            for tensor in tensors
            for _ in tensor.routes.by_rank.get(rank, ())
        ),
    }


def test_randomly_sliced_weights_arrive_bitwise_exact() -> None:
    ranks = run_ranks(carry, NUM_RANKS)
    assert [rank["wrong"] for rank in ranks] == [[]] * NUM_RANKS
    assert ranks[0]["rounds"] > 3
    assert ranks[0]["nbytes"] == 0  # it wants nothing, but sends
    assert ranks[0]["moves"] > 0
    for receiver in ranks[1:]:
        assert receiver["planned"] > 0
        assert (
            receiver["planned"]
            <= receiver["nbytes"]
            <= receiver["planned"] + 15 * receiver["moves"]
        )
