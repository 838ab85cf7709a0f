"""The grading pool: a failing grader loses only its own grading, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.rewards import GradingPool
from dapo_megatron.rewards.dapo_math import INVALID
from dapo_megatron.rewards.process import INHERITED, MAX_MESSAGE_BYTES, Answer, checked
from dapo_megatron.rewards.registry import MAX_PRED, MAX_SCORE
from dapo_megatron.types import ConfigError, DapoError, Grade
from tests.helpers.processes import is_alive, wait_until
from tests.helpers.sandboxes import needs_sandbox

HANG_SECONDS = 6.0
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


def noted_pids(pids: Path) -> set[int]:
    return {int(line) for line in pids.read_text().split()}


def wait_until_dead(processes: set[int]) -> None:
    wait_until(lambda: not any(map(is_alive, processes)))


# ------------------------------------------------------------------------ failures

BAD = {
    "hang_in_c": ("timeout", r"no grade within 6 s"),
    "hang_with_daemon": ("timeout", r"no grade within 6 s"),
    "exit": ("crash", "its process exited with 3"),
    "segfault": ("crash", "its process was killed by signal 11"),
    "memory_kept": ("memory", r"MemoryError: more than rewards\.memory_mib"),
    "raise": ("error", "RuntimeError: on purpose"),
}


@pytest.mark.parametrize("behavior", BAD)
def test_a_failing_grading_loses_only_itself(
    make: Callable[..., GradingPool], pids: Path, behavior: str, caplog: pytest.LogCaptureFixture
) -> None:
    responses = ["roomy", behavior, "roomy", "ok", behavior]
    cause, detail = BAD[behavior]
    with make(2, HANG_SECONDS if cause == "timeout" else 60.0) as pool:
        results = grade_all(pool, responses, pids)
        assert re.fullmatch(detail, pool.last_errors["task"])
    for key, response in enumerate(responses):
        expected = Grade(1.0, True, response), "graded"
        assert results[key] == ((None, cause) if response == behavior else expected)
    assert caplog.text.count("abstained") == 1  # the first of each cause
    wait_until_dead(noted_pids(pids))


def test_unusual_but_valid_gradings_are_graded(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        results = grade_all(pool, ["ok", "print", "big", "interrupt", "ok"], pids)
    assert [why for _, why in results.values()] == ["graded"] * 5
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


def test_temporary_files_of_a_grader_are_removed_with_its_worker(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        grade, _ = grade_all(pool, ["file"], pids)[0]
        assert grade is not None
        assert Path(grade.pred).exists()
    assert not Path(grade.pred).parent.exists()


def test_a_grader_may_be_a_coroutine(pids: Path) -> None:
    with GradingPool({"task": "pool_grader:act_async"}, 1, timeout_seconds=60.0) as pool:
        results = grade_all(pool, ["a", "raise", "b"], pids)
    assert [why for _, why in results.values()] == ["graded", "error", "graded"]


def test_the_data_source_of_a_row_chooses_its_grader(pids: Path) -> None:
    graders = {"mixed": {"x": "dapo_math", "y": "pool_grader:act"}}
    with GradingPool(graders, workers=2, timeout_seconds=60.0) as pool:
        for kind in ("x", "y"):
            pool.submit(kind, "mixed", "7", "7", {"data_source": kind, "pids": str(pids)})
        with pytest.raises(ValueError, match=r"'mixed'.* data_source 'z'; known: \['x', 'y'\]"):
            pool.submit("z", "mixed", "7", "7", {"data_source": "z"})
        with pytest.raises(ValueError, match=r"'other'; known: \['mixed'\]"):
            pool.submit(0, "other", "", "", {})
        results: dict[str, Grade | None] = {}
        while pool.pending:
            results |= {key: grade for key, grade, _ in pool.collect(wait=True)}
    assert results == {"x": Grade(-1.0, False, INVALID, False), "y": Grade(1.0, True, "7")}


# ------------------------------------------------------------------------ start


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("dies_at_import", DapoError, "3 grading workers in a row"),
        ("raises_at_import", ConfigError, "refused to start: 'only there'"),
        ("needs_memory_at_import", ConfigError, r"do not fit into rewards\.memory_mib"),
    ],
)
def test_workers_that_cannot_start_raise_an_error(
    pids: Path, module: str, error: type[Exception], message: str
) -> None:
    with GradingPool({"a": f"{module}:grade"}, workers=1, timeout_seconds=5.0) as pool:
        pool.submit(0, "a", "", "", {})
        with pytest.raises(error, match=message):
            pool.collect(wait=True)


@needs_sandbox
def test_the_libraries_of_the_graders_fit_into_the_default_memory() -> None:
    graders = {name: name for name in ("math_verify", "reasoning_gym", "dapo_math", "code")}
    with GradingPool(graders, workers=1, timeout_seconds=60.0) as pool:
        pool.submit(0, "math_verify", r"\boxed{\frac{2}{4}}", "0.5", {})
        ((_, grade, _),) = pool.collect(wait=True)
        assert grade is not None
        assert grade.correct


def test_a_worker_gets_only_listed_variables_and_dies_first(
    pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "SLURM_JWT", "DAPO_MEGATRON_SECRET")
    for name in (*secrets, "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NAMED", "LANG"):
        monkeypatch.setenv(name, "1")
    with GradingPool({"task": "pool_grader:act"}, 1, 60.0, environment=["NAMED", "ABSENT"]) as pool:
        results = grade_all(pool, ["environment", "modules", "oom"], pids)
    variables, modules, oom_score = [grade.pred if grade else "" for grade, _ in results.values()]
    expected = {"LANG", "NAMED", "TMPDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    expected |= set(INHERITED) & set(os.environ)
    assert set(variables.split(",")) - {"LC_CTYPE"} == expected - {"LC_CTYPE"}  # Python may set it
    assert (modules, oom_score) == ("set()", "1000")


# ------------------------------------------------------------------------ messages


def test_texts_and_extra_values_of_a_row_arrive_unchanged(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    value = {"text": "\ud800", "x": [float("inf"), 10**30], "empty": None}
    with make() as pool:
        pool.submit(0, "task", "extra", "\ud800", {"pids": str(pids), "value": value})
        ((_, grade, _),) = pool.collect(wait=True)
        with pytest.raises(TypeError, match="function is not JSON serializable"):
            pool.submit(0, "task", "", "", {"function": act})
    assert grade is not None
    assert grade.pred == repr(value)


def act() -> None: ...


grades = st.builds(
    Grade, st.floats(-MAX_SCORE, MAX_SCORE), st.booleans(), st.text(max_size=20), st.booleans()
)


@given(grades)
def test_a_grade_arrives_as_it_was_sent(grade: Grade) -> None:
    answer = Answer("graded", grade)
    assert checked(msgspec.json.encode(answer) + b"\n") == answer


GRADED = (
    b'{"cause": "graded", "grade": {"score": 1.0, "correct": true, "pred": "", "parsed": true}}'
)


@given(st.binary(max_size=50), st.integers(0, len(GRADED)), st.integers(0, len(GRADED)))
def test_any_other_message_is_a_crash(text: bytes, start: int, end: int) -> None:
    """Covers any bytes, also in the middle of a message."""
    for message in (text, GRADED[:start] + text + GRADED[end:]):
        answer = checked(message + b"\n")
        grade = answer.grade
        assert (grade is None) == (answer.cause != "graded")
        if grade is not None:
            types = [type(part) for part in (grade.score, grade.correct, grade.pred, grade.parsed)]
            assert types == [float, bool, str, bool]
            assert abs(grade.score) <= MAX_SCORE
            assert len(grade.pred) <= MAX_PRED


PICKLE = b"c__builtin__\neval\n(S\"open('pwned', 'w')\"\ntR.\n"
MESSAGES = {
    "a pickle": (PICKLE, "crash"),
    "NaN": (GRADED.replace(b"1.0", b"NaN") + b"\n", "crash"),
    "too long a prediction": (
        GRADED.replace(b'""', b'"%s"' % (b"x" * (MAX_PRED + 1))) + b"\n",
        "crash",
    ),
    "deeply nested": (b"[" * 10_000 + b"\n", "crash"),
    "without an end": (b"x" * (MAX_MESSAGE_BYTES + 2**17), "crash"),
    "half a message": (GRADED[:20], "timeout"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_hostile_worker_costs_a_grading(
    make: Callable[..., GradingPool], pids: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pids.parent)
    message, cause = MESSAGES[name]
    with make(timeout_seconds=HANG_SECONDS if cause == "timeout" else 60.0) as pool:
        results = grade_all(pool, ["ok", f"send {message.hex()}", "ok"], pids)
    assert [why for _, why in results.values()] == ["graded", cause, "graded"]
    assert not Path("pwned").exists()


def test_a_stopped_worker_times_out(make: Callable[..., GradingPool], pids: Path) -> None:
    """A message larger than the socket buffer cannot be sent to a process that does not read."""
    with make(timeout_seconds=HANG_SECONDS) as pool:
        grade_all(pool, ["ok"], pids)
        (worker,) = noted_pids(pids)
        os.kill(worker, signal.SIGSTOP)
        assert grade_all(pool, ["x" * 3_000_000], pids)[0] == (None, "timeout")
        assert grade_all(pool, ["x" * 3_000_000], pids)[0][1] == "graded"
    wait_until_dead({worker})


# ------------------------------------------------------------------------ end


@pytest.mark.parametrize("behavior", ["hang_in_c", "stopped", "starts"])
def test_close_is_prompt_and_leaves_no_process(
    make: Callable[..., GradingPool], pids: Path, behavior: str
) -> None:
    pool = make(workers=2, timeout_seconds=1000.0)
    if behavior == "stopped":
        grade_all(pool, ["ok"], pids)
        for worker in noted_pids(pids):
            os.kill(worker, signal.SIGSTOP)
    for key in range(20):
        pool.submit(key, "task", behavior, "", {"pids": str(pids)})
    while behavior != "starts" and not pids.exists():
        time.sleep(0.02)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 60.0, "the limit of a grading is 1000 s"
    assert pool.collect(wait=True) == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(0, "task", "", "", {})
    if pids.exists():
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


def test_collect_waits_only_if_asked_and_dropped_gradings_never_arrive(
    make: Callable[..., GradingPool], pids: Path
) -> None:
    with make() as pool:
        assert pool.collect(wait=True) == []  # does not block, because nothing is pending
        release = pids.parent / "release"
        for key, response in enumerate([f"wait for {release}", "ok", "ok"]):
            pool.submit(key, "task", response, "", {"pids": str(pids)})
        while not pids.exists():
            time.sleep(0.01)
        assert pool.collect(wait=False) == []
        assert pool.pending == 3
        pool.drop_queued()
        assert pool.pending == 1
        release.touch()
        assert [key for key, _, _ in pool.collect(wait=True)] == [0]
        assert pool.pending == 0


def test_a_slow_grading_delays_no_other(make: Callable[..., GradingPool], pids: Path) -> None:
    with make(workers=2) as pool:
        release = pids.parent / "release"
        for key, response in enumerate([f"wait for {release}", *["ok"] * 50]):
            pool.submit(key, "task", response, "truth", {"pids": str(pids)})
        graded: set[int] = set()
        while len(graded) < 50:
            graded |= {key for key, _, _ in pool.collect(wait=True)}
        assert 0 not in graded
        release.touch()
