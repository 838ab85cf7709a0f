"""The grading pool: whatever a grader does costs one grading, and no process is left."""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.rewards import GradingPool
from dapo_megatron.rewards.dapo_math import INVALID
from dapo_megatron.rewards.pool import MAX_BATCH
from dapo_megatron.rewards.process import INHERITED
from dapo_megatron.rewards.worker_messages import MAX_MESSAGE_BYTES
from dapo_megatron.types import ConfigError, DapoError, Grade
from tests.helpers.sandboxes import needs_sandbox

# The response says how the grader behaves; every call notes its process id.
GRADER = """
import gc, os, re, signal, socket, subprocess, sys, tempfile, time
from dapo_megatron.types import Grade

def act(response, truth, extra):
    with open(extra["pids"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if response == "hang":
        time.sleep(1000)
    if response == "hang_in_c":  # holds the interpreter lock, so no Python signal or thread runs
        re.match(r"(a|a)*$", "a" * 60 + "b")
    if response == "hang_with_child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(extra["pids"], "a") as file:
            file.write(f"{child.pid}\\n")
        child.wait()
    if response == "hang_with_daemon":  # in a session of its own, and its parent has ended
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
    if response.startswith("send "):  # what a worker that was taken over could write
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
    (tmp_path / "tells_of_import.py").write_text(
        "import sys, time\nfrom pool_grader import act\n"
        "if 'worker' in sys.argv[0]:\n"
        f"    with open({str(tmp_path / 'imports')!r}, 'a') as file:\n"
        "        print(time.monotonic(), file=file)"
    )
    (tmp_path / "eats_at_import.py").write_text(
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
    def make(workers: int = 1, timeout_seconds: float = 20.0) -> GradingPool:
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
    # A killed orphan waits as a zombie where nobody reaps (a container without an init).
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def noted(pids: Path) -> set[int]:
    return {int(line) for line in pids.read_text().split()}


def wait_until_dead(processes: set[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, f"still alive: {[p for p in processes if alive(p)]}"
        time.sleep(0.02)


# ------------------------------------------------------------------------ what goes wrong

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
def test_a_bad_grading_costs_exactly_itself(
    make: Callable[..., GradingPool], pids: Path, behavior: str, workers: int
) -> None:
    responses = [f"ok {i}" for i in range(40)]
    responses[5] = responses[39] = behavior
    # The good ones are far below this limit even on a busy machine.
    with make(workers, 1.5 if BAD[behavior] == "timeout" else 20.0) as pool:
        results = grade_all(pool, responses, pids)
    for key, response in enumerate(responses):
        expected = (None, BAD[behavior]) if response == behavior else (
            Grade(1.0, True, response),
            "graded",
        )  # fmt: skip
        assert results[key] == expected
    wait_until_dead(noted(pids))


@pytest.mark.parametrize("behavior", ["print", "big", "slow", "interrupt"])
def test_an_odd_grading_is_still_graded(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    with make() as pool:
        results = grade_all(pool, ["ok", behavior, "ok"], pids)
    assert [why for _, why in results.values()] == ["graded"] * 3
    assert len(noted(pids)) == 1


def test_a_worker_that_dies_idle_costs_nothing(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        grade_all(pool, ["ok"], pids)
        (worker,) = noted(pids)
        os.kill(worker, signal.SIGKILL)
        wait_until_dead({worker})
        assert grade_all(pool, ["ok"], pids)[0][1] == "graded"
    assert len(noted(pids)) == 2


def test_the_first_abstention_is_logged_with_its_cause(
    make: Callable[..., GradingPool], pids: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), make() as pool:
        grade_all(pool, ["raise", "raise"], pids)
    assert len(caplog.records) == 1
    assert "RuntimeError: on purpose" in caplog.text


LAST_WORDS = {
    "hang": "no grade within 1.5 s",
    "exit": "its process exited with 3",
    "segfault": "its process was killed by signal 11",
    "memory": "MemoryError: more than rewards.memory_mib",
    "raise": "RuntimeError: on purpose",
}


@pytest.mark.parametrize("behavior", LAST_WORDS)
def test_the_last_words_of_a_grader_are_kept(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    with make(timeout_seconds=1.5) as pool:
        grade_all(pool, ["ok"], pids)
        assert pool.last_errors == {}
        grade_all(pool, [behavior, "ok"], pids)
        assert pool.last_errors == {"task": LAST_WORDS[behavior]}


def test_memory_that_a_grading_keeps_is_not_missing_in_the_next(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        results = grade_all(pool, ["roomy", "memory_kept", "roomy"], pids)
    assert [why for _, why in results.values()] == ["graded", "memory", "graded"]


def test_files_of_a_grader_end_with_its_worker(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        grade, _ = grade_all(pool, ["file"], pids)[0]
        assert grade is not None
        assert Path(grade.pred).exists()
    assert not Path(grade.pred).parent.exists()


def test_a_coroutine_may_grade_and_hang_like_any_other(pids: Path) -> None:
    with GradingPool({"task": "pool_grader:act_async"}, 1, timeout_seconds=1.5) as pool:
        results = grade_all(pool, ["a", "hang", "b", "raise"], pids)
    assert [why for _, why in results.values()] == ["graded", "timeout", "graded", "error"]
    assert results[2][0] == Grade(1.0, True, "b")


def test_the_data_source_of_a_row_chooses_its_grader(pids: Path) -> None:
    graders = {"task": "pool_grader:act", "mixed": {"x": "dapo_math", "y": "pool_grader:act"}}
    with GradingPool(graders, workers=2, timeout_seconds=20.0) as pool:
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
def test_workers_that_cannot_start_stop_the_run(
    pids: Path, module: str, error: type[Exception], message: str
) -> None:
    with GradingPool({"a": f"{module}:grade"}, workers=1, timeout_seconds=5.0) as pool:
        pool.submit(0, "a", "", "", {})
        for _ in range(2):  # whoever asks again hears it again
            with pytest.raises(error, match=message):
                pool.collect(wait=True)


def test_graders_that_do_not_fit_into_memory_say_so(pids: Path) -> None:
    with GradingPool({"a": "eats_at_import:grade"}, 1, timeout_seconds=5.0) as pool:
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


def test_a_worker_is_light_and_the_first_to_go_when_memory_runs_out(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        results = grade_all(pool, ["modules", "oom"], pids)
    assert [grade and grade.pred for grade, _ in results.values()] == ["set()", "1000"]


def test_a_worker_gets_a_short_environment(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "SLURM_JWT", "DAPO_MEGATRON_SECRET")
    for name in (*secrets, "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NAMED", "LANG"):
        monkeypatch.setenv(name, "1")
    with GradingPool({"task": "pool_grader:act"}, 1, 20.0, environment=["NAMED", "ABSENT"]) as pool:
        grade, _ = grade_all(pool, ["environment"], pids)[0]
    assert grade is not None
    expected = {"LANG", "NAMED", "TMPDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    expected |= set(INHERITED) & set(os.environ)
    assert set(grade.pred.split(",")) - {"LC_CTYPE"} == expected - {"LC_CTYPE"}  # Python may set it


def test_what_a_grader_needs_of_a_row_arrives_as_it_was(
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


# ------------------------------------------------------------------------ a worker that lies

GRADED = b'{"score": 1.0, "correct": true, "pred": "", "parsed": true}\n'
PICKLE = b"c__builtin__\neval\n(S\"open('pwned', 'w')\"\ntR."
LIES = {
    "a pickle": PICKLE + b"\n",
    "a framed pickle": struct.pack("!i", len(PICKLE)) + PICKLE + b"\n",
    "a grade that is none": b'{"score": NaN, "correct": true, "pred": "", "parsed": true}\n',
    "a score that is a text": GRADED.replace(b"1.0", b'"1.0"'),
    "a field too many": GRADED.replace(b"{", b'{"key": 1, '),
    "a field too few": GRADED.replace(b', "parsed": true', b""),
    "another cause": b'{"cause": "graded", "detail": ""}\n',
    "nothing": b"\n",
    "null": b"null\n",
    "deep": b"[" * 10_000 + b"\n",
    "no text": b"\xff\xfe\n",
}


@pytest.mark.parametrize("name", LIES)
def test_a_malformed_message_is_a_crash_of_its_worker(
    make: Callable[..., GradingPool], pids: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pids.parent)
    with make() as pool:
        results = grade_all(pool, ["ok", f"send {LIES[name].hex()}", "ok"], pids)
    assert [why for _, why in results.values()] == ["graded", "crash", "graded"]
    assert not Path("pwned").exists()
    assert "it sent an invalid message" in pool.last_errors["task"]


@pytest.mark.parametrize("message", ["", "7b22", "78" * 300_000])
def test_half_a_message_ends_at_the_limit(
    make: Callable[..., GradingPool], pids: Path, message: str
) -> None:
    with make(timeout_seconds=1.5) as pool:
        grade_all(pool, ["ok"], pids)
        started = time.monotonic()
        assert grade_all(pool, [f"send {message}"], pids)[0] == (None, "timeout")
        assert time.monotonic() - started < 1.5 + 1.0


def test_a_message_without_an_end_is_a_crash(make: Callable[..., GradingPool], pids: Path) -> None:
    with make() as pool:
        message = "78" * (MAX_MESSAGE_BYTES + 2**17)
        assert grade_all(pool, [f"send {message}"], pids)[0] == (None, "crash")
        assert "it sent a message above" in pool.last_errors["task"]


@pytest.mark.parametrize("size", [1_000, 3_000_000])
def test_a_stopped_worker_costs_its_limit_whatever_it_is_sent(
    make: Callable[..., GradingPool], pids: Path, size: int
) -> None:
    """More than a socket holds cannot be sent to a process that does not read."""
    with make(timeout_seconds=1.5) as pool:
        grade_all(pool, ["ok"], pids)
        (worker,) = noted(pids)
        os.kill(worker, signal.SIGSTOP)
        started = time.monotonic()
        assert grade_all(pool, ["x" * size], pids)[0] == (None, "timeout")
        assert time.monotonic() - started < 1.5 + 1.0
        assert grade_all(pool, ["x" * size], pids)[0][1] == "graded"
    wait_until_dead({worker})


@pytest.mark.parametrize("behavior", ["stopped", "full", "half a message"])
def test_close_does_not_wait_for_a_worker_that_does_nothing(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    pool = make(timeout_seconds=1000.0)
    grade_all(pool, ["ok"], pids)
    (worker,) = noted(pids)
    if behavior != "half a message":
        os.kill(worker, signal.SIGSTOP)
    response = {"stopped": "x", "full": "x" * 3_000_000}.get(behavior, "send 7b22")
    pool.submit(0, "task", response, "", {"pids": str(pids)})
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 1.0
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
    assert time.monotonic() - started < 5.0
    assert pool.collect(wait=True) == []
    with pytest.raises(ValueError, match="closed"):
        pool.submit(0, "task", "", "", {})
    wait_until_dead(noted(pids))


@pytest.mark.parametrize("behavior", ["ok", "hang_in_c"])
def test_workers_die_with_a_parent_that_was_killed(pids: Path, behavior: str) -> None:
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
        env=os.environ | {"TMPDIR": str(pids.parent)},  # nobody is left to remove its folders
        timeout=60,
    )
    assert parent.returncode == -signal.SIGKILL
    wait_until_dead(noted(pids))


# ------------------------------------------------------------------------ flow


def test_collect_without_waiting_returns_at_once(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        assert pool.collect(wait=True) == []  # nothing pending: nothing to wait for
        pool.submit("key", "task", "slow", "", {"pids": str(pids)})
        assert pool.collect(wait=False) == []
        assert pool.pending == 1
        assert pool.collect(wait=True) == [("key", Grade(1.0, True, "slow"), "graded")]
        assert pool.pending == 0


def test_a_slow_grading_holds_up_no_more_than_its_batch(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make(workers=2) as pool:
        while not pids.exists() or len(noted(pids)) < 2:  # both have started
            grade_all(pool, ["slow"] * 2, pids)
        results = grade_all(pool, ["slow", *["ok"] * 50], pids)
    assert list(results).index(0) >= 51 - MAX_BATCH


def test_a_worker_that_seems_to_hang_has_its_successor_ready(pids: Path) -> None:
    with GradingPool({"task": "tells_of_import:act"}, 1, timeout_seconds=3.0) as pool:
        grade_all(pool, ["hang"], pids)
        killed = time.monotonic()
        grade_all(pool, ["ok"], pids)
    first, second = map(float, (pids.parent / "imports").read_text().split())
    assert first < second < killed


def test_submit_refuses_what_cannot_be_graded(make: Callable[..., GradingPool], pids: Path) -> None:
    with make() as pool:
        with pytest.raises(ValueError, match=r"'other'; known: \['task'\]"):
            pool.submit(0, "other", "", "", {})
        with pytest.raises(TypeError, match="function is not JSON serializable"):
            pool.submit(0, "task", "", "", {"function": lambda: None})
        assert pool.pending == 0


def test_thousands_of_small_gradings_per_second() -> None:
    def seconds(pool: GradingPool, count: int) -> float:
        started = time.monotonic()
        for key in range(count):
            pool.submit(key, "math", "Answer: 42", "42", {})
        while pool.pending:
            results: list[tuple[Any, Grade | None, str]] = pool.collect(wait=True)
            assert all(grade is not None and grade.correct for _, grade, _ in results)
        return time.monotonic() - started

    with GradingPool({"math": "dapo_math"}, workers=1, timeout_seconds=30.0) as pool:
        seconds(pool, 1)
        best = min(seconds(pool, 2000) for _ in range(3))
    # About 10,000 per second on one idle core; the bound leaves room for a busy machine.
    assert 2000 / best > 1000
