"""Prompts of any size reach a replica: large orders are divided, a too large prompt is refused."""

from __future__ import annotations

import pytest
from dapo_megatron.rollout.driver import EngineDriver
from dapo_megatron.rollout.messages import GroupRequest, Order, OrderKind

from dapo_megatron.cluster.collectives import decode
from dapo_megatron.rollout import driver as driver_module
from dapo_megatron.types import DataError, Prompt

LIMIT = 2_000


class Recorded:
    """Hub that keeps what is sent."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def send(self, member: int, message: bytes) -> None:
        assert len(message) <= LIMIT
        self.orders.append(decode(message, Order, "rank 0"))


def request(ticket: int, num_bytes: int) -> GroupRequest:
    prompt = Prompt("code", ticket, (1,), "p", "x" * num_bytes)
    return GroupRequest(ticket, prompt, ((0, None),))


def test_a_large_order_is_divided_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_ORDER_BYTES", LIMIT)
    hub = Recorded()
    driver = EngineDriver(hub, 1, 8, deterministic=True, silence_seconds=60.0)  # type: ignore[arg-type]
    requests = [request(ticket, 600) for ticket in range(7)]
    again = (9, 0, requests[0].prompt, "7")
    driver._send_run(0, requests, [again])
    assert [item for order in hub.orders for item in order.requests] == requests
    kinds = [order.kind for order in hub.orders]
    assert kinds == [OrderKind.SUBMIT] * (len(kinds) - 1) + [OrderKind.RUN]
    assert [order.regrade for order in hub.orders] == [[]] * (len(kinds) - 1) + [[again]]


def test_a_prompt_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_ORDER_BYTES", LIMIT)
    monkeypatch.setattr(driver_module, "MAX_PROMPT_BYTES", LIMIT)
    hub = Recorded()
    driver = EngineDriver(hub, 1, 8, deterministic=False, silence_seconds=60.0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^code, row 1: .* leave this row out"):
        driver._send_run(0, [request(0, 10), request(1, LIMIT), request(2, 10)], [])
