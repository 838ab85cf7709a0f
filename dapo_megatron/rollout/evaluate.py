"""Evaluation with the engines and graders of training: avg@k, pass@k and cons@k of each set."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dapo_megatron.algo.evaluation import (
    avg_per_problem,
    bootstrap_interval,
    cons_per_problem,
    pass_at_k,
    pass_per_problem,
)
from dapo_megatron.config import EvaluationConfig
from dapo_megatron.engine.messages import Sampling
from dapo_megatron.protocols import Sync
from dapo_megatron.rollout.dispatch import Dispatcher, Driver
from dapo_megatron.rollout.engines import Engines
from dapo_megatron.rollout.open_group import OpenGroup
from dapo_megatron.types import EnginesLost, Group, Prompt, Stopped


@dataclass(frozen=True)
class Evaluator:
    """Evaluates sets of held-out problems, by set name. Implements protocols.Evaluations."""

    config: EvaluationConfig
    sets: Mapping[str, Sequence[Prompt]]
    engines: Engines
    sync: Sync
    max_tokens: int
    """Limit of rollouts; used if `evaluation.max_response_tokens` is null."""
    seed: int

    def run(self, version: int) -> dict[str, float]:
        """Evaluate all sets and return metrics such as `eval/<set>/avg@k`, on every rank.

        Every call uses the same seeds, so two evaluations differ by their weights only. If all
        engines are lost, others get the weights, of `version`, and evaluate the set again.
        """
        metrics: dict[str, float] = {}
        names = list(self.sets)
        while names:
            try:
                evaluate = partial(self._evaluate, names[0])
                metrics |= self.engines.run(evaluate, dict[str, float])
                del names[0]
            except EnginesLost:
                self.sync(version)
        return metrics

    def due(self, step: int, last: int) -> bool:
        """Return whether to evaluate after rollout step `step` of `last` steps."""
        if not self.sets:
            return False
        return step in (0, last) or (self.config.every > 0 and step % self.config.every == 0)

    def _evaluate(self, name: str, driver: Driver) -> dict[str, float]:
        """Return the metrics of a set. Runs on rank 0."""
        sampling = Sampling(
            name=f"{self.seed}/evaluate/{name}",
            max_tokens=self.config.max_response_tokens or self.max_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            is_seeded=True,
        )
        prompts = list(enumerate(self.sets[name]))
        groups = sample_all(driver, prompts, sampling, self.config.samples)
        metrics = evaluation_metrics(groups, resamples=self.config.resamples, seed=self.seed)
        return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def sample_all(
    driver: Driver,
    tickets: Sequence[tuple[int, Prompt]],
    sampling: Sampling,
    num_samples: int,
) -> list[Group]:
    """Sample and grade `num_samples` completions of all (ticket, prompt) pairs. Return the groups
    in this order, without tokens and texts.

    The grade of a completion that could not be graded is None. Raises Stopped, after stopping the
    engines, if a rank was asked to stop, and EnginesLost if no replica is left.
    """
    groups = {ticket: OpenGroup(ticket, prompt, num_samples) for ticket, prompt in tickets}
    dispatcher = Dispatcher(driver, sampling, groups)
    dispatcher.start()
    for group in groups.values():
        dispatcher.submit(group)
    num_decided = 0
    while num_decided < len(groups):
        events = dispatcher.advance()
        if events.stop:
            dispatcher.interrupt()
            raise Stopped(f"stopped by {events.stop}")
        for ticket, completion in events.sampled:
            # Only its grade matters. The tokens of an evaluation may be gigabytes.
            small = replace(
                completion, tokens=array("i"), logprobs=array("f"), text="", routes=None
            )
            groups[ticket].completions[completion.sample] = small
        for ticket, sample, grade, _ in events.graded:
            groups[ticket].set_grade(sample, grade)
            num_decided += groups[ticket].is_decided
        if dispatcher.is_broken:
            dispatcher.interrupt()
            dispatcher.restart()
            for group in groups.values():
                if not group.is_decided:
                    group.reset()
                    dispatcher.submit(group)
    dispatcher.interrupt()
    return [group.group() for group in groups.values()]


def evaluation_metrics(groups: Sequence[Group], *, resamples: int, seed: int) -> dict[str, float]:
    """Return the metrics of one set with k samples per problem.

    - avg@k, pass@k and cons@k, each with its 95% interval (`avg@k_low`, `avg@k_high`; omitted if
      `resamples` is 0)
    - pass@j for each power of two j below k
    - ungraded: number of completions whose grader hung, died or raised; they count as wrong

    Raises ValueError if there are no problems.
    """
    correct = [[c.grade is not None and c.grade.correct for c in g.completions] for g in groups]
    preds = [["" if c.grade is None else c.grade.pred for c in g.completions] for g in groups]
    k = len(correct[0]) if correct else 0
    per_problem = {
        f"avg@{k}": avg_per_problem(correct),
        f"pass@{k}": pass_per_problem(correct),
        f"cons@{k}": cons_per_problem(correct, preds),
    }
    metrics: dict[str, float] = {}
    for name, values in per_problem.items():
        metrics[name] = sum(values) / len(values)
        if resamples:
            low, high = bootstrap_interval(values, resamples=resamples, seed=seed)
            metrics |= {f"{name}_low": low, f"{name}_high": high}
    for power in range((k - 1).bit_length()):
        metrics[f"pass@{2**power}"] = pass_at_k(correct, k=2**power)
    metrics["ungraded"] = float(sum(c.grade is None for g in groups for c in g.completions))
    return metrics
