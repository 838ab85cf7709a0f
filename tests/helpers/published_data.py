"""Generate files with the schema and the counts of the published DAPO-Math-17k and AIME-2024.

DAPO-Math-17k repeats a block of 17,917 rows 100 times. It has 17,398 different prompts, 17,188
after folding whitespace, and 12 of these have two truths. AIME-2024 repeats 30 problems 32 times,
shuffled. The problems are random words. A fifth has no spaces, like Chinese.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

OPENING = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
CLOSING = '\n\nRemember to put your answer on its own line after "Answer:".'
ROWS_PER_GROUP = 100_000


@dataclass(frozen=True)
class Counts:
    """Counts of rows and of different problems in a file."""

    block_rows: int
    copies: int
    distinct: int
    distinct_folded: int
    conflicting: int
    near: int
    """Problems that differ from another problem in one word."""

    @property
    def rows(self) -> int:
        return self.block_rows * self.copies

    @property
    def clean(self) -> int:
        return self.distinct_folded - self.conflicting


PUBLISHED = Counts(17_917, 100, 17_398, 17_188, 12, 150)
SMALL = Counts(700, 3, 640, 600, 12, 30)


def wrapped(problem: str) -> str:
    """Return the published prompt of a problem."""
    return f"{OPENING}{problem}{CLOSING}"


def row(problem: str, truth: str, index: str | int) -> dict[str, Any]:
    """Return a row of the published schema. `index` is a string in DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": wrapped(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def make_problems(number: int, rng: random.Random) -> list[str]:
    """Make problems of about 300 characters, no two of which are similar."""
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)
    ]
    signs = [chr(0x4E00 + place) for place in range(2500)]
    problems = []
    for place in range(number):
        if place % 5 == 4:
            problems.append("".join(rng.choices(signs, k=90)) + f"${place}$")
        else:
            problems.append(" ".join(rng.choices(words, k=rng.randint(35, 60))) + f" ${place}$?")
    return problems


def make_block(counts: Counts, seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of one copy, shuffled."""
    rng = random.Random(seed)
    problems = make_problems(counts.distinct_folded - counts.near, rng)
    # Near duplicates get one more word. They are long, so that they stay similar. None of them has
    # a spelling that differs only in whitespace, or a second truth.
    problems += [f"{problem} Exactly." for problem in problems[-counts.near :]]
    truths = [
        str(rng.randint(-(10**4), 10**21 if rng.random() < 0.01 else 10**4)) for _ in problems
    ]
    spaced = [place for place, problem in enumerate(problems[: -2 * counts.near]) if " " in problem]
    num_spelled = counts.distinct - counts.distinct_folded
    num_repeated = counts.block_rows - counts.distinct
    spelled = rng.sample(spaced, num_spelled)
    others = set(range(len(problems) - 2 * counts.near)).difference(spelled)
    repeated = rng.sample(sorted(others), num_repeated)
    problem_truths = list(zip(problems, truths, strict=True))
    problem_truths += [(problems[place].replace(" ", "  ", 1), truths[place]) for place in spelled]
    problem_truths += [(problems[place], truths[place]) for place in repeated]
    # Half of the conflicting truths are on another spelling, half on an exact repetition.
    half = counts.conflicting // 2
    for place in [*range(len(problems), len(problems) + half), *range(-half, 0)]:
        problem_truths[place] = (problem_truths[place][0], str(int(problem_truths[place][1]) + 1))
    rng.shuffle(problem_truths)
    return [
        row(problem, truth, str(uuid.UUID(int=rng.getrandbits(128), version=4)))
        for problem, truth in problem_truths
    ]


def write_published(path: Path, counts: Counts = PUBLISHED, seed: int = 0) -> Path:
    """Write the Parquet file. Memory is that of one row group."""
    block = pyarrow.Table.from_pylist(make_block(counts, seed))
    copies = max(1, ROWS_PER_GROUP // len(block))
    left = counts.copies
    with parquet.ParquetWriter(path, block.schema) as file:
        while left:
            file.write_table(pyarrow.concat_tables([block] * min(copies, left)).combine_chunks())
            left -= min(copies, left)
    return path


def write_aime(path: Path, problems: list[str] | None = None, copies: int = 32) -> Path:
    """Write 30 problems (the given ones first), each `copies` times, with AIME-2024's columns and
    integer indices."""
    rng = random.Random(1)
    all_problems = [*(problems or []), *make_problems(30, rng)][:30]
    rows = [
        row(problem, str(100 + place), place)
        | {
            "extra_info": {"index": place, "raw_problem": problem, "split": None},
            "__index_level_0__": place,
        }
        for place, problem in enumerate(all_problems)
    ] * copies
    rng.shuffle(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
