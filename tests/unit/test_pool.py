"""The grading pool: a failing grader loses only its own grading, and no process is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_megatron.rewards import GradingPool
from dapo_megatron.rewards.dapo_math import INVALID
from dapo_megatron.rewards.pool import MAX_BATCH
from dapo_megatron.rewards.process import INHERITED
from dapo_megatron.rewards.worker_messages import MAX_MESSAGE_BYTES
from dapo_megatron.types import ConfigError, DapoError, Grade
from tests.helpers.sandboxes import needs_sandbox

HANG_SECONDS = 3.0
"""Limit of one grading in tests of graders that hang. Far above what a sound grading takes, so that
none is late on a loaded machine."""

# The response selects the grader's behavior; every call appends its process id to a file.
GRADER = """
import gc, os, re, signal, socket, subprocess, sys, tempfile, time
from dapo_megatron.types import Grade

def act(response, truth, extra):
    with open(extra["pids"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if response == "hang":
        time.sleep(1000)
    if response == "hang_in_c":  # holds the GIL, so no Python signal handler or thread runs
        re.match(r"(a|a)*$", "a" * 60 + "b")
    if response == "hang_with_child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(extra["pids"], "a") as file:
            file.write(f"{child.pid}\\n")
        child.wait()
    if response == "hang_with_daemon":  # in its own session, and its parent has exited
        code = "import os, sys, time; os.setsid(); os.fork() and os._exit(0)\\n"
        code += "open(sys.argv[1], 'a').write(f'{os.getpid()}\\\\n'); time.sleep(1000)"
        subprocess.run([sys.executable, "-c", code, extra["pids"]])
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    if response == "memory":
        return len("x" * 10**12)
    if response == "memory_kept":
        kept = globals()["kept"] = []
        while True:
            kept.append(bytearray(2**26))
    if response == "roomy":
        bytearray(2**28)
    if response == "file":
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return Grade(1.0, True, file.name)
    if response == "sys_exit":
        sys.exit(3)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "raise":
        raise RuntimeError("on purpose")
    if response == "print":
        print("x" * 5_000_000)
    if response == "big":
        return Grade(1.0, True, "y" * 5_000_000)
    if response == "slow":
        time.sleep(0.3)
    if response.startswith("wait for "):
        while not os.path.exists(response.removeprefix("wait for ")):
            time.sleep(0.01)
    if response == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if response == "environment":
        return Grade(1.0, True, ",".join(sorted(os.environ)))
    if response == "oom":
        return Grade(1.0, True, open("/proc/self/oom_score_adj").read().strip())
    if response == "modules":
        return Grade(1.0, True, repr({"torch", "pydantic"} & set(sys.modules)))
    if response == "extra":
        return Grade(1.0, True, repr(extra["value"]))
    if response.startswith("send "):  # as a compromised worker could
        (connection,) = (o for o in gc.get_objects() if isinstance(o, socket.socket))
        os.write(connection.fileno(), bytes.fromhex(response[5:]))
        time.sleep(1000)
    return Grade(1.0, True, response)

async def act_async(response, truth, extra):
    import asyncio
    await asyncio.sleep(0)
    return act(response, truth, extra)
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pool_grader.py").write_text(GRADER)
    (tmp_path / "dies_at_import.py").write_text(
        "import os, sys\nif 'worker' in sys.argv[0]: os._exit(3)\ndef grade(r, t, e): return True\n"
    )
    (tmp_path / "logs_its_import.py").write_text(
        "import sys, time\nfrom pool_grader import act\n"
        "if 'worker' in sys.argv[0]:\n"
        f"    with open({str(tmp_path / 'imports')!r}, 'a') as file:\n"
        "        print(time.monotonic(), file=file)"
    )
    (tmp_path / "needs_memory_at_import.py").write_text(
        "import sys\nif 'worker' in sys.argv[0]: bytearray(10**12)\n"
        "def grade(r, t, e): return True\n"
    )
    (tmp_path / "raises_at_import.py").write_text(
        "import sys\nif 'worker' in sys.argv[0]: raise KeyError('only there')\n"
        "def grade(r, t, e): return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "pids"


@pytest.fixture
def make(pids: Path) -> Callable[..., GradingPool]:
    def make(workers: int = 1, timeout_seconds: float = 60.0) -> GradingPool:
        return GradingPool({"task": "pool_grader:act"}, workers, timeout_seconds, memory_mib=512)

    return make


def grade_all(
    pool: GradingPool, responses: list[str], pids: Path
) -> dict[int, tuple[Grade | None, str]]:
    for key, response in enumerate(responses):
        pool.submit(key, "task", response, "truth", {"pids": str(pids)})
    results: dict[int, tuple[Grade | None, str]] = {}
    while pool.pending:
        for key, grade, why in pool.collect(wait=True):
            assert key not in results
            results[key] = (grade, why)
    return results


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # In a container without an init, a killed orphan stays as a zombie.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def noted_pids(pids: Path) -> set[int]:
    return {int(line) for line in pids.read_text().split()}


def wait_until_dead(processes: set[int], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, f"still alive: {[p for p in processes if alive(p)]}"
        time.sleep(0.02)


# ------------------------------------------------------------------------ failures

BAD = {
    "hang": "timeout",
    "hang_in_c": "timeout",
    "hang_with_child": "timeout",
    "hang_with_daemon": "timeout",
    "exit": "crash",
    "sys_exit": "crash",
    "segfault": "crash",
    "memory": "memory",
    "memory_kept": "memory",
    "raise": "error",
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("behavior", BAD)
def test_a_failing_grading_loses_only_itself(
    make: Callable[..., GradingPool], pids: Path, behavior: str, workers: int
) -> None:
    responses = [f"ok {i}" for i in range(40)]
    responses[5] = responses[39] = behavior
    with make(workers, HANG_SECONDS if BAD[behavior] == "timeout" else 60.0) as pool:
        results = grade_all(pool, responses, pids)
    for key, response in enumerate(responses):
        expected = (None, BAD[behavior]) if response == behavior else (
            Grade(1.0, True, response),
            "graded",
        )  # fmt: skip
        assert results[key] == expected
    wait_until_dead(noted_pids(pids))


@pytest.mark.parametrize("behavior", ["print", "big", "slow", "interrupt"])
def test_unusual_but_valid_gradings_are_graded(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    with make() as pool:
        results = grade_all(pool, ["ok", behavior, "ok"], pids)
    assert [why for _, why in results.values()] == ["graded"] * 3
    assert len(noted_pids(pids)) == 1


def test_a_worker_that_dies_while_idle_loses_no_grading(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        grade_all(pool, ["ok"], pids)
        (worker,) = noted_pids(pids)
        os.kill(worker, signal.SIGKILL)
        wait_until_dead({worker})
        assert grade_all(pool, ["ok"], pids)[0][1] == "graded"
    assert len(noted_pids(pids)) == 2


def test_the_first_abstention_is_logged_with_its_cause(
    make: Callable[..., GradingPool], pids: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), make() as pool:
        grade_all(pool, ["raise", "raise"], pids)
    assert len(caplog.records) == 1
    assert "RuntimeError: on purpose" in caplog.text


LAST_ERRORS = {
    # The time left after sending the task, which takes longer on a busy machine.
    "hang": r"no grade within (2\.\d+|3) s",
    "exit": "its process exited with 3",
    "segfault": "its process was killed by signal 11",
    "memory": r"MemoryError: more than rewards\.memory_mib",
    "raise": "RuntimeError: on purpose",
}


@pytest.mark.parametrize("behavior", LAST_ERRORS)
def test_the_last_error_of_each_source_is_kept(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    with make(timeout_seconds=HANG_SECONDS) as pool:
        grade_all(pool, ["ok"], pids)
        assert pool.last_errors == {}
        grade_all(pool, [behavior, "ok"], pids)
        assert list(pool.last_errors) == ["task"]
        assert re.fullmatch(LAST_ERRORS[behavior], pool.last_errors["task"])


def test_memory_kept_by_a_grading_is_available_to_the_next(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        results = grade_all(pool, ["roomy", "memory_kept", "roomy"], pids)
    assert [why for _, why in results.values()] == ["graded", "memory", "graded"]


def test_temporary_files_of_a_grader_are_removed_with_its_worker(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        grade, _ = grade_all(pool, ["file"], pids)[0]
        assert grade is not None
        assert Path(grade.pred).exists()
    assert not Path(grade.pred).parent.exists()


def test_a_grader_may_be_a_coroutine(pids: Path) -> None:
    with GradingPool({"task": "pool_grader:act_async"}, 1, timeout_seconds=HANG_SECONDS) as pool:
        results = grade_all(pool, ["a", "hang", "b", "raise"], pids)
    assert [why for _, why in results.values()] == ["graded", "timeout", "graded", "error"]
    assert results[2][0] == Grade(1.0, True, "b")


def test_the_data_source_of_a_row_chooses_its_grader(pids: Path) -> None:
    graders = {"task": "pool_grader:act", "mixed": {"x": "dapo_math", "y": "pool_grader:act"}}
    with GradingPool(graders, workers=2, timeout_seconds=60.0) as pool:
        for kind in ("x", "y"):
            pool.submit(kind, "mixed", "7", "7", {"data_source": kind, "pids": str(pids)})
        with pytest.raises(ValueError, match=r"'mixed'.* data_source 'z'; known: \['x', 'y'\]"):
            pool.submit("z", "mixed", "7", "7", {"data_source": "z"})
        results: dict[str, Grade | None] = {}
        while pool.pending:
            results |= {key: grade for key, grade, _ in pool.collect(wait=True)}
    assert results == {"x": Grade(-1.0, False, INVALID, False), "y": Grade(1.0, True, "7")}


# ------------------------------------------------------------------------ start


def test_bad_names_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dapo_math'"):
        GradingPool({"a": "dapo_mth"}, workers=1, timeout_seconds=1.0)
    with pytest.raises(ConfigError, match="did you mean 'dapo_math'"):
        GradingPool({"a": {"x": "dapo_math", "y": "dapo_mth"}}, workers=1, timeout_seconds=1.0)
    for workers, timeout in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="workers >= 1"):
            GradingPool({}, workers, timeout)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("dies_at_import", DapoError, "3 grading workers in a row"),
        ("raises_at_import", ConfigError, "refused to start: 'only there'"),
    ],
)
def test_workers_that_cannot_start_raise_an_error(
    pids: Path, module: str, error: type[Exception], message: str
) -> None:
    with GradingPool({"a": f"{module}:grade"}, workers=1, timeout_seconds=5.0) as pool:
        pool.submit(0, "a", "", "", {})
        for _ in range(2):  # every later call raises it again
            with pytest.raises(error, match=message):
                pool.collect(wait=True)


def test_graders_that_do_not_fit_into_memory_are_reported(pids: Path) -> None:
    with GradingPool({"a": "needs_memory_at_import:grade"}, 1, timeout_seconds=5.0) as pool:
        pool.submit(0, "a", "", "", {})
        with pytest.raises(ConfigError, match=r"do not fit into rewards\.memory_mib"):
            pool.collect(wait=True)


@needs_sandbox
def test_the_libraries_of_the_graders_fit_into_the_default_memory() -> None:
    graders = {name: name for name in ("math_verify", "reasoning_gym", "dapo_math", "code")}
    with GradingPool(graders, workers=1, timeout_seconds=60.0) as pool:
        pool.submit(0, "math_verify", r"\boxed{\frac{2}{4}}", "0.5", {})
        ((_, grade, _),) = pool.collect(wait=True)
        assert grade is not None
        assert grade.correct


def test_a_worker_imports_no_torch_and_is_the_first_victim_of_the_oom_killer(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        results = grade_all(pool, ["modules", "oom"], pids)
    assert [grade and grade.pred for grade, _ in results.values()] == ["set()", "1000"]


def test_a_worker_gets_only_listed_environment_variables(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "SLURM_JWT", "DAPO_MEGATRON_SECRET")
    for name in (*secrets, "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NAMED", "LANG"):
        monkeypatch.setenv(name, "1")
    with GradingPool({"task": "pool_grader:act"}, 1, 60.0, environment=["NAMED", "ABSENT"]) as pool:
        grade, _ = grade_all(pool, ["environment"], pids)[0]
    assert grade is not None
    expected = {"LANG", "NAMED", "TMPDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    expected |= set(INHERITED) & set(os.environ)
    assert set(grade.pred.split(",")) - {"LC_CTYPE"} == expected - {"LC_CTYPE"}  # Python may set it


def test_extra_values_of_a_row_arrive_unchanged(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    value = {
        "size": (2, 3),
        "colors": {1: "red", (2, 3): None},
        "text": "\ud800",
        "x": [float("inf")],
    }
    with make() as pool:
        pool.submit(0, "task", "extra", "", {"pids": str(pids), "value": value})
        ((_, grade, _),) = pool.collect(wait=True)
    assert grade is not None
    assert grade.pred == repr(value)


# ------------------------------------------------------------------------ malformed messages

GRADED = b'{"score": 1.0, "correct": true, "pred": "", "parsed": true}\n'
PICKLE = b"c__builtin__\neval\n(S\"open('pwned', 'w')\"\ntR."
MALFORMED = {
    "a pickle": PICKLE + b"\n",
    "a framed pickle": struct.pack("!i", len(PICKLE)) + PICKLE + b"\n",
    "NaN as the score": b'{"score": NaN, "correct": true, "pred": "", "parsed": true}\n',
    "text as the score": GRADED.replace(b"1.0", b'"1.0"'),
    "an extra field": GRADED.replace(b"{", b'{"key": 1, '),
    "a missing field": GRADED.replace(b', "parsed": true', b""),
    "an unknown cause": b'{"cause": "graded", "detail": ""}\n',
    "an empty line": b"\n",
    "null": b"null\n",
    "deeply nested": b"[" * 10_000 + b"\n",
    "invalid UTF-8": b"\xff\xfe\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_a_crash_of_its_worker(
    make: Callable[..., GradingPool], pids: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pids.parent)
    with make() as pool:
        results = grade_all(pool, ["ok", f"send {MALFORMED[name].hex()}", "ok"], pids)
    assert [why for _, why in results.values()] == ["graded", "crash", "graded"]
    assert not Path("pwned").exists()
    assert "it sent an invalid message" in pool.last_errors["task"]


@pytest.mark.parametrize("message", ["", "7b22", "78" * 300_000])
def test_an_incomplete_message_ends_at_the_time_limit(
    make: Callable[..., GradingPool], pids: Path, message: str
) -> None:
    with make(timeout_seconds=HANG_SECONDS) as pool:
        grade_all(pool, ["ok"], pids)
        started = time.monotonic()
        assert grade_all(pool, [f"send {message}"], pids)[0] == (None, "timeout")
        assert time.monotonic() - started < 60.0, "the worker sleeps for 1000 s"


def test_a_message_without_an_end_is_a_crash(make: Callable[..., GradingPool], pids: Path) -> None:
    with make() as pool:
        message = "78" * (MAX_MESSAGE_BYTES + 2**17)
        assert grade_all(pool, [f"send {message}"], pids)[0] == (None, "crash")
        assert "it sent a message above" in pool.last_errors["task"]


@pytest.mark.parametrize("size", [1_000, 3_000_000])
def test_a_stopped_worker_times_out_for_any_message_size(
    make: Callable[..., GradingPool], pids: Path, size: int
) -> None:
    """A message larger than the socket buffer cannot be sent to a process that does not read."""
    with make(timeout_seconds=HANG_SECONDS) as pool:
        grade_all(pool, ["ok"], pids)
        (worker,) = noted_pids(pids)
        os.kill(worker, signal.SIGSTOP)
        started = time.monotonic()
        assert grade_all(pool, ["x" * size], pids)[0] == (None, "timeout")
        assert time.monotonic() - started < 60.0, "the worker stays stopped"
        assert grade_all(pool, ["x" * size], pids)[0][1] == "graded"
    wait_until_dead({worker})


@pytest.mark.parametrize("behavior", ["stopped", "full", "half a message"])
def test_close_does_not_wait_for_a_blocked_worker(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    pool = make(timeout_seconds=1000.0)
    grade_all(pool, ["ok"], pids)
    (worker,) = noted_pids(pids)
    if behavior != "half a message":
        os.kill(worker, signal.SIGSTOP)
    response = {"stopped": "x", "full": "x" * 3_000_000}.get(behavior, "send 7b22")
    pool.submit(0, "task", response, "", {"pids": str(pids)})
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 60.0, "the limit of the grading is 1000 s"
    wait_until_dead({worker})


# ------------------------------------------------------------------------ end


@pytest.mark.parametrize("behavior", ["hang", "hang_in_c", "slow"])
def test_close_is_prompt_and_leaves_no_process(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    pool = make(workers=2, timeout_seconds=1000.0)
    for key in range(20):
        pool.submit(key, "task", behavior, "", {"pids": str(pids)})
    while not pids.exists():
        time.sleep(0.02)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 60.0, "the limit of a grading is 1000 s"
    assert pool.collect(wait=True) == []
    with pytest.raises(ValueError, match="closed"):
        pool.submit(0, "task", "", "", {})
    wait_until_dead(noted_pids(pids))


@pytest.mark.parametrize("behavior", ["ok", "hang_in_c"])
def test_workers_die_with_a_killed_parent(pids: Path, behavior: str) -> None:
    code = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(pids.parent)!r})
        from dapo_megatron.rewards import GradingPool
        pool = GradingPool({{"task": "pool_grader:act"}}, 2, 1000.0)
        for key in range(8):
            pool.submit(key, "task", {behavior!r}, "", {{"pids": {str(pids)!r}}})
        while not os.path.exists({str(pids)!r}) or not os.path.getsize({str(pids)!r}):
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"TMPDIR": str(pids.parent)},  # no process is left to remove its folders
        timeout=300,
    )
    assert parent.returncode == -signal.SIGKILL
    wait_until_dead(noted_pids(pids))


# ------------------------------------------------------------------------ flow


def test_collect_without_waiting_does_not_block(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        assert pool.collect(wait=True) == []  # does not block, because nothing is pending
        pool.submit("key", "task", "slow", "", {"pids": str(pids)})
        assert pool.collect(wait=False) == []
        assert pool.pending == 1
        assert pool.collect(wait=True) == [("key", Grade(1.0, True, "slow"), "graded")]
        assert pool.pending == 0


def test_a_slow_grading_delays_only_its_batch(make: Callable[..., GradingPool], pids: Path) -> None:
    with make(workers=2) as pool:
        while not pids.exists() or len(noted_pids(pids)) < 2:  # both workers have started
            grade_all(pool, ["slow"] * 2, pids)
        release = pids.parent / "release"
        for key, response in enumerate([f"wait for {release}", *["ok"] * 50]):
            pool.submit(key, "task", response, "truth", {"pids": str(pids)})
        graded: set[int] = set()
        while len(graded) < 51 - MAX_BATCH:
            graded |= {key for key, _, _ in pool.collect(wait=True)}
        assert 0 not in graded
        release.touch()
        while pool.pending:
            graded |= {key for key, _, why in pool.collect(wait=True) if why == "graded"}
    assert graded == set(range(51))


def test_the_successor_of_a_hanging_worker_starts_before_the_timeout(pids: Path) -> None:
    imports = pids.parent / "imports"
    for timeout_seconds in (3.0, 60.0):  # half of it may be too short to start a worker under load
        imports.unlink(missing_ok=True)
        with GradingPool({"task": "logs_its_import:act"}, 1, timeout_seconds) as pool:
            grade_all(pool, ["hang"], pids)
            killed = time.monotonic()
            grade_all(pool, ["ok"], pids)
        first, second = map(float, imports.read_text().split())
        if first < second < killed:
            break
    assert first < second < killed


def test_submit_refuses_unknown_sources_and_values_that_json_lacks(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        with pytest.raises(ValueError, match=r"'other'; known: \['task'\]"):
            pool.submit(0, "other", "", "", {})
        with pytest.raises(TypeError, match="function is not JSON serializable"):
            pool.submit(0, "task", "", "", {"function": lambda: None})
        assert pool.pending == 0


def test_thousands_of_small_gradings_per_second() -> None:
    """Measured in CPU time of this process and the worker, which hardly depends on the load."""

    def cpu_seconds() -> float:
        times = [
            psutil.Process().cpu_times(),
            *(child.cpu_times() for child in psutil.Process().children()),
        ]
        return sum(process.user + process.system for process in times)

    def grade(pool: GradingPool, count: int) -> float:
        before = cpu_seconds()
        for key in range(count):
            pool.submit(key, "math", "Answer: 42", "42", {})
        while pool.pending:
            results: list[tuple[Any, Grade | None, str]] = pool.collect(wait=True)
            assert all(grade is not None and grade.correct for _, grade, _ in results)
        return cpu_seconds() - before

    with GradingPool({"math": "dapo_math"}, workers=1, timeout_seconds=60.0) as pool:
        grade(pool, 1)
        started = time.monotonic()
        best = min(grade(pool, 2000) for _ in range(3))
        assert time.monotonic() - started < 60.0
    # About 10,000 on an idle core; less if other processes use its caches.
    assert 2000 / best > 1000
