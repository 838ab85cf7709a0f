"""Failing together: a rank that gives up alone leaves the others waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from dapo_megatron.protocols import Exchange
from dapo_megatron.types import DapoError, ErrorRecord

NAMED = 5
"""Reasons that an error lists."""
T = TypeVar("T")


def agreed(exchange: Exchange, action: Callable[[], T], *, drain: Iterable[object] = ()) -> T:
    """Do something that may fail on some ranks: then all of them raise, with the reasons.
    Collective.

    `drain` is finished even so: it is a collective iteration that the other ranks are in. Anything
    but a DapoError ends this rank, and its launcher the others.
    """
    result, error = None, None
    try:
        result = action()
    except DapoError as raised:
        error = raised
    for _ in drain:
        pass
    records = exchange.all_gather(ErrorRecord.of(error), ErrorRecord | None)
    errors = {rank: record for rank, record in enumerate(records) if record is not None}
    if errors:
        lines = [f"rank {rank}: {record.text}" for rank, record in errors.items()]
        first = next(iter(errors.values()))
        raise ErrorRecord(first.kind, "\n".join(lines[:NAMED])).error()
    return cast(T, result)
