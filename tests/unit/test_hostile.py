"""Hostile completions through the real grading pool: each costs at most its time limit.

The submitting thread is never blocked, and a closed pool leaves no process and no file. `make test`
runs a sample; `make test-long` runs all 2,000.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.rewards import GradingPool
from dapo_megatron.types import Grade
from tests.helpers.cores import own_seconds
from tests.helpers.processes import processes_with
from tests.helpers.sandboxes import needs_sandbox

WORKERS = 2
TIMEOUT_SECONDS = 3.0

PLACES = ["/tmp", "/dev/shm", "/var/tmp", str(Path.home()), str(Path.cwd())]
"""Folders in which hostile programs try to leave a file."""

MATH = [
    r"\boxed{{9**9**9**{n}}}",
    r"\boxed{{10^{{10^{{10}}}}+{n}}}",
    r"\boxed{{{n}000000!!!}}",
    r"\boxed{{\binom{{10^{{12}}}}{{10^{{9}}+{n}}}}}",
    r"\boxed{{\sum_{{k=1}}^{{10^{{9}}}} k^{{-{n}}}}}",
    r"\boxed{{\int_0^1 x^{{x^{{x^{n}}}}} \sin(\tan(x)) dx}}",
    r"\boxed{{\left(1+\frac{{1}}{{{n}}}\right)^{{10^{{10}}}}}}",
    r"\boxed{{(x+y+z)^{{{n}00}}}}",
]
LONG = [
    lambda n: r"\boxed{" + r"\frac{1}{" * n + "1" + "}" * n + "}",
    lambda n: "$" + r"\sqrt{" * n + "7" + "}" * n + "$",
    lambda n: r"\text{" * n,
    lambda n: "Answer: " + "$" * n + r"\text{" * n + r"\boxed{" * n,
    lambda n: r"\boxed{" + "1," * n + "1}",
    lambda n: r"\boxed{" + "+".join(["x"] * n) + "}",
    lambda n: r"\boxed{\begin{pmatrix}" + r"1 & 2 \\" * n + r"\end{pmatrix}}",
    lambda n: "\\" * 50 * n,
    lambda n: "the answer is " * n + " =" * 50 * n,
    lambda n: "\0\ud800\U0001f4a3" * n,
]
ENTRIES = {
    "countdown": {"metadata": {"numbers": [1, 6], "target": 7}},
    "puzzle24": {"metadata": {"numbers": [1, 2, 3, 4]}},
    "spiral_matrix": {"answer": "1 2 3"},
}
EXPRESSIONS = [
    *("9**9**9**{n}", "10**10**10+{n}", "({n}**99999)**99999", "(" * 3000 + "{n}"),
    "__import__('os').system('touch ' + ' '.join(p + {token!r} for p in {places!r}))",
    "[open(p + {token!r}, 'w') for p in {places!r}]",
    "__import__('sys')._getframe(3).f_locals['entry']['metadata']['target']+0*(1+6)",
    "[setattr(__import__('sys').modules['__main__'], '_grade', None)]",
    "(lambda: __import__('os')._exit(0))()",
]

ENDLESS_PROGRAMS = [
    "while True: pass",
    "import time\ntime.sleep(10**6)",
    "9**9**9",
    "import re\nre.match(r'(a|a)*$', 'a' * 60 + 'b')",
    "from threading import Thread\nfor _ in range(20): Thread(target=exec, args=('while 1: 1',)).start()",  # noqa: E501,
]
PROGRAMS = [
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "import subprocess\nwhile True: subprocess.Popen(['sleep', '1000'])",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time\n"
    "        time.sleep(10**6)",
    "import multiprocessing as m\nm.Pool(50).map(hash, range(10**9))",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "x = []\nwhile True: x.append(bytearray(2**26))",
    "import mmap\nx = [mmap.mmap(-1, 2**28) for _ in range(10**6)]",
    "while True: print('x' * 10**6)",
    "f = open('big', 'wb')\nwhile True: f.write(bytes(2**20))",
    "for i in range(10**9): open(f'file{i}', 'w').write('x')",
    "for path in PLACES:\n    try: open(path + TOKEN, 'w').write('x')\n    except OSError: pass",
    "import os\nfor path in PLACES:\n    try: os.mkdir(path + TOKEN)\n    except OSError: pass",
    "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=5)",
    "import os\nfor pid in (1, os.getppid(), -1):\n    try: os.kill(pid, 9)\n"
    "    except OSError: pass",
    "import os, signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nos.abort()",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 1000 & sleep 1000 & exit 3'])",
    "x = " + "(" * 100_000,
    "import os\nos.closerange(0, 10**4)\nprint(1)",
    "import os, time\ntime.sleep(0.9)\nb = b'\\xff\\n' * 2**19\nwhile True: os.write(1, b)",
    "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "import threading\nthreading.stack_size(32768)\nwhile True: threading.Thread(target="
    "threading.Event().wait, daemon=True).start()",
    "import fcntl, os, time\nf = open(os.__file__)\nfcntl.flock(f, fcntl.LOCK_EX)",
    "import os\nfor path in PLACES:\n    try: os.mkfifo(path + TOKEN)\n    except OSError: pass",
    "import glob\nfor path in glob.glob('/proc/[0-9]*/*'):\n    try: print(open(path).read())\n"
    "    except OSError: pass",
    "import socket\nfor n in range(46):\n    try: socket.socket(n).bind(TOKEN)\n"
    "    except OSError: pass",
    "import multiprocessing.shared_memory as s\ns.SharedMemory('left', True, 2**20)",
    "import ctypes\nfor n in range(600): ctypes.CDLL(None).syscall(n, 0, 0, 0, 0, 0, 0)",
    "import atexit, time\natexit.register(time.sleep, 10**6)",
]


@dataclass(frozen=True)
class Attack:
    """A hostile completion."""

    source: str
    response: str
    truth: str
    extra: dict[str, Any]


def attacks(count: int, token: str) -> list[Attack]:
    """Return `count` attacks with every kind in turn, shuffled."""
    choice = random.Random(5)
    long, math, expressions, endless, programs = map(
        cycle, (LONG, MATH, EXPRESSIONS, ENDLESS_PROGRAMS, PROGRAMS)
    )
    header = f"PLACES, TOKEN = {[*PLACES, '.']!r}, {'/' + token!r}\n"
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["never written"]})

    def make_attack(kind: int) -> Attack:
        n = choice.randint(2, 9)
        if kind < 4:
            grader = ("dapo_math", "math_verify")[choice.randint(0, 1)]
            return Attack(grader, next(long)(100 * n), "7", {})
        if kind < 5:
            return Attack("math_verify", next(math).format(n=n), "7", {})
        if kind < 6:
            dataset = choice.choice(list(ENTRIES))
            text = next(expressions).format(n=n, token="/" + token, places=PLACES)
            entry = {"question": "", "answer": "", **ENTRIES[dataset]}
            return Attack("reasoning_gym", text, "", {"dataset": dataset, "entry": entry})
        program = next(endless if kind < 7 else programs)
        return Attack("code", f"```python\n{header}{program}\n```", tests, {})

    mixed = [make_attack(number % 20) for number in range(count)]
    choice.shuffle(mixed)
    return mixed


def unix_sockets() -> set[str]:
    """Return paths and abstract names of open Unix sockets."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if len(line) > 7}


def grade_all(
    pool: GradingPool, attacks_to_grade: list[Attack]
) -> tuple[dict[int, Grade | None], dict[str, Counter[str]], float]:
    """Grade like an engine, which never waits. Return the grades, the outcomes by source, and the
    median of the seconds that a call took."""
    grades: dict[int, Grade | None] = {}
    outcomes: dict[str, Counter[str]] = {attack.source: Counter() for attack in attacks_to_grade}
    seconds: list[float] = []
    unsent = list(enumerate(attacks_to_grade))[::-1]
    while unsent or pool.pending:
        with own_seconds(seconds):
            if unsent:
                key, attack = unsent.pop()
                pool.submit(key, attack.source, attack.response, attack.truth, attack.extra)
            results = pool.collect(wait=False)
        for key, grade, outcome in results:
            assert key not in grades
            grades[key] = grade
            outcomes[attacks_to_grade[key].source][outcome] += 1
        time.sleep(0 if unsent else 0.005)
    return grades, outcomes, statistics.median(seconds)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
@needs_sandbox
def test_hostile_completions_cost_their_limit_and_leave_nothing(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = f"hostile-{os.getpid()}-{tmp_path.name}"
    attacks_to_grade = attacks(count, token)
    graders = {name: name for name in ("dapo_math", "math_verify", "reasoning_gym", "code")}
    with GradingPool(graders, WORKERS, TIMEOUT_SECONDS) as pool:
        grades, counts, call_seconds = grade_all(pool, attacks_to_grade)
    abstained = sum(counts.values(), Counter[str]())
    with capsys.disabled():
        print(f"\n{count} hostile completions: {counts}, {1000 * call_seconds:.2f} ms per call")

    assert sorted(grades) == list(range(count))
    programs = sum(attack.source == "code" for attack in attacks_to_grade)
    # The reference grader reads only 300 characters. A program cannot make its group abstain,
    # except on a machine so busy that a sandbox does not start in time.
    assert counts["dapo_math"]["graded"] == sum(a.source == "dapo_math" for a in attacks_to_grade)
    assert counts["code"]["graded"] + counts["code"]["timeout"] == programs
    assert counts["code"]["timeout"] < 0.2 * programs
    assert abstained["timeout"] > 0
    assert call_seconds < 0.02

    # No attack is graded as correct, except texts that contain the right answer, 7, many times.
    wrong = {key for key, grade in grades.items() if grade is None or not grade.correct}
    assert {attacks_to_grade[key].source for key in set(grades) - wrong} <= {
        "math_verify",
        "dapo_math",
    }
    assert counts["reasoning_gym"]["graded"] == sum(
        a.source == "reasoning_gym" for a in attacks_to_grade
    )
    assert not Path("/dev/shm/left").exists()
    assert not [path for path in unix_sockets() if token in path]
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
    assert not [folder for folder in PLACES if Path(folder, token).exists()]
