"""Made files of the schema and the sub-counts of DAPO-Math-17k and AIME-2024 as published.

DAPO-Math-17k: a block of 17,917 rows, 100 times over: 17,398 different prompts, 17,188 with
whitespace folded, 12 of these with two truths. AIME-2024: 30 problems, 32 times, mixed.
The problems are words at random; a fifth is without spaces, as Chinese is.
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
ROWS_A_GROUP = 100_000


@dataclass(frozen=True)
class Counts:
    """What a file is made of."""

    block_rows: int
    copies: int
    distinct: int
    distinct_folded: int
    conflicting: int
    near: int
    """Problems that differ from another one in a word."""

    @property
    def rows(self) -> int:
        return self.block_rows * self.copies

    @property
    def clean(self) -> int:
        return self.distinct_folded - self.conflicting


PUBLISHED = Counts(17_917, 100, 17_398, 17_188, 12, 150)
SMALL = Counts(700, 3, 640, 600, 12, 30)


def wrapped(problem: str) -> str:
    """A problem as the published prompts put it."""
    return f"{OPENING}{problem}{CLOSING}"


def row(problem: str, truth: str, index: str | int) -> dict[str, Any]:
    """A row of the published schema; `index` is a string in DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": wrapped(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def make_problems(number: int, rng: random.Random) -> list[str]:
    """Different problems of about 300 characters; no two are alike."""
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
    """The rows of one copy, mixed."""
    rng = random.Random(seed)
    problems = make_problems(counts.distinct_folded - counts.near, rng)
    # Long ones, so that a word more leaves them alike; without "folded" twins or second truths.
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
    asked = list(zip(problems, truths, strict=True))
    asked += [(problems[place].replace(" ", "  ", 1), truths[place]) for place in spelled]
    asked += [(problems[place], truths[place]) for place in repeated]
    # Half of the second truths are on another spelling, half on an exact repetition.
    half = counts.conflicting // 2
    for place in [*range(len(problems), len(problems) + half), *range(-half, 0)]:
        asked[place] = (asked[place][0], str(int(asked[place][1]) + 1))
    rng.shuffle(asked)
    return [
        row(problem, truth, str(uuid.UUID(int=rng.getrandbits(128), version=4)))
        for problem, truth in asked
    ]


def write_published(path: Path, counts: Counts = PUBLISHED, seed: int = 0) -> Path:
    """The Parquet file; memory of one row group."""
    block = pyarrow.Table.from_pylist(make_block(counts, seed))
    copies = max(1, ROWS_A_GROUP // len(block))
    left = counts.copies
    with parquet.ParquetWriter(path, block.schema) as file:
        while left:
            file.write_table(pyarrow.concat_tables([block] * min(copies, left)).combine_chunks())
            left -= min(copies, left)
    return path


def write_aime(path: Path, problems: list[str] | None = None, copies: int = 32) -> Path:
    """30 problems (the given ones first), each so many times; index an integer, other columns."""
    rng = random.Random(1)
    asked = [*(problems or []), *make_problems(30, rng)][:30]
    rows = [
        row(problem, str(100 + place), place)
        | {
            "extra_info": {"index": place, "raw_problem": problem, "split": None},
            "__index_level_0__": place,
        }
        for place, problem in enumerate(asked)
    ] * copies
    rng.shuffle(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
