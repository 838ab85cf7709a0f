"""Environments: what classes are understood, and that each instance fails alone, within its limits,
and leaves no process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from dapo_megatron.environments.interface import load_environment
from dapo_megatron.environments.pool import EnvironmentPool
from dapo_megatron.environments.process import MAX_TEXT, Answer, Request
from dapo_megatron.types import ConfigError
from tests.helpers.processes import is_alive, processes_with, wait_until

MODULE = '''
import os, subprocess, sys, time

from dapo_megatron.environments.interface import Reply


class Machine:
    """Tools that fail in all ways."""
    repeatable = True

    def reset(self, row):
        self.total = row["start"]
        return f"from {self.total}"

    def add(self, number: int, times: int = 1) -> int:
        """Add to the total.

        Args:
            number: what to add
            times: how often
        """
        self.total += number * times
        return self.total

    def do(self, what: str) -> str:
        """Fail.

        Args:
            what: how
        """
        if what == "hang":
            while True: pass
        if what == "sleep with children":
            subprocess.Popen(["setsid", "sleep", "TOKEN"])
            if not os.fork():
                os.setsid()
                time.sleep(1000)
            time.sleep(1000)
        if what == "crash": os._exit(3)
        if what == "print":
            for _ in range(100): print("x" * 2**20)
            return "printed"
        if what == "long": return "y" * 10**6
        if what == "memory": return str(len(bytearray(2**40)))
        if what == "raise": raise RuntimeError("broken\\udc00")
        if what == "environment": return repr(sorted(os.environ))
        return what


class Talker:
    def step(self, turn: str) -> Reply:
        return Reply(turn.upper(), done="bye" in turn, reward=float(len(turn)))


class Neither: pass
class Both(Talker, Machine): pass
class Untyped:
    def tool(self, x):
        """A tool."""
class Undocumented:
    def tool(self, x: int) -> int: return x
not_a_class = 3
'''
SECONDS = 6.0
"""Limit of an answer, far above what any takes that comes at all, also on a busy machine."""
TOKEN = f"1000.{os.getpid()}"
"""Seconds that a child of an instance sleeps, to find it by."""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("environments")
    name = "environments_of_a_test"
    text = MODULE.replace("TOKEN", TOKEN)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield name
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(module: str) -> Iterator[EnvironmentPool]:
    names = {f"{module}:Machine", f"{module}:Talker"}
    with EnvironmentPool(names, SECONDS, 1024) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_instance_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop what a failed test left, so that the next one does not fail, too."""
    yield
    if "pool" in request.fixturenames:
        pool = request.getfixturevalue("pool")
        for key in list(pool._instances):
            pool.stop(key)


def answer(pool: EnvironmentPool, key: Any = 0) -> Answer:
    """Wait for the only answer."""
    while not (answers := pool.collect(1.0)):
        pass
    ((of, result),) = answers
    assert of == key
    return result


def do(pool: EnvironmentPool, what: str) -> Answer:
    pool.ask(0, Request("call", tool="do", arguments={"what": what}))
    return answer(pool)


def zombies(pool: EnvironmentPool) -> list[psutil.Process]:
    children = psutil.Process(pool._nursery.pid).children(recursive=True)
    return [child for child in children if not is_alive(child.pid)]


def test_methods_are_described_and_their_arguments_checked(module: str) -> None:
    machine = load_environment(f"{module}:Machine")
    assert machine.looks.is_repeatable and not machine.looks.has_step
    assert machine.described().tools["add"]["function"] == {
        "name": "add",
        "description": "Add to the total.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "integer", "description": "what to add"},
                "times": {"type": "integer", "description": "how often"},
            },
            "required": ["number"],
        },
    }
    instance = machine.kind()
    instance.reset({"start": 1})
    assert machine.call(instance, "add", {"number": 4, "times": 2}) == "9"
    for tool, arguments, message in (
        ("subtract", {}, "there is no tool 'subtract'; the tools are add, do"),
        ("reset", {"row": {}}, "there is no tool 'reset'"),
        ("add", {}, "add: number: Missing required argument"),
        ("add", {"number": "four"}, "add: number: Input should be a valid integer"),
        ("add", {"number": 4, "to": 3}, "add: to: Unexpected keyword argument"),
    ):
        with pytest.raises(ValueError, match=message):
            machine.call(instance, tool, arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Machine", "write module:Class"),
        ("no_such_module:Machine", "cannot be imported: ModuleNotFoundError"),
        ("MODULE:Nobody", "cannot be imported: AttributeError"),
        ("MODULE:not_a_class", "is not a class"),
        ("MODULE:Neither", "neither a tool"),
        ("MODULE:Both", "has the method step and the tools add, do"),
        ("MODULE:Untyped", "its tool tool needs a docstring, and for each argument a type"),
        ("MODULE:Undocumented", "its tool tool needs a docstring, and for each argument a type"),
    ],
)
def test_classes_that_cannot_be_used_are_refused(name: str, message: str, module: str) -> None:
    name = name.replace("MODULE", module)
    with pytest.raises(ConfigError, match=message) as raised:
        load_environment(name).described()
    assert repr(name) in str(raised.value)
    with pytest.raises(ConfigError, match=message):
        EnvironmentPool({name}, SECONDS, 1024)


def test_an_instance_keeps_its_state_and_answers_errors(
    pool: EnvironmentPool, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = pool.described[f"{module}:Machine"]
    assert (set(described.tools), described.is_repeatable) == ({"add", "do"}, True)
    pool.start(0, f"{module}:Machine", {"start": 5})
    assert answer(pool) == Answer("ok", "from 5")
    for total in (8, 11):
        pool.ask(0, Request("call", tool="add", arguments={"number": 3}))
        assert answer(pool) == Answer("ok", str(total))
    assert do(pool, "raise") == Answer("error", "RuntimeError: broken?")
    assert do(pool, "print") == Answer("ok", "printed")
    long = do(pool, "long")
    assert len(long.text) == MAX_TEXT and long.text.endswith("y ... (1,000,000 characters)")
    monkeypatch.setenv("A_SECRET", "x")
    assert "SECRET" not in do(pool, "environment").text
    pool.ask(0, Request("call", tool="add", arguments={"number": "no"}))
    assert answer(pool).cause == "error"
    pool.ask(0, Request("call", tool="add", arguments={"number": 1}))
    assert answer(pool) == Answer("ok", "12")

    pool.start("talk", f"{module}:Talker", {})
    assert answer(pool, "talk") == Answer("ok", "")
    pool.ask("talk", Request("step", turn="bye now"))
    assert answer(pool, "talk") == Answer("ok", "BYE NOW", True, 7.0)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("hang", "timeout"),
        ("sleep with children", "timeout"),
        ("crash", "crash"),
        ("memory", "memory"),
    ],
)
def test_a_lost_instance_takes_nothing_with_it(
    what: str, cause: str, pool: EnvironmentPool, module: str
) -> None:
    pool.start("other", f"{module}:Machine", {"start": 1})
    answer(pool, "other")
    pool.start(0, f"{module}:Machine", {"start": 0})
    answer(pool)
    assert do(pool, what).cause == cause
    wait_until(
        lambda: not processes_with(TOKEN) and not zombies(pool),
        lambda: (processes_with(TOKEN), zombies(pool)),
    )
    pool.ask("other", Request("call", tool="add", arguments={"number": 1}))
    assert answer(pool, "other") == Answer("ok", "2")
    pool.start(0, f"{module}:Machine", {"start": 7})  # its place is free
    assert answer(pool) == Answer("ok", "from 7")


def test_if_all_processes_die_each_instance_is_lost_and_others_start(
    pool: EnvironmentPool, module: str
) -> None:
    for key in range(3):
        pool.start(key, f"{module}:Machine", {"start": key})
        answer(pool, key)
    instances = psutil.Process(pool._nursery.pid).children()
    pool._nursery.kill()
    wait_until(lambda: not any(is_alive(instance.pid) for instance in instances))
    lost: Counter[Any] = Counter()
    for key in range(3):
        pool.ask(key, Request("call", tool="add", arguments={"number": 1}))
    while len(lost) < 3:
        lost.update((key, of.cause) for key, of in pool.collect(1.0))
    assert lost == {(key, "crash"): 1 for key in range(3)}
    pool.start(0, f"{module}:Machine", {"start": 3})
    assert answer(pool) == Answer("ok", "from 3")


def test_nothing_outlives_a_killed_owner(module: str) -> None:
    """Not even a process that a tool has started."""
    program = f"""if True:
        import sys, time
        sys.path.insert(0, {sys.path[0]!r})
        from dapo_megatron.environments.pool import EnvironmentPool, Request
        pool = EnvironmentPool({{"{module}:Machine"}}, 60.0, 1024)
        pool.start(0, "{module}:Machine", {{"start": 0}})
        while not pool.collect(1.0): pass
        pool.ask(0, Request("call", tool="do", arguments={{"what": "sleep with children"}}))
        print(pool._nursery.folder, flush=True)
        time.sleep(1000.0)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        folder = owner.stdout.readline().decode().strip()
        wait_until(lambda: any("sleep" in line for line in processes_with(TOKEN)))
        assert os.path.exists(folder)
        owner.kill()
    wait_until(
        lambda: not processes_with(TOKEN) and not os.path.exists(folder),
        lambda: processes_with(TOKEN),
    )


@pytest.mark.parametrize("num_calls", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_calls_that_hang_crash_or_flood_cost_only_themselves(num_calls: int, module: str) -> None:
    """One call in a hundred hangs, one crashes, one prints 100 MB."""
    before = set(psutil.Process().children(recursive=True))
    rng = random.Random(0)
    kinds = rng.choices(["hang", "crash", "print", "fine"], [1, 1, 1, 97], k=num_calls)
    causes: Counter[tuple[str, str]] = Counter()
    running: dict[int, str] = {}
    todo = list(enumerate(kinds))
    with EnvironmentPool({f"{module}:Machine"}, SECONDS, 1024) as pool:
        started = time.monotonic()
        while todo or running:
            while todo and len(running) < 64:
                number, kind = todo.pop()
                running[number] = kind
                pool.start(number, f"{module}:Machine", {"start": 0})
            for key, result in pool.collect(0.5):
                assert isinstance(key, int)
                if result.text == "from 0":
                    request = Request("call", tool="do", arguments={"what": running[key]})
                    pool.ask(key, request)
                    continue
                causes[running.pop(key), result.cause] += 1
                pool.stop(key)
        seconds = time.monotonic() - started
    expected = {"hang": "timeout", "crash": "crash", "print": "ok", "fine": "ok"}
    assert causes == Counter((kind, expected[kind]) for kind in kinds)
    print(f"{num_calls} calls in {seconds:.1f} s")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not os.path.exists(pool._nursery.folder)
