"""Where a finding begins: every number that findings.py and its parts judge by, in one table.

`python -m dapo_megatron.report.thresholds` prints it; docs/report.md shows it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """One number, and where it is from."""

    name: str
    value: float
    unit: str
    meaning: str
    why: str


_PAPER = "the paper (arXiv 2503.14476)"

TABLE: tuple[Threshold, ...] = (
    Threshold(
        "trend.least_steps",
        8,
        "steps",
        "fewer are not judged for trends",
        "the trend test cannot reach its bound with fewer than seven",
    ),
    Threshold(
        "trend.window",
        0.125,
        "share of the steps",
        "start and end of a series are medians of this share of it, of 3 to 20 steps",
        "a median stands firm against odd steps; wider windows hide how a run began",
    ),
    Threshold(
        "trend.z",
        3.0,
        "standard deviations",
        "Mann-Kendall statistic from which a series rises or falls",
        "one false alarm in 370 for independent noise; neighbouring steps are not quite "
        "independent, so that every trend must also be large enough",
    ),
    Threshold(
        "accuracy.change",
        0.03,
        "accuracy",
        "least change, end against start, that is learning (or falling)",
        "the median of 3 steps of 32 x 16 answers has a noise of 0.015",
    ),
    Threshold(
        "accuracy.from_best",
        0.08,
        "accuracy",
        "fallen so far from its best is told, if it is also 4 times the noise of the series",
        f"avg@32 in {_PAPER} goes back by up to 0.05 for a while and recovers",
    ),
    Threshold(
        "accuracy.top",
        0.95,
        "accuracy",
        "flat above this is no fault",
        "hardly a group is mixed there: nothing is left to learn from",
    ),
    Threshold(
        "accuracy.flat_steps",
        100,
        "steps",
        "flat for so long is a warning, before a note; a half of so many may be called level",
        f"accuracy in {_PAPER} rises clearly within 10 steps",
    ),
    Threshold(
        "entropy.low",
        0.4,
        "of its start",
        "below it and still falling: a note",
        f"the final run of {_PAPER} never fell below 0.44 of its start (figure 7c)",
    ),
    Threshold(
        "entropy.collapsed",
        0.15,
        "of its start",
        "below it: a warning",
        f"{_PAPER} without clip-higher passes it at step 29 and learns little afterwards "
        "(figures 2a, 2b)",
    ),
    Threshold(
        "entropy.none",
        0.02,
        "nats",
        "below it nearly all answers to a prompt are the same",
        f"where the collapse in {_PAPER} ends (figure 2b: 0.017 at step 60)",
    ),
    Threshold(
        "entropy.growth",
        2.0,
        "times its start",
        "above it, above 1 nat, and rising: the policy comes apart",
        f"{_PAPER} without overlong filtering and without token-level loss (figures 5b, 4a); "
        "the final run stayed below its start",
    ),
    Threshold(
        "length.growth",
        1.5,
        "times",
        "growth over the second half of the run that accuracy does not follow",
        f"answers in {_PAPER} grow as fast, but while accuracy rises (figures 1, 7a)",
    ),
    Threshold(
        "length.shrink",
        0.5,
        "of its start",
        "answers have become short: a note",
        f"in {_PAPER} they fall to 0.76 in the warm-up and then grow (figure 7a)",
    ),
    Threshold(
        "clipped.high",
        0.2,
        "of completions",
        "cut at the limit: a warning",
        "they are graded wrong however good they were",
    ),
    Threshold(
        "clipped.rise",
        0.1,
        "of completions",
        "rise, end against start, that is a warning",
        "twenty times the noise of 8,192 answers",
    ),
    Threshold(
        "keep.low",
        0.2,
        "of decided groups",
        "fewer are mixed: a warning",
        "a step then samples five prompts for each that it trains on",
    ),
    Threshold(
        "keep.fall",
        0.6,
        "of its start",
        "fallen so far: a note",
        f"{_PAPER} ends with about half of the prompts all correct (figure 3b)",
    ),
    Threshold(
        "gap.near_bound",
        0.5,
        "of sync.max_gap",
        "largest gap above it: a warning",
        "at the bound the run stops",
    ),
    Threshold(
        "gap.growth",
        3.0,
        "times its start",
        "mean gap grown so much: a warning",
        "the engine computes ever less what is trained",
    ),
    Threshold(
        "gradient.spike",
        5.0,
        "times the median of the 20 steps before",
        "a spike, if it is also 10 times their spread above it",
        "none of 878 steps of small runs of this project is one",
    ),
    Threshold(
        "gradient.spikes",
        0.05,
        "of the steps",
        "more spikes than this, and more than two: a warning",
        "single ones are what optimizer.clip_grad is for",
    ),
    Threshold(
        "gradient.clipped",
        0.9,
        "of the steps",
        "norm above optimizer.clip_grad as a rule: a note",
        "the norm then says nothing of the size of the step",
    ),
    Threshold(
        "policy.clipped_tokens",
        0.1,
        "of tokens",
        "outside the clip range on either side: a warning",
        "0.01 at the median of 878 steps of small runs of this project, 0.09 at most",
    ),
    Threshold(
        "policy.dual_clipped",
        0.01,
        "of tokens",
        "stopped by the dual clip: a warning",
        "it is for tokens whose probability grew tenfold within a step",
    ),
    Threshold(
        "policy.kl",
        0.1,
        "nats",
        "size of policy/approx_kl, within a step, above it: a warning",
        "0.002 at the median of 878 steps of small runs of this project, 0.05 at most",
    ),
    Threshold(
        "engines.idle",
        0.3,
        "of generation",
        "engines without work: a note",
        "simulated with rollout.on_policy, docs/rollout.md: 0.3 to 0.75; carrying: below 0.02",
    ),
    Threshold(
        "engines.idle_much",
        0.5,
        "of generation",
        "a warning",
        "half of what the engines could sample",
    ),
    Threshold(
        "time.growth",
        1.5,
        "times its start",
        "a phase (in seconds for each token) grown so much: a note",
        "one machine's phases vary by a fifth",
    ),
    Threshold(
        "time.growth_much",
        3.0,
        "times its start",
        "a warning",
        "no phase of a healthy run does",
    ),
    Threshold(
        "time.share",
        0.1,
        "of a step",
        "phases below it are not judged",
        "they cost nothing",
    ),
    Threshold(
        "time.slow_step",
        3.0,
        "times the median of the 20 steps before",
        "single slow steps are named (checkpoint and evaluation left out)",
        "a file system or a neighbour, as a rule",
    ),
    Threshold(
        "throughput.drop",
        0.7,
        "of its start",
        "tokens per second, end against start: a note",
        "one machine's figures vary by a fifth",
    ),
    Threshold(
        "throughput.drop_much",
        0.5,
        "of its start",
        "a warning",
        "the run then takes twice as long as it looked at first",
    ),
    Threshold(
        "grading.failed",
        0.01,
        "of completions",
        "no grade (timeout, crash, memory, error): a warning; any: a note",
        "one in a hundred costs one group of 16 in seven",
    ),
    Threshold(
        "grading.failed_much",
        0.1,
        "of completions",
        "bad",
        "four of five groups of 16 are lost",
    ),
    Threshold(
        "grading.unparsed",
        0.5,
        "of completions",
        "no answer found in the text: a warning",
        "the model does not keep to the format that the grader reads",
    ),
    Threshold(
        "groups.lost",
        0.01,
        "of issued groups",
        "expired (carrying) or abstained: a warning",
        "none expired in any simulation of docs/rollout.md",
    ),
    Threshold(
        "groups.starved",
        0.1,
        "of the steps",
        "trained on fewer groups than rollout.prompts_per_step: bad; any: a warning",
        "the bound was reached before the step was full",
    ),
    Threshold(
        "groups.stale",
        2.0,
        "times rollout.lookahead",
        "mean age of what is trained on above it: a note",
        "by Little's law the mean age is the lookahead (docs/rollout.md)",
    ),
    Threshold(
        "memory.over_plan",
        1.1,
        "times the plan, and 0.5 GiB above it",
        "a phase that took more: a warning",
        "tests/parity/test_plan_memory.py holds the plan to a tenth of what is measured",
    ),
    Threshold(
        "memory.leak",
        0.1,
        "of its size, and 0.5 GiB",
        "growth over the second half of the run, at every look: a warning",
        "buffers and caches have their size after a few steps",
    ),
    Threshold(
        "restarts.many",
        3,
        "starts",
        "that crashed, hung or were cut short: a warning",
        "the run works for its restarts",
    ),
)

_VALUES = {one.name: one.value for one in TABLE}


def limit(name: str) -> float:
    """The value of a row of TABLE."""
    return _VALUES[name]


def table() -> str:
    """TABLE in Markdown."""
    rows = [
        f"| `{one.name}` | {one.value:g} | {one.unit} | {one.meaning} | {one.why} |"
        for one in TABLE
    ]
    return "\n".join(["| name | value | unit | meaning | why |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
