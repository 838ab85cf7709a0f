"""Measure graded completions per second, through the grading pool.

    python tools/bench/grading.py [--against TREE] [--rounds 5] [--workers 1]

With --against, it measures another checkout of this project in turns with this one, in the same
environment, so that a busy machine slows both. It prints a table and, at the end, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
COMPLETIONS = {"dapo_math": 20000, "math_verify": 400, "code": 60}
WORDS = "Let us consider the equation once more and simplify each term of it. " * 40

PROGRAM = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"
TESTS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]})


def completion(grader: str, number: int) -> tuple[str, str]:
    """Return a response of about 3,000 characters, like a reasoning model's, and the truth."""
    if grader == "dapo_math":
        return f"{WORDS}\nAnswer: {number}", str(number)
    if grader == "math_verify":
        return (
            rf"{WORDS} so it is \boxed{{\frac{{{2 * number + 1}}}{{4}}}}",
            f"{(2 * number + 1) / 4}",
        )
    return f"{WORDS}\n{PROGRAM}", TESTS


def measure(grader: str, workers: int) -> float:
    """Return graded completions per second of the imported package."""
    from dapo_megatron.rewards import GradingPool

    tasks = [completion(grader, number) for number in range(COMPLETIONS[grader])]
    extra = {"data_source": "bench", "ability": "math", "extra_info": {"index": 1}}
    with GradingPool({"bench": grader}, workers, timeout_seconds=60.0) as pool:

        def grade(number: int) -> None:
            for key, (response, truth) in enumerate(tasks[:number]):
                pool.submit(key, "bench", response, truth, extra)
            while pool.pending:
                for _, result, reason in pool.collect(wait=True):
                    assert result is not None, reason
                    assert result.correct

        grade(2 * workers)  # every worker imports its grader before the measurement
        started = time.perf_counter()
        grade(len(tasks))
        return len(tasks) / (time.perf_counter() - started)


def measure_in(tree: Path, grader: str, workers: int) -> float:
    """Return graded completions per second of the package in `tree`, in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", grader, "--workers", str(workers)],
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--one", choices=COMPLETIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one, options.workers))
        return
    trees = {"here": CHECKOUT} | ({"against": options.against} if options.against else {})
    results: dict[str, Any] = {}
    for grader in COMPLETIONS:
        rates: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                rates[name].append(measure_in(tree, grader, options.workers))
        best = {name: max(values) for name, values in rates.items()}
        results[grader] = {name: round(value, 1) for name, value in best.items()}
        if options.against:
            ratios = [a / b for a, b in zip(rates["here"], rates["against"], strict=True)]
            results[grader]["ratio"] = round(statistics.median(ratios), 3)
        row = "  ".join(f"{name} {value:>9,.1f}" for name, value in results[grader].items())
        print(f"{grader:12} completions per second: {row}", flush=True)
    print(json.dumps({"workers": options.workers, "rounds": options.rounds, **results}))


if __name__ == "__main__":
    main()
