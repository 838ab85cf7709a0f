"""Which replica holds the tokens of a completion, and what follows if it is full or lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dapo_megatron.rollout.messages import Move
from dapo_megatron.rollout.open_group import NOWHERE, OpenGroup
from dapo_megatron.types import CompletionSummary, Finish

Inventory = list[tuple[int, int, int]]
"""(ticket, sample, number of tokens) of every completion that a replica holds."""


def rebalance(groups: Mapping[int, OpenGroup], num_replicas: int, max_sequences: int) -> list[Move]:
    """Decide which unfinished completions continue on another replica, and return them.

    A completion stays with the replica that holds its tokens, unless that replica holds more than
    it can run at once, as after a resume with fewer replicas. The newest ones then go to the
    replica that holds the fewest.
    """
    held: list[list[tuple[OpenGroup, CompletionSummary]]] = [[] for _ in range(num_replicas)]
    for group in groups.values():
        for completion in group.completions.values():
            if completion.finish is Finish.UNFINISHED:
                held[completion.replica].append((group, completion))
    moves = []
    for items in held:
        while len(items) > max_sequences:
            target = min(range(len(held)), key=lambda replica: len(held[replica]))
            if len(held[target]) + 1 >= len(items):
                break
            group, completion = items.pop()
            moved = replace(completion, replica=target)
            group.completions[completion.sample] = moved
            held[target].insert(0, (group, moved))
            moves.append(Move(group.ticket, group.prompt, completion, target))
    return moves


def groups_held_by(replicas: Collection[int], groups: Mapping[int, OpenGroup]) -> list[OpenGroup]:
    """Return the groups of which one of the replicas holds a completion."""
    return [
        group
        for group in groups.values()
        if any(completion.replica in replicas for completion in group.completions.values())
    ]


def find_completions(
    groups: Mapping[int, OpenGroup], inventories: Sequence[Inventory]
) -> list[OpenGroup]:
    """Set the replica of every completion to the one that holds it now, or to NOWHERE. Return the
    groups of which some completion is nowhere. `inventories` are those of the replicas, in order.
    """
    holders = {
        (ticket, sample): (replica, num_tokens)
        for replica, inventory in enumerate(inventories)
        for ticket, sample, num_tokens in inventory
    }
    for group in groups.values():
        for sample, completion in group.completions.items():
            replica, num_tokens = holders.get((group.ticket, sample), (NOWHERE, -1))
            if num_tokens != completion.num_tokens:
                replica = NOWHERE
            group.completions[sample] = replace(completion, replica=replica)
    return groups_held_by([NOWHERE], groups)
