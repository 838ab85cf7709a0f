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
MATRICES = 12


def content(sender: int, receiver: int, size: int) -> bytes:
    return random.Random(f"{sender} {receiver} {size}").randbytes(size)


def size_matrices() -> list[list[list[int]]]:
    """Return sizes [sender][receiver] of several exchanges."""
    rng = random.Random(1)
    choices = (0, 0, 1, 7, 4096, 300_001)
    return [
        [[rng.choice(choices) for _ in range(NUM_RANKS)] for _ in range(NUM_RANKS)]
        for _ in range(MATRICES)
    ] + [[[0] * NUM_RANKS] * NUM_RANKS]


def exchange_parts(rank: int) -> None:
    import numpy as np

    ranks = Ranks(rank, NUM_RANKS, rank)
    for number, sizes in enumerate(size_matrices()):
        parts: list[bytes | bytearray | memoryview] = [
            content(rank, other, sizes[rank][other]) for other in range(NUM_RANKS)
        ]
        if number % 2:  # arrays are sent from their own memory
            parts = [np.frombuffer(bytearray(part), np.uint8).reshape(1, -1).data for part in parts]
        received = ranks.all_to_all(parts, [sizes[other][rank] for other in range(NUM_RANKS)])
        assert [bytes(view) for view in received] == [
            content(other, rank, sizes[other][rank]) for other in range(NUM_RANKS)
        ]


def test_every_rank_gets_the_bytes_that_are_sent_to_it() -> None:
    run_ranks(exchange_parts, NUM_RANKS)


def send_slowly(rank: int) -> list[bytes]:
    """Exchange bytes in a group that had to connect within a second. Rank 1 sends after two."""
    names, connect_timeout = [0, 1], timedelta(seconds=1)
    group = make_group(default_store(), "slow", names, rank, TIMEOUT, connect_timeout)
    share = collectives._shared

    def share_late(part: memoryview) -> object:
        time.sleep(2.0 * rank)
        return share(part)

    collectives._shared = share_late  # type: ignore[assignment]
    return [bytes(part) for part in collectives.all_to_all([b"a", b"b"], [1, 1], group, names)]


def test_the_timeout_of_connecting_does_not_limit_an_exchange() -> None:
    assert run_ranks(send_slowly, 2) == [[b"a", b"a"], [b"b", b"b"]]


def exchange_numbers(rank: int) -> list[float]:
    import numpy as np

    values = np.arange(10, dtype=np.float32) + 100 * rank
    parts = [values.data] * 2
    received = Ranks(rank, 2, rank).all_to_all(parts, [40, 40])
    assert np.shares_memory(np.frombuffer(received[rank], np.float32), values)
    return list(np.frombuffer(received[1 - rank], np.float32))


def test_arrays_of_floats_arrive_and_the_own_part_is_not_copied() -> None:
    first, second = run_ranks(exchange_numbers, 2)
    assert first == [100.0 + number for number in range(10)]
    assert second == [float(number) for number in range(10)]


def expect_another_size(rank: int, expected: int) -> str:
    sizes = [3, 3] if rank == 0 else [expected, 3]
    try:
        Ranks(rank, 2, rank).all_to_all([b"abc", b"abc"], sizes)
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
    sent = [b"to %d" % (first + other) for other in range(2)]
    assert pair.all_to_all(sent, [4, 4]) == [b"to %d" % rank] * 2
    # The same ranks again, one of them only, and a group whose ranks are not consecutive.
    again = pair.subgroup([0, 1])
    assert again.group is not pair.group
    alone = again.subgroup([again.rank])
    assert (alone.rank, alone.world_size, alone.all_gather(rank, int)) == (0, 1, [rank])
    assert alone.all_to_all([b"own"], [3]) == [b"own"]
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
