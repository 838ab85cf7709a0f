"""Mutate the rooms without processes of their own, run their unit tests on each mutant, score.

    make test-mutations                                    all rooms
    make test-mutations ARGS="dapo_megatron.algo.loss*"    only mutants of this name

mutmut makes the mutants, picks the tests that call the mutated function, and keeps the results in
`mutants/`. A second run tests only functions that changed. Ends with 1 if in any room more than 5%
of the mutants survive that `equivalent.txt` does not list, or if that file lists a mutant that is
killed or does not exist.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import libcst as cst
from mutmut.__main__ import collect_source_file_mutation_data, run
from mutmut.mutation import file_mutation
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.workers import isolation

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
MAX_SURVIVORS = 0.05
KILLED = {"killed", "timeout", "segfault"}

Change = tuple[str, str]
"""Function, and the lines of its diff."""


def mutate_string(node: cst.BaseString) -> Iterator[cst.BaseString]:
    """Change a string once, unless it has a blank: that is text for people."""
    if isinstance(node, cst.SimpleString) and " " not in node.value:
        yield from list(operator_string(node))[:1]


def drop_argument(node: cst.Call) -> Iterator[cst.Call]:
    """Leave out each argument of a call, except `strict` of zip, which guards against what no test
    can bring about. A sole argument becomes None."""
    calls = list(operator_arg_removal(node))
    for call in calls:
        is_shorter = len(node.args) == 1 or len(call.args) < len(node.args)
        if is_shorter and is_strict(call) == is_strict(node):
            yield call


def is_strict(call: cst.Call) -> bool:
    return any(each.keyword is not None and each.keyword.value == "strict" for each in call.args)


OPERATORS = {operator_string: mutate_string, operator_arg_removal: drop_argument}


def change(mutant: str, path: Path) -> Change:
    """Return the function of a mutant and what the mutant changes in it."""
    function = mutant.rpartition("__mutmut_")[0].replace("xǁ", "").replace(".x_", ".")
    lines = get_diff_for_mutant(mutant, path=path).splitlines()[2:]
    changed = [f"{line[0]} {line[1:].strip()}" for line in lines if line[:1] in {"-", "+"}]
    return function.replace("ǁ", "."), "\n".join(changed)


def listed_equivalents() -> set[Change]:
    """Read the blocks of `equivalent.txt`: reasons (#), a function, the lines of one diff."""
    changes = set()
    for block in EQUIVALENT.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            changes.add((lines[0], "\n".join(lines[1:])))
    return changes


def score(names: list[str]) -> int:
    """Print the survivors and the score of each room. Return the exit code."""
    mutants, _ = collect_source_file_mutation_data(mutant_names=names)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    equivalents = listed_equivalents()
    unused = set(equivalents)
    for data, mutant, exit_code in mutants:
        room = mutant.split(".")[1]
        status = status_by_exit_code[exit_code]
        counts[room]["all"] += 1
        if status in KILLED:
            counts[room]["killed"] += 1
            continue
        function, diff = change(mutant, data.path)
        if (function, diff) in equivalents:
            counts[room]["equivalent"] += 1
            unused.discard((function, diff))
            continue
        counts[room][status] += 1
        print(f"\n# {mutant}: {status}\n{function}\n{diff}")

    print()
    failed = False
    for room, count in counts.items():
        left = count["all"] - count["killed"] - count["equivalent"]
        failed |= left > MAX_SURVIVORS * count["all"]
        print(
            f"{room}: {count['all']} mutants, {count['killed']} killed, "
            f"{count['equivalent']} listed as equivalent, {left} left ({left / count['all']:.1%})"
        )
    if not names:
        for function, diff in sorted(unused):
            failed = True
            print(f"\n{EQUIVALENT.name} lists a mutant that does not survive:\n{function}\n{diff}")
    return int(failed)


class FastTestsFirst(PytestRunner):
    """Runs the tests of a mutant in the order of their durations, until one fails."""

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        durations = state().duration_by_test
        return super().run_tests(mutant_name=mutant_name, tests=sorted(tests, key=durations.get))


def main(names: list[str]) -> int:
    """Run mutmut on the mutants `names` (patterns), or on all new ones. Return the exit code."""
    file_mutation.mutation_operators = [
        (kind, OPERATORS.get(operator, operator)) for kind, operator in mutation_operators
    ]
    isolation.PytestRunner = FastTestsFirst
    run.callback(tuple(names), max_children=1)
    return score(names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
