"""Process groups of some ranks, and the exchange of bytes between ranks."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

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


def check_scatter(world: Ranks) -> None:
    for sizes in SIZES:
        parts = [bytearray(content(other, size)) for other, size in enumerate(sizes)]
        received = world.scatter(parts if world.rank == 0 else None, sizes[world.rank])
        assert bytes(received) == content(world.rank, sizes[world.rank])


def check_late_sender(world: Ranks) -> None:
    """The timeout of connecting does not limit an exchange: rank 0 sends after more than that."""
    rank = world.rank
    world.barrier()  # so that both connect at about the same time
    if rank < 2:
        group = make_group(default_store(), "slow", [0, 1], rank, TIMEOUT, timedelta(seconds=4))
        time.sleep(5.0 * (rank == 0))
        parts = [bytearray(b"a"), bytearray(b"b")] if rank == 0 else None
        assert bytes(collectives.scatter(parts, 1, group, [0, 1])) == b"ab"[rank : rank + 1]


def check_subgroups(world: Ranks) -> None:
    rank = world.rank
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


def check_error_names_the_rank_of_the_world(some: Ranks, rank: int) -> None:
    # Rank 3 is rank 2 of the subgroup.
    with pytest.raises(RankError, match=r"^rank 3: sent a message"):
        some.all_gather("text" if rank == 3 else 1, int)
    if rank != 3:
        with pytest.raises(RankError, match=r"^rank 3: sent a message"):
            some.broadcast(1, int, source=2)
    else:
        some.broadcast("text", str, source=2)


def check_made_again(rank: int) -> None:
    """A group can be made again, also with a process that made none: members 0 and 1 meet twice
    with process 1, then on another store with process 2 in its place."""
    for name, processes in (("a", (0, 1)), ("a", (0, 1)), ("b", (0, 2))):
        if rank in processes:
            store = dist.PrefixStore(name, default_store())
            group = make_group(store, "pair", [0, 1], processes.index(rank))
            assert collectives.all_gather(rank, int, group, [0, 1]) == [*processes]


def check_secret(world: Ranks) -> None:
    """Members of a subgroup prove that they know the secret."""
    if world.rank in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 2:
                patch.setattr(module, "run_secret", lambda _: b"another")
            with pytest.raises(RankError, match="did not prove that it knows"):
                world.subgroup([1, 2])


def check_sizes(world: Ranks) -> None:
    """Another size than that expected is refused with its sender. One pair expects too little, the
    other too much. The sender waits until the other rank has ended, so this check is the last."""
    first, expected = (0, 2) if world.rank < 2 else (2, 4)
    pair = world.subgroup([first, first + 1])
    parts = [bytearray(3)] * 2 if pair.rank == 0 else None
    message = f"^rank {first}: sends 3 bytes where {expected} are expected"
    # The sender gets an error of gloo, or none.
    refused = pytest.raises(RankError, match=message) if pair.rank else suppress(RuntimeError)
    with refused:
        pair.scatter(parts, expected if pair.rank else 3)


def use_groups(rank: int) -> None:
    world = Ranks(rank, NUM_RANKS, rank)
    check_scatter(world)
    check_subgroups(world)
    check_late_sender(world)
    check_made_again(rank)
    check_secret(world)
    world.barrier()
    check_sizes(world)


def test_groups_of_some_ranks_exchange_what_is_sent_and_refuse_all_else() -> None:
    run_ranks(use_groups, NUM_RANKS)
