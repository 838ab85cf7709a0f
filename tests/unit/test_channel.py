"""The control channel between rank 0 and the leaders of replicas, on real sockets."""

from __future__ import annotations

from dapo_megatron.cluster.messages import open_channel
from dapo_megatron.cluster.ranks import Ranks
from tests.helpers.ranks import run_ranks


def both_directions(rank: int, num_messages: int) -> list[tuple[int, bytes]] | list[bytes]:
    hub, member = open_channel(Ranks(rank, 4, rank), rank, 4)
    assert member is not None
    for number in range(num_messages):
        member.send(b"%d from %d" % (number, rank))
    received = []
    if hub is not None:
        while len(received) < 4 * num_messages:
            received += hub.receive(60.0)
        for number in range(num_messages):
            for other in range(4):
                hub.send(other, b"%d to %d" % (number, other))
    orders: list[bytes] = []
    while len(orders) < num_messages:
        orders += member.receive(60.0)
    assert orders == [b"%d to %d" % (number, rank) for number in range(num_messages)]
    member.close()
    if hub is not None:
        hub.close()
    return received


def test_messages_arrive_in_order_in_both_directions() -> None:
    received = run_ranks(both_directions, 4, 2_000)[0]
    for rank in range(4):
        messages = [message for member, message in received if member == rank]
        assert messages == [b"%d from %d" % (number, rank) for number in range(2_000)]
