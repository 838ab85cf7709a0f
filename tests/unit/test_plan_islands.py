"""Plans for clusters: computed for one island, the same as a plan for every rank by itself."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
import torch

from dapo_megatron.bridge import islands
from dapo_megatron.bridge.islands import RankSlices
from dapo_megatron.bridge.plan import TransferPlan, make_plan
from dapo_megatron.bridge.transfer import Transfer
from dapo_megatron.model import ChunkPlace, architecture, engine_slices, layout_of
from dapo_megatron.types import SyncError, TensorSlice, whole
from tests.parity.test_transfer import CPU, contents, fill, make_shards, same_bits
from tests.unit.test_transfer import Threads

MOE = architecture(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "vocab_size": 48,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }
)
BUCKET_BYTES = 512


def slices_of_cluster(
    num_ranks: int, tp: int, pp: int, ep: int, engine_tp: int
) -> tuple[RankSlices, RankSlices]:
    """Return what each rank of a cluster holds and wants of MOE. Ranks of a pipeline stage are
    consecutive, as in Megatron."""
    per_stage, num_layers = num_ranks // pp, MOE.num_layers // pp
    held = []
    for rank in range(num_ranks):
        place = ChunkPlace(
            tp_rank=rank % tp,
            tp_size=tp,
            first_layer=rank // per_stage * num_layers,
            num_layers=num_layers,
            has_embedding=rank < per_stage,
            has_head=rank >= num_ranks - per_stage,
            ep_rank=rank % per_stage % ep,
            ep_size=ep,
        )
        parts = [part for parameter in layout_of(MOE, place).values() for part in parameter.parts]
        held.append([TensorSlice(p.name, p.global_shape, torch.bfloat16, p.region) for p in parts])
    engine = [engine_slices(MOE, rank, engine_tp, torch.bfloat16) for rank in range(engine_tp)]
    wanted = [engine[rank % engine_tp] for rank in range(num_ranks)]
    return RankSlices.of(held), RankSlices.of(wanted)


def digest(plan: TransferPlan) -> str:
    """Return a checksum of every box of a plan, with its source, tensor and round."""
    text = [
        [
            (tensor.name, box.target, str(box.region), str(box.box), box.nbytes, source)
            for tensor in tensors
            for box, source in tensor.routes.with_sources()
        ]
        for tensors in plan.rounds
    ]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("num_ranks", "tp", "pp", "ep", "engine_tp", "expected"),
    [
        (4, 2, 1, 2, 4, "409fafdfbb524e1e"),
        (8, 2, 2, 2, 4, "e53ea0ed0c471732"),
        (16, 4, 1, 8, 2, "d476912e7d0d854c"),
        (16, 2, 2, 4, 4, "9251d969ef5a116c"),
        (32, 2, 2, 8, 4, "0f22ecaae3a9bbc2"),
        (32, 2, 1, 2, 4, "2dc20b90141a40a6"),
    ],
)
def test_plan_is_the_one_computed_rank_by_rank(
    num_ranks: int, tp: int, pp: int, ep: int, engine_tp: int, expected: str
) -> None:
    """The checksums are of an older planner, which chose each box of each rank separately."""
    held, wanted = slices_of_cluster(num_ranks, tp, pp, ep, engine_tp)
    plan = make_plan(held, wanted, bucket_bytes=BUCKET_BYTES)
    assert plan.islands == (tuple(range(num_ranks)),)
    assert digest(plan) == expected


def test_large_cluster_has_the_plan_of_one_island() -> None:
    small = make_plan(*slices_of_cluster(32, 2, 2, 8, 4), bucket_bytes=BUCKET_BYTES)
    held, wanted = slices_of_cluster(256, 2, 2, 8, 4)
    large = make_plan(held, wanted, bucket_bytes=BUCKET_BYTES)
    assert digest(large) == digest(small)
    assert sorted(rank for island in large.islands for rank in island) == list(range(256))
    assert large.missing[:16] == small.missing[:16]
    for island in large.islands:
        assert [held[rank] for rank in island] == [held[rank] for rank in large.islands[0]]
        assert [wanted[rank] for rank in island] == [wanted[rank] for rank in large.islands[0]]
        # Whole nodes, because sources on a target's node are nearer.
        assert [rank % 8 for rank in island] == [*range(8)] * (len(island) // 8)
        assert all(b == a + 1 for a, b in pairwise(island) if b % 8)


def test_unequal_nodes_are_one_island() -> None:
    """Node 0 holds everything and wants nothing; the others want everything."""
    piece = TensorSlice("t", (8,), torch.float32, whole((8,)))
    held = [[piece]] * 8 + [[]] * 64
    wanted = [[]] * 8 + [[piece]] * 64
    plan = make_plan(held, wanted)
    assert plan.islands == (tuple(range(72)),)
    assert plan.sent == (*[8 * piece.nbytes] * 8, *[0] * 64)


def test_error_names_a_rank_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first island is ranks 0, 1, 4 and 5, and the last two of them want what no rank holds."""
    monkeypatch.setattr(islands, "ISLAND_RANKS", 4)
    piece, other = (TensorSlice(name, (8,), torch.float32, whole((8,))) for name in ("a", "b"))
    held = [[piece]] * 8
    wanted = [[piece]] * 4 + [[piece, other]] * 4
    with pytest.raises(SyncError, match=r"^rank 4 wants b, which no rank holds$"):
        make_plan(held, wanted, ranks_per_node=2)


def test_weights_arrive_in_every_island(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipeline stages of two nodes each, and so two islands of a node of each stage."""
    monkeypatch.setattr(islands, "ISLAND_RANKS", 4)
    ranks = Threads(8)
    monkeypatch.setattr("dapo_megatron.bridge.transfer.group_or_world", lambda _: ranks)
    held, wanted = slices_of_cluster(8, 2, 2, 2, 2)
    plan = make_plan(held, wanted, bucket_bytes=BUCKET_BYTES, ranks_per_node=2)
    assert plan.islands == ((0, 1, 4, 5), (2, 3, 6, 7))

    def receive() -> int:
        shards = make_shards(held[ranks.rank])
        fill(shards, 1)
        expected = {(piece.name, piece.region): piece for piece in wanted[ranks.rank]}
        transfer = Transfer(plan, shards, wanted[ranks.rank], ranks.rank, CPU)
        for name, regions in transfer:
            for region, value in regions:
                piece = expected.pop((name, region))
                assert same_bits(value, contents(piece, 1)[region.slices]), f"{name}{region}"
        assert not expected
        return transfer.nbytes_received

    assert min(ranks.run(receive)) > 0
