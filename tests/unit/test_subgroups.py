"""Process groups of some ranks, and the exchange of bytes between ranks."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest

import dapo_megatron.cluster.ranks as module
from dapo_megatron.cluster import collectives
from dapo_megatron.cluster.groups import TIMEOUT, make_group
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.cluster.store import default_store
from dapo_megatron.types import RankError
from tests.helpers.ranks import run_ranks

NUM_RANKS = 4
SIZES = ((0, 1, 7, 4096), (300_001, 0, 300_001, 0), (0, 0, 0, 0))


def content(receiver: int, size: int) -> bytes:
    return random.Random(f"{receiver} {size}").randbytes(size)


def receive_parts(rank: int) -> None:
    ranks = Ranks(rank, NUM_RANKS, rank)
    for sizes in SIZES:
        parts = [bytearray(content(other, size)) for other, size in enumerate(sizes)]
        received = ranks.scatter(parts if rank == 0 else None, sizes[rank])
        assert bytes(received) == content(rank, sizes[rank])


def test_every_rank_gets_the_bytes_that_are_sent_to_it() -> None:
    run_ranks(receive_parts, NUM_RANKS)


def receive_late(rank: int) -> bytes:
    """Scatter in a group that had to connect within a second. Rank 0 sends after two."""
    group = make_group(default_store(), "slow", [0, 1], rank, TIMEOUT, timedelta(seconds=1))
    time.sleep(2.0 * (rank == 0))
    parts = [bytearray(b"a"), bytearray(b"b")] if rank == 0 else None
    return bytes(collectives.scatter(parts, 1, group, [0, 1]))


def test_the_timeout_of_connecting_does_not_limit_an_exchange() -> None:
    assert run_ranks(receive_late, 2) == [b"a", b"b"]


def expect_another_size(rank: int, expected: int) -> str:
    try:
        Ranks(rank, 2, rank).scatter(
            [bytearray(3)] * 2 if rank == 0 else None, 3 if rank == 0 else expected
        )
    except RankError as error:
        return str(error)
    except RuntimeError:  # from gloo, on the rank that the other one leaves
        pass
    return ""


@pytest.mark.parametrize("expected", [2, 4])
def test_another_size_raises_an_error_with_the_sender(expected: int) -> None:
    message = run_ranks(expect_another_size, 2, expected)[1]
    assert message == f"rank 0: sends 3 bytes where {expected} are expected"


def use_subgroups(rank: int) -> None:
    world = Ranks(rank, NUM_RANKS, rank)
    pair = world.subgroup([0, 1] if rank < 2 else [3, 2])
    assert (pair.rank, pair.world_size) == (rank % 2, 2)
    first = rank - rank % 2
    assert pair.all_gather(rank, int) == [first, first + 1]
    assert pair.broadcast(rank, int, source=1) == first + 1
    sent = [bytearray(b"to %d" % (first + other)) for other in range(2)]
    assert pair.scatter(sent if pair.rank == 0 else None, 4) == b"to %d" % rank
    # The same ranks again, one of them only, and a group whose ranks are not consecutive.
    again = pair.subgroup([0, 1])
    assert again.group is not pair.group
    alone = again.subgroup([again.rank])
    assert (alone.rank, alone.world_size, alone.all_gather(rank, int)) == (0, 1, [rank])
    assert alone.scatter([bytearray(b"own")], 3) == b"own"
    outer = world.second()
    if rank != 1:
        some = outer.subgroup([0, 2, 3])
        assert some.all_gather(rank, int) == [0, 2, 3]
        check_error_names_the_rank_of_the_world(some, rank)
    world.barrier()


def check_error_names_the_rank_of_the_world(some: Ranks, rank: int) -> None:
    # Rank 3 is rank 2 of the subgroup.
    with pytest.raises(RankError, match=r"^rank 3: sent a message"):
        some.all_gather("text" if rank == 3 else 1, int)
    if rank != 3:
        with pytest.raises(RankError, match=r"^rank 3: sent a message"):
            some.broadcast(1, int, source=2)
    else:
        some.broadcast("text", str, source=2)


def test_subgroups_are_worlds_of_their_own() -> None:
    run_ranks(use_subgroups, NUM_RANKS)


def prove_in_subgroup(rank: int) -> str:
    if rank == 2:
        module.run_secret = lambda _: b"another"  # type: ignore[assignment]
    if rank > 0:
        try:
            Ranks(rank, 3, rank).subgroup([1, 2])
        except RankError as error:
            return str(error)
    return ""


def test_members_of_a_subgroup_prove_the_secret() -> None:
    results = run_ranks(prove_in_subgroup, 3)
    assert all("did not prove that it knows" in text for text in results[1:]), results


def make_pairs(rank: int) -> list[list[int]]:
    """Make the group of members 0 and 1 twice with process 1, then on another store with process 2,
    which takes the place of process 1."""
    import torch.distributed as dist

    gathered = []
    for name, processes in (("a", (0, 1)), ("a", (0, 1)), ("b", (0, 2))):
        if rank in processes:
            store = dist.PrefixStore(name, default_store())
            group = make_group(store, "pair", [0, 1], processes.index(rank))
            gathered.append(collectives.all_gather(rank, int, group, [0, 1]))
    return gathered


def test_a_group_can_be_made_again_also_with_a_process_that_made_none() -> None:
    assert run_ranks(make_pairs, 3) == [[[0, 1], [0, 1], [0, 2]], [[0, 1], [0, 1]], [[0, 2]]]
