"""One trial call of each of the user's graders, before any model is built.

A grader whose result is not understood would otherwise end a run after engine and policy are built
and the first groups are sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rewards.registry import is_built_in
from dapo_megatron.types import DataError, Prompt


def try_graders(
    graders: Mapping[str, str | Mapping[str, str]],
    prompts: Iterable[Prompt],
    timeout_seconds: float,
    memory_mib: int,
    environment: Collection[str],
) -> None:
    """Grade the truth of a prompt, as a response, with each grader that is not built in.

    graders   source -> grader's name, or source -> data_source of a row -> grader's name

    Runs in a process of its own, as every grading. Raises DataError naming row and grader if there
    is no grade, and ConfigError for a grader that cannot be imported.
    """
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        grader = graders[prompt.source]
        name = grader if isinstance(grader, str) else grader[prompt.extra["data_source"]]
        if not is_built_in(name):
            chosen.setdefault(name, prompt)
    if not chosen:
        return
    sources = {name: name for name in chosen}
    with GradingPool(sources, 1, timeout_seconds, memory_mib, environment) as pool:
        for name, prompt in chosen.items():
            pool.submit(name, name, prompt.truth, prompt.truth, prompt.extra)
        while pool.pending:
            for name, grade, why in pool.collect(wait=True):
                if grade is None:
                    raise DataError(
                        f"source {chosen[name].source!r}, row {chosen[name].index}: the grader "
                        f"{name!r} gave no grade ({why}) in a trial call, with the row's answer as "
                        f"response: {pool.last_errors.get(name, why)}"
                    )
