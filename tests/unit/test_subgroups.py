"""Process groups of some ranks, and the exchange of bytes between ranks."""

from __future__ import annotations

import os
import random
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest

import dapo_megatron.cluster.ranks as module
from dapo_megatron.cluster.groups import TIMEOUT, group_or_world, make_group, notice_lost_nodes
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
    import dapo_megatron.cluster.collectives as collectives

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


def use_roles(rank: int, other_secret: bool) -> str:
    """Join again, as one rank with a policy and two with engines."""
    import torch
    import torch.distributed as dist

    dist.destroy_process_group()
    if other_secret and rank == 2:
        module.run_secret = lambda _: b"another"  # type: ignore[assignment]
    try:
        ranks = module.join("gloo", num_policy=1, replica_size=2)
        ranks = module.first_generation(ranks, "gloo")
    except RankError as error:
        return str(error)
    assert (ranks.policy is None) == (rank > 0) and (ranks.engine is None) == (rank == 0)
    role = ranks.policy or ranks.engine
    assert role is not None
    # The default group has only the ranks of the policy, or of an engine.
    assert (dist.get_rank(), dist.get_world_size()) == (role.rank, role.world_size)
    assert role.all_gather(rank, int) == ([0] if rank == 0 else [1, 2])
    assert ranks.all_gather(rank, int) == [0, 1, 2]
    received = torch.empty(3)
    group_or_world(ranks.device_group).alltoall_base(
        received, torch.arange(3.0) + 10 * rank, [], []
    ).wait()
    assert received.tolist() == [rank, 10 + rank, 20 + rank]
    for _ in range(2):  # two generations of the same group
        pair = ranks.subgroup([0, 2]) if rank != 1 else None
        assert pair is None or pair.all_gather(rank, int) == [0, 2]
    if rank > 0:
        assert role.second().broadcast(rank, int, source=1) == 2
        with pytest.raises(RankError, match=r"^rank 2: sent a message"):
            role.all_gather("text" if rank == 2 else 1, int)
    ranks.barrier()
    return ""


def test_each_role_is_a_world_of_its_own_and_groups_extend_over_both() -> None:
    assert run_ranks(use_roles, 3, False) == [""] * 3


def test_ranks_of_both_roles_prove_the_secret() -> None:
    results = run_ranks(use_roles, 3, True)
    assert all("secret" in text for text in results), results


def test_connections_get_keepalive_and_no_file_stays_open(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (
        (tmp_path / "file").open("w"),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        before = len(os.listdir("/proc/self/fd"))
        notice_lost_nodes()
        assert len(os.listdir("/proc/self/fd")) == before
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    os.close(reading)
    os.close(writing)
