"""The pool of engines on a real socket: who gets in, who is lost, and what happens to its work."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from dapo_megatron.cluster.collectives import ErrorRecord, encode
from dapo_megatron.engine.messages import GroupRequest, OrderKind
from dapo_megatron.rollout.evaluate import sample_all
from dapo_megatron.types import EnginesLost, Finish, Segment, SyncError
from tests.helpers.rollouts import completion_of, make_coordinator
from tests.helpers.servers import (
    MODEL,
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
from tests.unit.test_coordinator import History, random_script

QUICK_SECONDS = 10.0
"""Time within which a lost connection has to be noticed, on a busy machine."""


def request(ticket: int, *samples: int) -> GroupRequest:
    return GroupRequest(ticket, prompt(ticket), tuple((sample, None) for sample in samples))


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
            pool.wait(1.5)
        friend = PlayedServer(pool.address)
        friend.hello(0)
        welcome = order_of(pool, friend)
        assert welcome.kind is OrderKind.WELCOME
        assert welcome.config == {"seed": 5}
        assert not any(stranger.orders() for stranger in strangers)
        assert len(pool.describe()) == 1 and pool.given_up == []
        for server in (*strangers, friend):
            server.close()


@pytest.mark.parametrize(
    ("replica", "facts", "why"),
    [
        (0, {"version of vllm": "1.3"}, "version of vllm is 1.3 there, and 1.2 on rank 0"),
        (0, {}, "version of vllm is None there, and 1.2 on rank 0"),
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
        for server in (*servers, other):
            server.close()


def test_a_server_with_another_model_is_lost() -> None:
    with opened_pool(1) as pool:
        server = PlayedServer(pool.address)
        server.hello(None)
        assert order_of(pool, server).kind is OrderKind.WELCOME
        server.send(ready={"config.json": "decaf"})
        order = order_of(pool, server)
        assert order.kind is OrderKind.LEAVE
        assert "model.path: config.json is decaf there, and c0ffee on rank 0" in order.text
        assert pool.ready == {} and len(pool.given_up) == 1
        server.close()


def test_another_server_takes_the_place_of_a_replica_from_the_next_sync() -> None:
    with opened_pool(2) as pool:
        old, other = synced(pool, 0, 1)
        numbers = pool.ready
        new = PlayedServer(pool.address)
        new.hello(0)
        assert order_of(pool, new).kind is OrderKind.WELCOME
        [leave] = old.orders(QUICK_SECONDS)
        assert leave.kind is OrderKind.LEAVE and "another process has taken its place" in leave.text
        assert pool.lost == {0} and pool.ready == {1: numbers[1]}
        new.send(ready=MODEL)
        wait_for(pool, lambda: 0 in pool.ready)
        assert pool.ready[0] not in numbers.values()
        assert pool.present == [1]
        # It connected in the middle of a phase, in which it gets nothing.
        pool.start(sampling())
        pool.advance([[], [request(7, 0)]])
        pool.wait(0.2)
        assert [order.kind for order in other.orders()] == [OrderKind.SAMPLE]
        assert new.orders() == []
        pool.note_sync([0])
        assert pool.present == [0]
        pool.start(sampling())
        pool.advance([[request(8, 0)], []])
        assert [order.kind for order in new.orders(QUICK_SECONDS)] == [OrderKind.SAMPLE]
        assert other.orders() == []  # not part of that sync
        for server in (old, new, other):
            server.close()


# ------------------------------------------------------------------ who is lost


def test_every_closed_connection_is_noticed() -> None:
    """Also if the event arrives before sending to that connection fails."""
    with opened_pool(1) as pool:
        for _ in range(50):
            [server] = synced(pool, 0)
            server.close()
            wait_for(pool, lambda: pool.lost)


def test_a_replica_whose_connection_has_ended_is_lost() -> None:
    with opened_pool(2) as pool:
        first, second = synced(pool, 0, 1)
        pool.start(sampling())
        pool.advance([[request(7, 0)], [request(8, 0)]])
        completion = completion_of(0, (Segment(0, 2),), Finish.STOP)
        first.send(returned=[(7, completion, "timeout")], num_sampled=1)
        time.sleep(0.3)
        first.close()
        started = time.monotonic()
        wait_for(pool, lambda: pool.lost == {0})
        assert time.monotonic() - started < QUICK_SECONDS
        assert pool.advance([[], []]) == []  # what a lost replica reported is not used
        assert pool.given_up == ["process of 0"] and pool.present == [1]
        second.send(is_interrupted=True)
        assert [replica for replica, _ in pool.interrupt()] == [1]
        second.close()
        wait_for(pool, lambda: pool.lost == {0, 1})
        with pytest.raises(EnginesLost):
            pool.start(sampling())


def test_only_a_silent_replica_with_work_is_lost() -> None:
    changes: list[tuple[int, int]] = []
    with opened_pool(3, silence_seconds=4.0) as pool:
        silent, idle, alive = synced(pool, 0, 1, 2)
        pool.timeline = SimpleNamespace(
            change=lambda replica, number: changes.append((replica, number))
        )
        pool.start(sampling())
        started = time.monotonic()
        pool.advance([[request(7, 0, 1)], [], [request(8, 0)]])
        while not pool.lost and time.monotonic() < started + 2 * QUICK_SECONDS:
            alive.send(is_news=False)
            pool.wait(0.2)
        assert pool.lost == {0}
        assert 4.0 <= time.monotonic() - started < 4.0 + QUICK_SECONDS
        assert changes == [(0, 2), (2, 1), (0, 0)]
        sample, leave = silent.orders(QUICK_SECONDS, 2)
        assert (sample.kind, leave.kind) == (OrderKind.SAMPLE, OrderKind.LEAVE)
        assert "no sign of life for 4 s" in leave.text
        # It wakes up, and its late message counts for nothing.
        completion = completion_of(0, (Segment(0, 2),), Finish.STOP)
        silent.send(returned=[(7, completion, "timeout")], num_sampled=1)
        assert order_of(pool, silent).kind is OrderKind.LEAVE
        assert pool.advance([[], [], []]) == []
        for server in (silent, idle, alive):
            server.close()


@pytest.mark.parametrize("message", [b"\xc1 no report", encode({"hello": 3})])
def test_a_server_that_sends_garbage_is_lost_and_named(message: bytes) -> None:
    with opened_pool(2) as pool:
        servers = synced(pool, 0, 1)
        servers[1].send_bytes(message)
        order = order_of(pool, servers[1])
        assert order.kind is OrderKind.LEAVE
        assert "process of 1: sent a message that cannot be read" in order.text
        assert pool.lost == {1} and pool.ready.keys() == {0}
        for server in servers:
            server.close()


def test_a_pool_closes_although_connections_have_ended() -> None:
    with opened_pool(3) as pool:
        first, second, third = synced(pool, 0, 1, 2)
        first.close()
        second.close()
        time.sleep(0.5)
    assert [order.kind for order in third.orders(QUICK_SECONDS)] == [OrderKind.END]
    third.close()


# ------------------------------------------------------------------ phases


def test_a_deterministic_pool_waits_for_all_and_sorts_them() -> None:
    with opened_pool(3, deterministic=True) as pool:
        servers = synced(pool, 0, 1, 2)
        pool.start(sampling())
        completion = completion_of(0, (Segment(0, 2),), Finish.STOP)
        for replica in (2, 0, 1):
            servers[replica].send(returned=[(replica, completion, "timeout")], num_sampled=1)
            time.sleep(0.1)
        reports = pool.advance([[request(replica, 0)] for replica in range(3)])
        assert [(r, report.returned[0][0]) for r, report in reports] == [(0, 0), (1, 1), (2, 2)]
        for server in servers:
            [order] = server.orders(QUICK_SECONDS)
            assert order.num_steps > 0
            server.send(is_interrupted=True)
        assert [replica for replica, _ in pool.interrupt()] == [0, 1, 2]
        for server in servers:
            server.close()


def test_a_second_passes_while_rank_0_waits() -> None:
    ticks: list[float] = []
    with opened_pool(1) as pool:
        pool.on_second = lambda: ticks.append(time.monotonic())
        pool.wait(3.5)
    assert 3 <= len(ticks) <= 4


@pytest.mark.parametrize("seed", range(8))
def test_each_sequence_ends_once_although_servers_come_and_go(seed: int) -> None:
    """The coordinator collects steps from servers that end their connections at random."""
    run: dict[str, Any] = {
        "on_policy": False, "max_overtake": 3, "prompts_per_step": 4, "samples_per_prompt": 3,
        "max_prompts_per_step": 500, "max_staleness": None,
    }  # fmt: skip
    correct, length = random_script(seed, 0.5)
    script = Script(correct, length, seed, losses=9)
    with opened_pool(3, max_sequences=6) as pool:
        pool.recorder = SimpleNamespace(note=lambda line: None)
        players = [Player(pool.address, replica, script) for replica in range(3)]
        for player in players:
            player.start()
        coordinator = make_coordinator(pool, **run)  # type: ignore[arg-type]
        history = History(coordinator, run)
        version = 0
        while version < 8:
            wait_for(pool, lambda: pool.ready or script.faults)
            script.version = version
            pool.note_sync(pool.ready)
            try:
                history.record_step(coordinator.collect(version, lambda done: None))
                version += 1
            except EnginesLost:
                continue
        script.is_over.set()
        for player in players:
            player.join()
    assert script.faults == []
    assert script.losses < 9
    history.check_totals()
    ended = [c for step in history.steps for g, _ in step.ended for c in g.completions]
    assert len(ended) == 3 * sum(len(step.ended) for step in history.steps)


def test_an_evaluation_samples_the_groups_of_a_lost_server_again() -> None:
    lengths = Counter({(ticket, sample): 3 for ticket in range(12) for sample in range(2)})
    script = Script(lambda ticket, sample: sample == 0, lambda *key: lengths[key], losses=1)
    with opened_pool(2, max_sequences=4) as pool:
        pool.recorder = SimpleNamespace(note=lambda line: None)
        players = [Player(pool.address, replica, script) for replica in range(2)]
        for player in players:
            player.start()
        wait_for(pool, lambda: len(pool.ready) == 2)
        pool.note_sync(pool.ready)
        groups = sample_all(pool, [(ticket, prompt(ticket)) for ticket in range(12)], sampling(), 2)
        script.is_over.set()
        for player in players:
            player.join()
    assert script.faults == [] and script.losses == 0
    assert [group.ticket for group in groups] == list(range(12))
    grades = [[c.grade and c.grade.correct for c in group.completions] for group in groups]
    assert grades == [[True, False]] * 12


# ------------------------------------------------------------------ calls


def test_calls_return_results_and_errors_and_lose_who_does_not_answer() -> None:
    with opened_pool(4, silence_seconds=3.0) as pool:
        servers = synced(pool, 0, 1, 2, 3)
        arguments = {replica: ([[replica]],) for replica in range(4)}
        pool.begin("score", arguments)
        for replica, server in enumerate(servers):
            [order] = server.orders(QUICK_SECONDS)
            assert (order.kind, order.text) == (OrderKind.CALL, "score")
            assert order.arguments == encode(arguments[replica])
        servers[0].send(is_news=False)
        servers[0].send(answer=encode([[-0.5]]))
        servers[1].send(error=ErrorRecord.of(SyncError("refused")))
        servers[2].close()
        started = time.monotonic()
        results, errors = pool.finish(5.0)  # longer than the silence that a phase allows
        assert 5.0 <= time.monotonic() - started < 5.0 + QUICK_SECONDS
        assert results == {0: [[-0.5]]}
        assert {replica: record.text for replica, record in errors.items()} == {1: "refused"}
        assert pool.ready.keys() == {0, 1}
        [leave] = servers[3].orders(QUICK_SECONDS)
        assert "no answer to score within 5 s" in leave.text
        servers[3].send(answer=encode([[-0.5]]))  # too late
        assert order_of(pool, servers[3]).kind is OrderKind.LEAVE
        # Nobody waits for a replica that is lost before the call.
        pool.begin("sleep", dict.fromkeys(range(4), ()))
        for server in servers[:2]:
            server.send(answer=encode(None))
        assert pool.finish(60.0) == ({0: None, 1: None}, {})
        for replica in (0, 1, 3):
            servers[replica].close()


def test_an_answer_at_the_last_moment_counts() -> None:
    with opened_pool(1) as pool:
        [server] = synced(pool, 0)
        pool.begin("sleep", {0: ()})
        server.send(answer=encode(None))
        assert pool.finish(0.0) == ({0: None}, {})
        assert pool.ready.keys() == {0}
        server.close()


def test_a_server_whose_answer_has_another_type_is_lost() -> None:
    with opened_pool(1) as pool:
        notes: list[str] = []
        pool.recorder = SimpleNamespace(note=notes.append)
        [server] = synced(pool, 0)
        pool.begin("score", {0: ([[1]],)})
        server.send(answer=encode("text"))
        assert pool.finish(5.0) == ({}, {})
        assert pool.ready == {}
        assert "engine 0 (process of 0): sent a message that cannot be read" in notes[0]
        server.close()
