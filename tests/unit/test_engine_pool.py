"""Engines as rank 0 sees them: played servers connect, sample, fall silent, and leave."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dapo_megatron.cluster.collectives import ErrorRecord, encode
from dapo_megatron.engine.messages import GroupRequest, OrderKind
from dapo_megatron.rollout import pool as module
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.rollout.pool import Pool
from dapo_megatron.segments import Segment
from dapo_megatron.types import EnginesLost, Finish, SyncError
from tests.helpers.rollouts import History, completion_of, make_coordinator, random_script
from tests.helpers.servers import (
    MODEL,
    PATIENCE_SECONDS,
    VERSIONS,
    PlayedServer,
    Player,
    Script,
    opened_pool,
    order_of,
    prompt,
    sampling,
    synced,
    wait_for,
)

SAMPLED = (7, completion_of(0, (Segment(0, 2),), Finish.STOP), "timeout")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass for pools."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr(module, "time", clock)
    return passed.append


def request(ticket: int, *samples: int) -> GroupRequest:
    return GroupRequest(ticket, prompt(ticket), tuple((sample, None) for sample in samples))


def heard_of(pool: Pool, replica: int) -> float:
    return pool._engines[replica].heard


def close(*servers: PlayedServer) -> None:
    for server in servers:
        server.close()


# ------------------------------------------------------------------ who gets in


def test_only_servers_with_the_secret_get_in() -> None:
    with opened_pool(2) as pool:
        strangers = [PlayedServer(pool.address, secret) for secret in (bytes(32), None)]
        # One that knows rank 0's public key.
        strangers.append(PlayedServer(pool.address, keys=zmq.curve_keypair()))
        for stranger in strangers:
            stranger.hello(0)
        host, _, port = pool.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as link, suppress(OSError):
            link.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + bytes(1000))
            pool.wait(0.5)
        friend = PlayedServer(pool.address)
        friend.hello(0)
        welcome = order_of(pool, friend)
        assert welcome.kind is OrderKind.WELCOME and welcome.config == {"seed": 5}
        assert not any(stranger.orders() for stranger in strangers)
        assert len(pool.describe()) == 1 and pool.given_up == []
        close(*strangers, friend)


@pytest.mark.parametrize(
    ("replica", "facts", "why"),
    [
        (0, {"version of vllm": "1.3"}, "version of vllm is 1.3 there, and 1.2 on rank 0"),
        (0, {**VERSIONS, "more": "x"}, "more is x there, and None on rank 0"),
        (2, VERSIONS, "the run has its 2 engines"),
        (None, VERSIONS, "the run has its 2 engines"),  # all are there
    ],
)
def test_a_server_that_does_not_fit_is_told_why(
    replica: int | None, facts: dict[str, str], why: str
) -> None:
    notes: list[str] = []
    with opened_pool(2) as pool:
        pool.recorder = SimpleNamespace(note=notes.append)
        servers = synced(pool, 0, 1)
        other = PlayedServer(pool.address)
        other.hello(replica, facts)
        order = order_of(pool, other)
        assert order.kind is OrderKind.LEAVE and why in order.text
        assert len(notes) == 1 and why in notes[0] and f"process of {replica}" in notes[0]
        assert pool.present == [0, 1] and pool.given_up == []  # as before
        assert not any(server.orders() for server in servers)
        close(*servers, other)


def garbage(pool: Pool, server: PlayedServer) -> None:
    server.send_bytes(b"\xc1 no report")


def another_type(pool: Pool, server: PlayedServer) -> None:
    server.send_bytes(encode({"hello": 3}))


def another_answer(pool: Pool, server: PlayedServer) -> None:
    pool.begin("score", {1: ([[1]],)})
    assert server.orders(PATIENCE_SECONDS)
    server.send(answer=encode("text"))
    assert pool.finish(PATIENCE_SECONDS) == ({}, {})


def another_model(pool: Pool, server: PlayedServer) -> None:
    server.send(ready={"config.json": "decaf"})


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (garbage, "process of 1: sent a message that cannot be read"),
        (another_type, "process of 1: sent a message that cannot be read"),
        (another_answer, "engine 1 (process of 1): sent a message that cannot be read"),
        (another_model, "model.path: config.json is decaf there, and c0ffee on rank 0"),
    ],
)
def test_a_server_that_sends_what_cannot_be_used_is_lost_and_named(
    send: Callable[[Pool, PlayedServer], None], why: str
) -> None:
    with opened_pool(2) as pool:
        servers = synced(pool, 0, 1)
        send(pool, servers[1])
        order = order_of(pool, servers[1])
        assert order.kind is OrderKind.LEAVE and why in order.text
        wait_for(pool, lambda: pool.lost == {1})
        assert pool.given_up == ["process of 1"]
        close(*servers)


def test_another_server_takes_the_place_of_a_replica_from_the_next_sync() -> None:
    with opened_pool(2) as pool:
        old, other = synced(pool, 0, 1)
        numbers = pool.ready
        new = PlayedServer(pool.address)
        new.hello(0)
        assert order_of(pool, new).kind is OrderKind.WELCOME
        [leave] = old.orders(PATIENCE_SECONDS)
        assert leave.kind is OrderKind.LEAVE and "another process has taken its place" in leave.text
        assert pool.lost == {0} and pool.ready == {1: numbers[1]}
        new.send(ready=MODEL)
        wait_for(pool, lambda: 0 in pool.ready)
        assert pool.ready[0] not in numbers.values()
        # It connected in the middle of a phase, in which it gets nothing.
        pool.start(sampling())
        pool.advance([[], [request(7, 0)]])
        assert [order.kind for order in other.orders(PATIENCE_SECONDS)] == [OrderKind.SAMPLE]
        assert pool.present == [1] and new.orders() == []
        pool.note_sync([0])
        pool.start(sampling())
        pool.advance([[request(8, 0)], []])
        assert [order.kind for order in new.orders(PATIENCE_SECONDS)] == [OrderKind.SAMPLE]
        assert pool.present == [0] and other.orders() == []  # not part of that sync
        close(old, new, other)


# ------------------------------------------------------------------ who is lost


def test_every_closed_connection_is_noticed() -> None:
    """Also if the event arrives before sending to that connection fails."""
    with opened_pool(1) as pool:
        for _ in range(20):
            [server] = synced(pool, 0)
            server.close()
            wait_for(pool, lambda: pool.lost)


def test_what_a_replica_reported_before_its_connection_ended_is_not_used() -> None:
    with opened_pool(2) as pool:
        first, second = synced(pool, 0, 1)
        pool.start(sampling())
        pool.advance([[request(7, 0)], [request(8, 0)]])
        first.send(returned=[SAMPLED], num_sampled=1)
        wait_for(pool, lambda: pool._reports)
        first.close()
        wait_for(pool, lambda: pool.lost == {0})
        assert pool.advance([[], []]) == []
        assert pool.given_up == ["process of 0"] and pool.present == [1]
        second.send(is_interrupted=True)
        assert [replica for replica, _ in pool.interrupt()] == [1]
        second.close()
        wait_for(pool, lambda: pool.lost == {0, 1})
        with pytest.raises(EnginesLost):
            pool.start(sampling())


def test_only_a_silent_replica_with_work_is_lost(pass_time: Callable[[float], None]) -> None:
    changes: list[tuple[int, int]] = []
    with opened_pool(3, silence_seconds=600.0) as pool:
        silent, idle, alive = synced(pool, 0, 1, 2)
        pool.timeline = SimpleNamespace(
            change=lambda replica, number: changes.append((replica, number))
        )
        pool.start(sampling())
        pool.advance([[request(7, 0, 1)], [], [request(8, 0)]])
        for _ in range(2):
            assert pool.lost == set()
            pass_time(400.0)
            before = heard_of(pool, 2)
            alive.send(is_news=False)
            wait_for(pool, lambda before=before: heard_of(pool, 2) > before)  # type: ignore[misc]
        assert pool.lost == {0}
        assert changes == [(0, 2), (2, 1), (0, 0)]
        sample, leave = silent.orders(PATIENCE_SECONDS, 2)
        assert (sample.kind, leave.kind) == (OrderKind.SAMPLE, OrderKind.LEAVE)
        assert "no sign of life for 600 s" in leave.text
        # It wakes up, and its late message counts for nothing.
        silent.send(returned=[SAMPLED], num_sampled=1)
        assert order_of(pool, silent).kind is OrderKind.LEAVE
        assert pool.advance([[], [], []]) == []
        close(silent, idle, alive)


def test_a_pool_closes_although_connections_have_ended() -> None:
    with opened_pool(3) as pool:
        first, second, third = synced(pool, 0, 1, 2)
        close(first, second)
        time.sleep(0.2)  # the pool does not look
    assert [order.kind for order in third.orders(PATIENCE_SECONDS)] == [OrderKind.END]
    third.close()


# ------------------------------------------------------------------ phases


def test_a_deterministic_pool_waits_for_all_and_sorts_them() -> None:
    with opened_pool(3, deterministic=True) as pool:
        servers = synced(pool, 0, 1, 2)
        pool.start(sampling())
        for number, replica in enumerate((2, 0, 1), start=1):
            servers[replica].send(returned=[(replica, *SAMPLED[1:])], num_sampled=1)
            wait_for(pool, lambda number=number: len(pool._reports) == number)  # type: ignore[misc]
        reports = pool.advance([[request(replica, 0)] for replica in range(3)])
        assert [(r, report.returned[0][0]) for r, report in reports] == [(0, 0), (1, 1), (2, 2)]
        for server in servers:
            [order] = server.orders(PATIENCE_SECONDS)
            assert order.num_steps > 0
            server.send(is_interrupted=True)
        assert [replica for replica, _ in pool.interrupt()] == [0, 1, 2]
        close(*servers)


def test_a_second_passes_while_rank_0_waits(pass_time: Callable[[float], None]) -> None:
    ticks: list[float] = []
    with opened_pool(1) as pool:
        pool.on_second = lambda: ticks.append(pool._ticked)
        for _ in range(3):
            pass_time(1.0)
            pool.wait(0.0)
            pool.wait(0.0)  # immediately afterwards
    assert len(ticks) >= 3
    assert all(after - before >= 1.0 for before, after in pairwise(ticks))


@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_ends_once_although_servers_come_and_go(seed: int) -> None:
    """The coordinator collects steps from servers that end their connections at random. Then a set
    is evaluated, and the groups of lost servers are sampled again."""
    run: dict[str, Any] = {
        "on_policy": False, "max_overtake": 3, "prompts_per_step": 4, "samples_per_prompt": 3,
        "max_prompts_per_step": 500, "max_staleness": None,
    }  # fmt: skip
    correct, length = random_script(seed, 0.5)
    script, notes = Script(correct, length, seed, losses=9), list[str]()
    with opened_pool(3, max_sequences=6) as pool:
        pool.recorder = SimpleNamespace(note=notes.append)
        players = [Player(pool.address, replica, script) for replica in range(3)]
        for player in players:
            player.start()

        def sync() -> None:
            wait_for(pool, lambda: pool.ready or script.faults)
            pool.note_sync(pool.ready)

        coordinator = make_coordinator(pool, **run)  # type: ignore[arg-type]
        history = History(run, correct, length)
        while (version := len(history.steps)) < 6:
            script.version = version
            sync()
            with suppress(EnginesLost):
                history.add(coordinator, coordinator.collect(version, lambda done: None))
        assert script.losses < 9
        script.losses = 1
        sync()
        while script.losses:
            with suppress(EnginesLost):
                prompts = [(ticket, prompt(ticket)) for ticket in range(12)]
                groups = sample_all(pool, prompts, sampling(), 2)
            sync()
        script.is_over.set()
        for player in players:
            player.join()
    assert script.faults == []
    assert [group.ticket for group in groups] == list(range(12))
    for group in groups:
        grades = [c.grade and c.grade.correct for c in group.completions]
        assert grades == [correct(group.ticket, sample) for sample in range(2)]


# ------------------------------------------------------------------ calls


def test_calls_return_results_and_errors_and_lose_who_does_not_answer(
    pass_time: Callable[[float], None],
) -> None:
    with opened_pool(4, silence_seconds=600.0) as pool:
        servers = synced(pool, 0, 1, 2, 3)
        arguments = {replica: ([[replica]],) for replica in range(4)}
        pool.begin("score", arguments)
        for replica, server in enumerate(servers):
            [order] = server.orders(PATIENCE_SECONDS)
            assert (order.kind, order.text) == (OrderKind.CALL, "score")
            assert order.arguments == encode(arguments[replica])
        servers[0].send(is_news=False)
        servers[0].send(answer=encode([[-0.5]]))
        servers[1].send(error=ErrorRecord.of(SyncError("refused")))
        servers[2].close()
        wait_for(pool, lambda: len(pool._reports) == 2 and 2 not in pool.ready)
        seconds: list[float] = []

        def tick() -> None:
            """Let more time pass than the silence that a phase allows, then that of the call."""
            assert 3 in pool.ready
            seconds.append(700.0)
            pass_time(700.0)

        pool.on_second = tick
        results, errors = pool.finish(1000.0)
        pool.on_second = None
        assert len(seconds) == 2 and results == {0: [[-0.5]]}
        assert {replica: record.text for replica, record in errors.items()} == {1: "refused"}
        assert pool.ready.keys() == {0, 1}
        [leave] = servers[3].orders(PATIENCE_SECONDS)
        assert "no answer to score within 1000 s" in leave.text
        servers[3].send(answer=encode([[-0.5]]))  # too late
        assert order_of(pool, servers[3]).kind is OrderKind.LEAVE
        # Nobody waits for a replica that is lost before the call. An answer that is there counts.
        pool.begin("sleep", dict.fromkeys(range(4), ()))
        for server in servers[:2]:
            server.send(answer=encode(None))
        wait_for(pool, lambda: len(pool._reports) == 2)
        assert pool.finish(0.0) == ({0: None, 1: None}, {})
        close(servers[0], servers[1], servers[3])
