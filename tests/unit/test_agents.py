"""Agents that call the endpoint with the SDK of OpenAI, through servers, dispatch and coordinator:
what the model sampled, each agent saw, and only that is trained, whatever an agent does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_megatron.data.batch import describe
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.segments import ENVIRONMENT, Segment, branches
from dapo_megatron.types import Completion, Finish, Outcome, Prompt, SampleRequest
from tests.helpers.agents import calls_of, write_agents
from tests.helpers.talking import (
    MAX_TOKENS,
    MAX_TURNS,
    OVERLONG,
    TalkingRun,
    disturb,
    tokenizer,
)

MODULE = "agents_of_a_test"
POOLS: list[EnvironmentPool] = []
SECONDS = 10.0
"""Time in which an agent has to call or end, also on a busy machine."""
KINDS = ("plain", "once", "careless", "parallel", "unruly", "endless", "hostile", "stubborn")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("agents")
    file = write_agents(folder, MODULE)
    sys.path.insert(0, str(folder))
    names = {f"agent:{MODULE}:{kind}" for kind in KINDS}
    with (
        EnvironmentPool(names, SECONDS, 4096) as first,
        EnvironmentPool(names, SECONDS, 4096) as second,
    ):
        POOLS[:] = first, second
        yield file
    sys.path.remove(str(folder))


class Run(TalkingRun):
    """A run whose completions are of one agent."""

    def start(self) -> None:
        prompts = [
            Prompt("sums", i, (), "", "", {"name": str(i), "start": i}, self.environment)
            for i in range(40)
        ]
        self.start_with(POOLS, prompts, {"sums": "environment"})

    @property
    def environment(self) -> str:
        return f"agent:{MODULE}:{self.kind}"

    def ended(self) -> list[tuple[Prompt, Completion]]:
        return [
            (group.prompt, completion)
            for collected in self.collected
            for group, outcome in collected.ended
            for completion in group.completions
            if outcome is Outcome.TRAINED
        ]


def turns_of(completion: Completion) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before, tokens) of each sampled turn, by branch."""
    in_order = []
    for start, segments in branches(completion.segments):
        end, first = start, -1
        for segment in (*segments, None):
            if first >= 0 and (segment is None or segment.is_observed):
                before = list(completion.tokens[start:first])
                in_order.append((before, list(completion.tokens[first:end])))
                first = -1
            if segment is not None:
                if not segment.is_observed and first < 0:
                    first = end
                end += segment.num_tokens
    return in_order


def is_subsequence(part: list[Any], whole: list[Any]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


def check_tokens(run: Run, log: Path) -> int:
    """Check that the sampled tokens of each completion are those of calls of one agent, in order,
    after the tokens that it was told. Return the number of branches."""
    by_agent: dict[tuple[str, int], list[Any]] = {}
    for call in calls_of(log):
        by_agent.setdefault((call["name"], call["process"]), []).append(call)
    num_branches = 0
    for prompt, completion in run.ended():
        turns = turns_of(completion)
        calls = [
            [(call["prompt"], call["tokens"]) for call in calls]
            for (name, _), calls in by_agent.items()
            if name == str(prompt.index)
        ]
        if run.kind == "unruly":  # an agent that left a call does not know its answer
            calls = [turns for own in calls if is_subsequence(own, turns)]
        assert turns in calls, (
            prompt.index,
            completion.sample,
            [(len(a), len(b)) for a, b in turns],
            [[(len(a), len(b)) for a, b in own] for own in calls],
        )
        num_branches += len(branches(completion.segments)) - 1
    return num_branches


@pytest.mark.parametrize("kind", ["plain", "once"])
def test_an_agent_trains_like_an_environment(kind: str, log: Path) -> None:
    log.unlink(missing_ok=True)
    run = Run(kind, 1)
    for _ in range(3):
        run.step()
    assert sum(collected.interrupted for collected in run.collected)
    run.driver.close()
    assert not check_tokens(run, log)
    allowed = {"waiting_seconds", "refused_calls", "agents_with/turns", "agent/turns"}
    assert run.counts.keys() <= allowed, run.counts
    assert run.counts["agent/turns"] > run.counts["agents_with/turns"] > 0
    ended = run.ended()
    assert {completion.finish for _, completion in ended} >= {Finish.DONE}
    for _, completion in ended:
        assert completion.grade is not None
        # What a tool spells out is not the end of its message.
        text = tokenizer().decode(completion.tokens)
        assert text.count("< end>") == text.count("total ")


def test_a_rewritten_history_is_a_branch_and_never_a_silent_change(log: Path) -> None:
    """The agent adds a space, drops what was said beside calls, changes the order of results, or
    writes arguments with other spaces, which means the same."""
    log.unlink(missing_ok=True)
    run = Run("careless", 2)
    for _ in range(3):
        run.step()
    run.driver.close()
    assert check_tokens(run, log) > 3
    for collected in run.collected:
        groups = collected.train
        completions = {(g.ticket, c.sample): c for g in groups for c in g.completions}
        sequences = describe(groups, overlong=OVERLONG, eps=1e-6)
        for key, completion in completions.items():
            own = [each for each in sequences if (each.ticket, each.sample) == key]
            assert [each.start for each in own] == [b for b, _ in branches(completion.segments)]
            assert len({(each.advantage, each.reward) for each in own}) == 1
            assert sum(each.response_tokens for each in own) == completion.num_tokens


def test_rewriting_can_be_refused(log: Path) -> None:
    run = Run("careless", 2, rewrites="refuse")
    run.step()
    run.driver.close()
    assert run.counts["refused_calls"] and run.counts["failed/error"]
    assert all(len(branches(completion.segments)) == 1 for _, completion in run.ended())
    assert "rollout.turns.rewrites" in run.driver.last_errors["sums"]


def test_calls_at_the_same_time_are_answered_one_after_the_other(log: Path) -> None:
    log.unlink(missing_ok=True)
    run = Run("parallel", 3)
    run.step()
    run.driver.close()
    check_tokens(run, log)
    for _, completion in run.ended():
        assert len(branches(completion.segments)) in (3, 4)


def test_an_unruly_agent_costs_only_its_own_completions(log: Path) -> None:
    """Agents crash, raise, hang, never call, call badly, leave a call and call again."""
    log.unlink(missing_ok=True)
    run = Run("unruly", 4)
    for _ in range(3):
        run.step()
    run.driver.close()
    check_tokens(run, log)
    assert {"failed/error", "failed/crash", "restarts", "refused_calls"} <= run.counts.keys()
    outcomes = Counter(outcome for each in run.collected for _, outcome in each.ended)
    assert outcomes.keys() <= {Outcome.TRAINED, Outcome.ABSTAINED}
    assert outcomes[Outcome.TRAINED] >= 9
    ended = [group.ticket for each in run.collected for group, _ in each.ended]
    issued = range(run.coordinator.state()["position"])
    assert sorted([*ended, *run.coordinator.groups]) == list(issued)


def test_malformed_calls_are_refused_and_the_server_goes_on(log: Path) -> None:
    run = Run("hostile", 9)
    run.step()
    run.driver.close()
    assert run.counts["refused_calls"] and not run.counts["failed/error"], run.driver.last_errors
    assert {completion.finish for _, completion in run.ended()} == {Finish.DONE}


def test_an_agent_that_calls_for_ever_is_ended(log: Path) -> None:
    run = Run("stubborn", 10)
    run.step()
    run.driver.close()
    assert {completion.finish for _, completion in run.ended()} == {Finish.TURNS}
    assert not run.counts["restarts"]


def test_a_text_that_a_pause_has_split_ends_the_turn(log: Path) -> None:
    run = Run("plain", 11)
    server, _ = run.driver._new_server(POOLS[0])
    assert server._turns is not None and server._turns._agents is not None
    before, turn = (tokenizer()(text)["input_ids"] for text in ("<start>assistant\n", "ab STOP me"))
    tokens = [*before, *turn]
    segments = (Segment(0, len(before), ENVIRONMENT), Segment(0, 5), Segment(1, len(turn) - 5))
    logprobs = [-float(place) for place in range(len(tokens))]
    completion = Completion(0, tokens, logprobs, "", Finish.STOP, segments)  # type: ignore[arg-type]
    call: Any = SimpleNamespace(stop=("STOP", "never"))
    cut = server._turns._agents._cut_after_stop(completion, len(before), call)
    run.driver.close()
    assert tokenizer().decode(cut.tokens[len(before) :]) == "ab STOP"
    assert cut.logprobs == completion.logprobs[: cut.num_tokens]
    assert [segment.num_tokens for segment in cut.segments] == [len(before), 5, 2]


def test_limits_end_an_agent_without_a_failure(log: Path) -> None:
    run = Run("endless", 5)
    for _ in range(2):
        run.step()
    run.driver.close()
    finishes = Counter(completion.finish for _, completion in run.ended())
    assert finishes[Finish.TURNS] and finishes[Finish.LENGTH], finishes
    assert not any(name.startswith("failed") for name in run.counts)
    for _, completion in run.ended():
        assert completion.longest_branch <= MAX_TOKENS
        assert len(turns_of(completion)) <= MAX_TURNS
        assert completion.grade is not None and completion.grade.score == 0


@pytest.mark.parametrize("kind", ["plain", "once", "careless"])
def test_kills_of_agents_servers_and_runs_cost_only_time(kind: str, log: Path) -> None:
    log.unlink(missing_ok=True)
    run = Run(kind, 6)
    for number in range(4):
        run.step(disturb)
        if number % 2:
            run.resume()
    run.driver.close()
    assert run.counts["failed/crash"] and not run.counts["failed/diverged"], run.counts
    assert (run.counts["restarts"] > 0) or kind != "once"
    check_tokens(run, log)


def test_a_killed_deterministic_run_collects_the_same(log: Path) -> None:
    tokens = []
    for is_killed in (False, True):
        run = Run("careless", 7, deterministic=True)
        for _ in range(3):
            run.step()
            if is_killed:
                run.resume()
        run.driver.close()
        tokens.append([completion.tokens for _, completion in run.ended()])
    assert tokens[0] == tokens[1]


def test_the_oldest_group_gets_the_next_slot(log: Path) -> None:
    run = Run("plain", 8)
    server, _ = run.driver._new_server(POOLS[0])
    engine: Any = server._engine
    engine.max_sequences, engine.step = 3, list
    prompt = Prompt("sums", 0, (1,), "", "", {}, run.environment)
    for tickets in ([7, 5], [9, 4, 1, 8]):
        requests = [SampleRequest(ticket, 0, prompt, None, 9, 1.0, 1.0) for ticket in tickets]
        server._go_on(requests, [])
    server._step()
    engine._running.clear()
    server._step()
    run.driver.close()
    assert [ticket for ticket, _ in engine.order] == [1, 4, 5, 7, 8, 9]
